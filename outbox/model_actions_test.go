package outbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"pgregory.net/rapid"

	"jetmesh/internal/meshtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

func (h *history) pick() *modelEvent {
	if len(h.events) == 0 {
		h.t.Skip("no events yet")
	}
	return h.events[rapid.IntRange(0, len(h.events)-1).Draw(h.t, "event")]
}

func (h *history) drawTask() modelTask {
	op := rapid.SampledFrom([]string{"replay", "skip", "fail", "dispatch"}).Draw(h.t, "op")
	return modelTask{op, op == "replay" && rapid.Bool().Draw(h.t, "reset")}
}

var scriptsGen = rapid.SliceOfN(rapid.StringOfN(rapid.RuneFrom([]rune("sfpxSFPX")), 1, 4, -1), 1, 3)

// perform does a task to the real event and says what it was told.
func (h *history) perform(e *modelEvent, task modelTask) (told string, err error) {
	if task.op == taskRelease {
		h.handler.release(e.id)
		return "ok", nil
	}
	do := map[string]func(context.Context, string, outbox.Action) (outbox.Row, error){
		"replay": h.op.Replay, "skip": h.op.Skip, "fail": h.op.Fail, "dispatch": h.op.Dispatch,
	}[task.op]
	_, err = do(context.Background(), e.id, outbox.Action{By: "ada", ResetRetries: task.reset})
	var state *outbox.StateError
	switch {
	case err == nil:
		return "ok", nil
	case errors.As(err, &state) && (state.Status == outbox.StatusPending || state.Status == outbox.StatusDispatching):
		return statusOpen, nil
	case errors.As(err, &state):
		return state.Status, nil
	default:
		return "", err
	}
}

// together does tasks at the same time.
func (h *history) together(e *modelEvent, tasks ...modelTask) {
	h.t.Helper()
	told, errs := make([]string, len(tasks)), make([]error, len(tasks))
	var wg sync.WaitGroup
	for i, task := range tasks {
		wg.Go(func() { told[i], errs[i] = h.perform(e, task) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		h.t.Fatal(err)
	}
	h.apply(e, tasks, told)
}

func (h *history) apply(e *modelEvent, tasks []modelTask, told []string) {
	h.t.Helper()
	if err := e.apply(tasks, told, h.up, h.calm); err != nil {
		h.t.Fatal(err)
	}
}

func (h *history) write() { h.create(scriptsGen.Draw(h.t, "scripts")...) }

func (h *history) create(scripts ...string) {
	e := &modelEvent{id: uuid.NewString(), max: rapid.IntRange(0, 3).Draw(h.t, "maxRetries"), scripts: scripts}
	if rapid.Bool().Draw(h.t, "keyed") {
		e.key = h.consumer + ":" + e.id
	}
	e.possible = []modelState{{status: statusOpen, due: true}}
	h.handler.mu.Lock()
	h.handler.runs[e.id] = &modelRuns{scripts: e.scripts, started: map[int]int{}, hanging: map[int]int{}, release: make(chan struct{})}
	h.handler.mu.Unlock()
	event := meshtest.Event(h.consumer)
	event.ID, event.IdempotencyKey, event.MaxRetries = e.id, e.key, e.max
	if e.max == 0 {
		event.MaxRetries = mesh.NoRetries
	}
	h.env.Write(event)
	h.events = append(h.events, e)
	h.apply(e, nil, nil)
}

// again writes an event whose key is known.
func (h *history) again() {
	e := h.pick()
	if e.key == "" {
		h.t.Skip("without a key")
	}
	event := meshtest.Event(h.consumer)
	event.IdempotencyKey = e.key
	if w := h.env.Write(event)[0]; !w.Existed || w.Row.ID != e.id {
		h.t.Fatalf("written twice: %+v", w)
	}
}

// hurry lets the delay of an operator's failure be over.
func (h *history) hurry(e *modelEvent) {
	ctx := context.Background()
	h.await(func() string {
		rec, revision, err := h.m.Record(ctx, h.consumer, e.id)
		if err != nil {
			return err.Error()
		}
		if rec == nil || rec.Status != mesh.RecordFailed || !rec.NextRetryAt.After(time.Now()) {
			return ""
		}
		rec.NextRetryAt = time.Now()
		if err := h.m.Decide(ctx, rec, revision); err != nil {
			return err.Error()
		}
		return ""
	})
	if _, err := h.env.Pool.Exec(ctx, `update mesh.outbox set next_retry_at = now() where id = $1 and tracked_status = 'retry' and next_retry_at > now()`, e.id); err != nil {
		h.t.Fatal(err)
	}
	for i := range e.possible {
		e.possible[i].byHand = false
	}
	h.apply(e, nil, nil)
}

// stop ends the runner and cuts off what hangs; none of it counts.
func (h *history) stop() {
	if !h.up {
		h.t.Skip("is down")
	}
	h.stopMesh()
	h.up = false
	for _, e := range h.events {
		for i := range e.possible {
			if s := &e.possible[i]; s.hangs != 0 {
				s.hangs, s.due = 0, true
			}
		}
	}
}

// kill is stop without a farewell: nothing reaches the server any more.
func (h *history) kill() {
	if h.kills == 2 { // of five an event would be taken to kill its process
		h.t.Skip("often enough")
	}
	h.kills++
	if h.up {
		h.runnerNC.Close()
	}
	h.stop()
}

// loseAck runs a handler whose message is not answered although its outcome is stored.
func (h *history) loseAck() {
	// What else runs would lose its sign of life too.
	if !h.up || h.handler.busy() || slices.ContainsFunc(h.events, (*modelEvent).waitsByHand) {
		h.t.Skip("not here")
	}
	h.create(rapid.SampledFrom([]string{"Ss", "F", "Fs", "P", "Xp", "fSs", "FfS"}).Draw(h.t, "script"))
	e := h.events[len(h.events)-1]
	h.settle()
	if e.possible[0].hangs == 0 {
		return // its first failure was its last
	}
	lost := h.losses.lost.Load()
	h.losses.on.Store(true)
	h.together(e, modelTask{op: taskRelease})
	h.settle()
	h.await(func() string {
		if h.losses.lost.Load() == lost {
			return "no answer was lost"
		}
		return ""
	})
	h.losses.on.Store(false)
	s := &e.possible[0]
	if s.status == outbox.StatusDispatched && s.retry == 0 {
		s.runs++ // there is no record of the first success
	}
	h.settle()
	if s.hangs == 0 {
		h.await(func() string {
			info, err := h.durable.Info(context.Background())
			if err != nil || info.NumAckPending > 0 {
				return fmt.Sprint("unanswered messages: ", info, err)
			}
			return ""
		})
	}
}

func (h *history) start() {
	if h.up {
		h.t.Skip("is up")
	}
	h.startMesh()
	for _, e := range h.events {
		h.apply(e, nil, nil)
	}
}

// restartRelay stops the relay; while it is away an operator acts, or a handler goes on, or both.
func (h *history) restartRelay() {
	h.stopRelay()
	var e *modelEvent
	var tasks []modelTask
	var told []string
	if len(h.events) > 0 {
		e = h.pick()
		for range rapid.IntRange(0, 3).Draw(h.t, "tasks") {
			task := h.drawTask()
			if rapid.Bool().Draw(h.t, "release") {
				task = modelTask{op: taskRelease}
			}
			what, err := h.perform(e, task)
			if err != nil {
				h.t.Fatal(err)
			}
			tasks, told = append(tasks, task), append(told, what)
		}
		h.apply(e, tasks, told)
	}
	h.startRelay()
}

// crash is an operator that dies between record and row. Another may come before the row follows.
func (h *history) crash() {
	e, task := h.pick(), h.drawTask()
	if task.op == "fail" || len(e.possible) != 1 || !slices.Contains(modelAllowed[task.op], e.possible[0].status) {
		h.t.Skip("not here")
	}
	ctx := context.Background()
	row, _, err := outbox.Get(ctx, h.env.Pool, e.id)
	if err != nil {
		h.t.Fatal(err)
	}
	rec, revision, err := h.m.Record(ctx, h.consumer, e.id)
	if err != nil {
		h.t.Fatal(err)
	}
	if rec == nil {
		rec = &mesh.Record{EventID: e.id, Subscription: h.consumer, Source: h.source, Consumer: h.consumer, EventType: row.Type, MaxRetries: e.max}
	}
	rec.Generation = row.Generation + 1
	rec.Exhausted, rec.NextRetryAt, rec.Starts = false, time.Time{}, 0
	rec.UpdatedAt = time.Now().Add(-time.Minute)
	rec.Status = map[string]string{"replay": mesh.RecordReplaying, "skip": mesh.RecordSkipped, "dispatch": mesh.RecordDispatched}[task.op]
	if task.reset {
		rec.RetriesBefore = rec.RetryCount
	}
	if err := h.m.Decide(ctx, rec, revision); err != nil {
		h.t.Fatal(err)
	}
	tasks, told := []modelTask{task}, []string{"ok"}
	if rapid.Bool().Draw(h.t, "another") {
		tasks = append(tasks, h.drawTask())
		another, err := h.perform(e, tasks[1])
		if err != nil {
			h.t.Fatal(err)
		}
		told = append(told, another)
	}
	h.apply(e, tasks, told)
}

// repeat stores batches of outcomes again, old ones too.
func (h *history) repeat() {
	n := rapid.IntRange(0, 9).Draw(h.t, "batch")
	h.mu.Lock()
	if len(h.outcomes) == 0 {
		h.mu.Unlock()
		h.t.Skip("no outcomes yet")
	}
	msg := h.outcomes[len(h.outcomes)-1-n%len(h.outcomes)]
	h.mu.Unlock()
	if _, err := h.m.JetStream().Publish(context.Background(), msg.Subject, msg.Data); err != nil {
		h.t.Fatal(err)
	}
}

// forge stores an outcome that is older than what the row has.
func (h *history) forge() {
	e := h.pick()
	row, _, err := outbox.Get(context.Background(), h.env.Pool, e.id)
	if err != nil {
		h.t.Fatal(err)
	}
	o := mesh.Outcome{EventID: e.id, Generation: row.Generation, Attempt: row.Attempt, RetryCount: 7, StartedAt: time.Now(), PublishedAt: time.Now()}
	if row.Generation > 0 && rapid.Bool().Draw(h.t, "olderGeneration") {
		o.Generation, o.Attempt = row.Generation-1, 99
	}
	if rapid.Bool().Draw(h.t, "failed") {
		o.Code, o.Exhausted = "forged", rapid.Bool().Draw(h.t, "exhausted")
	}
	data, err := json.Marshal(mesh.OutcomeBatch{Instance: "forger", Outcomes: []mesh.Outcome{o}})
	if err != nil {
		h.t.Fatal(err)
	}
	if _, err := h.m.JetStream().Publish(context.Background(), h.m.Names.OutcomeSubject(h.source), data); err != nil {
		h.t.Fatal(err)
	}
}
