package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/mesh"
)

// verifyLoop looks at the message that a publish was a duplicate of. JetStream deduplicates by
// message id alone, over the whole stream and all outboxes.
func (p *publisher) verifyLoop() {
	for it := range p.verify {
		ctx, cancel := context.WithTimeout(p.ctx, ackTimeout)
		err := p.verifyOne(ctx, it)
		cancel()
		p.mu.Lock()
		p.checking--
		if err != nil {
			p.s.log.Debug().Err(err).Str("event_id", it.event.ID).Msg("duplicate could not be verified, published again")
			it.tries++
			p.again(it, time.Second)
		}
		p.room.Broadcast()
		p.mu.Unlock()
	}
}

func (p *publisher) verifyOne(ctx context.Context, it *item) error {
	again := func(msgID string) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		it.msgID = msgID
		p.again(it, 0)
		return nil
	}
	raw, err := p.stream.GetMsg(ctx, it.streamSeq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		// The id is remembered, the message is gone.
		return again(fmt.Sprintf("%s#%d", it.event.ID, time.Now().UnixNano()))
	}
	if err != nil {
		return err
	}
	other, parseErr := mesh.ParseMessage(raw.Header, raw.Data)
	switch {
	case parseErr == nil && other.ID == it.event.ID && other.Generation < it.event.Generation:
		// It had been published before the operator's word, and nobody had noted it.
		it.published = true
		return again(p.replayID(it))
	case parseErr == nil && other.ID == it.event.ID:
		p.mu.Lock()
		p.stored(it) // our own publish, whose ack was lost
		p.mu.Unlock()
		return nil
	case parseErr == nil && other.Consumer == it.event.Consumer && other.Type == it.event.Type && other.IdempotencyKey == it.event.IdempotencyKey && other.IdempotencyKey != "":
		// The same action, written to another outbox as well.
		if err := p.s.skipDuplicate(ctx, it, other.ID); err != nil {
			return err
		}
		p.mu.Lock()
		p.drop(it)
		p.mu.Unlock()
		return nil
	default:
		// Another action under the same key: the key is ours only together with the names.
		msgID := fmt.Sprintf("%s|%s|%s", it.event.MsgID(), it.event.Consumer, it.event.Type)
		if it.msgID == msgID {
			msgID = fmt.Sprintf("%s#%d", it.event.ID, time.Now().UnixNano())
		}
		return again(msgID)
	}
}

// skipDuplicate settles a row whose action another outbox has published.
func (s *session) skipDuplicate(ctx context.Context, it *item, of string) error {
	_, err := s.db.Exec(ctx, s.cfg.Schema.sql(`
		update {{schema}}.outbox set status = 'skipped', tracked_status = 'skipped', duplicate_of = $2, updated_at = now(), settled_at = now()
		where seq = $1 and status = 'pending'`), it.seq, of)
	if err != nil {
		return fmt.Errorf("skip duplicate %s: %w", it.event.ID, err)
	}
	return nil
}
