package outbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"jetmesh/internal/meshtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

func exec(t *testing.T, env *meshtest.Env, sql string, args ...any) {
	t.Helper()
	if _, err := env.Pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func scan[T any](t *testing.T, env *meshtest.Env, sql string, args ...any) (v T) {
	t.Helper()
	if err := env.Pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// lock holds an event's row as a stranger would, until its transaction ends.
func lock(t *testing.T, env *meshtest.Env, id string) pgx.Tx {
	t.Helper()
	tx := begin(t, env.Pool)
	if _, err := tx.Exec(t.Context(), `select from mesh.outbox where id = $1 for update`, id); err != nil {
		t.Fatal(err)
	}
	return tx
}

func rollback(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// awaitBlocked waits until a statement waits for a row somebody holds.
func awaitBlocked(t *testing.T, env *meshtest.Env, statement string) {
	t.Helper()
	meshtest.Await(t, "the lock to be met by "+statement, func() bool {
		return scan[bool](t, env, `select exists (select from pg_stat_activity
			where wait_event_type = 'Lock' and datname = current_database() and position($1 in query) > 0 and pid <> pg_backend_pid())`, statement)
	})
}

// own leaves a consumer with a durable and without a handler.
func own(t *testing.T, env *meshtest.Env, consumer string) {
	t.Helper()
	js := relayJetStream(t, env.NC)
	_, stop := env.Handle((&sink{}).on(consumer))
	meshtest.Await(t, "the durable of "+consumer, func() bool {
		_, err := js.ConsumerInfo("MESH_EVENTS", "own_"+consumer)
		return err == nil
	})
	stop()
}

// bulk commits rows that were made by the server alone.
const bulkRows = `insert into mesh.outbox (id, consumer, event_type, aggregate_type, aggregate_id, payload, content_type, trace_id)
	select gen_random_uuid(), $1, 'order.created', 'order', 'O-1', convert_to('"' || repeat('x', $2) || '"', 'utf8'), 'application/json', 'trace' from generate_series(1, $3)`

func bulk(t *testing.T, env *meshtest.Env, consumer string, bytes, n int) {
	t.Helper()
	exec(t, env, bulkRows, consumer, bytes, n)
}

// settle sends outcomes as a handler's process would.
func settle(t *testing.T, env *meshtest.Env, instance string, outcomes ...mesh.Outcome) {
	t.Helper()
	for i := range outcomes {
		outcomes[i].StartedAt, outcomes[i].PublishedAt = time.Now(), time.Now()
	}
	data, err := json.Marshal(mesh.OutcomeBatch{Instance: instance, Outcomes: outcomes})
	if err != nil {
		t.Fatal(err)
	}
	var source string
	meshtest.Await(t, "the relay to take a source id for this database", func() bool {
		source = scan[string](t, env, `select case when home = mesh.home() then source_id::text else '' end from mesh.meta`)
		return source != ""
	})
	if _, err := relayJetStream(t, env.NC).Publish("mesh.outcomes."+source, data); err != nil {
		t.Fatal(err)
	}
}

// While a sweep waits for a locked row, a late one comes where the sweep has already passed: left
// untracked below meta.relay_low, no relay would find it again.
func TestLateRowIsNotPassedByARunningSweep(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	own(t, env, "orders")
	env.Relay(outbox.RelayConfig{})
	const lost = `select exists (select from mesh.outbox, mesh.meta where seq < relay_low and tracked_status is null and status in ('pending', 'dispatching'))`
	var late outbox.Written
	var slow, stranger pgx.Tx
	for { // until the row is held before a sweep came by
		first := env.Write(meshtest.Event("orders"))[0].Row.ID
		slow = begin(t, env.Pool)
		var err error
		if late, err = outbox.Write(t.Context(), slow, meshtest.Event("orders")); err != nil {
			t.Fatal(err)
		}
		env.Write(meshtest.Event("orders"))
		env.AwaitStatus(first, outbox.StatusDispatching)
		stranger = lock(t, env, first)
		if scan[bool](t, env, `select tracked_status is null from mesh.outbox where id = $1`, first) {
			break
		}
		rollback(t, stranger)
		rollback(t, slow)
	}
	awaitBlocked(t, env, "set tracked_status = status")
	if err := slow.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond) // many looks into the holes
	rollback(t, stranger)
	meshtest.Await(t, "a sweep to pass by the late row", func() bool {
		if scan[bool](t, env, lost) {
			t.Fatal("an unsettled row below relay_low is not tracked")
		}
		return scan[bool](t, env, `select relay_low > $1 from mesh.meta`, late.Row.Seq)
	})
	if row := env.AwaitStatus(late.Row.ID, outbox.StatusDispatching); !scan[bool](t, env, `select tracked_status is not null from mesh.outbox where id = $1`, row.ID) {
		t.Errorf("the late row is not tracked: %+v", row)
	}
}

func TestOutcomeThatCannotBeStoredKeepsNoOtherFromSettling(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	own(t, env, "orders")
	relay, _ := env.Relay(outbox.RelayConfig{})
	for name, c := range map[string]struct {
		instance string
		poison   mesh.Outcome
	}{
		"NUL in the instance":    {"a\x00b", mesh.Outcome{Attempt: 1}},
		"NUL in the code":        {"a", mesh.Outcome{Attempt: 1, Code: "a\x00", Message: "b\x00"}},
		"attempt beyond int4":    {"a", mesh.Outcome{Attempt: 1 << 40}},
		"negative attempt":       {"a", mesh.Outcome{Attempt: -1 << 40}},
		"generation beyond int4": {"a", mesh.Outcome{Generation: 1 << 40, Attempt: 1}},
		"retries beyond int4":    {"a", mesh.Outcome{Attempt: 1, Code: "error", RetryCount: 1 << 40}},
		"sequence beyond int8":   {"a", mesh.Outcome{Attempt: 1, StreamSeq: 1 << 63}},
		"no event":               {"a", mesh.Outcome{EventID: "nobody", Attempt: 1}},
	} {
		w := env.Write(meshtest.Event("orders"), meshtest.Event("orders"))
		together, apart := w[0].Row.ID, w[1].Row.ID
		if c.poison.EventID == "" {
			c.poison.EventID = uuid.NewString()
		}
		settle(t, env, c.instance, mesh.Outcome{EventID: together, Attempt: 1}, c.poison)
		settle(t, env, "b", mesh.Outcome{EventID: apart, Attempt: 1})
		row := env.AwaitStatus(together, outbox.StatusDispatched)
		env.AwaitStatus(apart, outbox.StatusDispatched)
		if row.LockedBy != strings.ReplaceAll(c.instance, "\x00", "\uFFFD") {
			t.Errorf("%s: settled by %q", name, row.LockedBy)
		}
	}
	if !relay.Stats().Active {
		t.Error("the relay has given up its session")
	}
}

func TestOddHeadersAreDeliveredAndListedAsText(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	got := make(chan mesh.Delivery[[]byte], 1)
	env.Handle(mesh.OnRaw("orders", mesh.AnyType, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		got <- d
		return nil
	}))
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	exec(t, env, `update mesh.outbox set headers = '{"n": 1.5, "b": true, "list": [1, "a"], "text": "ü", "none": null}'`)
	env.Relay(outbox.RelayConfig{})
	want := map[string]string{"n": "1.5", "b": "true", "list": `[1, "a"]`, "text": "ü", "none": ""}
	check := func(where string, headers map[string]string) {
		for k, v := range want {
			if got, ok := headers[k]; got != v || !ok {
				t.Errorf("%s: header %s is %q", where, k, got)
			}
		}
	}
	check("delivery", (<-got).Headers)
	check("row", env.AwaitStatus(id, outbox.StatusDispatched).Headers)
	page, err := outbox.List(t.Context(), env.Pool, outbox.Filter{}, 0, "")
	if err != nil || len(page.Items) != 1 {
		t.Fatalf("%d events, %v", len(page.Items), err)
	}
	check("list", page.Items[0].Headers)
}

func TestTableRefusesWhatNobodyCanRead(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Write(meshtest.Event("orders"))
	for _, set := range []string{
		`headers = '[1, 2]'`, `headers = '1'`, `headers = '"a"'`, `headers = 'null'`, `headers = null`,
		`created_at = 'infinity'`, `created_at = '-infinity'`, `occurred_at = 'infinity'`, `max_retries = -1`, `status = 'lost'`,
	} {
		_, err := env.Pool.Exec(t.Context(), `update mesh.outbox set `+set)
		if pg := (*pgconn.PgError)(nil); !errors.As(err, &pg) || !strings.HasPrefix(pg.Code, "23") {
			t.Errorf("%s: %v", set, err)
		}
	}
}

func TestTimeOfAnEventIsItsOwnElseThatOfWriting(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	got := make(chan mesh.Delivery[[]byte], 1)
	env.Handle(mesh.OnRaw("orders", mesh.AnyType, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		got <- d
		return nil
	}))
	env.Relay(outbox.RelayConfig{})
	for name, given := range map[string]time.Time{
		"default":             {},
		"own":                 time.Date(2001, 2, 3, 4, 5, 6, 789_000, time.FixedZone("", 3600)),
		"finer than Postgres": time.Date(2001, 2, 3, 4, 5, 6, 789_999, time.UTC),
	} {
		e := meshtest.Event("orders")
		e.Time = given
		w := env.Write(e)[0].Row
		want := given.Truncate(time.Microsecond)
		if given.IsZero() {
			want = w.CreatedAt
		}
		d, row := <-got, env.AwaitStatus(w.ID, outbox.StatusDispatched)
		if !w.Time.Equal(want) || !row.Time.Equal(want) || !d.Time.Equal(want) {
			t.Errorf("%s: given %s, written %s, read %s, delivered %s", name, given, w.Time, row.Time, d.Time)
		}
		if time.Since(row.CreatedAt).Abs() > time.Hour {
			t.Errorf("%s: created at %s", name, row.CreatedAt)
		}
	}
}

func TestEventsAreDeliveredAfterTheNumbersBeganAnew(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Handle(s.on("orders"))
	env.Relay(outbox.RelayConfig{})
	env.Write(events("orders", 50)...)
	env.AwaitCount(outbox.StatusDispatched, 50)
	meshtest.Await(t, "the sweep to end", func() bool {
		return scan[bool](t, env, `select relay_low > last_value from mesh.meta, mesh.outbox_seq_seq`)
	})
	exec(t, env, `truncate mesh.outbox restart identity`)
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	env.AwaitStatus(id, outbox.StatusDispatched)
	if !s.has(id) {
		t.Error("not handled")
	}
}

func TestDuplicateOfAForeignEventIsRecordedWhateverItsID(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Handle(s.on("orders"))
	foreign := keyed("same")
	foreign.ID = "not-a-uuid"
	if _, err := relayJetStream(t, env.NC).PublishMsg(foreign.Message("mesh.events.orders.order.created", "same")); err != nil {
		t.Fatal(err)
	}
	relay, _ := env.Relay(outbox.RelayConfig{})
	w := env.Write(keyed("same"), meshtest.Event("orders"))
	row := env.AwaitStatus(w[0].Row.ID, outbox.StatusSkipped)
	env.AwaitStatus(w[1].Row.ID, outbox.StatusDispatched)
	if row.DuplicateOf != "not-a-uuid" || row.SettledAt == nil || s.has(row.ID) || !relay.Stats().Active {
		t.Errorf("row %+v", row)
	}
}

func TestRelayThatEndsTellsWritersThatNobodyListens(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	asleep := func() bool { return scan[bool](t, env, `select relay_asleep from mesh.meta`) }
	for range 5 {
		_, stop := env.Relay(outbox.RelayConfig{})
		meshtest.Await(t, "the relay to sleep", asleep)
		stop()
		if asleep() {
			t.Fatal("relay_asleep stays")
		}
	}
}

func TestLockedRowKeepsNoOtherFromSettling(t *testing.T) {
	t.Parallel()
	for name, send := range map[string]func(t *testing.T, env *meshtest.Env, a, b mesh.Outcome){
		"one message": func(t *testing.T, env *meshtest.Env, a, b mesh.Outcome) { settle(t, env, "x", a, b) },
		"two messages": func(t *testing.T, env *meshtest.Env, a, b mesh.Outcome) {
			settle(t, env, "x", a)
			settle(t, env, "x", b)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			env := meshtest.New(t)
			own(t, env, "orders")
			relay, _ := env.Relay(outbox.RelayConfig{})
			w := env.Write(meshtest.Event("orders"), meshtest.Event("orders"))
			locked, free := w[0].Row.ID, w[1].Row.ID
			env.AwaitStatus(locked, outbox.StatusDispatching)
			env.AwaitStatus(free, outbox.StatusDispatching)
			stranger := lock(t, env, locked)
			send(t, env, mesh.Outcome{EventID: locked, Attempt: 1}, mesh.Outcome{EventID: free, Attempt: 1})
			env.AwaitStatus(free, outbox.StatusDispatched)
			if row, _ := env.Row(locked); row.Status != outbox.StatusDispatching {
				t.Errorf("the locked row is %s", row.Status)
			}
			rollback(t, stranger)
			env.AwaitStatus(locked, outbox.StatusDispatched)
			if !relay.Stats().Active {
				t.Error("the relay has given up its session")
			}
		})
	}
}

func TestEveryQueryExecModeWillDo(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			env := meshtest.New(t)
			cfg := env.Pool.Config()
			cfg.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			env.Pool = pool
			e := keyed("k")
			e.Headers = map[string]string{"A": `x"y\z'`}
			e.Payload = []byte{0, 1, 2, '\\', '"', 0xff}
			e.ContentType = "application/octet-stream"
			e.MaxRetries = 3
			e.Time = time.Date(2001, 2, 3, 4, 5, 6, 7000, time.UTC)
			first := env.Write(e, meshtest.Event("orders"))[0]
			again := env.Write(e)[0]
			row, _ := env.Row(first.Row.ID)
			if !again.Existed || again.Differs || again.Row.ID != row.ID {
				t.Errorf("written again: %+v", again)
			}
			if !bytes.Equal(row.Payload, e.Payload) || row.Headers["A"] != e.Headers["A"] || row.MaxRetries != 3 || !row.Time.Equal(e.Time) {
				t.Errorf("row %+v", row)
			}
			sub := mesh.OnRaw("orders", mesh.AnyType, func(_ context.Context, d mesh.Delivery[[]byte]) error {
				if d.Attempt == 1 {
					return fmt.Errorf("not yet")
				}
				time.Sleep(250 * time.Millisecond) // long enough to be marked
				return nil
			})
			sub.Backoff.Base = time.Millisecond
			env.Handle(sub)
			env.Relay(outbox.RelayConfig{})
			env.AwaitCount(outbox.StatusDispatched, 2)
		})
	}
}

// A message that was delivered twice ran twice at once: one run failed, the other succeeded.
func TestOfTwoRunsOfOneAttemptTheSuccessWins(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	m, _ := env.Handle(mesh.OnRaw("orders", mesh.AnyType, func(context.Context, mesh.Delivery[[]byte]) error {
		return mesh.Permanent(errors.New("no"))
	}))
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	row := env.AwaitStatus(id, outbox.StatusFailed)
	var source string
	if err := env.Pool.QueryRow(t.Context(), `select source_id::text from mesh.meta`).Scan(&source); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(mesh.OutcomeBatch{Instance: "other", Outcomes: []mesh.Outcome{{EventID: id, Attempt: row.Attempt, StartedAt: time.Now(), PublishedAt: time.Now()}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.JetStream().Publish(t.Context(), m.Names.OutcomeSubject(source), data); err != nil {
		t.Fatal(err)
	}
	row = env.AwaitStatus(id, outbox.StatusDispatched)
	if row.RetryCount != 1 || row.ErrorCode != "" {
		t.Errorf("row %+v", row)
	}
}
