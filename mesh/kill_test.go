package mesh_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/mesh"
)

// What kills a process is no attempt of the event that was handled.
func TestKillsInTheHandlerAreNoAttempts(t *testing.T) {
	t.Parallel()
	e := start(t)
	ev := e.doing("kill")
	p := e.service(settings{})
	await(t, "the durable", func() bool { return e.durable("orders") != nil })
	seq := e.publish(ev)
	for range 2 {
		p.awaitKilled()
		p.start(settings{})
	}
	p.awaitKilled()
	p.start(settings{Tame: true})
	if o := e.awaitFinal(ev.ID); !o.Succeeded() || o.RetryCount != 0 || o.Attempt != 1 {
		t.Errorf("outcome %+v", o)
	}
	e.awaitSettled("orders", seq)
	if r := e.record("orders", ev.ID); r.Status != mesh.RecordDispatched || r.RetryCount != 0 || r.Starts != 0 || len(r.Attempts) != 1 {
		t.Errorf("record %+v", r)
	}
	if n := p.callsOf(ev); n != 4 || len(e.outcomesOf(ev.ID)) != 1 {
		t.Errorf("%d calls and %d outcomes, want 4 and 1", n, len(e.outcomesOf(ev.ID)))
	}
}

// An event that kills its process each time ends as a dead letter, after a first run and five that
// were recorded. Those that ran beside it are not, and those that were only fetched ahead by the
// same processes are not even suspected.
func TestHandlerThatAlwaysKillsItsProcessIsACrashLoop(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.bind(with(orders(nothing), func(s *mesh.Subscription) { s.AckWait = time.Second }))
	doing := func(what string, n int) []mesh.Event {
		events := make([]mesh.Event, n)
		for i := range events {
			events[i] = e.doing(what)
			e.publish(events[i])
		}
		return events
	}
	killer, beside, ahead := doing("kill", 1)[0], doing("slow", 2), doing("ok", 3)
	s := settings{Concurrency: 3, Together: 3}
	p := e.service(s)
	for life := range 6 {
		p.awaitKilled()
		if r := e.record("orders", killer.ID); p.callsOf(killer) != life+1 || r == nil != (life == 0) || r != nil && (r.Starts != life || r.RetryCount != 0 || r.Status != mesh.RecordStarted) {
			t.Fatalf("after %d kills: %d calls, record %+v", life+1, p.callsOf(killer), r)
		}
		for _, ev := range ahead {
			if r := e.record("orders", ev.ID); life < 3 && (r != nil || p.callsOf(ev) != 0) {
				t.Errorf("after %d kills, an event fetched ahead: %d calls, record %+v", life+1, p.callsOf(ev), r)
			}
		}
		if c := e.durable("orders"); life < 3 && c.NumAckPending != 6 {
			t.Errorf("%d events at the process, want all 6", c.NumAckPending)
		}
		p.start(s)
	}
	after := e.doing("ok")
	e.awaitSettled("orders", e.publish(after))
	if o := e.awaitFinal(killer.ID); !o.Exhausted || o.Code != mesh.CodeCrashLoop || p.callsOf(killer) != 6 {
		t.Errorf("%d calls, outcome %+v", p.callsOf(killer), o)
	}
	if r := e.record("orders", killer.ID); r.Status != mesh.RecordFailed || !r.Exhausted || r.ErrorCode != mesh.CodeCrashLoop {
		t.Errorf("record %+v", r)
	}
	for _, ev := range append(append(ahead, beside...), after) {
		if o := e.awaitFinal(ev.ID); !o.Succeeded() || o.RetryCount != 0 || o.Attempt != 1 {
			t.Errorf("%s: %d calls, outcome %+v", ev.AggregateID, p.callsOf(ev), o)
		}
	}
	if n := len(e.deadLetters()); n != 1 {
		t.Errorf("%d dead letters, want 1", n)
	}
}

func TestKillBetweenTheStepsOfADelivery(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name       string
		does       string
		maxRetries int
		point      string
		hit        int
		calls      int
		retryCount int
		dead       bool
	}{
		{"handler that succeeded, outcome", "ok", 0, "handled", 1, 2, 0, false},
		{"handler that failed, record", "fail once", 0, "handled", 1, 3, 1, false},
		{"record of a failure, outcome", "fail once", 0, "recorded", 1, 2, 1, false},
		{"record of a success, outcome", "fail once", 0, "recorded", 2, 2, 1, false},
		{"record of a permanent failure, dead letter", "fail for good", 0, "recorded", 1, 1, 1, true},
		{"record of the last failure, dead letter", "fail", 2, "recorded", 2, 2, 2, true},
		{"dead letter, outcome", "fail", 2, "buried", 1, 2, 2, true},
		{"outcome of a success, ack", "ok", 0, "stored", 1, 2, 0, false},
		{"outcome of a failure, nak", "fail once", 0, "stored", 1, 2, 1, false},
		{"outcome of a success after a failure, ack", "fail once", 0, "stored", 2, 2, 1, false},
		{"outcome of the last failure, terminate", "fail", 2, "stored", 2, 2, 2, true},
	}
	// They wait for AckWait, most of the time: all at once.
	type step struct {
		*env
		p   *service
		ev  mesh.Event
		seq uint64
	}
	steps := make([]step, len(cases))
	for i, c := range cases {
		e := start(t)
		steps[i] = step{env: e, p: e.service(settings{MaxRetries: c.maxRetries, Point: c.point, Hit: c.hit}), ev: e.doing(c.does)}
	}
	for i := range steps {
		e := &steps[i]
		await(t, "the durable", func() bool { return e.durable("orders") != nil })
		e.seq = e.publish(e.ev)
	}
	for i, c := range cases {
		steps[i].p.awaitKilled()
		steps[i].p.start(settings{MaxRetries: c.maxRetries})
	}
	for i, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			e, p, ev := steps[i].env, steps[i].p, steps[i].ev
			e.t = t
			e.awaitSettled("orders", steps[i].seq)
			o := e.awaitFinal(ev.ID)
			if o.Succeeded() == c.dead || o.Exhausted != c.dead || o.RetryCount != c.retryCount || o.Generation != 0 {
				t.Errorf("outcome %+v", o)
			}
			attempts := c.retryCount
			if !c.dead {
				attempts++
			}
			if o.Attempt != attempts {
				t.Errorf("%d attempts, want %d", o.Attempt, attempts)
			}
			told := map[int]bool{}
			for _, o := range e.outcomesOf(ev.ID) {
				told[o.Attempt] = true
			}
			if len(told) != attempts {
				t.Errorf("outcomes of attempts %v are told, want %d", told, attempts)
			}
			if r := e.record("orders", ev.ID); r.Starts != 0 || r.RetryCount != c.retryCount || len(r.Attempts) != attempts ||
				r.Exhausted != c.dead || r.Status == mesh.RecordDispatched == c.dead {
				t.Errorf("record %+v", r)
			}
			if n := p.callsOf(ev); n != c.calls {
				t.Errorf("%d calls, want %d", n, c.calls)
			}
			if n := len(e.deadLetters()); n > 1 || n == 1 != c.dead {
				t.Errorf("%d dead letters", n)
			}
		})
	}
}

// A process that is told to end while it handles a redelivered event leaves no trace of it.
func TestStopInARedeliveredEventsHandlerCountsNothing(t *testing.T) {
	t.Parallel()
	e := start(t)
	quick := func(s *mesh.Subscription) { s.AckWait = time.Second }
	e.bind(with(orders(nothing), quick))
	events := []mesh.Event{e.doing("wait"), e.doing("succeed late"), e.doing("hang")}
	for _, ev := range events {
		e.publish(ev)
	}
	e.takeAndHandBack("orders", len(events))
	p := e.service(settings{Concurrency: len(events), Drain: time.Millisecond})
	for _, ev := range events {
		p.awaitCalls(ev, 1)
		if r := e.record("orders", ev.ID); r == nil || r.Starts != 1 {
			t.Fatalf("%s: record %+v, want one start", ev.AggregateID, r)
		}
	}
	p.stop()
	for _, ev := range events {
		if r := e.record("orders", ev.ID); r.Starts != 0 || r.RetryCount != 0 || len(r.Attempts) != 0 || r.Status != mesh.RecordStarted {
			t.Errorf("%s: record %+v", ev.AggregateID, r)
		}
		if all := e.outcomesOf(ev.ID); len(all) != 0 {
			t.Errorf("%s: outcomes %+v", ev.AggregateID, all)
		}
	}
	h, fn := script()
	e.handle(with(orders(fn), quick))
	e.awaitSettled("orders", uint64(len(events)))
	for _, ev := range events {
		if o := e.awaitFinal(ev.ID); !o.Succeeded() || o.Attempt != 1 || o.RetryCount != 0 || len(h.of(ev.ID)) != 1 {
			t.Errorf("%s: %d calls, outcome %+v", ev.AggregateID, len(h.of(ev.ID)), o)
		}
	}
}

func TestEventsThatWaitForARetrySurviveAKillOfTheServer(t *testing.T) {
	t.Parallel()
	e, server := onChild(t)
	var mu sync.Mutex
	calls := map[string]int{}
	e.handle(with(mesh.OnRaw("orders", ordered, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		mu.Lock()
		defer mu.Unlock()
		if calls[d.ID]++; calls[d.ID] == 1 {
			return mesh.RetryAfter(4*time.Second, errBoom)
		}
		return nil
	}), func(s *mesh.Subscription) {
		// A nak that the server took with it is made up for after AckWait.
		s.Concurrency, s.AckWait = 100, 2*time.Second
	}))
	const n = 1000
	events := e.publishAtOnce(n, func(int) mesh.Event { return e.event("orders") })
	await(t, "all to fail", func() bool { return len(e.allOutcomes()) >= n })
	server.Kill()
	mu.Lock()
	for _, ev := range events {
		if calls[ev.ID] != 1 {
			t.Errorf("%d calls before the server was killed", calls[ev.ID])
		}
	}
	mu.Unlock()
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.awaitSettled("orders", n)
	last := map[string]mesh.Outcome{}
	for _, o := range e.allOutcomes() {
		if o.Attempt >= last[o.EventID].Attempt {
			last[o.EventID] = o.Outcome
		}
	}
	for _, ev := range events {
		if o := last[ev.ID]; !o.Succeeded() || o.RetryCount != 1 || o.Attempt != 2 || calls[ev.ID] != 2 {
			t.Fatalf("%d calls, outcome %+v", calls[ev.ID], o)
		}
	}
}

func TestPoisonEventCostsTheOthersNothing(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script()
	e.handle(orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		_ = fn(ctx, d)
		if d.AggregateID == "poison" {
			panic("poison")
		}
		return nil
	}))
	good := e.publishMany(50, "orders")
	poison := e.event("orders")
	poison.AggregateID, poison.MaxRetries = "poison", 3
	e.publish(poison)
	good = append(good, e.publishMany(50, "orders")...)
	e.awaitSettled("orders", 101)
	for _, ev := range good {
		if o := e.awaitFinal(ev.ID); !o.Succeeded() || o.Attempt != 1 || len(h.of(ev.ID)) != 1 || len(e.outcomesOf(ev.ID)) != 1 {
			t.Errorf("%d calls, outcome %+v", len(h.of(ev.ID)), o)
		}
		if r := e.record("orders", ev.ID); r != nil {
			t.Errorf("record %+v", r)
		}
	}
	if o := e.awaitFinal(poison.ID); !o.Exhausted || o.Code != mesh.CodePanic || o.RetryCount != 3 || len(h.of(poison.ID)) != 3 {
		t.Errorf("%d calls, outcome %+v", len(h.of(poison.ID)), o)
	}
	if letters := e.deadLetters(); len(letters) != 1 || letters[0].Header.Get("Nats-Msg-Id") != poison.ID+"#orders#0" {
		t.Errorf("%d dead letters", len(letters))
	}
}

// publishAtOnce publishes n events without waiting for each.
func (e *env) publishAtOnce(n int, make func(i int) mesh.Event) []mesh.Event {
	e.t.Helper()
	nc, err := e.connect()
	if err != nil {
		e.t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(4000))
	if err != nil {
		e.t.Fatal(err)
	}
	var events []mesh.Event
	var acks []jetstream.PubAckFuture
	for i := range n {
		ev := make(i)
		ack, err := js.PublishMsgAsync(ev.Message(e.EventSubject(ev.Consumer, ev.Type), ev.MsgID()), jetstream.WithStallWait(patience))
		if err != nil {
			e.t.Fatal(err)
		}
		events, acks = append(events, ev), append(acks, ack)
	}
	for _, ack := range acks {
		select {
		case <-ack.Ok():
		case err := <-ack.Err():
			e.t.Fatal(err)
		case <-time.After(patience):
			e.t.Fatalf("waited %s in vain for an ack", patience)
		}
	}
	return events
}
