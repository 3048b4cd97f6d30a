package bench

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
)

// raw measures what JetStream itself does for one client, in rounds on fresh streams.
func (b *bench) raw(ctx context.Context, p *phase) error {
	n := min(b.Events, rawMost)
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
		rate, err := b.rawPublish(ctx, n)
		if err != nil {
			return err
		}
		published = append(published, rate)
		if rate, err = b.rawConsume(ctx, n); err != nil {
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

// checkStored makes sure that the events stream holds n messages, each once.
func (b *bench) checkStored(ctx context.Context, n int) error {
	events, err := b.events(ctx)
	if err != nil {
		return err
	}
	if stored := events.CachedInfo().State.Msgs; stored != uint64(n) {
		return fmt.Errorf("the events stream holds %d messages, not %d", stored, n)
	}
	return nil
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
	return nil
}
