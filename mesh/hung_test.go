package mesh_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"jetmesh/mesh"
)

// hung is a handler that ignores its context for events of aggregate "bad", until the test
// ends.
func hung(t *testing.T, others mesh.Handler) (fn mesh.Handler, started chan mesh.Delivery[[]byte], release func()) {
	stuck := make(chan struct{})
	started = make(chan mesh.Delivery[[]byte], 100)
	var closed atomic.Bool
	release = func() {
		if closed.CompareAndSwap(false, true) {
			close(stuck)
		}
	}
	t.Cleanup(release)
	return func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "bad" {
			started <- d
			<-stuck
			return nil
		}
		return others(ctx, d)
	}, started, release
}

func (e *env) publishBad(n int) []mesh.Event {
	e.t.Helper()
	events := make([]mesh.Event, n)
	for i := range events {
		events[i] = e.event("orders")
		events[i].AggregateID = "bad"
		e.publish(events[i])
	}
	return events
}

func TestHandlerThatIgnoresItsTimeoutIsGivenUpAndOthersGoOn(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, succeed := script()
	fn, _, release := hung(t, succeed)
	sub := orders(fn)
	sub.Concurrency, sub.Timeout, sub.Backoff = 2, 100*time.Millisecond, mesh.Backoff{Base: time.Hour, Cap: time.Hour}
	p := e.handle(sub)
	bad := e.publishBad(2) // both slots
	good := e.publishMany(20, "orders")
	for _, ev := range bad {
		if o := e.awaitOutcome(ev.ID, 1); o.Code != mesh.CodeTimeout || o.Exhausted || o.RetryCount != 1 || o.Duration < 2*time.Second {
			t.Errorf("outcome %+v", o)
		}
	}
	for _, ev := range good {
		e.awaitOutcome(ev.ID, 1)
	}
	if n := h.count(); n != 20 {
		t.Errorf("%d other calls, want 20", n)
	}
	// What a handler returns after it was given up changes nothing.
	release()
	p.stop()
	for _, ev := range bad {
		if all := e.outcomesOf(ev.ID); len(all) != 1 {
			t.Errorf("%d outcomes", len(all))
		}
		if r := e.record("orders", ev.ID); r.Status != mesh.RecordFailed || r.RetryCount != 1 || r.ErrorCode != mesh.CodeTimeout {
			t.Errorf("record %+v", r)
		}
	}
}

// Only so many goroutines are lost to handlers that never return; then the subscription stands
// still here, and other processes take its events.
func TestMoreHungHandlersThanAreTolerated(t *testing.T) {
	t.Parallel()
	e := start(t)
	_, succeed := script()
	fn, started, release := hung(t, succeed)
	short := func(s *mesh.Subscription) { s.AckWait = time.Second }
	sub := with(orders(fn), short)
	sub.Concurrency, sub.Timeout, sub.Backoff = 1, time.Millisecond, mesh.Backoff{Base: time.Hour, Cap: time.Hour}
	sick := e.handle(sub)
	left := map[string]bool{}
	for _, ev := range e.publishBad(3) {
		left[ev.ID] = true
	}
	for range 2 {
		d := receive(t, "a hung handler", started)
		if o := e.awaitOutcome(d.ID, 1); o.Code != mesh.CodeTimeout {
			t.Errorf("outcome %+v", o)
		}
		delete(left, d.ID)
	}
	h, fine := script()
	well := e.handle(with(orders(fine), short))
	if d := receive(t, "the third event", h.calls); !left[d.ID] || d.Attempt != 1 {
		t.Errorf("event %s, attempt %d", d.ID, d.Attempt)
	}
	if len(started) > 0 {
		t.Error("a third handler was started here")
	}
	well.stop()
	sick.stop() // does not wait for handlers that were given up
	release()
}

// A process whose handlers are stuck, but not yet over their timeout, keeps nothing from
// others that it only fetched ahead.
func TestMessageThatWaitsForASlotGoesToAnotherProcess(t *testing.T) {
	t.Parallel()
	e := start(t)
	_, succeed := script()
	fn, started, release := hung(t, succeed)
	sub := orders(fn)
	sub.Concurrency, sub.AckWait = 1, time.Second
	e.handle(sub)
	e.publishBad(1)
	receive(t, "the hung handler", started)
	ev := e.event("orders")
	e.publish(ev)
	await(t, "the next event to be fetched ahead", func() bool { return e.durable("orders").NumAckPending == 2 })
	h, fine := script()
	other := orders(fine)
	other.Concurrency, other.AckWait = 1, time.Second
	e.handle(other)
	if d := receive(t, "the event at the other process", h.calls); d.ID != ev.ID || d.Attempt != 1 {
		t.Errorf("event %s, attempt %d", d.ID, d.Attempt)
	}
	e.awaitOutcome(ev.ID, 1)
	release()
}
