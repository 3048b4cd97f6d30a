package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
)

// phase runs one phase on fresh streams and an empty outbox.
func (b *bench) phase(ctx context.Context, name string, run func(context.Context, *phase) error) error {
	b.say("phase %s", name)
	if err := b.reset(ctx); err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	p := &phase{bench: b, name: name, fail: fail}
	p.watch.Go(func() {
		select {
		case <-ctx.Done():
		case <-b.nats.Done():
			fail(errors.New("the NATS server ended"))
		case <-b.postgresDone:
			fail(errors.New("the Postgres server ended"))
		}
	})
	err := run(ctx, p)
	if ctx.Err() != nil {
		err = context.Cause(ctx) // what broke, not what noticed it
	}
	return errors.Join(err, p.end())
}

// reset makes the outbox and the streams anew.
func (b *bench) reset(ctx context.Context) error {
	if err := b.resetOutbox(ctx); err != nil {
		return err
	}
	if err := b.resetStreams(ctx); err != nil {
		return err
	}
	runtime.GC() // what the phase before left is not to be collected in this one
	return nil
}

// A phase starts processes and handlers that end with it.
type phase struct {
	*bench
	name  string
	fail  context.CancelCauseFunc // ends the phase when one of them breaks
	watch sync.WaitGroup
	stops []func() error
}

func (p *phase) end() error {
	var errs []error
	for i := len(p.stops) - 1; i >= 0; i-- {
		errs = append(errs, p.stops[i]())
	}
	p.fail(nil)
	p.watch.Wait()
	return errors.Join(errs...)
}

// startRelay starts `jetmesh serve`.
func (p *phase) startRelay(ctx context.Context) error {
	r, err := startProcess(ctx, p.Executable, []string{"serve", "--schema", string(p.Schema), "--prefix", p.Prefix},
		[]string{"JETMESH_DATABASE_URL=" + p.databaseURL, "JETMESH_NATS_URL=" + p.nats.URL()}, "jetmesh serve: ready")
	if err != nil {
		return fmt.Errorf("start the relay: %w", err)
	}
	p.watch.Go(func() {
		<-r.done
		p.fail(fmt.Errorf("the relay ended: %w", r.failure()))
	})
	p.stops = append(p.stops, func() error {
		for _, line := range r.output.warnings() {
			p.say("the relay: %s", line)
		}
		if err := r.stop(); err != nil {
			return fmt.Errorf("stop the relay: %w", err)
		}
		peak := r.peak.Load()
		if peak == 0 {
			return errors.New("this system does not tell the relay's resident size")
		}
		p.result.MaxRSS = max(p.result.MaxRSS, float64(peak)/(1<<20))
		return nil
	})
	return nil
}
