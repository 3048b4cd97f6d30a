package mesh_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/internal/natsd"
	"jetmesh/mesh"
)

func TestSuccessIsAckedAndReportedInBatches(t *testing.T) {
	t.Parallel()
	e := start(t)
	g := newGate()
	sub := orders(g.handle)
	sub.Concurrency = 200
	p := e.handle(sub)
	sources := []string{uuid.NewString(), uuid.NewString()}
	var events []mesh.Event
	for i := range 200 {
		ev := e.event("orders")
		ev.Source = sources[i%2]
		events = append(events, ev)
		e.publish(ev)
	}
	for range events {
		receive(t, "200 handlers", g.started)
	}
	close(g.open)
	e.awaitSettled("orders", uint64(len(events)))
	batches := map[uint64]bool{}
	for i, ev := range events {
		all := e.outcomesOf(ev.ID)
		if len(all) != 1 {
			t.Fatalf("%d outcomes of event %d", len(all), i)
		}
		o := all[0]
		batches[o.Batch] = true
		want := instanceOutcome{
			Outcome: mesh.Outcome{EventID: ev.ID, Attempt: 1, StreamSeq: uint64(i + 1), StartedAt: o.StartedAt, Duration: o.Duration, PublishedAt: o.PublishedAt},
			Batch:   o.Batch, Instance: p.Instance(), Subject: e.OutcomeSubject(ev.Source),
		}
		if diff := cmp.Diff(want, o); diff != "" {
			t.Error(diff)
		}
		if o.Duration <= 0 || o.StartedAt.Before(o.PublishedAt) || o.PublishedAt.Before(ev.Time.Add(-time.Second)) || time.Since(o.StartedAt) > patience {
			t.Errorf("times %+v", o)
		}
		if e.record("orders", ev.ID) != nil {
			t.Error("a success has a record")
		}
	}
	if len(batches) > 100 {
		t.Errorf("%d messages for %d outcomes", len(batches), len(events))
	}
}

// An event that names no outbox is handled all the same: nobody waits for its outcome.
func TestEventWithoutASourceIsAckedWithoutAnOutcome(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script()
	e.handle(orders(fn))
	ev := e.event("orders")
	ev.Source = ""
	e.awaitSettled("orders", e.publish(ev))
	if h.count() != 1 || len(e.allOutcomes()) != 0 {
		t.Errorf("%d calls, %d outcomes", h.count(), len(e.allOutcomes()))
	}
}

func TestNothingIsAnsweredBeforeItsOutcomeIsStored(t *testing.T) {
	t.Parallel()
	e := startWith(t, natsd.Config{}, mesh.Topology{MaxBytes: 64 << 20, MaxDeadBytes: 1 << 20, MaxLedger: 64 << 10})
	e.fill(e.OutcomeSubject("junk"))
	h, succeed := script()
	_, fail := script(mesh.Permanent(errBoom))
	sub := orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "bad" {
			return fail(ctx, d)
		}
		return succeed(ctx, d)
	})
	sub.AckWait = time.Second
	e.handle(sub)
	events := append(e.publishMany(10, "orders"), e.publishBad(2)...)
	began := time.Now()
	await(t, "the handlers, and twice AckWait", func() bool { return h.count() == 10 && time.Since(began) > 2*time.Second })
	if c := e.durable("orders"); c.AckFloor.Stream != 0 || c.NumAckPending != 12 {
		t.Errorf("answered up to %d, %d unanswered", c.AckFloor.Stream, c.NumAckPending)
	}
	e.empty(e.OutcomesStream())
	e.mu.Lock()
	e.read = 0
	e.mu.Unlock()
	for _, ev := range events {
		e.awaitFinal(ev.ID)
	}
	e.awaitSettled("orders", 12)
	if n := h.count(); n != 10 || len(e.allOutcomes()) != 12 {
		t.Errorf("%d calls and %d outcomes, want 10 and 12", n, len(e.allOutcomes()))
	}
}

// While outcomes cannot be stored, a process can still end: what it could not report is
// delivered again.
func TestRunEndsWhileOutcomesCannotBeStored(t *testing.T) {
	t.Parallel()
	e := startWith(t, natsd.Config{}, mesh.Topology{MaxBytes: 64 << 20, MaxDeadBytes: 1 << 20, MaxLedger: 64 << 10})
	e.fill(e.OutcomeSubject("junk"))
	var calls atomic.Int64
	p := e.handleOn(e.mesh(mesh.Config{DrainTimeout: soon}), orders(func(context.Context, mesh.Delivery[[]byte]) error {
		calls.Add(1)
		return nil
	}))
	const events = 6000 // up to 5000 fit between handlers and stream
	for range events {
		ev := e.event("orders")
		if _, err := e.js.PublishMsgAsync(ev.Message(e.EventSubject(ev.Consumer, ev.Type), ev.MsgID()), jetstream.WithStallWait(patience)); err != nil {
			t.Fatal(err)
		}
	}
	receive(t, "the events to be stored", e.js.PublishAsyncComplete())
	var last int64
	var since time.Time
	await(t, "handlers to be held up", func() bool {
		if n := calls.Load(); n != last {
			last, since = n, time.Now()
		}
		return last > 0 && time.Since(since) > 10*soon
	})
	if last == events {
		t.Error("nothing held the handlers up")
	}
	p.cancel()
	receive(t, "Run to end", p.done)
	if c := e.durable("orders"); c.AckFloor.Stream != 0 {
		t.Errorf("answered up to %d", c.AckFloor.Stream)
	}
}
