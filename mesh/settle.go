package mesh

import (
	"context"
	"encoding/json"
	"time"

	"github.com/nats-io/nats.go"
)

// Outcomes are stored in batches, up to outcomeBatch of them, what comes within
// outcomeWait, or what max_payload allows.
const (
	outcomeBatch     = 500
	outcomeWait      = 5 * time.Millisecond
	outcomesInFlight = 8 // batches published and not yet acked

	// largestOutcome bounds the JSON of one outcome and of what stands around the batch.
	largestOutcome = 16 << 10
)

// settled is an attempt that ended: its outcome is to be stored, then its message to be
// answered.
type settled struct {
	source  string // where the outcome goes; "" for nowhere
	outcome Outcome
	answer  func() error // acks, naks or terminates; then forgets the message
}

// writeOutcomes stores outcomes and answers messages afterwards, never before: a message
// acked without its outcome would leave its row unsettled. It ends when the channel is closed
// and empty, or when ctx ends; what was not stored by then is delivered again.
func (m *Mesh) writeOutcomes(ctx context.Context) {
	slots := make(chan struct{}, outcomesInFlight)
	defer func() {
		for range outcomesInFlight {
			slots <- struct{}{}
		}
	}()
	for {
		batches, open := m.collect()
		for source, batch := range batches {
			slots <- struct{}{}
			go func() {
				defer func() { <-slots }()
				if m.storeOutcomes(ctx, source, batch) {
					fault("stored")
					m.answer(ctx, batch)
				}
			}()
		}
		if !open {
			return
		}
	}
}

// tell hands an outcome to the writer. It reports false if ctx ended before there was room.
func (m *Mesh) tell(ctx context.Context, s settled) bool {
	select {
	case m.outcomes <- s:
		return true
	default:
	}
	select {
	case m.outcomes <- s:
		return true
	case <-ctx.Done():
		return false
	}
}

// collect waits for outcomes and gathers a batch per source.
func (m *Mesh) collect() (batches map[string][]settled, open bool) {
	first, open := <-m.outcomes
	if !open {
		return nil, false
	}
	batches = map[string][]settled{first.source: {first}}
	size, n := first.outcome.maxSize(), 1
	room := int(m.nc.MaxPayload()) - largestOutcome
	timer := time.NewTimer(outcomeWait)
	defer timer.Stop()
	for n < outcomeBatch && size < room {
		select {
		case s, open := <-m.outcomes:
			if !open {
				return batches, false
			}
			batches[s.source] = append(batches[s.source], s)
			size, n = size+s.outcome.maxSize(), n+1
		case <-timer.C:
			return batches, true
		}
	}
	return batches, true
}

// storeOutcomes publishes a batch, again and again until it is stored or ctx ends. A batch
// stored twice is harmless: a row applies an attempt once.
func (m *Mesh) storeOutcomes(ctx context.Context, source string, batch []settled) bool {
	if source == "" {
		return true
	}
	data, err := encodeOutcomes(m.cfg.Instance, batch)
	if err != nil {
		m.log.Error().Err(err).Msg("outcomes cannot be encoded; their events will be delivered again")
		return false
	}
	return m.persist(ctx, "store outcomes", func() error {
		return m.publish(ctx, &nats.Msg{Subject: m.Names.OutcomeSubject(source), Data: data})
	})
}

func encodeOutcomes(instance string, batch []settled) ([]byte, error) {
	doc := OutcomeBatch{Instance: instance, Outcomes: make([]Outcome, len(batch))}
	for i, s := range batch {
		doc.Outcomes[i] = s.outcome
	}
	return json.Marshal(doc)
}

// answer acks, naks and terminates. While the connection is down the client refuses to;
// an answer is worth keeping until it is back, since without one the handler runs again.
func (m *Mesh) answer(ctx context.Context, batch []settled) {
	for _, s := range batch {
		m.persist(ctx, "answer message", s.answer)
	}
}

// persist repeats do with growing pauses until it succeeds or ctx ends.
func (m *Mesh) persist(ctx context.Context, what string, do func() error) bool {
	pause := 50 * time.Millisecond
	for {
		err := do()
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			m.log.Warn().Err(err).Str("what", what).Msg("given up at shutdown; the events are delivered again")
			return false
		}
		if pause >= time.Second {
			m.log.Warn().Err(err).Str("what", what).Msg("failed, trying again")
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, 2*time.Second)
	}
}
