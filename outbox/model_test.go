package outbox_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"pgregory.net/rapid"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/natstest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

const modelLog = `
create table model_log (n bigint generated always as identity, id uuid, from_status text, to_status text, from_gen int, to_gen int,
	from_retry int, to_retry int, from_planned bool, planned bool);
create function model_note() returns trigger language plpgsql as $$ begin
	if tg_op = 'INSERT' then
		insert into model_log values (default, new.id, '', new.status, 0, new.generation, 0, new.retry_count, false, new.next_retry_at is not null);
	elsif (old.status, old.generation, old.retry_count) is distinct from (new.status, new.generation, new.retry_count) then
		insert into model_log values (default, new.id, old.status, new.status, old.generation, new.generation, old.retry_count, new.retry_count,
			old.next_retry_at is not null, new.next_retry_at is not null);
	end if;
	return null;
end $$;
create trigger model_note after insert or update on mesh.outbox for each row execute function model_note();`

// A modelMesh is what all histories share.
type modelMesh struct {
	env      *meshtest.Env
	url      string // of the NATS server
	source   string
	mu       sync.Mutex
	outcomes []*nats.Msg // every batch that was stored
	logged   int64       // changes of rows that were looked at
	count    map[string]int
}

// A history is one life of some events, with runners and relays of its own.
type history struct {
	*modelMesh
	t         *rapid.T
	consumer  string
	handler   modelHandler
	m         *mesh.Mesh // of the operator
	op        outbox.Operator
	events    []*modelEvent
	calm      bool
	up        bool // a runner is at work
	stopMesh  func()
	runnerNC  *nats.Conn // of the runner alone
	losses    losses     // the runner's
	kills     int
	durable   jetstream.Consumer
	stopRelay func()
}

func (h *history) startMesh() {
	var err error
	if h.runnerNC, err = nats.Connect(h.url, nats.SetCustomDialer(&h.losses)); err != nil {
		h.t.Fatal(err)
	}
	m, err := mesh.New(h.runnerNC, mesh.Config{DrainTimeout: 20 * time.Millisecond})
	if err != nil {
		h.t.Fatal(err)
	}
	sub := mesh.OnRaw(h.consumer, mesh.AnyType, h.handler.handle)
	sub.Backoff = mesh.Backoff{Base: time.Millisecond, Cap: 2 * time.Millisecond}
	sub.AckWait, sub.Concurrency = time.Second, 64
	m.Handle(sub)
	nc := h.runnerNC
	stop := h.env.Run("mesh", func(ctx context.Context) error {
		if err := m.Run(ctx); err != nil && !nc.IsClosed() { // killed while it started
			return err
		}
		return nil
	})
	h.stopMesh, h.up = func() { stop(); nc.Close() }, true
}

func (h *history) startRelay() {
	m, err := mesh.New(h.env.NC, mesh.Config{})
	if err != nil {
		h.t.Fatal(err)
	}
	relay, err := outbox.NewRelay(h.env.Pool, m, outbox.RelayConfig{PollInterval: 20 * time.Millisecond})
	if err != nil {
		h.t.Fatal(err)
	}
	h.stopRelay = h.env.Run("relay", relay.Run)
}

// await polls until why is empty.
func (h *history) await(why func() string) {
	h.t.Helper()
	deadline := time.Now().Add(8 * time.Second)
	for pause := time.Millisecond; ; pause = min(2*pause, 10*time.Millisecond) {
		reason := why()
		if reason == "" {
			return
		}
		if time.Now().After(deadline) {
			h.t.Fatalf("waited in vain: %s", reason)
		}
		time.Sleep(pause)
	}
}

// settle waits until every event is where the model says, and holds what led there against the contract.
func (h *history) settle() {
	h.t.Helper()
	for _, e := range h.events {
		h.apply(e, nil, nil) // the delay of an operator's failure may be over now
	}
	matches := make([][]modelState, len(h.events))
	h.await(func() string {
		for i, e := range h.events {
			row, _, err := outbox.Get(context.Background(), h.env.Pool, e.id)
			if err != nil {
				return err.Error()
			}
			started, hanging := h.handler.counts(e.id, row.Generation)
			var match []modelState
			for _, s := range e.possible {
				status := s.status == row.Status || s.status == statusOpen && (row.Status == outbox.StatusPending || row.Status == outbox.StatusDispatching)
				if status && s.gen == row.Generation && s.retry == row.RetryCount && s.runs == started && (s.hangs != 0) == (hanging > 0) &&
					(row.Status != outbox.StatusFailed || s.exhausted() == (row.NextRetryAt == nil)) {
					match = append(match, s)
				}
			}
			if len(match) == 0 {
				return fmt.Sprintf("event %s (max %d, scripts %q) is %s, generation %d, retryCount %d, next %v, %d runs, %d hang; the model says %+v",
					e.id, e.max, e.scripts, row.Status, row.Generation, row.RetryCount, row.NextRetryAt, started, hanging, e.possible)
			}
			matches[i] = match
		}
		return ""
	})
	for i, e := range h.events {
		e.possible = matches[i]
	}
	h.checkLog()
}

func (h *history) checkLog() {
	h.t.Helper()
	rows, err := h.env.Pool.Query(context.Background(), `select n, id::text, from_status, to_status, from_gen, to_gen, from_retry, to_retry, from_planned, planned
		from model_log where n > $1 order by n`, h.logged)
	if err != nil {
		h.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var c modelChange
		if err := rows.Scan(&h.logged, &c.id, &c.from, &c.to, &c.fromGen, &c.toGen, &c.fromRetry, &c.toRetry, &c.fromPlanned, &c.planned); err != nil {
			h.t.Fatal(err)
		}
		if err := c.check(); err != nil {
			h.t.Fatal(err)
		}
	}
	if rows.Err() != nil {
		h.t.Fatal(rows.Err())
	}
}

// checkRecords: where there is a record, the row agrees with it.
func (h *history) checkRecords() {
	h.t.Helper()
	for _, e := range h.events {
		rec, _, err := h.m.Record(context.Background(), h.consumer, e.id)
		if err != nil {
			h.t.Fatal(err)
		}
		row, _, err := outbox.Get(context.Background(), h.env.Pool, e.id)
		if err != nil {
			h.t.Fatal(err)
		}
		status := map[string]string{outbox.StatusPending: mesh.RecordReplaying, outbox.StatusDispatching: mesh.RecordReplaying}[row.Status]
		if status == "" {
			status = row.Status
		}
		switch {
		case rec == nil && row.Generation == 0 && row.RetryCount == 0:
		case rec == nil:
			h.t.Fatalf("event %s has no record: %+v", e.id, row)
		case rec.Status == mesh.RecordStarted && row.Generation == 0 && row.RetryCount == 0:
		case rec.Starts > 0 && (rec.Status == mesh.RecordDispatched || rec.Status == mesh.RecordSkipped):
			h.t.Fatalf("event %s: nothing runs, but starts are counted: %+v", e.id, rec)
		case rec.Status == mesh.RecordDispatched && row.Status == outbox.StatusDispatched && rec.Generation > row.Generation && rec.RetryCount == row.RetryCount:
			// An operator came too late; the generation that was raised for that stays.
		case rec.Generation != row.Generation || rec.RetryCount != row.RetryCount || rec.Status != status:
			h.t.Fatalf("event %s: record %+v, row %s, generation %d, retryCount %d", e.id, rec, row.Status, row.Generation, row.RetryCount)
		}
	}
}

// end lets everything come to its end, then replays what failed or was skipped.
func (h *history) end() {
	h.calm = true
	h.handler.mu.Lock()
	h.handler.calm = true
	h.handler.mu.Unlock()
	if !h.up {
		h.start()
	}
	all := func(do func(*modelEvent)) {
		for _, e := range h.events {
			do(e)
		}
		h.settle()
		h.checkRecords()
	}
	all(func(e *modelEvent) { h.together(e, modelTask{op: taskRelease}); h.hurry(e) })
	all(func(e *modelEvent) {
		if s := e.possible[0].status; s == outbox.StatusFailed || s == outbox.StatusSkipped {
			h.together(e, modelTask{op: "replay"})
		}
	})
	for _, e := range h.events {
		s := e.possible[0]
		if s.status != outbox.StatusDispatched || s.ok && h.handler.runs[e.id].successes == 0 {
			h.t.Fatalf("event %s is lost: %+v", e.id, s)
		}
	}
}

func (mm *modelMesh) history(t *rapid.T) {
	h := &history{modelMesh: mm, t: t, consumer: fmt.Sprintf("model-%d", rand.Uint64()), handler: modelHandler{runs: map[string]*modelRuns{}}}
	var err error
	if h.m, err = mesh.New(mm.env.NC, mesh.Config{}); err != nil {
		t.Fatal(err)
	}
	h.op = outbox.Operator{DB: mm.env.Pool, Mesh: h.m}
	stream, err := h.m.JetStream().Stream(context.Background(), h.m.Names.EventsStream())
	if err != nil {
		t.Fatal(err)
	}
	durable := h.m.Names.OwnerDurable(h.consumer)
	h.startMesh()
	defer func() {
		h.stopMesh()
		if h.stopRelay != nil {
			h.stopRelay()
		}
		stream.DeleteConsumer(context.Background(), durable)
	}()
	h.await(func() string {
		if h.durable, err = stream.Consumer(context.Background(), durable); err != nil {
			return err.Error()
		}
		return ""
	})
	h.startRelay() // it finds the durable at once

	mm.mu.Lock()
	mm.outcomes = nil
	mm.mu.Unlock()
	if err := mm.env.Pool.QueryRow(context.Background(), `select coalesce(max(n), 0) from model_log`).Scan(&mm.logged); err != nil {
		t.Fatal(err)
	}
	mm.count["histories"]++
	actions := map[string]func(){
		"write": h.write, "write2": h.write, "writeKnownKey": h.again, "stop": h.stop, "start": h.start, "restartRelay": h.restartRelay,
		"kill": h.kill, "loseAck": h.loseAck, "crash": h.crash, "repeatOutcomes": h.repeat,
		"operate":  func() { h.together(h.pick(), h.drawTask()) },
		"operate2": func() { h.together(h.pick(), h.drawTask()) },
		"meet":     func() { h.together(h.pick(), h.drawTask(), h.drawTask()) },
		"race":     func() { h.together(h.pick(), h.drawTask(), modelTask{op: taskRelease}) },
		"release":  func() { h.together(h.pick(), modelTask{op: taskRelease}) },
		"hurry": func() {
			e := h.pick()
			if !e.waitsByHand() {
				h.t.Skip("not waiting")
			}
			h.hurry(e)
		},
		"forge": h.forge,
	}
	repeat := map[string]func(*rapid.T){"": func(*rapid.T) {}}
	for name, do := range actions {
		repeat[name] = func(t *rapid.T) {
			h.t = t
			do()
			h.settle()
			mm.count["steps"]++
			mm.count[strings.TrimSuffix(name, "2")]++
		}
	}
	t.Repeat(repeat)
	h.t = t
	h.end()
}

func setFlag(t *testing.T, name, value string) {
	old := flag.Lookup(name).Value.String()
	flag.Set(name, value)
	t.Cleanup(func() { flag.Set(name, old) })
}

// checkModel runs histories of failures against the real thing.
func checkModel(t *testing.T, checks, steps string) {
	setFlag(t, "rapid.checks", checks)
	setFlag(t, "rapid.steps", steps)
	setFlag(t, "rapid.shrinktime", "20s")
	setFlag(t, "rapid.nofailfile", "true") // the seed is enough
	server, nc := natstest.Start(t)
	mm := &modelMesh{env: meshtest.On(t, pgtest.Pool(t, meshtest.Migrate), nc), url: server.URL(), count: map[string]int{}}
	if _, err := mm.env.Pool.Exec(t.Context(), modelLog); err != nil {
		t.Fatal(err)
	}
	if err := mm.env.Pool.QueryRow(t.Context(), `select source_id::text from mesh.meta`).Scan(&mm.source); err != nil {
		t.Fatal(err)
	}
	names, _ := mesh.NewNames("")
	sub, err := mm.env.NC.Subscribe(names.OutcomeSubject("*"), func(msg *nats.Msg) {
		mm.mu.Lock()
		defer mm.mu.Unlock()
		mm.outcomes = append(mm.outcomes, msg)
	})
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Unsubscribe()
	rapid.Check(t, mm.history)
	t.Logf("model: %d histories, %d steps: %v", mm.count["histories"], mm.count["steps"], mm.count)
}

func TestModelOfFailures(t *testing.T) { checkModel(t, "14", "20") }
