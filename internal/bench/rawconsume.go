package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// rawConsume consumes and acks the n messages that are there.
func (b *bench) rawConsume(ctx context.Context, n int) (float64, error) {
	owner, err := b.ownerInfo(ctx)
	if err != nil {
		return 0, err
	}
	cfg := owner.Config
	cfg.Name, cfg.Durable, cfg.Description, cfg.Metadata = "", "raw", "", nil
	durable, err := b.js.CreateConsumer(ctx, b.mesh.Names.EventsStream(), cfg)
	if err != nil {
		return 0, fmt.Errorf("create durable: %w", err)
	}
	var left atomic.Int64
	left.Store(int64(n))
	done := make(chan error, 1)
	began := time.Now()
	cc, err := durable.Consume(func(msg jetstream.Msg) {
		err := msg.Ack()
		if left.Add(-1) == 0 || err != nil {
			select {
			case done <- err:
			default:
			}
		}
	}, jetstream.PullMaxMessages(handlerConcurrency), jetstream.PullExpiry(5*time.Second), jetstream.PullHeartbeat(time.Second))
	if err != nil {
		return 0, fmt.Errorf("consume: %w", err)
	}
	defer func() { cc.Stop(); <-cc.Closed() }()
	if err := awaitDone(ctx, done, &left); err != nil {
		return 0, fmt.Errorf("consume: %w", err)
	}
	if err := b.nc.FlushTimeout(stallAfter); err != nil { // the acks too have reached the server
		return 0, fmt.Errorf("consume: %w", err)
	}
	return perSecond(n, time.Since(began)), nil
}

// awaitDone waits for done while left changes now and then.
func awaitDone(ctx context.Context, done <-chan error, left *atomic.Int64) error {
	stalled := time.NewTicker(stallAfter)
	defer stalled.Stop()
	for last := int64(-1); ; {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-stalled.C:
			now := left.Load()
			if now == last {
				return fmt.Errorf("nothing came within %s, %d messages are left", stallAfter, now)
			}
			last = now
		}
	}
}
