package mesh

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// past are the events of a subscription that had a record when its durable was bound, and after
// each reconnect. A server that crashes forgets the deliveries of its last moments (its state of
// a durable reaches the disk up to 100 ms late: measured), and a durable that was made again
// forgets all of them: what has failed before is delivered as if for the first time.
type past struct {
	mu    sync.Mutex
	signs uint64 // of the runner, when the records were listed
	ids   map[string]bool
}

// of reports whether the records were listed under these signs.
func (p *past) of(signs uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.signs == signs
}

// mayHold reports whether an event, delivered under these signs, may have an older record.
func (p *past) mayHold(eventID string, signs uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.signs != signs || p.ids[eventID]
}

// load lists the records.
func (p *past) load(ctx context.Context, l ledger, subscription string, signs uint64) error {
	ids, err := l.ids(ctx, subscription)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.signs, p.ids = signs, ids
	return nil
}

// ids lists the events of a subscription that have a record.
func (l ledger) ids(ctx context.Context, subscription string) (map[string]bool, error) {
	prefix := l.subject(subscription, "")
	c, err := l.js.OrderedConsumer(ctx, "KV_"+l.names.FailuresBucket(), jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{prefix + "*"}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, HeadersOnly: true,
		InactiveThreshold: time.Minute,
	})
	if err != nil {
		return nil, fmt.Errorf("mesh: list failure records: %w", err)
	}
	ids := map[string]bool{}
	for left := c.CachedInfo().NumPending; left > 0; {
		batch, err := c.Fetch(int(min(left, 1000)), jetstream.FetchMaxWait(5*time.Second))
		if err != nil {
			return nil, fmt.Errorf("mesh: list failure records: %w", err)
		}
		n := uint64(0)
		for msg := range batch.Messages() {
			n++
			ids[strings.TrimPrefix(msg.Subject(), prefix)] = true
		}
		if err := batch.Error(); err != nil {
			return nil, fmt.Errorf("mesh: list failure records: %w", err)
		}
		if n == 0 {
			break // deleted meanwhile
		}
		left -= min(n, left)
	}
	return ids, nil
}
