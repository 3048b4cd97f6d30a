package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/mesh"
)

// raw measures what JetStream itself does for one client, in rounds on fresh streams.
func (b *bench) raw(ctx context.Context, p *phase) error {
	var published, consumed []float64
	for round := range rawRounds {
		if round > 0 {
			if err := b.resetStreams(ctx); err != nil {
				return err
			}
		}
		// As for the relay, a durable of the handlers exists when messages come.
		if err := p.makeDurable(ctx); err != nil {
			return err
		}
		rate, err := b.rawPublish(ctx)
		if err != nil {
			return err
		}
		published = append(published, rate)
		if rate, err = b.rawConsume(ctx); err != nil {
			return err
		}
		consumed = append(consumed, rate)
	}
	b.result.RawPublish, b.result.RawConsume = median(published), median(consumed)
	b.say("raw_publish_per_s %.0f, the median of %.0f", b.result.RawPublish, published)
	b.say("raw_consume_per_s %.0f, the median of %.0f", b.result.RawConsume, consumed)
	return nil
}

// rawMessage is the i-th event as the relay would publish it.
func (b *bench) rawMessage(i int) (*nats.Msg, error) {
	e := b.event("raw", i)
	id, err := uuid.NewV7()
	if err != nil {
		return nil, fmt.Errorf("make an event id: %w", err)
	}
	e.ID, e.Source = id.String(), b.source
	e.Time = time.Now().Truncate(time.Microsecond) // as Postgres keeps it
	e.Trace(context.Background())
	return e.Message(b.mesh.Names.EventSubject(e.Consumer, e.Type), e.MsgID()), nil
}

func (b *bench) rawPublish(ctx context.Context) (float64, error) {
	messages := make([]*nats.Msg, b.Events)
	for i := range messages {
		var err error
		if messages[i], err = b.rawMessage(i); err != nil {
			return 0, err
		}
	}
	window := max(1, min(maxInFlight, bytesInFlight/(b.Payload+1024)))
	room := make(chan struct{}, window)
	failed := make(chan error, 1)
	js, err := jetstream.New(b.nc, jetstream.WithPublishAsyncMaxPending(window+1),
		jetstream.WithPublishAsyncAckHandler(func(jetstream.JetStream, *nats.Msg, *jetstream.PubAck) { <-room }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, _ *nats.Msg, err error) {
			select {
			case failed <- err:
			default:
			}
		}))
	if err != nil {
		return 0, fmt.Errorf("open JetStream: %w", err)
	}
	defer js.CleanupPublisher()
	take := func() error {
		select {
		case room <- struct{}{}:
			return nil
		default:
		}
		select {
		case room <- struct{}{}:
			return nil
		case err := <-failed:
			return fmt.Errorf("publish: %w", err)
		case <-time.After(stallAfter):
			return errors.New("publish: no ack for " + stallAfter.String())
		case <-ctx.Done():
			return ctx.Err()
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
	return perSecond(b.Events, took), b.checkStored(ctx)
}

// checkStored makes sure that the events stream holds each message once.
func (b *bench) checkStored(ctx context.Context) error {
	events, err := b.events(ctx)
	if err != nil {
		return err
	}
	if stored := events.CachedInfo().State.Msgs; stored != uint64(b.Events) {
		return fmt.Errorf("the events stream holds %d messages, not %d", stored, b.Events)
	}
	return nil
}

func (b *bench) rawConsume(ctx context.Context) (float64, error) {
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
	done := make(chan error, 1)
	left := b.Events
	began := time.Now()
	cc, err := durable.Consume(func(msg jetstream.Msg) {
		err := msg.Ack()
		if left--; err == nil && left > 0 {
			return
		}
		select {
		case done <- err:
		default:
		}
	}, jetstream.PullMaxMessages(handlerConcurrency), jetstream.PullExpiry(5*time.Second), jetstream.PullHeartbeat(time.Second))
	if err != nil {
		return 0, fmt.Errorf("consume: %w", err)
	}
	defer func() { cc.Stop(); <-cc.Closed() }()
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err == nil {
		err = b.nc.FlushTimeout(10 * time.Second) // the acks too have reached the server
	}
	took := time.Since(began)
	if err != nil {
		return 0, fmt.Errorf("consume: %w", err)
	}
	return perSecond(b.Events, took), nil
}

// checkHeaders makes sure that the raw loop publishes the headers that the relay does.
func (b *bench) checkHeaders(ctx context.Context) error {
	events, err := b.events(ctx)
	if err != nil {
		return err
	}
	relayed, err := events.GetMsg(ctx, 1)
	if err != nil {
		return fmt.Errorf("read the first event: %w", err)
	}
	raw, err := b.rawMessage(0)
	if err != nil {
		return err
	}
	names := func(h nats.Header) []string { return slices.Sorted(maps.Keys(h)) }
	if r, w := names(relayed.Header), names(raw.Header); !slices.Equal(r, w) {
		return fmt.Errorf("the relay publishes headers %q, the raw loop %q", r, w)
	}
	if _, err := mesh.ParseMessage(raw.Header, raw.Data); err != nil {
		return err
	}
	return nil
}
