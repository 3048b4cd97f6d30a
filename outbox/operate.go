package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"jetmesh/mesh"
)

// An Operator does what a person at 3 a.m. needs: replay, skip, and marks by hand. Each
// operation raises the event's generation in the failure record by compare-and-set, and the row
// follows; whatever still runs for an older generation changes nothing any more. Its methods
// are safe for concurrent use: of two that meet, one wins and the other gets a [StateError].
type Operator struct {
	DB     *pgxpool.Pool
	Mesh   *mesh.Mesh
	Schema Schema // default "mesh"
}

// An Action says who does something and why; both are kept in the failure record.
type Action struct {
	By, Reason string
	// ResetRetries gives a replayed event a fresh budget of retries. Without it an exhausted
	// event gets one more attempt.
	ResetRetries bool
	// ErrorCode and ErrorMessage of an event that is marked failed; default "operator".
	ErrorCode, ErrorMessage string
}

// A StateError refuses an operation that the event's state does not allow.
type StateError struct {
	Op      string // replay, skip, fail or dispatch
	EventID string
	Status  string // of the event when it was refused
}

func (e *StateError) Error() string {
	return fmt.Sprintf("outbox: cannot %s event %s: it is %s", e.Op, e.EventID, e.Status)
}

// The operations. Their names stand in errors.
const (
	opReplay   = "replay"
	opSkip     = "skip"
	opFail     = "fail"
	opDispatch = "dispatch"
	opPark     = "park" // the relay's own
	opFollow   = "settle"
)

// The state table: which statuses an operation may start from.
var allowedFrom = map[string][]string{
	opReplay:   {StatusFailed, StatusSkipped},
	opSkip:     {StatusPending, StatusDispatching, StatusFailed},
	opFail:     {StatusPending, StatusDispatching, StatusFailed},
	opDispatch: {StatusPending, StatusDispatching, StatusFailed},
	opPark:     {StatusPending},
}

// Replay delivers a failed or skipped event again, to the subscription that owns it. Its
// retryCount stays.
func (o Operator) Replay(ctx context.Context, id string, a Action) (Row, error) {
	return o.do(ctx, opReplay, id, a)
}

// Skip makes an event that is not dispatched unnecessary. A handler that is running may finish;
// the event stays skipped.
func (o Operator) Skip(ctx context.Context, id string, a Action) (Row, error) {
	return o.do(ctx, opSkip, id, a)
}

// Fail marks an event failed like a failed handler does: retryCount + 1, and another attempt
// while the budget lasts.
func (o Operator) Fail(ctx context.Context, id string, a Action) (Row, error) {
	return o.do(ctx, opFail, id, a)
}

// Dispatch marks an event as done.
func (o Operator) Dispatch(ctx context.Context, id string, a Action) (Row, error) {
	return o.do(ctx, opDispatch, id, a)
}

func (o Operator) do(ctx context.Context, op, id string, a Action) (Row, error) {
	orElse(&o.Schema, DefaultSchema)
	for range 10 {
		row, err := o.try(ctx, op, id, a)
		if !errors.Is(err, mesh.ErrConflict) {
			return row, err
		}
	}
	return Row{}, fmt.Errorf("outbox: %s event %s: %w", op, id, mesh.ErrConflict)
}

func (o Operator) try(ctx context.Context, op, id string, a Action) (Row, error) {
	row, _, err := o.Schema.Get(ctx, o.DB, id)
	if err != nil {
		return Row{}, err
	}
	owner, err := o.owner(ctx, row.Consumer)
	if err != nil {
		return Row{}, err
	}
	var rec *mesh.Record
	var revision uint64
	if owner != "" {
		if rec, revision, err = o.Mesh.Record(ctx, owner, id); err != nil {
			return Row{}, err
		}
	}
	if err := check(op, row, rec); err != nil {
		return Row{}, err
	}
	next := recordOf(row, rec, owner)
	apply(op, next, a)
	if owner != "" {
		if err := o.Mesh.Decide(ctx, next, revision); err != nil {
			return Row{}, err
		}
	}
	row, err = o.Schema.follow(ctx, o.DB, op, next)
	if late := (*StateError)(nil); errors.As(err, &late) && owner != "" {
		if closing := concede(ctx, o.Mesh, row, next); closing != nil {
			return row, errors.Join(err, closing)
		}
	}
	return row, err
}

// concede closes the record of a decision that came too late for its row, which had been settled by a handler.
func concede(ctx context.Context, m *mesh.Mesh, row Row, decided *mesh.Record) error {
	rec, revision, err := m.Record(ctx, decided.Subscription, row.ID)
	if err != nil || rec == nil || rec.Generation != decided.Generation || rec.Status == mesh.RecordDispatched {
		return err
	}
	rec.Status, rec.RetryCount, rec.Exhausted, rec.NextRetryAt = mesh.RecordDispatched, row.RetryCount, false, time.Time{}
	rec.ErrorCode, rec.ErrorMessage = "", ""
	if err := m.Decide(ctx, rec, revision); !errors.Is(err, mesh.ErrConflict) {
		return err
	}
	return nil // somebody else sees that the row is dispatched
}

// owner is the name of the subscription that owns a consumer, "" if none does yet.
func (o Operator) owner(ctx context.Context, consumer string) (string, error) {
	stream, err := o.Mesh.JetStream().Stream(ctx, o.Mesh.Names.EventsStream())
	if err != nil {
		return "", fmt.Errorf("outbox: open stream %s: %w", o.Mesh.Names.EventsStream(), err)
	}
	owners, err := mesh.Owners(ctx, stream)
	if err != nil {
		return "", err
	}
	return strings.TrimPrefix(owners[consumer], o.Mesh.Names.OwnerDurable("")), nil
}

// check refuses what the state table does not allow. The record decides where it is ahead of
// the row; dispatched is absorbing wherever it stands.
func check(op string, row Row, rec *mesh.Record) error {
	status := row.Status
	if rec != nil && rec.Generation >= row.Generation && status != StatusDispatched {
		switch rec.Status {
		case mesh.RecordReplaying:
			if rec.Generation > row.Generation {
				status = StatusPending
			}
		case mesh.RecordFailed, mesh.RecordSkipped, mesh.RecordDispatched:
			status = rec.Status
		}
	}
	for _, from := range allowedFrom[op] {
		if status == from {
			return nil
		}
	}
	return &StateError{Op: op, EventID: row.ID, Status: status}
}

// recordOf is the record to start from: the one there is, or one made of the row.
func recordOf(row Row, rec *mesh.Record, owner string) *mesh.Record {
	next := &mesh.Record{
		EventID: row.ID, Subscription: owner, Source: row.Source, Consumer: row.Consumer, EventType: row.Type,
		AggregateType: row.AggregateType, AggregateID: row.AggregateID, IdempotencyKey: row.IdempotencyKey, TraceID: row.TraceID,
		RetryCount: row.RetryCount, MaxRetries: mesh.MaxRetries(row.MaxRetries), CreatedAt: time.Now(),
	}
	if rec != nil {
		*next = *rec
	}
	next.Generation = max(next.Generation, row.Generation) + 1
	next.Starts = 0 // those were runs of an older generation
	next.UpdatedAt = time.Now()
	return next
}

func apply(op string, r *mesh.Record, a Action) {
	r.DecidedBy, r.Reason = a.By, a.Reason
	r.NextRetryAt, r.Exhausted = time.Time{}, false
	switch op {
	case opReplay:
		r.Status = mesh.RecordReplaying
		if a.ResetRetries {
			r.RetriesBefore = r.RetryCount
		}
	case opSkip:
		r.Status = mesh.RecordSkipped
	case opDispatch:
		r.Status, r.ErrorCode, r.ErrorMessage = mesh.RecordDispatched, "", ""
	case opFail:
		orElse(&a.ErrorCode, "operator")
		orElse(&a.ErrorMessage, "marked failed by an operator")
		r.Fail(a.ErrorCode, a.ErrorMessage)
	case opPark:
		r.Fail(a.ErrorCode, a.ErrorMessage)
		r.Exhausted, r.NextRetryAt = true, time.Time{}
	}
}

// followRow lets the row follow the record. attempt starts again with each generation.
const followRow = `
update {{schema}}.outbox o set status = $3, tracked_status = $4, generation = $2, attempt = 0, retry_count = greatest(retry_count, $5),
	next_retry_at = $6, error_code = $7, error_message = $8, updated_at = now(),
	settled_at = case when $3 in ('dispatched', 'skipped') then now() end
where id = $1 and generation < $2 and status <> 'dispatched'`

// statusOf is the row's status for a record's, and how the row is found by a relay that has to
// publish it.
func statusOf(r *mesh.Record) (status string, tracked *string) {
	track := func(s string) *string { return &s }
	switch r.Status {
	case mesh.RecordReplaying:
		return StatusPending, track(trackReplay)
	case mesh.RecordSkipped:
		return StatusSkipped, track(StatusSkipped)
	case mesh.RecordDispatched:
		return StatusDispatched, nil
	default:
		if r.Exhausted {
			return StatusFailed, track(StatusFailed)
		}
		return StatusFailed, track(trackRetry)
	}
}

// Values of tracked_status beside the statuses themselves.
const (
	trackReplay = "replay" // pending: to be published to its owner alone
	trackRetry  = "retry"  // failed by hand: to be published so when next_retry_at has come
)

// follow applies a record's decision to the row and returns it. When the handler of an older generation has
// settled the row meanwhile, it has won.
func (s Schema) follow(ctx context.Context, db *pgxpool.Pool, op string, r *mesh.Record) (Row, error) {
	status, tracked := statusOf(r)
	var nextRetry *time.Time
	if !r.NextRetryAt.IsZero() {
		nextRetry = &r.NextRetryAt
	}
	var code, message *string
	if r.ErrorCode != "" {
		text := cleanText(r.ErrorMessage)
		code, message = &r.ErrorCode, &text
	}
	batch := &pgx.Batch{}
	batch.Queue(s.sql(followRow), r.EventID, r.Generation, status, tracked, r.RetryCount, nextRetry, code, message)
	batch.Queue(s.sql(`select pg_notify($1, '') from {{schema}}.meta where relay_asleep`), s.channel())
	if err := db.SendBatch(ctx, batch).Close(); err != nil {
		return Row{}, fmt.Errorf("outbox: %s event %s: %w", op, r.EventID, err)
	}
	row, _, err := s.Get(ctx, db, r.EventID)
	if err != nil {
		return Row{}, err
	}
	if row.Generation < r.Generation {
		return row, &StateError{Op: op, EventID: row.ID, Status: row.Status}
	}
	return row, nil
}

// decisionsLoop lets rows follow decisions whose operator crashed between record and row, and
// closes those that nothing can contradict any more.
func (s *session) decisionsLoop(ctx context.Context) error {
	tick := time.NewTicker(decisionSweep)
	defer tick.Stop()
	for {
		if err := s.sweepDecisions(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn().Err(err).Msg("operators' decisions cannot be looked at")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

var (
	decisionSweep = 15 * time.Second
	// decisionKept is how long a decision stays open: until no message of an older generation can
	// still be on its way, with a wide margin. Past it the record alone decides, on a redelivery.
	decisionKept = 24 * time.Hour
)

// decisionGrace is what an operator may take between record and row.
const decisionGrace = 5 * time.Second

func (s *session) sweepDecisions(ctx context.Context) error {
	open, err := s.m.OpenDecisions(ctx)
	if err != nil {
		return err
	}
	for _, d := range open {
		if time.Since(d.At) < decisionGrace {
			continue
		}
		rec, _, err := s.m.Record(ctx, d.Subscription, d.EventID)
		if err != nil {
			return err
		}
		if rec == nil || rec.Generation < d.Generation {
			// The operator never got as far as the record.
			if err := s.m.CloseDecision(ctx, d); err != nil {
				return err
			}
			continue
		}
		row, _, err := s.cfg.Schema.Get(ctx, s.db, d.EventID)
		switch {
		case errors.Is(err, ErrNotFound):
			continue // of another outbox
		case err != nil:
			return err
		}
		if row.Generation < rec.Generation {
			row, err := s.cfg.Schema.follow(ctx, s.db, opFollow, rec)
			if late := (*StateError)(nil); errors.As(err, &late) {
				err = concede(ctx, s.m, row, rec)
			}
			if err != nil {
				return err
			}
		}
		if time.Since(d.At) > decisionKept {
			if err := s.m.CloseDecision(ctx, d); err != nil {
				return err
			}
		}
	}
	return nil
}

// trackedAs is how rows of a status that left the fast path are tracked.
func trackedAs(status string) []string {
	switch status {
	case StatusFailed:
		return []string{StatusFailed, trackRetry}
	case StatusPending:
		return []string{StatusPending, trackReplay}
	default:
		return []string{status}
	}
}
