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
	RecordDispatched = "dispatched" // closed: a later attempt succeeded, or an operator said so
	RecordSkipped    = "skipped"    // an operator made it unnecessary
	RecordReplaying  = "replaying"  // an operator asked for another attempt, which has not ended
	RecordStarted    = "started"    // never failed; a redelivery whose handler has not ended
)

// keptAttempts bounds the attempts a record and a dead letter keep: the latest ones.
const keptAttempts = 20

// A Record is the failure ledger's entry about one event at one subscription, in the KV
// bucket mesh-failures under <subscription>.<eventId>. It exists only for events that failed, were
// delivered again, or were decided by an operator, and it decides; the outbox row follows it.
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
	Starts         int       `json:"starts,omitempty"`        // of the handler since its last outcome, from the second delivery on
	RetriesBefore  int       `json:"retriesBefore,omitempty"` // of RetryCount, what a reset took out of the budget
	NextRetryAt    time.Time `json:"nextRetryAt,omitzero"`
	ErrorCode      string    `json:"errorCode,omitempty"`
	ErrorMessage   string    `json:"errorMessage,omitempty"`
	Attempts       []Attempt `json:"attempts"`            // the latest 20
	DecidedBy      string    `json:"decidedBy,omitempty"` // the operator who raised the generation last
	Reason         string    `json:"reason,omitempty"`
	CreatedAt      time.Time `json:"createdAt"`
	UpdatedAt      time.Time `json:"updatedAt"`
}

// Fail counts a failure without a run of the handler, as of an operator, and plans the next
// attempt by the default backoff while the budget lasts.
func (r *Record) Fail(code, message string) {
	r.Status = RecordFailed
	r.RetryCount++
	r.ErrorCode, r.ErrorMessage = code, clip(message, maxErrorText)
	r.Exhausted, r.NextRetryAt = r.exhausted(), time.Time{}
	if !r.Exhausted {
		r.NextRetryAt = r.UpdatedAt.Add(Backoff{Base: defaultBackoffBase, Cap: defaultBackoffCap}.delay(r.RetryCount))
	}
}

// exhausted reports whether no retry is left. RetryCount is the history of the event and is
// never set back; a reset counts the budget from there.
func (r *Record) exhausted() bool { return r.RetryCount-r.RetriesBefore >= r.MaxRetries }

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

// headerRoom is kept free of max_payload for the headers of records and outcomes.
const headerRoom = 1 << 10

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

// get returns nil without error when there is no record. The revision is 0 only where there
// never was one: a deleted record has the revision of its deletion.
func (l ledger) get(ctx context.Context, subscription, eventID string) (r *Record, revision uint64, err error) {
	s, err := l.js.Stream(ctx, "KV_"+l.names.FailuresBucket())
	if err != nil {
		return nil, 0, fmt.Errorf("mesh: open failure records: %w", err)
	}
	msg, err := s.GetLastMsgForSubject(ctx, l.subject(subscription, eventID))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("mesh: read failure record of event %s: %w", eventID, err)
	}
	if msg.Header.Get("KV-Operation") != "" {
		return nil, msg.Sequence, nil // deleted
	}
	if err := json.Unmarshal(msg.Data, &r); err != nil {
		return nil, 0, fmt.Errorf("mesh: decode failure record of event %s: %w", eventID, err)
	}
	return r, msg.Sequence, nil
}

// put stores the record if its revision is still the given one, else [errRecordChanged]. Of a
// record that is larger than the server's max_payload the oldest attempts go.
func (l ledger) put(ctx context.Context, r *Record, revision uint64) (uint64, error) {
	var data []byte
	for {
		var err error
		if data, err = json.Marshal(r); err != nil {
			return 0, fmt.Errorf("mesh: encode failure record of event %s: %w", r.EventID, err)
		}
		if len(data) <= int(l.js.Conn().MaxPayload())-headerRoom || len(r.Attempts) <= 1 {
			break
		}
		r.Attempts = r.Attempts[1:]
	}
	ack, err := l.js.PublishMsg(ctx, &nats.Msg{Subject: l.subject(r.Subscription, r.EventID), Data: data},
		jetstream.WithExpectLastSequencePerSubject(revision))
	if isConflict(err) {
		return 0, errRecordChanged
	}
	if err != nil {
		return 0, fmt.Errorf("mesh: write failure record of event %s: %w", r.EventID, err)
	}
	return ack.Sequence, nil
}

// isConflict recognises a lost compare-and-set: 10071 from a single server, 10164 from a
// cluster under contention.
func isConflict(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == 10164)
}
