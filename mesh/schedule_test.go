package mesh_test

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"jetmesh/internal/natsd"
	"jetmesh/internal/natstest"
	"jetmesh/mesh"
)

// bubble runs a test on fake time, with a server of its own inside. Such tests are not
// parallel: one bubble at a time, and no other server beside it.
func bubble(t *testing.T, test func(*testing.T, *env)) {
	emptyPools()
	defer emptyPools()
	synctest.Test(t, func(t *testing.T) {
		s := natstest.Run(t, natsd.Config{DontListen: true})
		test(t, on(t, small, s.Conn))
	})
}

// emptyPools drops the timers in sync.Pools, which must not leave or enter a bubble.
func emptyPools() {
	runtime.GC()
	runtime.GC()
}

// run is one call of a handler.
type run struct {
	mesh.Delivery[[]byte]
	at time.Time
}

func TestRetryComesWhenTheRecordSays(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		wait time.Duration
	}{
		"an hour and a half": {mesh.RetryAfter(90*time.Minute, errBoom), 90 * time.Minute},
		"at once":            {mesh.RetryAfter(0, errBoom), 0},
		"in the past":        {mesh.RetryAfter(-time.Hour, errBoom), 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, e *env) {
				runs := make(chan run, 10)
				e.handle(mesh.OnRaw("orders", ordered, func(_ context.Context, d mesh.Delivery[[]byte]) error {
					runs <- run{d, time.Now()}
					if d.Attempt > 1 {
						return nil
					}
					return c.err
				}))
				ev := e.event("orders")
				e.publish(ev)
				first := <-runs
				r := e.awaitRecord("orders", ev.ID, 1)
				if due := r.NextRetryAt.Sub(first.at); due < c.wait || due > c.wait+time.Second {
					t.Errorf("due after %s, want %s", due, c.wait)
				}
				second := <-runs
				if late := second.at.Sub(r.NextRetryAt); late < 0 || late > time.Second {
					t.Errorf("%s after it was due", late)
				}
				if o := e.awaitFinal(ev.ID); !o.Succeeded() || o.Attempt != 2 {
					t.Errorf("outcome %+v", o)
				}
				if o := e.outcomesOf(ev.ID)[0]; o.RetryIn > c.wait || o.RetryIn < c.wait-time.Second {
					t.Errorf("told: retry in %s, want %s", o.RetryIn, c.wait)
				}
			})
		})
	}
}

// With the defaults: each retry is due within full jitter's bounds, comes then and not before, and
// the tenth failure is the last.
func TestRetriesKeepToTheScheduleUntilTheyAreExhausted(t *testing.T) {
	bubble(t, func(t *testing.T, e *env) {
		const maxRetries = 10
		runs := make(chan run, 2*maxRetries)
		due := make(chan time.Time, 2*maxRetries) // as the record said when the next run began
		e.handle(mesh.OnRaw("orders", ordered, func(_ context.Context, d mesh.Delivery[[]byte]) error {
			runs <- run{d, time.Now()}
			if r := e.record("orders", d.ID); r != nil {
				due <- r.NextRetryAt
			}
			return errBoom
		}))
		ev := e.event("orders")
		ev.MaxRetries = maxRetries
		e.publish(ev)
		before := <-runs
		for failure := 1; failure < maxRetries; failure++ {
			next, at := <-runs, <-due
			if ceiling, wait := min(10*time.Minute, time.Second<<(failure-1)), at.Sub(before.at); wait < 0 || wait > ceiling {
				t.Errorf("failure %d: due after %s, want up to %s", failure, wait, ceiling)
			}
			if late := next.at.Sub(at); late < 0 || late > 100*time.Millisecond {
				t.Errorf("failure %d: came %s after it was due", failure, late)
			}
			if next.Attempt != failure+1 {
				t.Errorf("attempt %d, want %d", next.Attempt, failure+1)
			}
			before = next
		}
		if o := e.awaitFinal(ev.ID); !o.Exhausted || o.RetryCount != maxRetries || o.Attempt != maxRetries || o.Code != mesh.CodeError {
			t.Errorf("outcome %+v", o)
		}
		if r := e.record("orders", ev.ID); !r.Exhausted || r.RetryCount != maxRetries || !r.NextRetryAt.IsZero() || len(r.Attempts) != maxRetries {
			t.Errorf("record %+v", r)
		}
		e.awaitSettled("orders", 1)
		time.Sleep(time.Hour)
		if n := len(e.deadLetters()); n != 1 || len(runs) > 0 {
			t.Errorf("%d dead letters, %d more runs", n, len(runs))
		}
	})
}

func TestDelaysDoubleUpToTheCapWithFullJitter(t *testing.T) {
	bubble(t, func(t *testing.T, e *env) {
		runs := make(chan run, 2000)
		sub := mesh.OnRaw("orders", ordered, func(_ context.Context, d mesh.Delivery[[]byte]) error {
			runs <- run{d, time.Now()}
			return errBoom
		})
		sub.Backoff.Cap = time.Minute
		e.handle(sub)
		const events = 40
		e.publishMany(events, "orders")
		last := map[string]time.Time{}
		mean := map[int]time.Duration{}
		for range 10 * events {
			r := <-runs
			if before := last[r.ID]; !before.IsZero() {
				delay := r.at.Sub(before)
				mean[r.Attempt] += delay / events
				if ceiling := min(time.Second<<(r.Attempt-2), time.Minute); delay > ceiling+time.Second {
					t.Errorf("attempt %d came after %s, more than %s", r.Attempt, delay, ceiling)
				}
			}
			last[r.ID] = r.at
		}
		// Full jitter: on average half of the ceiling.
		for attempt, got := range mean {
			ceiling := min(time.Second<<(attempt-2), time.Minute)
			if got < ceiling/4 || got > ceiling*3/4+time.Second {
				t.Errorf("attempt %d came after %s on average, of up to %s", attempt, got, ceiling)
			}
		}
		await(t, "all to be exhausted", func() bool { return len(e.deadLetters()) == events })
	})
}

// With the defaults: handlers take ten times AckWait, and others wait behind them.
func TestSlowHandlersRunOnceEach(t *testing.T) {
	bubble(t, func(t *testing.T, e *env) {
		runs := make(chan run, 100)
		sub := mesh.OnRaw("orders", ordered, func(_ context.Context, d mesh.Delivery[[]byte]) error {
			runs <- run{d, time.Now()}
			time.Sleep(5 * time.Minute)
			return nil
		})
		sub.Concurrency = 2
		e.handle(sub)
		began := time.Now()
		events := e.publishMany(7, "orders")
		for time.Since(began) < 25*time.Minute {
			time.Sleep(time.Minute)
		}
		e.awaitSettled("orders", 7)
		seen := map[string]int{}
		for len(runs) > 0 {
			seen[(<-runs).ID]++
		}
		for _, ev := range events {
			if o := e.awaitOutcome(ev.ID, 1); seen[ev.ID] != 1 || !o.Succeeded() || o.Attempt != 1 || o.Duration < 5*time.Minute {
				t.Errorf("%d runs, outcome %+v", seen[ev.ID], o)
			}
		}
	})
}
