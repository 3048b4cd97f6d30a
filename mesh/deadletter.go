package mesh

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

// A dead letter is the event's message, published to MESH_DEAD with the event's headers and
// payload and, beside them, why it died:
const (
	hdrDeadSubscription = "mesh-subscription"
	hdrDeadCode         = "mesh-error-code"
	hdrDeadMessage      = "mesh-error-message"
	hdrDeadAt           = "mesh-died-at"
	hdrDeadSeq          = "mesh-stream-seq"
	hdrDeadAttempts     = "mesh-attempts" // JSON, the latest ones
)

// These keep a dead letter's headers within what [Event.CheckSize] reserves: of 4 KiB, up to
// 1.3 KiB are for the others.
const (
	deadAttempts      = 5
	deadAttemptsBytes = 2560 // as encoded
	deadText          = 256
)

// bury publishes the dead letter of an exhausted event. It is idempotent: its message id
// names event, subscription and generation.
func (m *Mesh) bury(ctx context.Context, e *Event, r *Record, streamSeq uint64) error {
	msg := e.Message(m.Names.DeadSubject(r.Subscription, e.Consumer, e.Type),
		fmt.Sprintf("%s#%s#%d", e.ID, r.Subscription, r.Generation))
	set := func(key, value string) { msg.Header[key] = []string{value} }
	set(hdrDeadSubscription, r.Subscription)
	set(hdrDeadCode, r.ErrorCode)
	set(hdrDeadMessage, percentEncode(clip(r.ErrorMessage, deadText)))
	set(hdrRetryCount, strconv.Itoa(r.RetryCount))
	set(hdrDeadAt, r.UpdatedAt.UTC().Format(time.RFC3339Nano))
	set(hdrDeadSeq, strconv.FormatUint(streamSeq, 10))
	short := []Attempt{}
	for _, a := range r.Attempts[max(0, len(r.Attempts)-deadAttempts):] {
		a.ErrorMessage = clip(a.ErrorMessage, deadText/2)
		short = append(short, a)
	}
	for {
		data, err := json.Marshal(short)
		if err != nil {
			return fmt.Errorf("mesh: encode attempts of event %s: %w", e.ID, err)
		}
		if text := percentEncode(string(data)); len(text) <= deadAttemptsBytes {
			set(hdrDeadAttempts, text)
			return m.publish(ctx, msg)
		}
		short = short[1:] // "[]" is short enough
	}
}

// publishTimeout is short, since a server that dies takes its answer with it, and harmless,
// since what is published here may be stored twice.
const publishTimeout = 2 * time.Second

// publish stores a message or says why not.
func (m *Mesh) publish(ctx context.Context, msg *nats.Msg) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if _, err := m.js.PublishMsg(ctx, msg); err != nil {
		return fmt.Errorf("mesh: publish to %s: %w", msg.Subject, err)
	}
	return nil
}
