package mesh

import (
	"encoding/json"
	"fmt"
	"time"
)

// An Outcome is what one attempt came to. It travels from the handler's process to the
// outbox that wrote the event, whose row it settles, and is the event's delivery log.
// The JSON names are short because every event pays for them; stored batches keep them.
type Outcome struct {
	EventID    string `json:"id"`
	Generation int    `json:"gen,omitempty"`
	Attempt    int    `json:"att"`

	// Failed with retries left if Code is set and Exhausted is not; succeeded if neither.
	Code       string        `json:"code,omitempty"`
	Message    string        `json:"msg,omitempty"`
	RetryCount int           `json:"retries,omitempty"` // of the event, this failure included
	Exhausted  bool          `json:"exh,omitempty"`
	RetryIn    time.Duration `json:"in,omitempty"` // nanoseconds until the next attempt

	StartedAt time.Time     `json:"start"`
	Duration  time.Duration `json:"dur"` // nanoseconds

	StreamSeq   uint64    `json:"seq"` // of the message in the events stream
	PublishedAt time.Time `json:"pub"` // when the events stream stored it
}

// Succeeded reports whether the handler returned without error.
func (o *Outcome) Succeeded() bool { return o.Code == "" }

// maxSize bounds the outcome's JSON in bytes; a byte of text may take six.
func (o *Outcome) maxSize() int { return 512 + 6*len(o.Message) }

// An OutcomeBatch is one message of the outcomes stream.
type OutcomeBatch struct {
	Instance string    `json:"instance"` // the handler process
	Outcomes []Outcome `json:"outcomes"`
}

// ParseOutcomes reads a message of the outcomes stream.
func ParseOutcomes(data []byte) (OutcomeBatch, error) {
	var b OutcomeBatch
	if err := json.Unmarshal(data, &b); err != nil {
		return b, fmt.Errorf("mesh: decode outcomes: %w", err)
	}
	return b, nil
}
