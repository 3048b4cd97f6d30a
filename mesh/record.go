package mesh

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// States of a [Record].
const (
	RecordFailed     = "failed"     // waits for NextRetryAt, or is exhausted
	RecordDispatched = "dispatched" // closed: a later attempt succeeded
)

// keptAttempts bounds the attempts a record and a dead letter keep: the latest ones.
const keptAttempts = 20

// A Record is the failure ledger's entry about one event at one subscription, in the KV
// bucket mesh-failures under <subscription>.<eventId>. It exists only for events that failed, and
// it decides; the outbox row follows it.
type Record struct {
	EventID        string    `json:"eventId"`
	Subscription   string    `json:"subscription"`
	Source         string    `json:"source,omitempty"`
	Consumer       string    `json:"consumer"`
	EventType      string    `json:"eventType"`
	AggregateType  string    `json:"aggregateType"`
	AggregateID    string    `json:"aggregateId"`
	IdempotencyKey string    `json:"idempotencyKey,omitempty"`
	TraceID        string    `json:"traceId,omitempty"`
	Generation     int       `json:"generation"`
	Status         string    `json:"status"`
	RetryCount     int       `json:"retryCount"`
	MaxRetries     int       `json:"maxRetries"`
	Exhausted      bool      `json:"exhausted"`
	NextRetryAt    time.Time `json:"nextRetryAt,omitzero"`
	ErrorCode      string    `json:"errorCode,omitempty"`
	ErrorMessage   string    `json:"errorMessage,omitempty"`
	Attempts       []Attempt `json:"attempts"` // the latest 20
	CreatedAt      time.Time `json:"createdAt"`
	UpdatedAt      time.Time `json:"updatedAt"`

	revision uint64 // 0: not stored yet
}

// An Attempt is one run of a handler as a [Record] and a [DeadLetter] keep it.
type Attempt struct {
	Number       int           `json:"attempt"`
	Instance     string        `json:"instance"`
	StartedAt    time.Time     `json:"startedAt"`
	Duration     time.Duration `json:"durationNs"`
	ErrorCode    string        `json:"errorCode,omitempty"`
	ErrorMessage string        `json:"errorMessage,omitempty"`
}

// attempt is the number of the last attempt that was recorded.
func (r *Record) attempt() int {
	if len(r.Attempts) == 0 {
		return 0
	}
	return r.Attempts[len(r.Attempts)-1].Number
}

func (r *Record) add(a Attempt) {
	r.Attempts = append(r.Attempts, a)
	if n := len(r.Attempts); n > keptAttempts {
		r.Attempts = r.Attempts[n-keptAttempts:]
	}
}

// errRecordChanged: another process wrote the record since it was read.
var errRecordChanged = errors.New("mesh: record changed meanwhile")

// ledger reads and writes records. Reads ask the stream's leader: the bucket has no
// direct access, see [Topology].
type ledger struct {
	js    jetstream.JetStream
	names Names
}

func (l ledger) subject(subscription, eventID string) string {
	return "$KV." + l.names.FailuresBucket() + "." + subscription + "." + eventID
}

// get returns nil without error when there is no record.
func (l ledger) get(ctx context.Context, subscription, eventID string) (*Record, error) {
	s, err := l.js.Stream(ctx, "KV_"+l.names.FailuresBucket())
	if err != nil {
		return nil, fmt.Errorf("mesh: open failure records: %w", err)
	}
	msg, err := s.GetLastMsgForSubject(ctx, l.subject(subscription, eventID))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("mesh: read failure record of event %s: %w", eventID, err)
	}
	r := &Record{revision: msg.Sequence}
	if msg.Header.Get("KV-Operation") != "" {
		return nil, nil // deleted
	}
	if err := json.Unmarshal(msg.Data, r); err != nil {
		return nil, fmt.Errorf("mesh: decode failure record of event %s: %w", eventID, err)
	}
	return r, nil
}

// put stores the record if nobody changed it since it was read, else [errRecordChanged].
func (l ledger) put(ctx context.Context, r *Record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("mesh: encode failure record of event %s: %w", r.EventID, err)
	}
	ack, err := l.js.PublishMsg(ctx, &nats.Msg{Subject: l.subject(r.Subscription, r.EventID), Data: data},
		jetstream.WithExpectLastSequencePerSubject(r.revision))
	if err != nil {
		if isConflict(err) {
			return errRecordChanged
		}
		return fmt.Errorf("mesh: write failure record of event %s: %w", r.EventID, err)
	}
	r.revision = ack.Sequence
	return nil
}

// isConflict recognises a lost compare-and-set: 10071 from a single server, 10164 from a
// cluster under contention.
func isConflict(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == 10164)
}
