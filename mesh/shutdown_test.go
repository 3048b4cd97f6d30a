package mesh_test

import (
	"context"
	"testing"
	"time"

	"jetmesh/mesh"
)

func TestShutdownWaitsForHandlersAndHandsBackWhatWaited(t *testing.T) {
	t.Parallel()
	e := start(t)
	first := newGate()
	sub := orders(first.handle) // AckWait 30s: what comes back in this test was handed back
	sub.Concurrency = 4
	p := e.handle(sub)
	events := e.publishMany(8, "orders")
	for range 4 {
		receive(t, "four handlers", first.started)
	}
	await(t, "four messages fetched ahead", func() bool { return e.durable("orders").NumAckPending == 8 })

	p.cancel()
	h, fn := script()
	other := e.handle(orders(fn))
	for range 4 {
		if d := receive(t, "what was handed back", h.calls); d.Attempt != 1 || !d.Redelivered {
			t.Errorf("attempt %d, redelivered %v", d.Attempt, d.Redelivered)
		}
	}
	select {
	case <-p.done:
		t.Error("Run ended before its handlers")
	default:
	}
	close(first.open)
	receive(t, "Run to end", p.done)
	// What ran is stored and acked by the time Run returns, once the server has read it.
	e.awaitSettled("orders", 8)
	other.stop()
	byInstance := map[string]int{}
	for _, ev := range events {
		all := e.outcomesOf(ev.ID)
		if len(all) != 1 || !all[0].Succeeded() || all[0].Attempt != 1 {
			t.Fatalf("outcomes %+v", all)
		}
		byInstance[all[0].Instance]++
	}
	if byInstance[p.Instance()] != 4 || byInstance[other.Instance()] != 4 || h.count() != 4 || len(first.started) != 0 {
		t.Errorf("settled by %v", byInstance)
	}
}

func TestHandlersContextOutlivesTheEndOfRun(t *testing.T) {
	t.Parallel()
	e := start(t)
	g := newGate()
	p := e.handle(orders(g.handle))
	ev := e.event("orders")
	e.publish(ev)
	receive(t, "the handler", g.started)
	p.cancel()
	g.open <- struct{}{} // were its context canceled, it would have returned
	receive(t, "Run to end", p.done)
	if o := e.awaitOutcome(ev.ID, 1); !o.Succeeded() {
		t.Errorf("outcome %+v", o)
	}
}

func TestHandlerThatIsCutOffCountsNoAttempt(t *testing.T) {
	t.Parallel()
	e := start(t)
	honours := newGate()
	_, never := script()
	ignores, _, release := hung(t, never)
	p := e.handleOn(e.mesh(mesh.Config{DrainTimeout: soon}), orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		honours.started <- d
		if d.AggregateID == "bad" {
			return ignores(ctx, d)
		}
		return honours.handle(ctx, d)
	}))
	events := append(e.publishMany(1, "orders"), e.publishBad(1)...)
	for range events {
		receive(t, "the handlers", honours.started)
	}
	p.cancel()
	receive(t, "Run to end", p.done)
	h, fn := script()
	e.handle(orders(fn))
	for range events {
		// Far sooner than AckWait.
		if d := receive(t, "the redelivery", h.calls); d.Attempt != 1 || !d.Redelivered {
			t.Errorf("attempt %d, redelivered %v", d.Attempt, d.Redelivered)
		}
	}
	for _, ev := range events {
		if o := e.awaitOutcome(ev.ID, 1); !o.Succeeded() || o.RetryCount != 0 {
			t.Errorf("outcome %+v", o)
		}
		if rec := e.record("orders", ev.ID); rec != nil && (rec.Status != mesh.RecordDispatched || rec.RetryCount != 0 || rec.Starts != 0) {
			t.Errorf("record %+v", rec)
		}
	}
	release()
}

func TestIdleMeshEndsAtOnce(t *testing.T) {
	t.Parallel()
	e := start(t)
	p := e.handle(orders(nothing))
	await(t, "the durable", func() bool { return e.durable("orders") != nil })
	began := time.Now()
	p.stop()
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("Run took %s to end", took)
	}
}
