package mesh

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
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
	running   sync.WaitGroup

	mu     sync.Mutex
	active map[*delivery]struct{} // taken and not answered yet
	held   int                    // of those, the ones whose handler waits for a slot or has one
	left   chan struct{}          // told when held shrinks
}

func newRunner(m *Mesh, sub *Subscription) *runner {
	return &runner{
		m: m, sub: sub, log: m.log.With().Str("subscription", sub.Name).Logger(),
		slots:     make(chan struct{}, sub.Concurrency),
		abandoned: make(chan struct{}, sub.Concurrency),
		active:    map[*delivery]struct{}{},
		left:      make(chan struct{}, 1),
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

// consume takes as many messages as there is room for. The client's own buffer stays empty that
// way: a message that waited in it would send no sign of life and be delivered twice.
func (r *runner) consume(ctx, handlers context.Context) error {
	if r.consumer == nil {
		if err := r.bind(ctx); err != nil {
			return err
		}
	}
	room := r.awaitRoom(ctx)
	if ctx.Err() != nil {
		return nil
	}
	var taken atomic.Int64
	silent := make(chan struct{}, 1)
	cc, err := r.consumer.Consume(
		func(msg jetstream.Msg) {
			taken.Add(1)
			r.take(ctx, handlers, msg)
		},
		jetstream.PullMaxMessages(room),
		jetstream.StopAfter(room),
		// With the defaults a lost server is noticed only after 30 s.
		jetstream.PullExpiry(5*time.Second),
		jetstream.PullHeartbeat(time.Second),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
			r.log.Debug().Err(err).Msg("pull")
			if errors.Is(err, jetstream.ErrNoHeartbeat) || errors.Is(err, nats.ErrNoResponders) {
				select {
				case silent <- struct{}{}:
				default:
				}
			}
		}),
	)
	if err != nil {
		r.consumer = nil
		return fmt.Errorf("mesh: consume %s: %w", r.m.Names.OwnerDurable(r.sub.Name), err)
	}
	closed := cc.Closed()
	for {
		select {
		case <-closed:
			if taken.Load() == int64(room) {
				return nil
			}
			r.consumer = nil
			return fmt.Errorf("mesh: durable %s was deleted", r.m.Names.OwnerDurable(r.sub.Name))
		case <-silent:
			// The client waits for a durable that went with its server's store for ever.
			if err := r.missing(ctx); err != nil {
				cc.Drain()
				<-closed
				r.consumer = nil
				return err
			}
		case <-ctx.Done():
			// What is still on its way here is handed back.
			cc.Drain()
			<-closed
			return nil
		}
	}
}

// missing is an error if the durable does not exist any more.
func (r *runner) missing(ctx context.Context) error {
	_, err := r.consumer.Info(ctx)
	if errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("mesh: durable %s is gone: %w", r.m.Names.OwnerDurable(r.sub.Name), err)
	}
	return nil
}

// awaitRoom waits until a round trip to the server is worth its while and returns the number of
// messages to ask for: what runs and what waits here are at most Concurrency each.
func (r *runner) awaitRoom(ctx context.Context) int {
	for {
		r.mu.Lock()
		room := 2*r.sub.Concurrency - r.held
		r.mu.Unlock()
		if room >= (r.sub.Concurrency+1)/2 {
			return room
		}
		select {
		case <-r.left:
		case <-ctx.Done():
			return 0
		}
	}
}

// take holds a message, which from now on is kept alive, and runs its handler once a slot is
// free.
func (r *runner) take(ctx, handlers context.Context, msg jetstream.Msg) {
	d := &delivery{r: r, msg: msg, startedAt: time.Now()}
	r.mu.Lock()
	r.active[d] = struct{}{}
	r.held++
	r.mu.Unlock()
	r.running.Add(1)
	go d.run(ctx, handlers)
}

// slot waits for a handler's slot, until ctx ends. A message that waited as long as AckWait is
// better off with a process that has one free.
func (r *runner) slot(ctx context.Context) bool {
	wait := time.NewTimer(r.sub.AckWait)
	defer wait.Stop()
	select {
	case r.slots <- struct{}{}:
	case <-wait.C:
		return false
	case <-ctx.Done():
		return false
	}
	if ctx.Err() != nil {
		<-r.slots
		return false
	}
	return true
}

// leave makes room for another message.
func (r *runner) leave() {
	r.mu.Lock()
	r.held--
	r.mu.Unlock()
	select {
	case r.left <- struct{}{}:
	default:
	}
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
