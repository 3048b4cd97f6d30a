package outbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"jetmesh/mesh"
)

// The states of a row. They are stored and stand in the API: renaming one breaks both.
const (
	StatusPending     = "pending"     // committed, not known to be published
	StatusDispatching = "dispatching" // published, not settled
	StatusDispatched  = "dispatched"  // its owner's handler succeeded
	StatusFailed      = "failed"      // the last attempt failed; NextRetryAt is nil when exhausted
	StatusSkipped     = "skipped"     // an operator, or an event already written elsewhere, made it unnecessary
)

// A Row is an event in its outbox.
type Row struct {
	mesh.Event
	Seq          int64
	Status       string
	Attempt      int // the last one applied, within the event's generation
	RetryCount   int
	NextRetryAt  *time.Time
	ErrorCode    string
	ErrorMessage string
	LockedBy     string // the instance of the last attempt
	LockedAt     *time.Time
	StartedAt    *time.Time // of the last attempt
	Duration     time.Duration
	StreamSeq    int64  // of its message in the events stream; 0: none known
	DuplicateOf  string // the event of another outbox that carries the same action
	CreatedAt    time.Time
	UpdatedAt    time.Time
	PublishedAt  *time.Time
	SettledAt    *time.Time
}

// An Attempt is a failed attempt in the delivery log; the successful one stands in the row. An
// attempt without an ErrorCode is a late success: of a handler that was still running when an
// operator decided otherwise.
type Attempt struct {
	Generation   int
	Attempt      int
	Instance     string
	StartedAt    time.Time
	Duration     time.Duration
	ErrorCode    string
	ErrorMessage string
}

// querier is what reads need: a pool, a connection, or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

const rowColumns = `o.seq, o.id::text, o.consumer, o.event_type, o.aggregate_type, o.aggregate_id, coalesce(o.idempotency_key, ''),
	o.payload, o.content_type, o.headers, o.trace_id, o.max_retries, o.status, o.generation, o.attempt, o.retry_count, o.next_retry_at,
	coalesce(o.error_code, ''), coalesce(o.error_message, ''), coalesce(o.locked_by, ''), o.locked_at, o.started_at,
	coalesce(o.duration_ms, 0), coalesce(o.stream_seq, 0), coalesce(o.duplicate_of, ''),
	coalesce(o.occurred_at, o.created_at), o.created_at, o.updated_at, o.published_at, o.settled_at`

func scanRow(row pgx.CollectableRow) (Row, error) {
	var r Row
	var headers []byte
	var maxRetries *int
	var durationMS float64
	err := row.Scan(&r.Seq, &r.ID, &r.Consumer, &r.Type, &r.AggregateType, &r.AggregateID, &r.IdempotencyKey,
		&r.Payload, &r.ContentType, &headers, &r.TraceID, &maxRetries, &r.Status, &r.Generation, &r.Attempt, &r.RetryCount, &r.NextRetryAt,
		&r.ErrorCode, &r.ErrorMessage, &r.LockedBy, &r.LockedAt, &r.StartedAt,
		&durationMS, &r.StreamSeq, &r.DuplicateOf,
		&r.Time, &r.CreatedAt, &r.UpdatedAt, &r.PublishedAt, &r.SettledAt)
	if err != nil {
		return r, err
	}
	r.Duration = time.Duration(durationMS * float64(time.Millisecond))
	setMaxRetries(&r.Event, maxRetries)
	return r, setHeaders(&r.Event, headers)
}

// The column max_retries is null where the event leaves it to its subscription.
func setMaxRetries(e *mesh.Event, column *int) {
	switch {
	case column == nil:
		e.MaxRetries = 0
	case *column == 0:
		e.MaxRetries = mesh.NoRetries
	default:
		e.MaxRetries = *column
	}
}

func maxRetriesColumn(e *mesh.Event) *int {
	if e.MaxRetries == 0 {
		return nil
	}
	n := max(e.MaxRetries, 0)
	return &n
}

// The column headers holds the event's headers and its W3C trace context.
const traceParentKey, traceStateKey = "traceparent", "tracestate"

func headersColumn(e *mesh.Event) (string, error) {
	if len(e.Headers) == 0 && e.TraceParent == "" {
		return "{}", nil
	}
	all := make(map[string]string, len(e.Headers)+2)
	for k, v := range e.Headers {
		all[k] = v
	}
	if e.TraceParent != "" {
		all[traceParentKey] = e.TraceParent
	}
	if e.TraceState != "" {
		all[traceStateKey] = e.TraceState
	}
	data, err := json.Marshal(all)
	if err != nil {
		return "", fmt.Errorf("outbox: encode headers of event %s: %w", e.ID, err)
	}
	return string(data), nil
}

func setHeaders(e *mesh.Event, column []byte) error {
	if len(column) <= len("{}") {
		return nil
	}
	if json.Unmarshal(column, &e.Headers) != nil {
		// Put there by other hands: what is no string is taken as its JSON text.
		var values map[string]json.RawMessage
		if err := json.Unmarshal(column, &values); err != nil {
			return fmt.Errorf("outbox: decode headers of event %s: %w", e.ID, err)
		}
		e.Headers = make(map[string]string, len(values))
		for key, raw := range values {
			var text string
			if json.Unmarshal(raw, &text) != nil {
				text = string(raw)
			}
			e.Headers[key] = text
		}
	}
	e.TraceParent, e.TraceState = e.Headers[traceParentKey], e.Headers[traceStateKey]
	delete(e.Headers, traceParentKey)
	delete(e.Headers, traceStateKey)
	if len(e.Headers) == 0 {
		e.Headers = nil
	}
	return nil
}

// ErrNotFound: there is no such event.
var ErrNotFound = errors.New("outbox: no such event")

// Get reads an event and its failed attempts, oldest first. The error is [ErrNotFound] if
// there is no event of that id.
func Get(ctx context.Context, db querier, id string) (Row, []Attempt, error) {
	return DefaultSchema.Get(ctx, db, id)
}

// Get is [Get] for this schema.
func (s Schema) Get(ctx context.Context, db querier, id string) (Row, []Attempt, error) {
	if err := s.check(); err != nil {
		return Row{}, nil, err
	}
	if err := checkUUID("id", id); err != nil {
		return Row{}, nil, err
	}
	rows, err := db.Query(ctx, s.sql(`select `+rowColumns+` from {{schema}}.outbox o where o.id = $1`), id)
	if err != nil {
		return Row{}, nil, fmt.Errorf("outbox: read event %s: %w", id, err)
	}
	r, err := pgx.CollectExactlyOneRow(rows, scanRow)
	if errors.Is(err, pgx.ErrNoRows) {
		return Row{}, nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	if err != nil {
		return Row{}, nil, fmt.Errorf("outbox: read event %s: %w", id, err)
	}
	if rows, err = db.Query(ctx, s.sql(`
		select generation, attempt, instance, started_at, duration_ms, error_code, error_message
		from {{schema}}.outbox_attempt where event_id = $1 order by generation, attempt`), id); err != nil {
		return Row{}, nil, fmt.Errorf("outbox: read attempts of event %s: %w", id, err)
	}
	attempts, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (a Attempt, err error) {
		var ms float64
		err = row.Scan(&a.Generation, &a.Attempt, &a.Instance, &a.StartedAt, &ms, &a.ErrorCode, &a.ErrorMessage)
		a.Duration = time.Duration(ms * float64(time.Millisecond))
		return a, err
	})
	if err != nil {
		return Row{}, nil, fmt.Errorf("outbox: read attempts of event %s: %w", id, err)
	}
	return r, attempts, nil
}

// cleanText makes a handler's error text fit for a text column, which takes no NUL and no
// broken UTF-8: one such message must not keep a batch of outcomes from being stored.
func cleanText(s string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", "\uFFFD"), "\uFFFD")
}
