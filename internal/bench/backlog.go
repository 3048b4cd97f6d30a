package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/mesh"
	"jetmesh/outbox"
)

// relay measures a backlog on its way into the stream, while nobody handles it.
func (b *bench) relay(ctx context.Context, p *phase) error {
	if err := p.makeDurable(ctx); err != nil {
		return err
	}
	if err := b.fill(ctx, p.name); err != nil {
		return err
	}
	if err := p.startRelay(ctx); err != nil {
		return err
	}
	var state jetstream.StreamState
	err := await(ctx, "events to be published", 20*time.Millisecond, func() (int, error) {
		events, err := b.events(ctx)
		if err != nil {
			return 0, err
		}
		state = events.CachedInfo().State
		return b.Events - int(state.Msgs), nil
	})
	if err != nil {
		return err
	}
	// Between the first and the last of N messages lie N-1 of them.
	b.result.Relay = perSecond(b.Events-1, state.LastTime.Sub(state.FirstTime))
	b.say("relay_per_s %.0f", b.result.Relay)
	if err := b.awaitRows(ctx, outbox.StatusDispatching); err != nil {
		return err
	}
	return b.checkHeaders(ctx)
}

// endToEnd measures a backlog on its way through the handlers and back into its rows.
//
// Rows are not looked at while they are counted: a handler's message is acked when its
// outcome is stored, and the outcome leaves its stream when the row's settlement is
// committed. So it is over when the durable owes nothing and the outcomes stream is empty.
func (b *bench) endToEnd(ctx context.Context, p *phase) error {
	var handled atomic.Int64
	err := p.startHandlers(ctx, func(context.Context, mesh.Delivery[[]byte]) error {
		handled.Add(1)
		return nil
	})
	if err != nil {
		return err
	}
	if err := b.fill(ctx, p.name); err != nil {
		return err
	}
	if err := p.startRelay(ctx); err != nil {
		return err
	}
	err = await(ctx, "events to be handled", 5*time.Millisecond, func() (int, error) {
		return max(0, b.Events-int(handled.Load())), nil
	})
	if err != nil {
		return err
	}
	allHandled := time.Now()
	err = await(ctx, "messages to be acked", 10*time.Millisecond, func() (int, error) {
		info, err := b.ownerInfo(ctx)
		if err != nil {
			return 0, err
		}
		return info.NumAckPending + int(info.NumPending), nil
	})
	if err != nil {
		return err
	}
	allAcked := time.Now()
	err = await(ctx, "outcomes to be applied", 10*time.Millisecond, func() (int, error) {
		s, err := b.js.Stream(ctx, b.mesh.Names.OutcomesStream())
		if err != nil {
			return 0, fmt.Errorf("open stream %s: %w", b.mesh.Names.OutcomesStream(), err)
		}
		return int(s.CachedInfo().State.Msgs), nil
	})
	allSettled := time.Now()
	if err != nil {
		return err
	}
	events, err := b.events(ctx)
	if err != nil {
		return err
	}
	state := events.CachedInfo().State
	after := func(t time.Time) time.Duration { return t.Sub(state.FirstTime).Round(time.Millisecond) } // the server's clock is this machine's
	b.result.EndToEnd = perSecond(b.Events, allSettled.Sub(state.FirstTime))
	b.say("end_to_end_per_s %.0f: all published after %s, handled after %s, acked after %s, settled after %s",
		b.result.EndToEnd, after(state.LastTime), after(allHandled), after(allAcked), after(allSettled))
	if err := b.checkStored(ctx, b.Events); err != nil {
		return err
	}
	left, err := b.countOthers(ctx, outbox.StatusDispatched)
	if err == nil && left > 0 {
		err = fmt.Errorf("all outcomes are applied, but %d rows are not %s", left, outbox.StatusDispatched)
	}
	return err
}

// countOthers counts the rows of any other status.
func (b *bench) countOthers(ctx context.Context, status string) (n int, err error) {
	if err := b.pool.QueryRow(ctx, `select count(*) from `+b.table("outbox")+` where status <> $1`, status).Scan(&n); err != nil {
		return 0, fmt.Errorf("count rows: %w", err)
	}
	return n, nil
}

func (b *bench) awaitRows(ctx context.Context, status string) error {
	return await(ctx, "rows to be "+status, 100*time.Millisecond, func() (int, error) { return b.countOthers(ctx, status) })
}

// stallAfter ends a wait in which nothing moves any more.
const stallAfter = time.Minute

// await looks, with pauses, until nothing is left.
func await(ctx context.Context, what string, pause time.Duration, look func() (left int, err error)) error {
	last, moved := -1, time.Now()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		left, err := look()
		switch {
		case err != nil:
			return err
		case left == 0:
			return nil
		case left != last:
			last, moved = left, time.Now()
		case time.Since(moved) > stallAfter:
			return fmt.Errorf("waited %s in vain for %s: %d left", stallAfter, what, left)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
