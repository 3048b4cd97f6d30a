package mesh_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"jetmesh/internal/natstest"
	"jetmesh/mesh"
)

func TestEventOfAKilledProcessIsHandledByAnother(t *testing.T) {
	t.Parallel()
	e := start(t)
	p := e.service(settings{Concurrency: 1})
	await(t, "the durable", func() bool { return e.durable("orders") != nil })
	running, waiting := e.doing("hang"), e.doing("hang")
	e.publish(running)
	seq := e.publish(waiting)
	p.awaitCalls(running, 1)
	await(t, "the second event to be fetched ahead", func() bool { return e.durable("orders").NumAckPending == 2 })
	p.kill()
	h, fn := script()
	e.handle(with(orders(fn), func(s *mesh.Subscription) { s.AckWait = time.Second }))
	e.awaitSettled("orders", seq)
	for _, ev := range []mesh.Event{running, waiting} {
		calls := h.of(ev.ID)
		if len(calls) != 1 || calls[0].Attempt != 1 || !calls[0].Redelivered {
			t.Errorf("calls %+v", calls)
		}
		if o := e.awaitOutcome(ev.ID, 1); !o.Succeeded() || o.RetryCount != 0 {
			t.Errorf("outcome %+v", o)
		}
	}
}

// url is the address of the server.
func (e *env) url() string { return e.js.Conn().ConnectedUrl() }

func onChild(t *testing.T, args ...string) (*env, interface {
	Kill()
	Restart(context.Context) error
}) {
	t.Helper()
	c := natstest.Child(t, args...)
	return on(t, small, func(opts ...nats.Option) (*nats.Conn, error) { return mesh.Connect(c.URL(), opts...) }), c
}

func TestServerThatIsKilledAndRestartedLosesNothing(t *testing.T) {
	t.Parallel()
	e, server := onChild(t)
	g := newGate()
	h, fails := script(errBoom, errBoom, nil)
	sub := orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "bad" {
			return fails(ctx, d)
		}
		return g.handle(ctx, d)
	})
	sub.AckWait, sub.Backoff = 2*time.Second, mesh.Backoff{Base: 500 * time.Millisecond, Cap: 500 * time.Millisecond}
	e.handle(sub)
	retried := e.publishBad(5)
	running := e.publishMany(5, "orders")
	for range running {
		receive(t, "handlers to run", g.started)
	}
	for _, ev := range retried {
		e.awaitRecord("orders", ev.ID, 1)
	}
	server.Kill()
	close(g.open) // they return while there is no server
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, ev := range append(running, retried...) {
		if o := e.awaitFinal(ev.ID); !o.Succeeded() {
			t.Errorf("outcome %+v", o)
		}
	}
	e.awaitSettled("orders", 10)
	for _, ev := range retried {
		// A run that the server's death kept from being recorded in time may not count.
		if r := e.record("orders", ev.ID); r.Status != mesh.RecordDispatched || r.RetryCount < 1 || r.RetryCount > 2 || len(h.of(ev.ID)) < 3 {
			t.Errorf("%d calls, record %+v", len(h.of(ev.ID)), r)
		}
	}
	// The subscription is alive.
	ev := e.event("orders")
	e.publish(ev)
	if o := e.awaitOutcome(ev.ID, 1); !o.Succeeded() {
		t.Errorf("outcome %+v", o)
	}
}

func TestRunWaitsForAServerThatIsAway(t *testing.T) {
	t.Parallel()
	e, server := onChild(t)
	server.Kill()
	h, fn := script()
	p := e.handle(orders(fn))
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	await(t, "the test's own connection", e.js.Conn().IsConnected)
	ev := e.event("orders")
	e.publish(ev)
	if d := receive(t, "the event", h.calls); d.ID != ev.ID {
		t.Errorf("event %s", d.ID)
	}
	p.stop()

	// One that never comes is waited for until the context ends, which is no error.
	server.Kill()
	ctx, cancel := context.WithCancel(t.Context())
	m := e.mesh(mesh.Config{})
	m.Handle(orders(fn))
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	cancel()
	if err := receive(t, "Run to end", done); err != nil {
		t.Error(err)
	}
	// A connection that was closed never comes back.
	m = e.mesh(mesh.Config{})
	m.Handle(orders(fn))
	m.Conn().Close()
	if err := m.Run(t.Context()); !errors.Is(err, nats.ErrConnectionClosed) {
		t.Errorf("on a closed connection: %v", err)
	}
}

func TestDurableThatIsDeletedIsMadeAgain(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script()
	bad, fail := script(mesh.Permanent(errBoom))
	e.handle(orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "bad" {
			return fail(ctx, d)
		}
		return fn(ctx, d)
	}))
	dead := e.publishBad(1)[0]
	e.awaitFinal(dead.ID)
	if err := e.js.DeleteConsumer(t.Context(), e.EventsStream(), e.OwnerDurable("orders")); err != nil {
		t.Fatal(err)
	}
	await(t, "the durable", func() bool { return e.durable("orders") != nil })
	second := e.event("orders")
	e.publish(second)
	await(t, "the second event", func() bool { return len(h.of(second.ID)) == 1 })
	e.awaitOutcome(second.ID, 1)
	// The new durable begins from the start: what was given up stays given up.
	e.awaitSettled("orders", 2)
	if n := bad.count(); n != 1 {
		t.Errorf("%d calls for the event that was given up, want 1", n)
	}
}

// A server that comes back without its store: the client waits for the durable for ever, the
// subscription does not.
func TestSubscriptionSurvivesTheLossOfTheStore(t *testing.T) {
	t.Parallel()
	store := t.TempDir() + "/nats"
	e, server := onChild(t, "-store", store)
	h, fn := script()
	e.handle(orders(fn))
	e.awaitSettled("orders", e.publish(e.event("orders")))
	server.Kill()
	if err := errors.Join(os.RemoveAll(store), server.Restart(t.Context())); err != nil {
		t.Fatal(err)
	}
	m := e.mesh(mesh.Config{})
	await(t, "the streams", func() bool { return m.ApplyTopology(t.Context(), small) == nil })
	await(t, "the test's own connection", e.js.Conn().IsConnected)
	e.read = 0
	ev := e.event("orders")
	e.publish(ev)
	await(t, "the event", func() bool { return len(h.of(ev.ID)) == 1 })
	e.awaitOutcome(ev.ID, 1)
}

// A process can end while there is no server: what it could not tell is delivered again.
func TestRunEndsWhileTheServerIsAway(t *testing.T) {
	t.Parallel()
	e, server := onChild(t)
	g := newGate()
	p := e.handleOn(e.mesh(mesh.Config{DrainTimeout: time.Second}), orders(g.handle))
	e.publishMany(3, "orders")
	for range 3 {
		receive(t, "the handlers", g.started)
	}
	server.Kill()
	await(t, "the connection to be lost", func() bool { return !p.Conn().IsConnected() })
	close(g.open)
	began := time.Now()
	p.stop()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Run took %s to end", took)
	}
}
