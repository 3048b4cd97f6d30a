package mesh

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
)

// abandonAfter is what a handler gets, once its context ended at the timeout, to return by
// itself.
const abandonAfter = 2 * time.Second

// A runner is one subscription at work.
type runner struct {
	m        *Mesh
	sub      *Subscription
	log      zerolog.Logger
	consumer jetstream.Consumer

	slots     chan struct{} // one for each handler that may run
	abandoned chan struct{} // one for each handler that ignored its timeout and still runs
	draining  atomic.Bool
	running   sync.WaitGroup

	mu     sync.Mutex
	active map[*delivery]struct{}
}

func newRunner(m *Mesh, sub *Subscription) *runner {
	return &runner{
		m: m, sub: sub, log: m.log.With().Str("subscription", sub.Name).Logger(),
		slots:     make(chan struct{}, sub.Concurrency),
		abandoned: make(chan struct{}, sub.Concurrency),
		active:    map[*delivery]struct{}{},
	}
}

// run takes messages until ctx ends and returns when every handler did, or DrainTimeout
// after that.
func (r *runner) run(ctx context.Context) {
	handlers, cutOff := context.WithCancel(context.WithoutCancel(ctx))
	defer cutOff()
	watching, stopWatching := context.WithCancel(handlers)
	var watch sync.WaitGroup
	watch.Go(func() { r.watch(watching, handlers) })
	defer watch.Wait()
	defer stopWatching()

	for ctx.Err() == nil {
		if err := r.consume(ctx, handlers); err != nil && ctx.Err() == nil {
			r.log.Warn().Err(err).Msg("consuming stopped, starting again")
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}

	done := make(chan struct{})
	go func() { defer close(done); r.running.Wait() }()
	select {
	case <-done:
		return
	case <-time.After(r.m.cfg.DrainTimeout):
	}
	cutOff() // from here on whatever a handler returns is not counted
	r.log.Warn().Dur("drain_timeout", r.m.cfg.DrainTimeout).Msg("handlers cut off; their events are delivered again")
	select {
	case <-done:
	case <-time.After(abandonAfter):
		for _, d := range r.snapshot() {
			d.abandon(handlers)
		}
		<-done
	}
}

// consume delivers messages to handlers until ctx ends or the durable is gone.
func (r *runner) consume(ctx, handlers context.Context) error {
	if r.consumer == nil {
		if err := r.bind(ctx); err != nil {
			return err
		}
	}
	r.draining.Store(false)
	cc, err := r.consumer.Consume(
		func(msg jetstream.Msg) { r.take(ctx, handlers, msg) },
		jetstream.PullMaxMessages(r.sub.Concurrency),
		// With the defaults a lost server is noticed only after 30 s.
		jetstream.PullExpiry(5*time.Second),
		jetstream.PullHeartbeat(time.Second),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			r.log.Debug().Err(err).Msg("pull")
		}),
	)
	if err != nil {
		r.consumer = nil
		return fmt.Errorf("mesh: consume %s: %w", r.m.Names.OwnerDurable(r.sub.Name), err)
	}
	select {
	case <-cc.Closed():
		r.consumer = nil
		return fmt.Errorf("mesh: durable %s was deleted", r.m.Names.OwnerDurable(r.sub.Name))
	case <-ctx.Done():
	}
	// What waits in the client's buffer is handed back, not started.
	r.draining.Store(true)
	cc.Drain()
	<-cc.Closed()
	return nil
}

// take starts a handler for a message once a slot is free.
func (r *runner) take(ctx, handlers context.Context, msg jetstream.Msg) {
	select {
	case r.slots <- struct{}{}:
	case <-ctx.Done():
	}
	if ctx.Err() != nil || r.draining.Load() {
		if err := msg.Nak(); err != nil {
			r.log.Debug().Err(err).Msg("hand back")
		}
		return
	}
	d := &delivery{r: r, msg: msg, startedAt: time.Now()}
	r.mu.Lock()
	r.active[d] = struct{}{}
	r.mu.Unlock()
	r.running.Add(1)
	go d.run(handlers)
}

// watch keeps unanswered messages alive on the server and settles those whose handler
// ignores its timeout.
func (r *runner) watch(ctx, handlers context.Context) {
	beat := time.NewTicker(r.sub.AckWait / 3)
	defer beat.Stop()
	overdue := time.NewTicker(min(time.Second, r.sub.AckWait/3))
	defer overdue.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
			for _, d := range r.snapshot() {
				if err := d.msg.InProgress(); err != nil {
					r.log.Debug().Err(err).Msg("heartbeat")
				}
			}
		case now := <-overdue.C:
			for _, d := range r.snapshot() {
				if limit := d.deadline.Load(); limit != 0 && now.UnixNano() > limit {
					d.abandon(handlers)
				}
			}
		}
	}
}

func (r *runner) snapshot() []*delivery {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]*delivery, 0, len(r.active))
	for d := range r.active {
		list = append(list, d)
	}
	return list
}

// forget ends the watch over a delivery: its message was answered, or never will be.
func (r *runner) forget(d *delivery) {
	r.mu.Lock()
	delete(r.active, d)
	r.mu.Unlock()
}
