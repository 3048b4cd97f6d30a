package outbox

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"jetmesh/mesh"
)

// owners are the consumers whose events somebody takes: those that a durable owns. The
// rows of all others wait in the table.
type owners struct {
	mu       sync.Mutex
	prefix   string // of an owner's durable
	known    map[string]string
	appeared []string
}

func (o *owners) has(consumer string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, ok := o.known[consumer]
	return ok
}

// subscription is the name of the subscription that owns a consumer.
func (o *owners) subscription(consumer string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.TrimPrefix(o.known[consumer], o.prefix)
}

// takeAppeared returns the consumers that have got an owner since the last call.
func (o *owners) takeAppeared() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	a := o.appeared
	o.appeared = nil
	return a
}

func (o *owners) set(known map[string]string) (news bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for consumer := range known {
		if _, ok := o.known[consumer]; !ok {
			o.appeared = append(o.appeared, consumer)
		}
	}
	o.known = known
	return len(o.appeared) > 0
}

func (s *session) refreshOwners(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	stream, err := s.m.JetStream().Stream(ctx, s.m.Names.EventsStream())
	if err != nil {
		return fmt.Errorf("open stream %s: %w", s.m.Names.EventsStream(), err)
	}
	known, err := mesh.Owners(ctx, stream)
	if err != nil {
		return err
	}
	if s.owners.set(known) {
		s.wake.signal()
	}
	return nil
}

// ownersLoop keeps the owners up to date. While NATS does not answer the old ones stay.
func (s *session) ownersLoop(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for failures := 0; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := s.refreshOwners(ctx); err == nil {
			failures = 0
		} else if failures++; failures%10 == 0 && ctx.Err() == nil {
			s.log.Warn().Err(err).Msg("durables cannot be listed; events of new consumers wait")
		}
	}
}
