package bench

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// rawPublish publishes n messages, and is over with the last ack.
func (b *bench) rawPublish(ctx context.Context, n int) (float64, error) {
	messages := make([]*nats.Msg, n)
	for i := range messages {
		var err error
		if messages[i], err = b.rawMessage(i); err != nil {
			return 0, err
		}
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	window := max(1, min(maxInFlight, bytesInFlight/(b.Payload+1024)))
	room := make(chan struct{}, window)
	js, err := jetstream.New(b.nc, jetstream.WithPublishAsyncMaxPending(window+1),
		jetstream.WithPublishAsyncAckHandler(func(jetstream.JetStream, *nats.Msg, *jetstream.PubAck) { <-room }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, _ *nats.Msg, err error) { fail(fmt.Errorf("publish: %w", err)) }))
	if err != nil {
		return 0, fmt.Errorf("open JetStream: %w", err)
	}
	defer js.CleanupPublisher()
	stalled := time.NewTicker(stallAfter)
	defer stalled.Stop()
	taken, before := 0, -1
	take := func() error {
		for {
			select {
			case room <- struct{}{}:
				taken++
				return nil
			default:
			}
			select {
			case room <- struct{}{}:
				taken++
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-stalled.C:
				if taken == before {
					return fmt.Errorf("publish: no ack within %s", stallAfter)
				}
				before = taken
			}
		}
	}
	runtime.GC()
	began := time.Now()
	for _, msg := range messages {
		if err := take(); err != nil {
			return 0, err
		}
		if _, err := js.PublishMsgAsync(msg); err != nil {
			return 0, fmt.Errorf("publish: %w", err)
		}
	}
	for range window { // full of what no ack will free: every message was acked
		if err := take(); err != nil {
			return 0, err
		}
	}
	took := time.Since(began)
	return perSecond(n, took), b.checkStored(ctx, n)
}
