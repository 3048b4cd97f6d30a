package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"jetmesh/mesh"
)

// warmUp is the time at the beginning of the latency phase that does not count.
const warmUp = time.Second

// stopwatch notes when events were committed and when their handlers were entered.
type stopwatch struct {
	base               time.Time
	committed, entered []atomic.Int64 // nanoseconds since base; 0: not yet
	missing            atomic.Int64
}

func newStopwatch(n int) *stopwatch {
	w := &stopwatch{base: time.Now(), committed: make([]atomic.Int64, n), entered: make([]atomic.Int64, n)}
	w.missing.Store(int64(n))
	return w
}

// handle is the handler. Of an event that is delivered twice, the first time counts.
func (w *stopwatch) handle(_ context.Context, d mesh.Delivery[[]byte]) error {
	now := time.Since(w.base)
	_, number, _ := strings.Cut(d.AggregateID, "-")
	i, err := strconv.Atoi(number)
	if err != nil {
		return mesh.Permanent(fmt.Errorf("not an event of this run: %w", err))
	}
	if w.entered[i].CompareAndSwap(0, int64(now)) {
		w.missing.Add(-1)
	}
	return nil
}

func (w *stopwatch) left() (int, error) { return int(w.missing.Load()), nil }

// latencies are those of the events from the given one on, in order of size.
func (w *stopwatch) latencies(from int) []time.Duration {
	var all []time.Duration
	for i := from; i < len(w.committed); i++ {
		all = append(all, time.Duration(w.entered[i].Load()-w.committed[i].Load()))
	}
	slices.Sort(all)
	return all
}

// latency measures single events on their way from a commit to a handler. Their schedule does
// not wait for slow ones.
func (b *bench) latency(ctx context.Context, p *phase) error {
	// Event 0 shows that the relay works; only then does the schedule begin.
	warm := 1 + int(warmUp.Seconds()*float64(b.Rate))
	n := warm + max(1, int(b.Duration.Seconds()*float64(b.Rate)))
	w := newStopwatch(n)
	if err := p.startHandlers(ctx, w.handle); err != nil {
		return err
	}
	if err := b.settleDisk(ctx); err != nil {
		return err
	}
	if err := p.startRelay(ctx); err != nil {
		return err
	}
	if err := b.writeTimed(ctx, w, 0); err != nil {
		return err
	}
	err := await(ctx, "the first event to be handled", time.Millisecond, func() (int, error) {
		return int(1 - min(1, w.entered[0].Load())), nil
	})
	if err != nil {
		return err
	}
	if err := b.writeOnSchedule(ctx, w, n); err != nil {
		return err
	}
	if err := await(ctx, "events to be handled", 10*time.Millisecond, w.left); err != nil {
		return err
	}
	all := w.latencies(warm)
	b.result.LatencyP50, b.result.LatencyP99 = milliseconds(percentile(all, 50)), milliseconds(percentile(all, 99))
	b.say("latency_p50_ms %.3f, latency_p99_ms %.3f, largest %.3f, of %d events", b.result.LatencyP50, b.result.LatencyP99, milliseconds(all[len(all)-1]), len(all))
	return nil
}

// writeOnSchedule writes the events after the first at the rate, or reports that it could not.
func (b *bench) writeOnSchedule(ctx context.Context, w *stopwatch, n int) error {
	due := make(chan int, n)
	errs := make([]error, insertConnections)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	for worker := range errs {
		wg.Go(func() {
			for i := range due {
				if errs[worker] = b.writeTimed(ctx, w, i); errs[worker] != nil {
					cancel()
					return
				}
			}
		})
	}
	began := time.Now()
	for i := 1; i < n && ctx.Err() == nil; i++ {
		time.Sleep(time.Until(began.Add(time.Duration(i-1) * time.Second / time.Duration(b.Rate))))
		due <- i
	}
	close(due)
	wg.Wait()
	if err := errors.Join(errs...); err != nil || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	if reached := perSecond(n-1, time.Since(began)); reached < 0.9*float64(b.Rate) {
		return fmt.Errorf("this machine commits %.0f events per second, not the %d that were asked for: latencies would be those of a queue", reached, b.Rate)
	}
	return nil
}

func (b *bench) writeTimed(ctx context.Context, w *stopwatch, i int) error {
	if err := b.write(ctx, b.pool, b.event("latency", i)); err != nil {
		return err
	}
	w.committed[i].Store(int64(time.Since(w.base)))
	return nil
}
