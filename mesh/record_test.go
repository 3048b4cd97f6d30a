package mesh_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"jetmesh/internal/natsd"
	"jetmesh/mesh"
)

// lossy is a server on which the user "deaf" acks in vain.
func lossy(t *testing.T) *env {
	t.Helper()
	const config = `
		jetstream { max_file_store: 1GB }
		no_auth_user: all
		authorization { users = [
			{ user: all, password: p }
			{ user: deaf, password: p, permissions: { publish: { allow: ">", deny: "$JS.ACK.>" } } }
		] }`
	return startWith(t, natsd.Config{ConfigText: []byte(config)}, small)
}

// An ack that is lost after the outcome was stored: the message comes back, the handler does
// not run again.
func TestLostAckRunsNoHandlerAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		results []error
		calls   int
	}{
		"exhausted": {[]error{mesh.Permanent(errBoom)}, 1},
		"closed":    {[]error{errBoom, nil}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := lossy(t)
			short := func(s *mesh.Subscription) { s.AckWait = time.Second }
			h, fn := script(c.results...)
			refusals := nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}) // else the client prints them
			deaf := e.handleOn(e.mesh(mesh.Config{}, userInfo("deaf"), refusals), with(orders(fn), short))
			ev := e.event("orders")
			seq := e.publish(ev)
			final := e.awaitFinal(ev.ID)
			deaf.stop()
			if h.count() != c.calls || e.durable("orders").NumAckPending != 1 {
				t.Fatalf("%d calls, %d unanswered", h.count(), e.durable("orders").NumAckPending)
			}
			before, letters := e.record("orders", ev.ID), len(e.deadLetters())

			h, fn = script(errBoom)
			e.handle(with(orders(fn), short))
			e.awaitSettled("orders", seq)
			if h.count() != 0 {
				t.Errorf("%d calls after the outcome was stored", h.count())
			}
			if after := e.record("orders", ev.ID); after.RetryCount != before.RetryCount || after.Status != before.Status || !after.UpdatedAt.Equal(before.UpdatedAt) {
				t.Errorf("record %+v, was %+v", after, before)
			}
			if n := len(e.deadLetters()); n != letters {
				t.Errorf("%d dead letters, were %d", n, letters)
			}
			// The outcome is told again, since it may be what was lost.
			all := e.outcomesOf(ev.ID)
			last := all[len(all)-1]
			if len(all) <= c.calls || last.Attempt != final.Attempt || last.Code != final.Code || last.Exhausted != final.Exhausted ||
				last.RetryCount != final.RetryCount || !last.StartedAt.Equal(final.StartedAt) || last.Duration != final.Duration || last.Instance == final.Instance {
				t.Errorf("outcome %+v, want that of %+v from another instance", last, final)
			}
		})
	}
}

func TestRecordDecidesOverARedelivery(t *testing.T) {
	t.Parallel()
	recordDecides(t, start(t), true)
}

// The server's count of deliveries is no proof: it is lost with the durable, and the end of it
// with the server's process.
func TestRecordDecidesOverADeliveryThatLooksLikeTheFirst(t *testing.T) {
	t.Parallel()
	recordDecides(t, start(t), false)
}

func recordDecides(t *testing.T, e *env, redelivered bool) {
	later := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	one := []mesh.Attempt{{Number: 4, Instance: "other", StartedAt: later.Add(-2 * time.Hour), Duration: time.Second}}
	for i, c := range []struct {
		name       string
		record     mesh.Record
		generation int // of the message
		calls      int
		attempt    int
		unanswered int
		outcome    string // code; "-" for none
	}{
		{"none", mesh.Record{}, 0, 1, 1, 0, ""},
		{"failed, not yet due", mesh.Record{Status: mesh.RecordFailed, RetryCount: 4, NextRetryAt: later, ErrorCode: "x", Attempts: one}, 0, 0, 0, 1, "x"},
		{"failed, due", mesh.Record{Status: mesh.RecordFailed, RetryCount: 4, NextRetryAt: later.Add(-2 * time.Hour), ErrorCode: "x", Attempts: one}, 0, 1, 5, 0, ""},
		{"exhausted", mesh.Record{Status: mesh.RecordFailed, RetryCount: 4, Exhausted: true, ErrorCode: "x", Attempts: one}, 0, 0, 0, 0, "x"},
		{"closed", mesh.Record{Status: mesh.RecordDispatched, RetryCount: 4, Attempts: one}, 0, 0, 0, 0, ""},
		{"of a later generation", mesh.Record{Status: "skipped", Generation: 1, RetryCount: 4, Attempts: one}, 0, 0, 0, 0, "-"},
		{"exhausted, replayed since", mesh.Record{Status: mesh.RecordFailed, RetryCount: 4, Exhausted: true, ErrorCode: "x", Attempts: one}, 1, 1, 1, 0, ""},
		{"closed, replayed since", mesh.Record{Status: mesh.RecordDispatched, RetryCount: 4, Attempts: one}, 1, 1, 1, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			consumer := fmt.Sprint("c", i)
			h, fn := script()
			sub := mesh.OnRaw(consumer, ordered, fn)
			e := &env{t: t, Names: e.Names, js: e.js, source: e.source, connect: e.connect}
			e.bind(sub)
			ev := e.event(consumer)
			ev.Generation = c.generation
			if c.record.Status != "" {
				c.record.EventID, c.record.Subscription, c.record.Consumer, c.record.EventType = ev.ID, consumer, consumer, ordered
				c.record.MaxRetries, c.record.Source = 10, e.source
				e.putRecord(c.record)
			}
			seq := e.publish(ev)
			if redelivered {
				e.takeAndHandBack(consumer, 1)
			}
			e.handle(sub)
			if c.unanswered == 0 {
				e.awaitSettled(consumer, seq)
			} else {
				e.awaitOutcome(ev.ID, 1)
			}
			if n := h.count(); n != c.calls {
				t.Errorf("%d calls, want %d", n, c.calls)
			} else if n == 1 {
				if d := h.of(ev.ID)[0]; d.Attempt != c.attempt || d.Redelivered != redelivered {
					t.Errorf("attempt %d, redelivered %v", d.Attempt, d.Redelivered)
				}
			}
			all := e.outcomesOf(ev.ID)
			if c.outcome == "-" {
				if len(all) != 0 {
					t.Errorf("outcomes %+v", all)
				}
			} else if len(all) != 1 || all[0].Code != c.outcome || all[0].RetryCount != c.record.RetryCount || all[0].Exhausted != (c.record.Exhausted && c.calls == 0) {
				t.Errorf("outcomes %+v", all)
			}
			if d := e.durable(consumer); d.NumAckPending != c.unanswered {
				t.Errorf("%d unanswered, want %d", d.NumAckPending, c.unanswered)
			}
			r := e.record(consumer, ev.ID)
			if c.calls == 1 && c.record.Status != "" && (r.Status != mesh.RecordDispatched || r.RetryCount != 4 || r.Generation != c.generation) {
				t.Errorf("record %+v", r)
			}
			if letters := len(e.messages(e.DeadStream(), 1)); c.record.Exhausted && c.calls == 0 && letters == 0 {
				t.Error("no dead letter of the exhausted event")
			}
		})
	}
}

// An exhausted event that an operator replays gets one more attempt, and keeps its history.
func TestReplayOfAnExhaustedEventIsOneMoreAttempt(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script(errBoom)
	e.handle(with(orders(fn), func(s *mesh.Subscription) { s.MaxRetries = 2 }))
	ev := e.event("orders")
	e.awaitSettled("orders", e.publish(ev))
	ev.Generation = 1
	e.awaitSettled("orders", e.publishReplay("orders", ev))
	r := e.record("orders", ev.ID)
	if h.count() != 3 || r.RetryCount != 3 || !r.Exhausted || r.Generation != 1 || len(r.Attempts) != 3 {
		t.Errorf("%d calls, record %+v", h.count(), r)
	}
	if o := e.awaitFinal(ev.ID); o.Generation != 1 || o.Attempt != 1 || o.RetryCount != 3 || !o.Exhausted {
		t.Errorf("outcome %+v", o)
	}
	if letters := e.deadLetters(); len(letters) != 2 || letters[1].Header.Get("Nats-Msg-Id") != ev.ID+"#orders#1" {
		t.Errorf("%d dead letters", len(letters))
	}
}
