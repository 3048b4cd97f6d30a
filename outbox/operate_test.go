package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"jetmesh/internal/meshtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// switchable is a handler whose result a test changes.
type switchable struct {
	sink
	fail atomic.Pointer[error]
}

func (h *switchable) set(err error) { h.fail.Store(&err) }

func (h *switchable) on(consumer string) mesh.Subscription {
	sub := mesh.OnRaw(consumer, mesh.AnyType, func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		h.handle(ctx, d)
		if err := h.fail.Load(); err != nil {
			return *err
		}
		return nil
	})
	sub.Backoff = mesh.Backoff{Base: time.Hour, Cap: time.Hour}
	return sub
}

func (h *switchable) deliveries(id string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.got[id]
}

func operator(env *meshtest.Env, m *mesh.Mesh) outbox.Operator {
	return outbox.Operator{DB: env.Pool, Mesh: m}
}

// The drill: a handler fails, its event is failed; an operator replays it, the handler has recovered, it is
// dispatched, and the trail is kept.
func TestFailedEventIsReplayedAndItsTrailIsKept(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	var h switchable
	h.set(errors.New("down"))
	m, _ := env.Handle(h.on("orders"))
	op := operator(env, m)
	id := env.Write(keyed("drill"))[0].Row.ID
	env.AwaitStatus(id, outbox.StatusFailed)

	h.set(nil)
	row, err := op.Replay(t.Context(), id, outbox.Action{By: "ada", Reason: "it is back"})
	if err != nil || row.Status != outbox.StatusPending || row.RetryCount != 1 || row.Generation != 1 {
		t.Fatalf("replay: %+v, %v", row, err)
	}
	row = env.AwaitStatus(id, outbox.StatusDispatched)
	_, attempts := env.Row(id)
	if row.RetryCount != 1 || row.Generation != 1 || row.ErrorCode != "" || len(attempts) != 1 || h.deliveries(id) != 2 {
		t.Errorf("row %+v, attempts %+v, %d deliveries", row, attempts, h.deliveries(id))
	}
	rec, _, err := m.Record(t.Context(), "orders", id)
	if err != nil || rec == nil || rec.Status != mesh.RecordDispatched || rec.RetryCount != 1 || rec.DecidedBy != "ada" || len(rec.Attempts) != 2 {
		t.Errorf("record %+v, %v", rec, err)
	}
}

func TestExhaustedEventGetsOneMoreAttemptOrAFreshBudget(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	var h switchable
	h.set(errors.New("down"))
	m, _ := env.Handle(h.on("orders"))
	op := operator(env, m)
	e := meshtest.Event("orders")
	e.MaxRetries = 1
	id := env.Write(e)[0].Row.ID
	row := env.AwaitStatus(id, outbox.StatusFailed)
	if row.NextRetryAt != nil || row.RetryCount != 1 {
		t.Fatalf("exhausted: %+v", row)
	}
	failedAgain := func(reset bool) outbox.Row {
		t.Helper()
		before, _ := env.Row(id)
		if _, err := op.Replay(t.Context(), id, outbox.Action{ResetRetries: reset}); err != nil {
			t.Fatal(err)
		}
		meshtest.Await(t, "the replay to fail", func() bool {
			row, _ = env.Row(id)
			return row.Status == outbox.StatusFailed && row.RetryCount > before.RetryCount
		})
		return row
	}
	if row := failedAgain(false); row.RetryCount != 2 || row.NextRetryAt != nil {
		t.Errorf("one more attempt: %+v", row)
	}
	// A budget of one retry: the first failure exhausts it here too, the count goes on.
	if row := failedAgain(true); row.RetryCount != 3 || row.NextRetryAt != nil {
		t.Errorf("a fresh budget: %+v", row)
	}
	dead, _, err := m.DeadLetters(t.Context(), mesh.DeadFilter{Consumer: "orders"}, 50, "")
	if err != nil || len(dead) != 3 || dead[0].ID != id || dead[0].Generation != 2 || dead[2].Generation != 0 || dead[0].RetryCount != 3 {
		t.Errorf("dead letters %+v, %v", dead, err)
	}
}

func TestSkippedEventIsNotHandled(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var h switchable
	sub := h.on("orders")
	// The durable exists, the handler is down: events are published and wait in the stream.
	m, stop := env.Handle(sub)
	env.Relay(outbox.RelayConfig{})
	warm := env.Write(meshtest.Event("orders"))[0].Row.ID
	env.AwaitStatus(warm, outbox.StatusDispatched)
	stop()
	ids := []string{env.Write(meshtest.Event("orders"))[0].Row.ID, env.Write(meshtest.Event("orders"))[0].Row.ID}
	for _, id := range ids {
		env.AwaitStatus(id, outbox.StatusDispatching)
	}
	op := operator(env, m)
	if row, err := op.Skip(t.Context(), ids[0], outbox.Action{By: "ada"}); err != nil || row.Status != outbox.StatusSkipped || row.SettledAt == nil {
		t.Fatalf("skip: %+v, %v", row, err)
	}
	if row, err := op.Dispatch(t.Context(), ids[1], outbox.Action{By: "ada"}); err != nil || row.Status != outbox.StatusDispatched {
		t.Fatalf("dispatch: %+v, %v", row, err)
	}
	last := env.Write(meshtest.Event("orders"))[0].Row.ID
	env.Handle(sub)
	env.AwaitStatus(last, outbox.StatusDispatched)
	if h.has(ids[0]) || h.has(ids[1]) {
		t.Error("the handler was run for an event that an operator had settled")
	}
	// Skipped is not the end: replay brings it back.
	if _, err := op.Replay(t.Context(), ids[0], outbox.Action{}); err != nil {
		t.Fatal(err)
	}
	env.AwaitStatus(ids[0], outbox.StatusDispatched)
	if h.deliveries(ids[0]) != 1 {
		t.Errorf("%d deliveries", h.deliveries(ids[0]))
	}
}

func TestEventFailedByHandIsTriedAgainWhenItIsDue(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	var h switchable
	release := make(chan struct{})
	sub := mesh.OnRaw("orders", mesh.AnyType, func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.Generation == 0 {
			<-release // still at it when the operator gives up on it
		}
		return h.handle(ctx, d)
	})
	m, _ := env.Handle(sub)
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	env.AwaitStatus(id, outbox.StatusDispatching)
	row, err := operator(env, m).Fail(t.Context(), id, outbox.Action{ErrorCode: "stuck", ErrorMessage: "it hangs"})
	if err != nil || row.Status != outbox.StatusFailed || row.RetryCount != 1 || row.NextRetryAt == nil || row.ErrorCode != "stuck" {
		t.Fatalf("fail: %+v, %v", row, err)
	}
	page, err := outbox.List(t.Context(), env.Pool, outbox.Filter{Status: outbox.StatusFailed}, 0, "")
	if err != nil || len(page.Items) != 1 {
		t.Errorf("list of failed events: %+v, %v", page, err)
	}
	row = env.AwaitStatus(id, outbox.StatusDispatched)
	if row.Generation != 1 || row.RetryCount != 1 {
		t.Errorf("row %+v", row)
	}
	close(release) // the first handler succeeds, too late
	meshtest.Await(t, "the late success in the log", func() bool {
		_, attempts := env.Row(id)
		return len(attempts) == 1 && attempts[0].Generation == 0 && attempts[0].ErrorCode == ""
	})
	if late, _ := env.Row(id); late.Generation != 1 || late.Status != outbox.StatusDispatched {
		t.Errorf("row %+v", late)
	}
}

// Nobody takes the consumer's events yet when an operator fails one: the count goes along.
func TestFailureOfAnEventThatNobodyTakesCounts(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	m, err := mesh.New(env.NC, mesh.Config{})
	if err != nil {
		t.Fatal(err)
	}
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	if row, err := operator(env, m).Fail(t.Context(), id, outbox.Action{}); err != nil || row.RetryCount != 1 {
		t.Fatalf("fail: %+v, %v", row, err)
	}
	var h switchable
	h.set(mesh.Permanent(errors.New("no")))
	env.Handle(h.on("orders"))
	meshtest.Await(t, "the second failure", func() bool {
		row, _ := env.Row(id)
		return row.RetryCount == 2
	})
}

// The mark of the first publish comes after the operator's word, and is not to be taken for the second's.
func TestEventDecidedBeforeItWasMarkedIsPublishedAgain(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	var h switchable
	started, release := make(chan struct{}, 2), make(chan struct{})
	defer close(release)
	m, _ := env.Handle(mesh.OnRaw("orders", mesh.AnyType, func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.Generation == 0 {
			started <- struct{}{}
			<-release
		}
		return h.handle(ctx, d)
	}))
	op := operator(env, m)
	replayed := env.Write(meshtest.Event("orders"))[0].Row.ID
	failed := env.Write(meshtest.Event("orders"))[0].Row.ID
	<-started
	<-started
	if _, err := op.Skip(t.Context(), replayed, outbox.Action{}); err != nil {
		t.Fatal(err)
	}
	if _, err := op.Replay(t.Context(), replayed, outbox.Action{}); err != nil {
		t.Fatal(err)
	}
	if _, err := op.Fail(t.Context(), failed, outbox.Action{}); err != nil {
		t.Fatal(err)
	}
	env.AwaitStatus(replayed, outbox.StatusDispatched)
	env.AwaitStatus(failed, outbox.StatusDispatched)
}

// Events that were never published, since nobody takes them: the row alone is there to decide.
func TestUnpublishedEventIsSkippedAndReplayed(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	m, err := mesh.New(env.NC, mesh.Config{})
	if err != nil {
		t.Fatal(err)
	}
	op := operator(env, m)
	id := env.Write(keyed("nobody"))[0].Row.ID
	if row, err := op.Skip(t.Context(), id, outbox.Action{}); err != nil || row.Status != outbox.StatusSkipped {
		t.Fatalf("skip: %+v, %v", row, err)
	}
	if row, err := op.Replay(t.Context(), id, outbox.Action{}); err != nil || row.Status != outbox.StatusPending {
		t.Fatalf("replay: %+v, %v", row, err)
	}
	var h switchable
	env.Handle(h.on("orders"))
	row := env.AwaitStatus(id, outbox.StatusDispatched)
	if row.Generation != 2 || h.deliveries(id) != 1 {
		t.Errorf("row %+v, %d deliveries", row, h.deliveries(id))
	}
}

func TestOperationsRefuseWhatTheStateTableDoes(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	var h switchable
	m, _ := env.Handle(h.on("orders"))
	op := operator(env, m)
	ops := map[string]func(context.Context, string, outbox.Action) (outbox.Row, error){
		"replay": op.Replay, "skip": op.Skip, "fail": op.Fail, "dispatch": op.Dispatch,
	}
	dispatched := env.Write(meshtest.Event("orders"))[0].Row.ID
	env.AwaitStatus(dispatched, outbox.StatusDispatched)
	pending := env.Write(meshtest.Event("nobody"))[0].Row.ID
	skipped := env.Write(meshtest.Event("nobody"))[0].Row.ID
	if _, err := op.Skip(t.Context(), skipped, outbox.Action{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ op, id, status string }{
		{"replay", dispatched, "dispatched"}, {"skip", dispatched, "dispatched"}, {"fail", dispatched, "dispatched"}, {"dispatch", dispatched, "dispatched"},
		{"skip", skipped, "skipped"}, {"fail", skipped, "skipped"}, {"dispatch", skipped, "skipped"},
		{"replay", pending, "pending"},
	} {
		_, err := ops[c.op](t.Context(), c.id, outbox.Action{})
		var state *outbox.StateError
		if !errors.As(err, &state) || state.Op != c.op || state.Status != c.status || state.EventID != c.id {
			t.Errorf("%s of a %s event: %v", c.op, c.status, err)
		}
		if row, _ := env.Row(c.id); row.Status != c.status {
			t.Errorf("%s changed a %s event to %s", c.op, c.status, row.Status)
		}
	}
	if _, err := op.Replay(t.Context(), "00000000-0000-0000-0000-000000000000", outbox.Action{}); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("unknown event: %v", err)
	}
}

func TestOfOperatorsThatMeetOneWins(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	env.Relay(outbox.RelayConfig{})
	var h switchable
	h.set(mesh.Permanent(errors.New("down")))
	m, _ := env.Handle(h.on("orders"))
	op := operator(env, m)
	for round := range 10 {
		id := env.Write(keyed(fmt.Sprintf("meet:%d", round)))[0].Row.ID
		env.AwaitStatus(id, outbox.StatusFailed)
		results := make(chan error, 4)
		for range 2 {
			go func() { _, err := op.Skip(context.Background(), id, outbox.Action{}); results <- err }()
			go func() { _, err := op.Dispatch(context.Background(), id, outbox.Action{}); results <- err }()
		}
		won := 0
		for range 4 {
			err := <-results
			var state *outbox.StateError
			switch {
			case err == nil:
				won++
			case !errors.As(err, &state):
				t.Errorf("round %d: %v", round, err)
			}
		}
		row, _ := env.Row(id)
		if won != 1 || row.Status != outbox.StatusSkipped && row.Status != outbox.StatusDispatched {
			t.Errorf("round %d: %d won, the event is %s", round, won, row.Status)
		}
	}
}

// An operator's process dies after the record and before the row: the relay lets the row follow.
func TestRowFollowsTheRecordOfAnOperatorThatCrashed(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var h switchable
	h.set(mesh.Permanent(errors.New("down")))
	m, _ := env.Handle(h.on("orders"))
	env.Relay(outbox.RelayConfig{})
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	env.AwaitStatus(id, outbox.StatusFailed)
	rec, revision, err := m.Record(t.Context(), "orders", id)
	if err != nil || rec == nil {
		t.Fatal(rec, err)
	}
	h.set(nil)
	rec.Generation++
	rec.Status, rec.Exhausted = mesh.RecordReplaying, false
	rec.UpdatedAt = time.Now().Add(-time.Minute)
	if err := m.Decide(t.Context(), rec, revision); err != nil {
		t.Fatal(err)
	}
	env.AwaitStatus(id, outbox.StatusDispatched)
}
