// Package meshtest gives tests a whole mesh: a Postgres database with an outbox, a NATS
// server with the mesh's streams, relays and handlers that end with the test.
package meshtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"jetmesh/internal/natstest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// patience bounds every wait for a condition. It is long because it only ever runs out in a
// test that fails.
const patience = 40 * time.Second

// Env is a database and a NATS connection with everything in place.
type Env struct {
	tb   testing.TB
	Pool *pgxpool.Pool
	NC   *nats.Conn
	Log  zerolog.Logger
}

// New makes an outbox in a fresh database and a mesh on a NATS server in this process.
func New(tb testing.TB) *Env {
	tb.Helper()
	_, nc := natstest.Start(tb)
	return On(tb, pgtest.Pool(tb, Migrate), nc)
}

// On makes the mesh's streams on the given server and uses the given, migrated database.
func On(tb testing.TB, pool *pgxpool.Pool, nc *nats.Conn) *Env {
	tb.Helper()
	e := &Env{tb: tb, Pool: pool, NC: nc, Log: Logger(tb)}
	if err := e.newMesh().ApplyTopology(e.Context(), mesh.Topology{MaxBytes: 256 << 20, MaxDeadBytes: 64 << 20, MaxLedger: 64 << 20}); err != nil {
		tb.Fatal(err)
	}
	return e
}

// WithPool is an outbox without a mesh, for what Postgres does alone.
func WithPool(tb testing.TB, pool *pgxpool.Pool) *Env {
	return &Env{tb: tb, Pool: pool, Log: Logger(tb)}
}

// Migrate is what a database for tests is prepared with.
func Migrate(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return outbox.Migrate(ctx, conn)
}

// Logger writes warnings to the test's log, and everything when JETMESH_TEST_LOG is set. What is
// logged after the test is dropped.
func Logger(tb testing.TB) zerolog.Logger {
	level := zerolog.WarnLevel
	if os.Getenv("JETMESH_TEST_LOG") != "" {
		level = zerolog.TraceLevel
	}
	w := &testWriter{tb: tb}
	tb.Cleanup(w.close)
	return zerolog.New(w).Level(level).With().Timestamp().Logger()
}

type testWriter struct {
	mu   sync.Mutex
	tb   testing.TB
	done bool
}

func (w *testWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.done {
		w.tb.Logf("%s", p[:max(len(p)-1, 0)])
	}
	return len(p), nil
}

func (w *testWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
}

// Context ends with the test.
func (e *Env) Context() context.Context { return e.tb.Context() }

func (e *Env) newMesh() *mesh.Mesh {
	m, err := mesh.New(e.NC, mesh.Config{Logger: e.Log})
	if err != nil {
		e.tb.Fatal(err)
	}
	return m
}

// Relay runs a relay until the test ends, or until stop is called.
func (e *Env) Relay(cfg outbox.RelayConfig) (r *outbox.Relay, stop func()) {
	e.tb.Helper()
	cfg.Logger = e.Log
	r, err := outbox.NewRelay(e.Pool, e.newMesh(), cfg)
	if err != nil {
		e.tb.Fatal(err)
	}
	return r, e.Run("relay", r.Run)
}

// Handle runs subscriptions until the test ends, or until stop is called.
func (e *Env) Handle(subs ...mesh.Subscription) (m *mesh.Mesh, stop func()) {
	e.tb.Helper()
	m = e.newMesh()
	m.Handle(subs...)
	return m, e.Run("mesh", m.Run)
}

// Run runs something until the test ends, or until stop is called; an error it ends with
// fails the test.
func (e *Env) Run(name string, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			e.tb.Errorf("%s: %v", name, err)
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	e.tb.Cleanup(stop)
	return stop
}

// Write commits events in one transaction.
func (e *Env) Write(events ...mesh.Event) []outbox.Written {
	e.tb.Helper()
	var written []outbox.Written
	err := pgx.BeginFunc(e.Context(), e.Pool, func(tx pgx.Tx) (err error) {
		written, err = outbox.WriteMany(e.Context(), tx, events)
		return err
	})
	if err != nil {
		e.tb.Fatal(err)
	}
	return written
}

// Row reads an event.
func (e *Env) Row(id string) (outbox.Row, []outbox.Attempt) {
	e.tb.Helper()
	row, attempts, err := outbox.Get(e.Context(), e.Pool, id)
	if err != nil {
		e.tb.Fatal(err)
	}
	return row, attempts
}

// AwaitStatus waits until an event has a status.
func (e *Env) AwaitStatus(id, status string) outbox.Row {
	e.tb.Helper()
	var row outbox.Row
	Await(e.tb, fmt.Sprintf("event %s to be %s", id, status), func() bool {
		row, _ = e.Row(id)
		return row.Status == status
	})
	return row
}

// Count counts the rows of a status.
func (e *Env) Count(status string) (n int) {
	e.tb.Helper()
	if err := e.Pool.QueryRow(e.Context(), `select count(*) from mesh.outbox where status = $1`, status).Scan(&n); err != nil {
		e.tb.Fatal(err)
	}
	return n
}

// AwaitCount waits until n rows have a status.
func (e *Env) AwaitCount(status string, n int) {
	e.tb.Helper()
	Await(e.tb, fmt.Sprintf("%d events to be %s", n, status), func() bool { return e.Count(status) == n })
}

// Await waits until a condition holds.
func Await(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; !holds(); pause = min(2*pause, 50*time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatalf("waited %s in vain for %s", patience, what)
		}
		time.Sleep(pause)
	}
}

// Event is a valid event for a consumer, without a key.
func Event(consumer string) mesh.Event {
	return mesh.Event{Consumer: consumer, Type: "order.created", AggregateType: "order", AggregateID: "O-1", Payload: []byte(`{"total":12}`)}
}
