package outbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"jetmesh/mesh"
)

// Written is what became of an event given to [Write].
type Written struct {
	// Row is the event as it stands in the outbox.
	Row Row
	// Existed: an event with this idempotency key (or id) was there already. Row is that event, and nothing was
	// written.
	Existed bool
	// Differs: the event that existed has another payload, content type, consumer, type or
	// aggregate than the one given.
	Differs bool
}

// Write adds an event to the outbox in the caller's transaction: it is published if, and
// only if, the transaction commits. One round trip; one more when the event existed.
//
// What is wrong with the event is reported before anything is written, as
// [mesh.FieldError]s and [mesh.KeyError]s joined, and leaves the transaction usable. An
// idempotency key that is known already is no error, see [Written]; a concurrent
// transaction that wrote the same key is waited for. (In a repeatable-read or serializable
// transaction, which cannot see that other event, Postgres reports a serialization failure
// instead, to be retried as always.)
//
// The event's trace id is its own, else the context's, else a new one, see [mesh.Event.Trace].
func Write(ctx context.Context, tx pgx.Tx, event mesh.Event) (Written, error) {
	return DefaultSchema.Write(ctx, tx, event)
}

// WriteMany is [Write] for several events, in one round trip: all of them, or an error and
// none. They are published in the order given, as far as no publish must be repeated. Transactions
// that write the same keys in opposite order can deadlock, as with any unique column.
func WriteMany(ctx context.Context, tx pgx.Tx, events []mesh.Event) ([]Written, error) {
	return DefaultSchema.WriteMany(ctx, tx, events)
}

// Write is [Write] for this schema.
func (s Schema) Write(ctx context.Context, tx pgx.Tx, event mesh.Event) (Written, error) {
	written, err := s.WriteMany(ctx, tx, []mesh.Event{event})
	if err != nil {
		return Written{}, err
	}
	return written[0], nil
}

// insert writes the events that fit the server's max_payload, all or none, and wakes the
// relay if it sleeps. The transaction gets its id before a row draws its number: the relay
// relies on that order when it forgets the number of a transaction that never came.
const insert = `
with me as materialized (select pg_current_xact_id()),
meta as materialized (select max_payload, relay_asleep from {{schema}}.meta),
input as materialized (
	select * from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bytea[], $8::text[], $9::jsonb[], $10::text[], $11::int[], $12::int[], $13::timestamptz[])
	with ordinality as i (id, consumer, event_type, aggregate_type, aggregate_id, idempotency_key, payload, content_type, headers, trace_id, max_retries, size, occurred_at, ord)
),
written as (
	insert into {{schema}}.outbox (id, consumer, event_type, aggregate_type, aggregate_id, idempotency_key, payload, content_type, headers, trace_id, max_retries, occurred_at)
	select i.id, i.consumer, i.event_type, i.aggregate_type, i.aggregate_id, i.idempotency_key, i.payload, i.content_type, i.headers, i.trace_id, i.max_retries, i.occurred_at
	from me, input i
	where (select max(size) from input) <= (select max_payload from meta)
	order by i.ord
	on conflict do nothing
	returning id, seq, created_at
),
woken as (
	select pg_notify($14, '') from meta where relay_asleep and $15 and exists (select from written)
)
select i.ord, w.seq, w.created_at, (select max_payload from meta), (select count(*) from woken)
from input i left join written w on w.id = i.id
order by i.ord`

// WriteMany is [WriteMany] for this schema.
func (s Schema) WriteMany(ctx context.Context, tx pgx.Tx, events []mesh.Event) ([]Written, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if len(events) == 0 {
		return nil, nil
	}
	in, err := prepare(ctx, events)
	if err != nil {
		return nil, err
	}
	owned, quiet := tx.(*ownedTx) // whoever opened it wakes the relay after the commit
	if quiet {
		*owned.wrote = true
	}
	written, maxPayload, err := s.insert(ctx, tx, in, !quiet)
	if err != nil {
		return nil, err
	}
	if err := checkSizes(in.events, maxPayload); err != nil {
		return nil, err
	}
	if err := s.findExisting(ctx, tx, in.events, written); err != nil {
		return nil, err
	}
	return written, nil
}

// input is the columns of the events to be written.
type input struct {
	events                                  []mesh.Event
	ids, consumers, types, aggTypes, aggIDs []string
	keys                                    []*string
	payloads                                [][]byte
	contentTypes, headers, traceIDs         []string
	maxRetries                              []*int
	sizes                                   []int
	occurred                                []*time.Time
}

// prepare completes and checks the events.
func prepare(ctx context.Context, events []mesh.Event) (*input, error) {
	in := &input{events: make([]mesh.Event, len(events))}
	var errs []error
	seen := make(map[string]bool, len(events))
	for i, e := range events {
		if e.ID == "" {
			id, err := uuid.NewV7()
			if err != nil {
				return nil, fmt.Errorf("outbox: make an event id: %w", err)
			}
			e.ID = id.String()
		}
		e.Trace(ctx)
		e.Time = e.Time.Truncate(time.Microsecond) // as Postgres keeps it
		err := e.Validate()
		if err == nil {
			err = e.CheckSize(maxMessage)
		}
		if seen[e.ID] {
			err = &mesh.FieldError{Field: "id", Reason: "stands twice in one call: " + e.ID}
		}
		seen[e.ID] = true
		if err != nil {
			if len(events) > 1 {
				err = fmt.Errorf("event %d of %d: %w", i+1, len(events), err)
			}
			errs = append(errs, err)
			continue
		}
		if e.ContentType == "" {
			e.ContentType = mesh.DefaultContentType
		}
		headers, err := headersColumn(&e)
		if err != nil {
			return nil, err
		}
		var key *string
		if e.IdempotencyKey != "" {
			key = &e.IdempotencyKey
		}
		if e.Payload == nil {
			e.Payload = []byte{}
		}
		in.events[i] = e
		in.ids = append(in.ids, e.ID)
		in.consumers = append(in.consumers, e.Consumer)
		in.types = append(in.types, e.Type)
		in.aggTypes = append(in.aggTypes, e.AggregateType)
		in.aggIDs = append(in.aggIDs, e.AggregateID)
		in.keys = append(in.keys, key)
		in.payloads = append(in.payloads, e.Payload)
		in.contentTypes = append(in.contentTypes, e.ContentType)
		in.headers = append(in.headers, headers)
		in.traceIDs = append(in.traceIDs, e.TraceID)
		in.maxRetries = append(in.maxRetries, maxRetriesColumn(&e))
		in.sizes = append(in.sizes, e.NeededMaxPayload())
		var occurred *time.Time
		if !e.Time.IsZero() {
			occurred = &e.Time
		}
		in.occurred = append(in.occurred, occurred)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("outbox: event refused: %w", err)
	}
	return in, nil
}

// maxMessage bounds an event before Postgres sees it: no NATS server takes more than 64 MiB.
const maxMessage = 64 << 20

func checkSizes(events []mesh.Event, maxPayload int) error {
	var errs []error
	for i := range events {
		if err := events[i].CheckSize(maxPayload); err != nil {
			if len(events) > 1 {
				err = fmt.Errorf("event %d of %d: %w", i+1, len(events), err)
			}
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("outbox: event refused: %w", err)
	}
	return nil
}

func (s Schema) insert(ctx context.Context, tx pgx.Tx, in *input, notify bool) (written []Written, maxPayload int, err error) {
	rows, err := tx.Query(ctx, s.sql(insert), in.ids, in.consumers, in.types, in.aggTypes, in.aggIDs, in.keys,
		in.payloads, in.contentTypes, in.headers, in.traceIDs, in.maxRetries, in.sizes, in.occurred, s.channel(), notify)
	if err != nil {
		return nil, 0, fmt.Errorf("outbox: write events: %w", err)
	}
	written, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (w Written, err error) {
		var ord, woken int64
		var seq *int64
		var created *time.Time
		var limit *int
		if err := row.Scan(&ord, &seq, &created, &limit, &woken); err != nil {
			return w, err
		}
		if limit == nil {
			return w, fmt.Errorf("schema %s has no row in its table meta: run `jetmesh migrate validate`", string(s))
		}
		maxPayload = *limit
		if w.Existed = seq == nil; !w.Existed {
			w.Row = Row{Event: in.events[ord-1], Seq: *seq, Status: StatusPending, CreatedAt: *created, UpdatedAt: *created}
			if w.Row.Time.IsZero() {
				w.Row.Time = *created
			}
		}
		return w, nil
	})
	if err != nil {
		return nil, 0, fmt.Errorf("outbox: write events: %w", err)
	}
	return written, maxPayload, nil
}

// findExisting fills in the events that were there already. It is a statement of its own
// because a concurrent writer's event, committed while the insert waited for it, is invisible
// to the insert's snapshot.
func (s Schema) findExisting(ctx context.Context, tx pgx.Tx, events []mesh.Event, written []Written) error {
	var ids, keys []string
	for i := range written {
		if written[i].Existed {
			ids = append(ids, events[i].ID)
			if key := events[i].IdempotencyKey; key != "" {
				keys = append(keys, key)
			}
		}
	}
	if ids == nil {
		return nil
	}
	rows, err := tx.Query(ctx, s.sql(`select `+rowColumns+` from {{schema}}.outbox o where o.idempotency_key = any($1)
		union all
		select `+rowColumns+` from {{schema}}.outbox o where o.id = any($2::uuid[])`), keys, ids)
	if err != nil {
		return fmt.Errorf("outbox: read existing events: %w", err)
	}
	existing, err := pgx.CollectRows(rows, scanRow)
	if err != nil {
		return fmt.Errorf("outbox: read existing events: %w", err)
	}
	find := func(e *mesh.Event) *Row {
		for i := range existing {
			if r := &existing[i]; e.IdempotencyKey != "" && r.IdempotencyKey == e.IdempotencyKey || r.ID == e.ID {
				return r
			}
		}
		return nil
	}
	for i := range written {
		if !written[i].Existed {
			continue
		}
		e := &events[i]
		r := find(e)
		if r == nil {
			return fmt.Errorf("outbox: event with key %q existed and was purged meanwhile: write it again", e.IdempotencyKey)
		}
		written[i].Row = *r
		written[i].Differs = r.Consumer != e.Consumer || r.Type != e.Type || r.AggregateType != e.AggregateType || r.AggregateID != e.AggregateID ||
			r.ContentType != e.ContentType || !bytes.Equal(r.Payload, e.Payload)
	}
	return nil
}
