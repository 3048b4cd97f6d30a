package mesh

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
)

// A Decision is an operator's word about one event at one subscription: it raised the record's
// generation, and messages of a lower one count for nothing. While a decision is open, under
// <subscription>.<eventId>.open beside the record, runners look at the record before they run
// the handler even of a first delivery, and a relay makes the row follow. The set of open
// decisions is small; runners watch it.
type Decision struct {
	Subscription string    `json:"subscription"`
	EventID      string    `json:"eventId"`
	Generation   int       `json:"generation"`
	At           time.Time `json:"at"`
}

// ErrConflict: somebody else changed the record meanwhile; look at it and decide again.
var ErrConflict = errors.New("mesh: the failure record was changed by somebody else meanwhile")

// Record reads the failure record of an event from the leader, with the revision that
// [Mesh.Decide] wants. A record that does not exist is nil without error.
func (m *Mesh) Record(ctx context.Context, subscription, eventID string) (*Record, uint64, error) {
	return m.ledger.get(ctx, subscription, eventID)
}

// Decide opens a decision and stores the record that states it, if its revision is still the
// given one, else [ErrConflict]. The decision is opened first: after a crash between the two it
// speaks of a generation that no record has, and is closed without effect.
func (m *Mesh) Decide(ctx context.Context, rec *Record, revision uint64) error {
	d := Decision{Subscription: rec.Subscription, EventID: rec.EventID, Generation: rec.Generation, At: rec.UpdatedAt}
	data, err := json.Marshal(d)
	if err != nil {
		return fmt.Errorf("mesh: encode decision about event %s: %w", rec.EventID, err)
	}
	if err := m.publish(ctx, &nats.Msg{Subject: m.ledger.decisionSubject(rec.Subscription, rec.EventID), Data: data}); err != nil {
		return err
	}
	_, err = m.ledger.put(ctx, rec, revision)
	if errors.Is(err, errRecordChanged) {
		return ErrConflict
	}
	return err
}

// CloseDecision ends a decision that the row has followed and no message can contradict any more.
func (m *Mesh) CloseDecision(ctx context.Context, d Decision) error {
	s, err := m.js.Stream(ctx, "KV_"+m.Names.FailuresBucket())
	if err != nil {
		return fmt.Errorf("mesh: open failure records: %w", err)
	}
	if err := s.Purge(ctx, jetstream.WithPurgeSubject(m.ledger.decisionSubject(d.Subscription, d.EventID))); err != nil {
		return fmt.Errorf("mesh: close decision about event %s: %w", d.EventID, err)
	}
	return nil
}

// OpenDecisions lists the open decisions of all subscriptions.
func (m *Mesh) OpenDecisions(ctx context.Context) ([]Decision, error) {
	var list []Decision
	err := m.ledger.each(ctx, m.ledger.decisionSubject("*", "*"), func(msg jetstream.Msg) {
		var d Decision
		if json.Unmarshal(msg.Data(), &d) == nil && d.EventID != "" {
			list = append(list, d)
		}
	})
	return list, err
}

func (l ledger) decisionSubject(subscription, eventID string) string {
	return l.subject(subscription, eventID) + ".open"
}

// each calls fn with the last message of every subject that matches.
func (l ledger) each(ctx context.Context, filter string, fn func(jetstream.Msg)) error {
	s, err := l.js.Stream(ctx, "KV_"+l.names.FailuresBucket())
	if err != nil {
		return fmt.Errorf("mesh: open failure records: %w", err)
	}
	c, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, InactiveThreshold: time.Minute,
	})
	if err != nil {
		return fmt.Errorf("mesh: read failure records: %w", err)
	}
	left := c.CachedInfo().NumPending
	for left > 0 {
		batch, err := c.Fetch(int(min(left, 500)), jetstream.FetchMaxWait(5*time.Second))
		if err != nil {
			return fmt.Errorf("mesh: read failure records: %w", err)
		}
		n := uint64(0)
		for msg := range batch.Messages() {
			n++
			fn(msg)
		}
		if err := batch.Error(); err != nil {
			return fmt.Errorf("mesh: read failure records: %w", err)
		}
		if n == 0 {
			break // deleted while we read
		}
		left -= min(n, left)
	}
	return nil
}

// decisions are the open decisions about one subscription. A runner reads them before its first
// delivery and then watches; what a watch may miss, a list finds within decisionsEvery.
type decisions struct {
	mu   sync.Mutex
	open map[string]bool // by event id
}

const decisionsEvery = 30 * time.Second

func (d *decisions) has(eventID string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.open[eventID]
}

func (d *decisions) add(msg jetstream.Msg) {
	tokens := strings.Split(msg.Subject(), ".") // $KV.<bucket>.<subscription>.<eventId>.open
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open == nil {
		d.open = map[string]bool{}
	}
	d.open[tokens[len(tokens)-2]] = true
}

// load replaces the set by what is stored.
func (d *decisions) load(ctx context.Context, l ledger, subscription string) error {
	stored := decisions{}
	if err := l.each(ctx, l.decisionSubject(subscription, "*"), stored.add); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open = stored.open
	return nil
}

// watch keeps the set up to date until ctx ends.
func (d *decisions) watch(ctx context.Context, l ledger, subscription string, log zerolog.Logger) {
	for ctx.Err() == nil {
		round, cancel := context.WithTimeout(ctx, decisionsEvery)
		err := d.follow(round, l, subscription)
		if err == nil {
			err = d.load(ctx, l, subscription)
		}
		cancel()
		if err != nil && ctx.Err() == nil {
			log.Debug().Err(err).Msg("watch decisions")
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// follow adds decisions as they are stored, until ctx ends.
func (d *decisions) follow(ctx context.Context, l ledger, subscription string) error {
	s, err := l.js.Stream(ctx, "KV_"+l.names.FailuresBucket())
	if err != nil {
		return err
	}
	c, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{l.decisionSubject(subscription, "*")}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy,
	})
	if err != nil {
		return err
	}
	cc, err := c.Consume(d.add)
	if err != nil {
		return err
	}
	<-ctx.Done()
	cc.Stop()
	<-cc.Closed()
	return nil
}
