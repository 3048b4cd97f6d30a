package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/natstest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// sink is a handler that keeps what it was given.
type sink struct {
	mu  sync.Mutex
	got map[string]int // deliveries by event id
}

func (s *sink) handle(_ context.Context, d mesh.Delivery[[]byte]) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.got == nil {
		s.got = map[string]int{}
	}
	s.got[d.ID]++
	return nil
}

func (s *sink) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.got)
}

func (s *sink) has(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got[id] > 0
}

func (s *sink) twice() (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, n := range s.got {
		if n > 1 {
			ids = append(ids, id)
		}
	}
	return ids
}

func (s *sink) on(consumer string) mesh.Subscription {
	return mesh.OnRaw(consumer, mesh.AnyType, s.handle)
}

func events(consumer string, n int) []mesh.Event {
	list := make([]mesh.Event, n)
	for i := range list {
		list[i] = meshtest.Event(consumer)
		list[i].IdempotencyKey = fmt.Sprintf("%s:%d", consumer, i)
	}
	return list
}

func TestWrittenEventReachesItsHandlerAndIsDispatched(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	got := make(chan mesh.Delivery[[]byte], 1)
	env.Relay(outbox.RelayConfig{})
	env.Handle(mesh.OnRaw("orders", "order.created", func(_ context.Context, d mesh.Delivery[[]byte]) error {
		got <- d
		return nil
	}))
	e := keyed("k:1")
	e.Headers = map[string]string{"x-shop": "Zürich"}
	e.TraceID = "t-1"
	w := env.Write(e)[0]
	d := <-got
	if d.ID != w.Row.ID || string(d.Data) != `{"total":12}` || d.TraceID != "t-1" || d.IdempotencyKey != "k:1" || d.Headers["x-shop"] != "Zürich" ||
		d.AggregateID != "O-1" || d.Attempt != 1 || d.Source == "" || !d.Time.Equal(w.Row.CreatedAt) {
		t.Errorf("delivered %+v, wrote %+v", d, w.Row)
	}
	row := env.AwaitStatus(w.Row.ID, outbox.StatusDispatched)
	if row.StreamSeq == 0 || row.PublishedAt == nil || row.SettledAt == nil || row.LockedBy == "" || row.StartedAt == nil || row.RetryCount != 0 || row.Attempt != 1 {
		t.Errorf("row %+v", row)
	}
}

func TestRollbackPublishesNothing(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.on("orders"))
	for range 20 {
		err := outbox.InTx(t.Context(), env.Pool, func(tx pgx.Tx) error {
			if _, err := outbox.WriteMany(t.Context(), tx, events("orders", 3)); err != nil {
				return err
			}
			return errors.New("roll back")
		})
		if err == nil {
			t.Fatal("committed")
		}
	}
	after := env.Write(events("orders", 5)...)
	env.AwaitCount(outbox.StatusDispatched, 5)
	if s.count() != 5 || !s.has(after[4].Row.ID) {
		t.Errorf("handled %d events", s.count())
	}
}

func TestSlowCommitterWithALowerNumberIsNotOvertakenForEver(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.on("orders"))
	slow := begin(t, env.Pool)
	first, err := outbox.Write(t.Context(), slow, meshtest.Event("orders"))
	if err != nil {
		t.Fatal(err)
	}
	later := env.Write(events("orders", 700)...) // more than a batch
	env.AwaitCount(outbox.StatusDispatched, 700)
	if later[0].Row.Seq < first.Row.Seq || s.has(first.Row.ID) {
		t.Fatalf("numbers %d, %d", first.Row.Seq, later[0].Row.Seq)
	}
	if err := slow.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	env.AwaitStatus(first.Row.ID, outbox.StatusDispatched)
}

// A transaction that was committed after its number was long passed by the sweep that moves
// meta.relay_low must be found by the relay that works, and by one that starts anew.
func TestVeryLateCommitterIsFoundBehindTheSweep(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart=%v", restart), func(t *testing.T) {
			env := meshtest.New(t)
			var s sink
			_, stop := env.Relay(outbox.RelayConfig{})
			slow := begin(t, env.Pool)
			first, err := outbox.Write(t.Context(), slow, meshtest.Event("orders"))
			if err != nil {
				t.Fatal(err)
			}
			env.Handle(s.on("orders"))
			env.Write(events("orders", 50)...)
			env.AwaitCount(outbox.StatusDispatched, 50)
			env.Write(events("nobody", 1)...)
			meshtest.Await(t, "the sweep", func() bool {
				var tracked bool
				env.Pool.QueryRow(t.Context(), `select tracked_status is not null from mesh.outbox where consumer = 'nobody'`).Scan(&tracked)
				return tracked
			})
			if restart {
				stop()
			}
			if err := slow.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if restart {
				env.Relay(outbox.RelayConfig{})
			}
			env.AwaitStatus(first.Row.ID, outbox.StatusDispatched)
			if n := s.count(); n != 51 {
				t.Errorf("handled %d events", n)
			}
		})
	}
}

func TestStrangersLongTransactionStallsNothing(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.on("orders"))
	// One that writes, here, and one in another database of the same server.
	stranger := begin(t, env.Pool)
	if _, err := stranger.Exec(t.Context(), `create table stranger (n int); insert into stranger values (1); select pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	elsewhere := begin(t, pgtest.Pool(t, nil))
	if _, err := elsewhere.Exec(t.Context(), `create table stranger (n int)`); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		outbox.InTx(t.Context(), env.Pool, func(tx pgx.Tx) error { // leaves a hole each
			outbox.Write(t.Context(), tx, meshtest.Event("orders"))
			return errors.New("roll back")
		})
		env.Write(meshtest.Event("orders"), meshtest.Event("orders"))
	}
	env.AwaitCount(outbox.StatusDispatched, 20)
	if err := errors.Join(stranger.Rollback(t.Context()), elsewhere.Rollback(t.Context())); err != nil {
		t.Fatal(err)
	}
	env.Write(meshtest.Event("orders"))
	env.AwaitCount(outbox.StatusDispatched, 21)
}

func TestConcurrentWritersLoseNothing(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Relay(outbox.RelayConfig{BatchSize: 37}) // many batches, many edges
	sub := s.on("orders")
	sub.Concurrency = 64
	env.Handle(sub)
	const writers, each = 12, 150
	var wg sync.WaitGroup
	var mu sync.Mutex
	committed := 0
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				err := pgx.BeginFunc(t.Context(), env.Pool, func(tx pgx.Tx) error {
					if _, err := outbox.WriteMany(t.Context(), tx, []mesh.Event{meshtest.Event("orders"), meshtest.Event("orders")}); err != nil {
						return err
					}
					if (i+w)%5 == 0 {
						return errors.New("roll back")
					}
					return nil
				})
				if err == nil {
					mu.Lock()
					committed += 2
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	env.AwaitCount(outbox.StatusDispatched, committed)
	if s.count() != committed || len(s.twice()) > 0 {
		t.Errorf("committed %d, handled %d, twice %v", committed, s.count(), s.twice())
	}
}

func TestRowsWaitWhileTheirConsumerHasNoDurable(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var present, late sink
	_, stop := env.Relay(outbox.RelayConfig{BatchSize: 10})
	env.Handle(present.on("orders"))
	waiting := env.Write(events("later", 35)...)
	env.Write(events("orders", 10)...)
	env.AwaitCount(outbox.StatusDispatched, 10)
	if n := env.Count(outbox.StatusPending); n != 35 {
		t.Errorf("%d rows wait", n)
	}
	stop() // the next relay must find them too
	env.Relay(outbox.RelayConfig{BatchSize: 10})
	env.Handle(late.on("later"))
	env.AwaitCount(outbox.StatusDispatched, 45)
	if late.count() != 35 || !late.has(waiting[34].Row.ID) || len(late.twice()) > 0 {
		t.Errorf("handled %d, twice %v", late.count(), late.twice())
	}
}

func TestUnsettledRowIsMarkedDispatching(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	release := make(chan struct{})
	env.Relay(outbox.RelayConfig{})
	env.Handle(mesh.OnRaw("orders", mesh.AnyType, func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		<-release
		return nil
	}))
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	row := env.AwaitStatus(id, outbox.StatusDispatching)
	if row.StreamSeq == 0 || row.PublishedAt == nil || row.SettledAt != nil {
		t.Errorf("row %+v", row)
	}
	close(release)
	env.AwaitStatus(id, outbox.StatusDispatched)
}

func TestHandlerThatFailsTwiceLeavesItsTrail(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	calls := make(chan int, 10)
	sub := mesh.OnRaw("orders", mesh.AnyType, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		calls <- d.Attempt
		if d.Attempt <= 2 {
			return fmt.Errorf("not yet: \x00 and \xff do not fit into a text column")
		}
		return nil
	})
	sub.Backoff = mesh.Backoff{Base: time.Millisecond, Cap: 10 * time.Millisecond}
	env.Handle(sub)
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	row := env.AwaitStatus(id, outbox.StatusDispatched)
	_, attempts := env.Row(id)
	if row.RetryCount != 2 || row.Attempt != 3 || row.NextRetryAt != nil || row.ErrorCode != "" || len(attempts) != 2 {
		t.Fatalf("row %+v, attempts %+v", row, attempts)
	}
	for i, a := range attempts {
		if a.Attempt != i+1 || a.ErrorCode != mesh.CodeError || !strings.HasPrefix(a.ErrorMessage, "not yet") || a.Instance == "" || a.StartedAt.IsZero() {
			t.Errorf("attempt %+v", a)
		}
	}
	if got := []int{<-calls, <-calls, <-calls}; !slices.Equal(got, []int{1, 2, 3}) {
		t.Errorf("attempts %v", got)
	}
}

// Every way a handler can fail has a defined status in the row.
func TestFailedHandlerLeavesAFailedRow(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	never := mesh.Backoff{Base: time.Hour, Cap: time.Hour}
	type handler = func(context.Context, mesh.Delivery[[]byte]) error
	cases := []struct {
		consumer  string
		handle    handler
		typed     bool
		code      string
		exhausted bool
	}{
		{"errs", func(context.Context, mesh.Delivery[[]byte]) error { return errors.New("no") }, false, mesh.CodeError, false},
		{"permanent", func(context.Context, mesh.Delivery[[]byte]) error { return mesh.Permanent(errors.New("never")) }, false, mesh.CodeError, true},
		{"panics", func(context.Context, mesh.Delivery[[]byte]) error { panic("boom") }, false, mesh.CodePanic, false},
		{"times-out", func(ctx context.Context, _ mesh.Delivery[[]byte]) error { <-ctx.Done(); return ctx.Err() }, false, mesh.CodeTimeout, false},
		{"hangs", func(context.Context, mesh.Delivery[[]byte]) error { <-t.Context().Done(); return nil }, false, mesh.CodeTimeout, false},
		{"other-type", nil, false, mesh.CodeNoHandler, false},
		{"undecodable", nil, true, mesh.CodeUndecodable, true},
	}
	ids := map[string]string{}
	for _, c := range cases {
		var sub mesh.Subscription
		switch {
		case c.typed:
			sub = mesh.On(c.consumer, "order.created", func(context.Context, mesh.Delivery[struct{ Total string }]) error { return nil })
		case c.handle == nil:
			sub = mesh.OnRaw(c.consumer, "order.deleted", func(context.Context, mesh.Delivery[[]byte]) error { return nil })
		default:
			sub = mesh.OnRaw(c.consumer, mesh.AnyType, c.handle)
		}
		sub.Backoff, sub.Timeout = never, 50*time.Millisecond
		env.Handle(sub)
		ids[c.consumer] = env.Write(meshtest.Event(c.consumer))[0].Row.ID
	}
	for _, c := range cases {
		row := env.AwaitStatus(ids[c.consumer], outbox.StatusFailed)
		_, attempts := env.Row(row.ID)
		if row.ErrorCode != c.code || row.ErrorMessage == "" || row.RetryCount != 1 || (row.NextRetryAt == nil) != c.exhausted || row.SettledAt != nil || len(attempts) != 1 {
			t.Errorf("%s: row %+v, attempts %+v", c.consumer, row, attempts)
		}
	}
	page, err := outbox.List(t.Context(), env.Pool, outbox.Filter{Status: outbox.StatusFailed}, 0, "")
	if err != nil || len(page.Items) != len(cases) {
		t.Errorf("list of failed events: %d, %v", len(page.Items), err)
	}
}

// Rows that other hands put into the table are parked, and block nobody.
func TestRowThatCanNeverBePublishedIsParked(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	relay, _ := env.Relay(outbox.RelayConfig{})
	env.Handle(s.on("orders"))
	env.Write(meshtest.Event("orders"))
	env.AwaitCount(outbox.StatusDispatched, 1)
	insert := func(consumer, typ, headers string, payload int) string {
		var id string
		err := env.Pool.QueryRow(t.Context(), `insert into mesh.outbox (id, consumer, event_type, aggregate_type, aggregate_id, payload, content_type, headers, trace_id)
			values (gen_random_uuid(), $1, $2, 'a', 'b', convert_to(repeat('a', $4), 'utf8'), 'text/plain', $3::jsonb, 't') returning id::text`, consumer, typ, headers, payload).Scan(&id)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	poison := map[string]string{
		"wildcard":      insert("orders", "a.*", `{}`, 1),
		"empty token":   insert("orders", "a..b", `{}`, 1),
		"over-long":     insert("orders", strings.Repeat("a", 5000), `{}`, 1),
		"injection":     insert("orders", "a", `{"x": "a\r\nNats-Rollup: all"}`, 1),
		"server header": insert("orders", "a", `{"Nats-Rollup": "all"}`, 1),
		"2 MB":          insert("orders", "a", `{}`, 2<<20),
		"70 KB headers": insert("orders", "a", `{"x": "`+strings.Repeat("a", 70<<10)+`"}`, 1),
	}
	good := env.Write(meshtest.Event("orders"))[0].Row.ID
	env.AwaitStatus(good, outbox.StatusDispatched)
	for name, id := range poison {
		row := env.AwaitStatus(id, outbox.StatusFailed)
		if row.ErrorCode != mesh.CodeUnpublished || row.ErrorMessage == "" || row.NextRetryAt != nil || row.RetryCount != 1 || s.has(id) {
			t.Errorf("%s: %+v", name, row)
		}
	}
	if n := relay.Stats().Parked; n != int64(len(poison)) {
		t.Errorf("%d parked", n)
	}
}

func TestOneRelayWorksAndTheOtherTakesOver(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Handle(s.on("orders"))
	one, stopOne := env.Relay(outbox.RelayConfig{})
	meshtest.Await(t, "the first relay", func() bool { return one.Stats().Active })
	two, _ := env.Relay(outbox.RelayConfig{PollInterval: 10 * time.Millisecond})
	env.Write(events("orders", 10)...)
	env.AwaitCount(outbox.StatusDispatched, 10)
	if two.Stats().Active || two.Stats().Published != 0 {
		t.Errorf("the second relay works: %+v", two.Stats())
	}
	stopOne()
	meshtest.Await(t, "the second relay", func() bool { return two.Stats().Active })
	env.Write(meshtest.Event("orders"))
	env.AwaitCount(outbox.StatusDispatched, 11)
	if s.count() != 11 || len(s.twice()) > 0 {
		t.Errorf("handled %d, twice %v", s.count(), s.twice())
	}
}

// JetStream deduplicates by message id over the whole stream: two outboxes that use the same key
// for different things must not lose one of them, and for the same thing must deliver it once.
func TestSameKeyInTwoOutboxes(t *testing.T) {
	t.Parallel()
	one := meshtest.New(t) // the databases are copies of one template
	two := meshtest.On(t, pgtest.Pool(t, meshtest.Migrate), one.NC)
	var orders, bills sink
	one.Handle(orders.on("orders"), bills.on("bills"))
	one.Relay(outbox.RelayConfig{})
	first := one.Write(keyed("same"))[0].Row.ID
	one.AwaitStatus(first, outbox.StatusDispatched)

	two.Relay(outbox.RelayConfig{})
	bill := meshtest.Event("bills")
	bill.IdempotencyKey = "same"
	other := two.Write(bill)[0].Row.ID
	two.AwaitStatus(other, outbox.StatusDispatched)
	if !bills.has(other) {
		t.Error("another action under the same key was lost")
	}

	three := meshtest.On(t, pgtest.Pool(t, meshtest.Migrate), one.NC)
	three.Relay(outbox.RelayConfig{})
	again := three.Write(keyed("same"))[0].Row.ID
	row := three.AwaitStatus(again, outbox.StatusSkipped)
	if row.DuplicateOf != first || orders.has(again) {
		t.Errorf("the same action, written to two outboxes: %+v", row)
	}
}

func TestDuplicateOfAMessageThatIsGoneIsPublishedAgain(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	js := relayJetStream(t, env.NC)
	_, stop := env.Handle((&sink{}).on("orders"))
	meshtest.Await(t, "the durable", func() bool {
		_, err := js.ConsumerInfo("MESH_EVENTS", "own_orders")
		return err == nil
	})
	stop()
	_, stopRelay := env.Relay(outbox.RelayConfig{})
	id := env.Write(keyed("gone"))[0].Row.ID
	env.AwaitStatus(id, outbox.StatusDispatching)
	stopRelay()
	// The server still remembers the id when the message is purged and the mark was lost.
	if err := js.PurgeStream("MESH_EVENTS"); err != nil {
		t.Fatal(err)
	}
	if _, err := env.Pool.Exec(t.Context(), `update mesh.outbox set status = 'pending'`); err != nil {
		t.Fatal(err)
	}
	relay, _ := env.Relay(outbox.RelayConfig{})
	var s sink
	env.Handle(s.on("orders"))
	env.AwaitStatus(id, outbox.StatusDispatched)
	if !s.has(id) || relay.Stats().Duplicates == 0 {
		t.Errorf("stats %+v", relay.Stats())
	}
}

func relayJetStream(t *testing.T, nc *nats.Conn) nats.JetStreamContext {
	t.Helper()
	js, err := nc.JetStream()
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func TestNATSAwayAndBack(t *testing.T) {
	t.Parallel()
	server := natstest.Child(t)
	nc, err := mesh.Connect(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	env := meshtest.On(t, pgtest.Pool(t, meshtest.Migrate), nc)
	var s sink
	relay, _ := env.Relay(outbox.RelayConfig{})
	env.Handle(s.on("orders"))
	env.Write(events("orders", 100)...)
	env.AwaitCount(outbox.StatusDispatched, 100)

	server.Kill()
	meshtest.Await(t, "the client to notice", func() bool { return !nc.IsConnected() })
	env.Write(events("away", 0)...)
	var during []mesh.Event
	for i := range 1000 {
		during = append(during, keyed(fmt.Sprintf("during:%d", i)))
	}
	env.Write(during...)
	meshtest.Await(t, "a publish to fail", func() bool { return relay.Stats().Retried > 0 })
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	env.AwaitCount(outbox.StatusDispatched, 1100)
	if s.count() != 1100 {
		t.Errorf("handled %d", s.count())
	}
}

func TestPostgresRestarted(t *testing.T) {
	t.Parallel()
	for name, restart := range map[string]func(*testing.T, *meshtest.Postgres){
		"stopped": func(t *testing.T, p *meshtest.Postgres) { p.StopAndStart(t) },
		"killed":  func(t *testing.T, p *meshtest.Postgres) { p.KillAndStart(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := meshtest.NewPostgres(t)
			_, nc := natstest.Start(t)
			env := meshtest.On(t, pg.Pool, nc)
			var s sink
			relay, _ := env.Relay(outbox.RelayConfig{})
			env.Handle(s.on("orders"))
			env.Write(events("orders", 200)...)
			restart(t, pg)
			more := events("orders", 250)[200:]
			meshtest.Await(t, "Postgres to take writes", func() bool { return write(t.Context(), pg.Pool, more...) == nil })
			env.AwaitCount(outbox.StatusDispatched, 250)
			if s.count() != 250 || !relay.Stats().Active {
				t.Errorf("handled %d, %+v", s.count(), relay.Stats())
			}
		})
	}
}

func write(ctx context.Context, pool *pgxpool.Pool, events ...mesh.Event) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := outbox.WriteMany(ctx, tx, events)
		return err
	})
}

func TestRelayRefusesWhatOnlyAPersonCanMend(t *testing.T) {
	t.Parallel()
	_, nc := natstest.Start(t)
	m, err := mesh.New(nc, mesh.Config{})
	if err != nil {
		t.Fatal(err)
	}
	run := func(pool *pgxpool.Pool) error {
		r, err := outbox.NewRelay(pool, m, outbox.RelayConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Run(t.Context())
	}
	if err := run(pgtest.Pool(t, nil)); err == nil || !strings.Contains(err.Error(), "jetmesh migrate up") {
		t.Errorf("without a schema: %v", err)
	}
	if err := run(pgtest.Pool(t, meshtest.Migrate)); err == nil || !strings.Contains(err.Error(), "MESH_EVENTS") {
		t.Errorf("without streams: %v", err)
	}
	if _, err := outbox.NewRelay(pgtest.Pool(t, nil), m, outbox.RelayConfig{PollInterval: time.Hour, BatchSize: -1, Schema: "A"}); err == nil ||
		!strings.Contains(err.Error(), "pollInterval") || !strings.Contains(err.Error(), "batchSize") || !strings.Contains(err.Error(), "schema") {
		t.Errorf("bad settings: %v", err)
	}
}

// The table's settings and indexes are chosen so that settling an event touches no index. One index
// over a column that a success changes would undo that for all of them.
func TestSettlingTouchesNoIndex(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	env.Handle((&sink{}).on("orders"))
	env.Write(events("orders", 300)...)
	env.AwaitCount(outbox.StatusDispatched, 300)
	var updates, hot int
	meshtest.Await(t, "the statistics", func() bool {
		if err := env.Pool.QueryRow(t.Context(), `select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where schemaname = 'mesh' and relname = 'outbox'`).Scan(&updates, &hot); err != nil {
			t.Fatal(err)
		}
		return updates >= 300
	})
	if hot != updates {
		t.Errorf("%d of %d updates touched the indexes", updates-hot, updates)
	}
}
