package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/trace"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback(context.Background()) })
	return tx
}

func keyed(key string) mesh.Event {
	e := meshtest.Event("orders")
	e.IdempotencyKey = key
	return e
}

func TestRefusedEventWritesNothingAndLeavesTheTransactionUsable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, meshtest.Migrate)
	change := func(f func(*mesh.Event)) mesh.Event { e := meshtest.Event("orders"); f(&e); return e }
	cases := map[string]struct {
		event mesh.Event
		field string
	}{
		"wildcard consumer":     {change(func(e *mesh.Event) { e.Consumer = "a.*" }), "consumer"},
		"full wildcard":         {change(func(e *mesh.Event) { e.Type = ">" }), "eventType"},
		"empty token":           {change(func(e *mesh.Event) { e.Type = "a..b" }), "eventType"},
		"space":                 {change(func(e *mesh.Event) { e.Type = "a b" }), "eventType"},
		"5,000-byte name":       {change(func(e *mesh.Event) { e.Type = strings.Repeat("a", 5000) }), "eventType"},
		"no aggregate":          {change(func(e *mesh.Event) { e.AggregateID = "" }), "aggregateId"},
		"NUL":                   {change(func(e *mesh.Event) { e.AggregateID = "a\x00b" }), "aggregateId"},
		"broken UTF-8":          {change(func(e *mesh.Event) { e.AggregateType = "a\xffb" }), "aggregateType"},
		"key out of alphabet":   {keyed("a b"), "key"},
		"header line break":     {change(func(e *mesh.Event) { e.Headers = map[string]string{"x": "a\r\nNats-Rollup: all"} }), "headers.x"},
		"illegal header key":    {change(func(e *mesh.Event) { e.Headers = map[string]string{"x y": "a"} }), "headers"},
		"header of the server":  {change(func(e *mesh.Event) { e.Headers = map[string]string{"NATS-Rollup": "all"} }), "headers.NATS-Rollup"},
		"2 MB payload":          {change(func(e *mesh.Event) { e.Payload = []byte(`"` + strings.Repeat("a", 2<<20) + `"`) }), "payload"},
		"70 KB headers":         {change(func(e *mesh.Event) { e.Headers = map[string]string{"x": strings.Repeat("a", 70<<10)} }), "headers"},
		"payload is not JSON":   {change(func(e *mesh.Event) { e.Payload = []byte(`{"a":`) }), "payload"},
		"no payload":            {change(func(e *mesh.Event) { e.Payload = nil }), "payload"},
		"id is no UUID":         {change(func(e *mesh.Event) { e.ID = "42" }), "id"},
		"unsafe explicit trace": {change(func(e *mesh.Event) { e.TraceID = "a b" }), "traceId"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			tx := begin(t, pool)
			good := meshtest.Event("orders")
			_, err := outbox.WriteMany(t.Context(), tx, []mesh.Event{good, c.event})
			var field *mesh.FieldError
			var key *mesh.KeyError
			switch {
			case errors.As(err, &field) && field.Field == c.field:
			case errors.As(err, &key) && key.Part == c.field:
			default:
				t.Errorf("error %v names no field %s", err, c.field)
			}
			if err != nil && !strings.Contains(err.Error(), "event 2 of 2") {
				t.Errorf("error %v does not say which event", err)
			}
			var n int
			if err := tx.QueryRow(t.Context(), `select count(*) from mesh.outbox`).Scan(&n); err != nil || n != 0 {
				t.Errorf("%d rows, error %v", n, err)
			}
		})
	}
}

func TestEventIsMeasuredByTheLimitOfTheServerThatTheRelayMet(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, meshtest.Migrate)
	if _, err := pool.Exec(t.Context(), `update mesh.meta set max_payload = 65536`); err != nil {
		t.Fatal(err)
	}
	e := meshtest.Event("orders")
	e.Payload = []byte(`"` + strings.Repeat("a", 64<<10) + `"`)
	tx := begin(t, pool)
	_, err := outbox.Write(t.Context(), tx, e)
	var field *mesh.FieldError
	if !errors.As(err, &field) || field.Field != "payload" || !strings.Contains(err.Error(), "65536") {
		t.Fatalf("error %v", err)
	}
	if _, err := outbox.Write(t.Context(), tx, meshtest.Event("orders")); err != nil {
		t.Errorf("the transaction is unusable afterwards: %v", err)
	}
}

func TestKnownKeyGivesBackTheExistingEvent(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, meshtest.Migrate)
	env := meshtest.WithPool(t, pool)
	first := env.Write(keyed("order:1"))[0]
	if first.Existed || first.Differs || first.Row.Status != outbox.StatusPending || first.Row.Seq == 0 {
		t.Fatalf("first %+v", first)
	}
	changed := keyed("order:1")
	changed.Payload = []byte(`{"total":13}`)
	same := keyed("order:1")
	again := env.Write(keyed("order:2"), same, changed, keyed("order:2"))
	if again[0].Existed || !again[1].Existed || again[1].Differs || !again[2].Existed || !again[2].Differs {
		t.Errorf("again %+v", again)
	}
	if !again[3].Existed || again[3].Row.ID != again[0].Row.ID {
		t.Errorf("a key twice in one call: %+v", again[3])
	}
	for _, w := range again[1:3] {
		if diff := cmp.Diff(first.Row, w.Row); diff != "" {
			t.Errorf("existing event (-first +again):\n%s", diff)
		}
	}
	if n := env.Count(outbox.StatusPending); n != 2 {
		t.Errorf("%d rows", n)
	}
}

func TestKnownIDGivesBackTheExistingEvent(t *testing.T) {
	t.Parallel()
	env := meshtest.WithPool(t, pgtest.Pool(t, meshtest.Migrate))
	first := env.Write(meshtest.Event("orders"))[0]
	e := meshtest.Event("orders")
	e.ID = first.Row.ID
	again := env.Write(e)[0]
	if !again.Existed || again.Row.Seq != first.Row.Seq {
		t.Errorf("%+v", again)
	}
}

func TestTwoOpenTransactionsRaceForAKey(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		commit  bool
		existed bool
	}{
		"the first commits":    {commit: true, existed: true},
		"the first rolls back": {commit: false, existed: false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t, meshtest.Migrate)
			first := begin(t, pool)
			one, err := outbox.Write(t.Context(), first, keyed("race"))
			if err != nil {
				t.Fatal(err)
			}
			second := begin(t, pool)
			var two outbox.Written
			done := make(chan error, 1)
			go func() {
				var err error
				two, err = outbox.Write(context.Background(), second, keyed("race"))
				done <- err
			}()
			meshtest.Await(t, "the second writer to wait for the first", func() bool {
				var waiting bool
				pool.QueryRow(t.Context(), `select exists (select from pg_locks where not granted and locktype = 'transactionid'
					and pid in (select pid from pg_stat_activity where datname = current_database()))`).Scan(&waiting)
				return waiting
			})
			if c.commit {
				err = first.Commit(t.Context())
			} else {
				err = first.Rollback(t.Context())
			}
			if err := errors.Join(err, <-done); err != nil {
				t.Fatal(err)
			}
			if two.Existed != c.existed || (two.Row.ID == one.Row.ID) != c.existed {
				t.Errorf("second writer got %+v", two)
			}
			if err := second.Commit(t.Context()); err != nil {
				t.Errorf("second commit: %v", err)
			}
		})
	}
}

func TestRepeatableReadReportsASerializationFailure(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, meshtest.Migrate)
	env := meshtest.WithPool(t, pool)
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `select count(*) from mesh.outbox`); err != nil { // takes the snapshot
		t.Fatal(err)
	}
	env.Write(keyed("late"))
	_, err = outbox.Write(t.Context(), tx, keyed("late"))
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "40001" {
		t.Errorf("error %v", err)
	}
}

func TestManyEventsAreOneRoundTripInTheOrderGiven(t *testing.T) {
	t.Parallel()
	cfg, err := pgxpool.ParseConfig(pgtest.URL(t, meshtest.Migrate))
	if err != nil {
		t.Fatal(err)
	}
	counter := &queryCounter{}
	cfg.ConnConfig.Tracer = counter
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	tx := begin(t, pool)
	var events []mesh.Event
	for i := range 300 {
		events = append(events, keyed(fmt.Sprintf("k-%d", i)))
	}
	before := counter.n
	written, err := outbox.WriteMany(t.Context(), tx, events)
	if err != nil {
		t.Fatal(err)
	}
	if n := counter.n - before; n != 1 {
		t.Errorf("%d statements", n)
	}
	for i, w := range written {
		if w.Existed || w.Row.IdempotencyKey != events[i].IdempotencyKey || i > 0 && w.Row.Seq != written[i-1].Row.Seq+1 {
			t.Fatalf("event %d: %+v", i, w)
		}
	}
}

type queryCounter struct{ n int }

func (c *queryCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n++
	return ctx
}
func (c *queryCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestTraceIDIsTheExplicitOneElseTheContextsElseNew(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, meshtest.Migrate)
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled})
	inSpan := trace.ContextWithSpanContext(t.Context(), span)
	write := func(ctx context.Context, traceID string) outbox.Row {
		tx := begin(t, pool)
		e := meshtest.Event("orders")
		e.TraceID = traceID
		w, err := outbox.Write(ctx, tx, e)
		if err != nil {
			t.Fatal(err)
		}
		row, _, err := outbox.Get(ctx, tx, w.Row.ID)
		if err != nil {
			t.Fatal(err)
		}
		return row
	}
	if r := write(inSpan, "mine"); r.TraceID != "mine" || r.TraceParent == "" {
		t.Errorf("explicit: %q %q", r.TraceID, r.TraceParent)
	}
	if r := write(mesh.WithTraceID(inSpan, "context"), ""); r.TraceID != "context" {
		t.Errorf("context: %q", r.TraceID)
	}
	if r := write(inSpan, ""); r.TraceID != span.TraceID().String() || r.TraceParent != "00-"+span.TraceID().String()+"-"+span.SpanID().String()+"-01" {
		t.Errorf("span: %q %q", r.TraceID, r.TraceParent)
	}
	if a, b := write(t.Context(), ""), write(mesh.WithTraceID(t.Context(), "not safe"), ""); len(a.TraceID) != 32 || len(b.TraceID) != 32 || a.TraceID == b.TraceID {
		t.Errorf("new: %q %q", a.TraceID, b.TraceID)
	}
}

func TestWritersNotifyOnlyWhileTheRelaySleeps(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, meshtest.Migrate)
	listener, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Release()
	if _, err := listener.Exec(t.Context(), `listen mesh_outbox`); err != nil {
		t.Fatal(err)
	}
	// next is how often writers had notified before the marker came.
	next := func() (n int) {
		if _, err := pool.Exec(t.Context(), `select pg_notify('mesh_outbox', 'marker')`); err != nil {
			t.Fatal(err)
		}
		for {
			got, err := listener.Conn().WaitForNotification(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got.Payload == "marker" {
				return n
			}
			n++
		}
	}
	plain := func() error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := outbox.Write(t.Context(), tx, meshtest.Event("orders"))
			return err
		})
	}
	owned := func(fail error) func() error {
		return func() error {
			err := outbox.InTx(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := outbox.Write(t.Context(), tx, meshtest.Event("orders"))
				return errors.Join(err, fail)
			})
			if fail != nil && errors.Is(err, fail) {
				return nil
			}
			return err
		}
	}
	empty := func() error { return outbox.InTx(t.Context(), pool, func(pgx.Tx) error { return nil }) }
	for _, c := range []struct {
		name   string
		asleep bool
		write  func() error
		want   int
	}{
		{"plain transaction, awake", false, plain, 0},
		{"plain transaction, asleep", true, plain, 1},
		{"InTx, awake", false, owned(nil), 0},
		{"InTx, asleep", true, owned(nil), 1},
		{"InTx that fails", true, owned(errors.New("no")), 0},
		{"InTx that writes nothing", true, empty, 0},
	} {
		if _, err := pool.Exec(t.Context(), `update mesh.meta set relay_asleep = $1`, c.asleep); err != nil {
			t.Fatal(err)
		}
		if err := c.write(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := next(); got != c.want {
			t.Errorf("%s: %d notifications, want %d", c.name, got, c.want)
		}
	}
}

func TestSchemaIsASetting(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, nil)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	billing := outbox.Schema("billing")
	if err := billing.Migrate(t.Context(), conn); err != nil {
		t.Fatal(err)
	}
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w, err := billing.Write(t.Context(), tx, meshtest.Event("orders"))
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if row, _, err := billing.Get(t.Context(), conn, w.Row.ID); err != nil || row.Seq != w.Row.Seq {
		t.Errorf("%+v, %v", row, err)
	}
	for _, bad := range []outbox.Schema{"", "Mesh", `m"; drop table x; --`, "pg_mesh", "1a", outbox.Schema(strings.Repeat("a", 49))} {
		if err := bad.Migrate(t.Context(), conn); err == nil {
			t.Errorf("schema %q was accepted", string(bad))
		}
		if _, err := bad.Write(t.Context(), nil, meshtest.Event("orders")); err == nil {
			t.Errorf("schema %q was accepted", string(bad))
		}
	}
}

func TestWrittenRowIsWhatGetReads(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, meshtest.Migrate)
	env := meshtest.WithPool(t, pool)
	e := keyed("a:b:c:D")
	e.Headers = map[string]string{"x-shop": "Zürich", "X.Y": ""}
	e.MaxRetries = mesh.NoRetries
	e.ContentType = "application/octet-stream"
	e.Payload = []byte{0, 255, 1}
	w := env.Write(e)[0]
	row, attempts := env.Row(w.Row.ID)
	if diff := cmp.Diff(w.Row, row); diff != "" || len(attempts) != 0 {
		t.Errorf("(-written +read):\n%s%v", diff, attempts)
	}
	if row.CreatedAt.IsZero() || time.Since(row.CreatedAt).Abs() > time.Hour {
		t.Errorf("created at %s", row.CreatedAt)
	}
	if _, _, err := outbox.Get(t.Context(), pool, "00000000-0000-0000-0000-000000000000"); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("error %v", err)
	}
}
