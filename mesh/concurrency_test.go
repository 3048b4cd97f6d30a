package mesh_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"jetmesh/mesh"
)

// gate is a handler whose calls wait until the test lets them through.
type gate struct {
	running, most atomic.Int64
	started       chan mesh.Delivery[[]byte]
	open          chan struct{} // close it, or send to let one through
}

func newGate() *gate {
	return &gate{started: make(chan mesh.Delivery[[]byte], 10_000), open: make(chan struct{})}
}

func (g *gate) handle(ctx context.Context, d mesh.Delivery[[]byte]) error {
	n := g.running.Add(1)
	defer g.running.Add(-1)
	for most := g.most.Load(); n > most && !g.most.CompareAndSwap(most, n); most = g.most.Load() {
	}
	g.started <- d
	select {
	case <-g.open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestConcurrencyBoundsWhatRunsAndWhatIsFetchedAhead(t *testing.T) {
	t.Parallel()
	e := start(t)
	first, second := newGate(), newGate()
	sub := orders(first.handle)
	sub.Concurrency = 3
	e.handle(sub)
	e.publishMany(20, "orders")
	for range 3 {
		receive(t, "three handlers", first.started)
	}
	await(t, "as many to be fetched ahead", func() bool { return e.durable("orders").NumAckPending == 6 })
	// A second process gets all the rest at once.
	other := orders(second.handle)
	other.Concurrency = 14
	e.handle(other)
	for range 14 {
		receive(t, "the rest at the second process", second.started)
	}
	if c := e.durable("orders"); c.NumAckPending != 20 || c.NumPending != 0 || len(first.started) != 0 {
		t.Errorf("%d unanswered, %d waiting, %d more started", c.NumAckPending, c.NumPending, len(first.started))
	}
	close(first.open)
	close(second.open)
	e.awaitSettled("orders", 20)
	if a, b := first.most.Load(), second.most.Load(); a != 3 || b != 14 {
		t.Errorf("%d and %d handlers at once, want 3 and 14", a, b)
	}
	if c := e.durable("orders"); c.NumRedelivered != 0 {
		t.Errorf("%d redelivered", c.NumRedelivered)
	}
}

func TestConcurrencyIsNeverExceededUnderLoad(t *testing.T) {
	t.Parallel()
	e := start(t)
	g := newGate()
	close(g.open)
	sub := orders(g.handle)
	sub.Concurrency = 4
	e.handle(sub)
	seen := map[string]int{}
	for range 4 {
		e.publishMany(100, "orders")
	}
	e.awaitSettled("orders", 400)
	for range 400 {
		seen[receive(t, "400 calls", g.started).ID]++
	}
	if len(seen) != 400 || len(g.started) > 0 || g.most.Load() > 4 {
		t.Errorf("%d events, %d calls too many, %d at once", len(seen), len(g.started), g.most.Load())
	}
}

func TestHandlersStartInTheOrderOfTheStream(t *testing.T) {
	t.Parallel()
	e := start(t)
	g := newGate()
	sub := orders(g.handle)
	sub.Concurrency = 4
	e.handle(sub)
	events := e.publishMany(8, "orders")
	for range 4 {
		receive(t, "the first four", g.started)
	}
	await(t, "four to be fetched ahead", func() bool { return e.durable("orders").NumAckPending == 8 })
	for _, ev := range events[4:] {
		g.open <- struct{}{}
		if got := receive(t, "the next handler", g.started); got.ID != ev.ID {
			t.Errorf("event %s starts, want %s", got.ID, ev.ID)
		}
	}
	close(g.open)
	e.awaitSettled("orders", 8)
}

// One at a time they run in the order of the stream, as long as none fails.
func TestSingleHandlerKeepsTheOrderOfTheStream(t *testing.T) {
	t.Parallel()
	e := start(t)
	g := newGate()
	close(g.open)
	sub := orders(g.handle)
	sub.Concurrency = 1
	e.handle(sub)
	for i, ev := range e.publishMany(200, "orders") {
		if got := receive(t, "the next handler", g.started); got.ID != ev.ID {
			t.Fatalf("call %d is of event %s, want %s", i, got.ID, ev.ID)
		}
	}
}

// The handler runs longer than AckWait, and the messages behind it wait longer: each runs once.
func TestHandlersLongerThanAckWaitRunOnce(t *testing.T) {
	t.Parallel()
	e := start(t)
	g := newGate()
	sub := orders(g.handle)
	sub.Concurrency, sub.AckWait = 2, time.Second
	e.handle(sub)
	events := e.publishMany(8, "orders")
	began := time.Now()
	for range 2 {
		receive(t, "the first handlers", g.started)
	}
	await(t, "three times AckWait to pass", func() bool { return time.Since(began) > 3*time.Second })
	if len(g.started) > 0 {
		t.Errorf("started again: %s", (<-g.started).ID)
	}
	close(g.open)
	for _, ev := range events {
		if o := e.awaitOutcome(ev.ID, 1); !o.Succeeded() || o.Attempt != 1 {
			t.Errorf("outcome %+v", o)
		}
	}
	e.awaitSettled("orders", 8)
	if n := len(g.started); n != 6 || len(e.allOutcomes()) != 8 {
		t.Errorf("%d more calls and %d outcomes, want 6 and 8", n, len(e.allOutcomes()))
	}
}

// Nothing waits behind a failing event: it comes back when it is due.
func TestEventsInRetryHoldUpNoOthers(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, succeed := script()
	_, fail := script(mesh.RetryAfter(time.Hour, errBoom))
	sub := orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "bad" {
			return fail(ctx, d)
		}
		return succeed(ctx, d)
	})
	sub.Concurrency = 2
	e.handle(sub)
	e.publishBad(50)
	for _, ev := range e.publishMany(10, "orders") {
		e.awaitOutcome(ev.ID, 1)
	}
	if n := h.count(); n != 10 {
		t.Errorf("%d calls, want 10", n)
	}
	if c := e.durable("orders"); c.NumAckPending != 50 {
		t.Errorf("%d in retry, want 50", c.NumAckPending)
	}
}
