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
	decided  decisions
	past     past

	running sync.WaitGroup // what was started and is not settled
	freed   chan struct{}  // told when there is more room for messages

	mu        sync.Mutex
	active    map[*delivery]struct{} // taken and not answered yet
	waiting   []*delivery            // of those, the ones for which no slot is free
	busy      int                    // slots that are taken, of Concurrency
	abandoned int                    // handlers that ignored their timeout and still run, without a slot
	suspect   *delivery              // the one that may kill this process
	stopped   bool
	lastBeat  time.Time
	lapses    uint64 // times that lastBeat lay further back than AckWait
}

func newRunner(m *Mesh, sub *Subscription) *runner {
	return &runner{
		m: m, sub: sub, log: m.log.With().Str("subscription", sub.Name).Logger(),
		active:   map[*delivery]struct{}{},
		freed:    make(chan struct{}, 1),
		lastBeat: time.Now(),
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
	watch.Go(func() { r.decided.watch(watching, r.m.ledger, r.sub.Name, r.log) })
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

	r.stop()
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
	if signs := r.signs(); !r.past.of(signs) {
		if err := r.past.load(ctx, r.m.ledger, r.sub.Name, signs); err != nil {
			return err
		}
	}
	var taken atomic.Int64
	silent := make(chan struct{}, 1)
	cc, err := r.consumer.Consume(
		func(msg jetstream.Msg) {
			taken.Add(1)
			r.take(handlers, msg)
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
			r.stop() // what is still on its way here is handed back too
			if r.m.nc.IsConnected() {
				cc.Drain()
			} else {
				cc.Stop() // a drain would wait 10 s for the server
			}
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
		room := 2*r.sub.Concurrency - r.busy - len(r.waiting)
		r.mu.Unlock()
		if room >= (r.sub.Concurrency+1)/2 {
			return room
		}
		select {
		case <-r.freed:
		case <-ctx.Done():
			return 0
		}
	}
}

// take holds a message, which from now on is kept alive until it is answered.
func (r *runner) take(handlers context.Context, msg jetstream.Msg) {
	d := &delivery{r: r, msg: msg, startedAt: time.Now(), signs: r.signs()}
	r.mu.Lock()
	stopped := r.stopped
	if !stopped {
		r.active[d] = struct{}{}
		r.waiting = append(r.waiting, d)
		r.startLocked(handlers)
	}
	r.mu.Unlock()
	if stopped {
		d.handBack()
	}
}

// startLocked starts handlers in the order of their messages, as far as there are slots.
func (r *runner) startLocked(handlers context.Context) {
	for !r.stopped && r.busy < r.sub.Concurrency && len(r.waiting) > 0 {
		d := r.waiting[0]
		r.waiting = r.waiting[1:]
		r.busy++
		r.running.Add(1)
		go d.run(handlers)
	}
}

// release ends a handler's goroutine: its slot is free, unless that was taken from it before.
func (r *runner) release(handlers context.Context, givenUp bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if givenUp {
		r.abandoned--
		return
	}
	r.busy--
	r.startLocked(handlers)
	r.tellFreed()
}

// giveUp takes the slot from a handler that does not return, if no more than Concurrency run
// without one; beyond that they keep it.
func (r *runner) giveUp(handlers context.Context) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.abandoned == r.sub.Concurrency {
		return false
	}
	r.abandoned++
	r.busy--
	r.startLocked(handlers)
	r.tellFreed()
	return true
}

func (r *runner) tellFreed() {
	select {
	case r.freed <- struct{}{}:
	default:
	}
}

// stop starts no more handlers and hands back what waits for a slot.
func (r *runner) stop() {
	r.mu.Lock()
	r.stopped = true
	r.mu.Unlock()
	r.handBack(func(*delivery) bool { return true })
}

// handBack returns waiting messages to the server, the first ones up to one that is not meant.
func (r *runner) handBack(meant func(*delivery) bool) {
	r.mu.Lock()
	n := 0
	for n < len(r.waiting) && meant(r.waiting[n]) {
		n++
	}
	back := r.waiting[:n]
	r.waiting = r.waiting[n:]
	r.mu.Unlock()
	for _, d := range back {
		d.handBack()
	}
	r.tellFreed()
}

// watch keeps unanswered messages alive on the server, settles those whose handler ignores
// its timeout, and hands back those that no handler gets to.
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
			r.noteBeat()
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
			// What waited as long as AckWait is better off with a process that has a slot free.
			r.handBack(func(d *delivery) bool { return now.Sub(d.startedAt) > r.sub.AckWait })
		}
	}
}

// signs changes when the server may have missed the signs of life of what is held here, and
// given it to somebody else: with the connection, or when this process stood still.
func (r *runner) signs() uint64 {
	r.mu.Lock()
	signs := r.lapses
	if time.Since(r.lastBeat) > r.sub.AckWait {
		signs++
	}
	r.mu.Unlock()
	if !r.m.nc.IsConnected() {
		signs++ // what the reconnect will count
	}
	return signs + r.m.nc.Stats().Reconnects
}

func (r *runner) noteBeat() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.lastBeat) > r.sub.AckWait {
		r.lapses++
	}
	r.lastBeat = time.Now()
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
	if r.suspect == d {
		r.suspect = nil
	}
	r.mu.Unlock()
}

// suspected reports whether d may run as the only one that is suspected to kill this process.
func (r *runner) suspected(d *delivery) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.suspect == nil {
		r.suspect = d
	}
	return r.suspect == d
}
