package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"jetmesh/mesh"
)

// An item is a row on its way into the stream.
type item struct {
	seq       int64
	publish   bool // it is pending, or due again by an operator's word
	published bool // before now, under an older generation
	event     mesh.Event

	size        int    // what it takes of bytesInFlight; 0: nothing yet
	msgID       string // under which it was published last
	tries       int    // publishes whose fate is unknown, or that the server refused
	notBefore   time.Time
	streamSeq   uint64
	publishedAt time.Time
	settled     bool // an outcome came before the mark
}

// Rows that are not to be published are read for their number alone.
const publishable = `(o.status = 'pending' or o.tracked_status = 'retry' and o.next_retry_at <= now()) is true`
const itemColumns = `o.seq, ` + publishable + `, o.published_at is not null, o.id::text, o.consumer, o.event_type, o.aggregate_type, o.aggregate_id, coalesce(o.idempotency_key, ''),
	case when ` + publishable + ` then o.payload end, o.content_type, o.headers, o.trace_id, o.max_retries, o.generation, o.retry_count, coalesce(o.occurred_at, o.created_at)`

// Every read is bounded by rows and by bytes: what crosses readBytes is the last row.
const readBytes = 16 << 20

// bounded wraps a query of outbox rows, in the order of seq, with both bounds. Its first parameter
// is the number of rows.
func bounded(from string) string {
	return `select ` + itemColumns + ` from (
		select r.*, sum(octet_length(r.payload)) over (order by r.seq rows unbounded preceding) - octet_length(r.payload) as before
		from ` + from + ` order by r.seq limit $1
	) o where o.before < ` + fmt.Sprint(readBytes) + ` order by o.seq`
}

func (s *session) scanItem(row pgx.CollectableRow) (*item, error) {
	it := &item{}
	e := &it.event
	var headers []byte
	var maxRetries *int
	err := row.Scan(&it.seq, &it.publish, &it.published, &e.ID, &e.Consumer, &e.Type, &e.AggregateType, &e.AggregateID, &e.IdempotencyKey,
		&e.Payload, &e.ContentType, &headers, &e.TraceID, &maxRetries, &e.Generation, &e.Failures, &e.Time)
	if err != nil {
		return nil, err
	}
	e.Source = s.sourceID
	setMaxRetries(e, maxRetries)
	return it, setHeaders(e, headers)
}

// query reads rows; more reports that a bound cut them off.
func (s *session) query(ctx context.Context, from string, args ...any) (items []*item, more bool, err error) {
	rows, err := s.db.Query(ctx, s.cfg.Schema.sql(bounded(from)), append([]any{s.cfg.BatchSize}, args...)...)
	if err != nil {
		return nil, false, fmt.Errorf("read rows: %w", err)
	}
	if items, err = pgx.CollectRows(rows, s.scanItem); err != nil {
		return nil, false, fmt.Errorf("read rows: %w", err)
	}
	bytes := 0
	for _, it := range items {
		bytes += len(it.event.Payload)
	}
	return items, len(items) == s.cfg.BatchSize || bytes >= readBytes, nil
}

// read finds rows and publishes them until ctx ends. Each round takes a share of everything
// there is to do, so that no backlog starves a late row or another consumer's.
func (s *session) read(ctx context.Context) error {
	looks := pacer{most: s.cfg.PollInterval}
	for ctx.Err() == nil {
		if err := s.publisher.repeat(ctx); err != nil {
			return err
		}
		arrived, more, err := s.readNext(ctx)
		if err != nil {
			return err
		}
		if arrived > 0 {
			looks.hurry()
		}
		if !s.holes.empty() && looks.due() {
			began := time.Now()
			found, cut, err := s.readHoles(ctx)
			if err != nil {
				return err
			}
			looks.done(time.Since(began), found > 0)
			if cut { // there is more, and it is not searched for in vain
				looks.hurry()
				more = true
			}
		}
		for _, consumer := range s.owners.takeAppeared() {
			s.waiting[consumer] = 0
		}
		for consumer := range s.waiting {
			left, err := s.readWaiting(ctx, consumer)
			if err != nil {
				return err
			}
			more = more || left
		}
		decided, err := s.readDecided(ctx)
		if err != nil {
			return err
		}
		if err := s.wake.arrived(ctx, arrived); err != nil {
			return err
		}
		if more || decided {
			continue
		}
		most := s.cfg.PollInterval
		if !s.holes.empty() {
			most = looks.wait()
		}
		if at, waiting := s.publisher.nextRepeat(); waiting {
			most = min(most, max(time.Until(at), time.Millisecond))
		}
		if err := s.wake.wait(ctx, most); err != nil {
			return err
		}
	}
	return nil
}

// A pacer spaces looks into the holes: soon after rows arrived, at doubling pauses while nothing is
// found, and never more than a tenth of the time.
type pacer struct {
	most, pause time.Duration
	last        time.Time
}

const minLook = 10 * time.Millisecond

func (p *pacer) hurry()    { p.pause = minLook }
func (p *pacer) due() bool { return time.Since(p.last) >= p.pause }
func (p *pacer) wait() time.Duration {
	return max(p.pause-time.Since(p.last), time.Millisecond)
}

func (p *pacer) done(took time.Duration, found bool) {
	p.last = time.Now()
	p.pause = min(2*max(p.pause, minLook), p.most)
	if found {
		p.pause = minLook
	}
	p.pause = max(p.pause, 10*took)
}

// readNext reads on from the cursor.
func (s *session) readNext(ctx context.Context) (arrived int, more bool, err error) {
	items, more, err := s.query(ctx, `{{schema}}.outbox r where r.seq > $2`, s.cursor)
	if err != nil {
		return 0, false, err
	}
	for _, it := range items {
		if it.seq > s.cursor+1 {
			s.holes.add(s.cursor+1, it.seq-1)
		}
		s.cursor = it.seq
	}
	if err := s.publish(ctx, items); err != nil {
		return 0, false, err
	}
	s.progress.Store(s.cursor)
	return len(items), more, nil
}

// readHoles looks whether rows have come where none was.
func (s *session) readHoles(ctx context.Context) (found int, more bool, err error) {
	// From before the look until the holes know of it, no sweep may pass by these rows.
	s.sweep.Lock()
	items, more, err := s.lookIntoHoles(ctx)
	s.sweep.Unlock()
	if err != nil {
		return 0, false, err
	}
	return len(items), more, s.publish(ctx, items)
}

func (s *session) lookIntoHoles(ctx context.Context) (items []*item, more bool, err error) {
	// An older snapshot than that of the look: what it calls ended has ended for the look too.
	var oldest, next int64
	if err := s.db.QueryRow(ctx, `select pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint from pg_current_snapshot() s`).Scan(&oldest, &next); err != nil {
		return nil, false, fmt.Errorf("look for late rows: %w", err)
	}
	from, to := s.holes.ranges()
	items, more, err = s.query(ctx, `unnest($2::bigint[], $3::bigint[]) as hole (a, b)
		cross join lateral (select * from {{schema}}.outbox r where r.seq between hole.a and hole.b and r.status = 'pending') r`, from, to)
	if err != nil {
		return nil, false, err
	}
	upTo := int64(math.MaxInt64)
	if more {
		upTo = items[len(items)-1].seq
	}
	var found, below []int64
	for _, it := range items {
		found = append(found, it.seq)
		if it.seq < s.low.Load() {
			below = append(below, it.seq)
		}
	}
	// No sweep comes by here again.
	if err := s.setAside(ctx, below); err != nil {
		return nil, false, err
	}
	s.holes.looked(found, upTo, uint64(oldest), uint64(next))
	return items, more, nil
}

// readWaiting publishes the next rows of a consumer that had waited for its durable.
func (s *session) readWaiting(ctx context.Context, consumer string) (more bool, err error) {
	items, _, err := s.query(ctx, `{{schema}}.outbox r
		where r.tracked_status = 'pending' and r.status = 'pending' and r.consumer = $2 and r.seq > $3`, consumer, s.waiting[consumer])
	if err != nil {
		return false, err
	}
	if len(items) == 0 {
		delete(s.waiting, consumer)
		return false, nil
	}
	s.waiting[consumer] = items[len(items)-1].seq
	return true, s.publish(ctx, items)
}

// readDecided publishes what an operator replayed, or failed by hand and is due again. Those rows
// keep their mark until the publish is acked, so they come again after a crash.
func (s *session) readDecided(ctx context.Context) (any bool, err error) {
	if time.Since(s.decidedAt) < 50*time.Millisecond {
		return false, nil
	}
	s.decidedAt = time.Now()
	items, _, err := s.query(ctx, `{{schema}}.outbox r where r.tracked_status = 'replay'`)
	if err != nil {
		return false, err
	}
	retries, _, err := s.query(ctx, `{{schema}}.outbox r where r.tracked_status = 'retry' and r.next_retry_at <= now()`)
	if err != nil {
		return false, err
	}
	items = append(items, retries...)
	var due []*item
	for _, it := range items {
		if s.owners.has(it.event.Consumer) && !s.publisher.knows(it.event.ID) {
			due = append(due, it)
		}
	}
	return len(due) > 0, s.publish(ctx, due)
}

// publish hands rows to the publisher and sets aside those nobody takes.
func (s *session) publish(ctx context.Context, items []*item) error {
	var waiting []int64
	for _, it := range items {
		if !it.publish || s.publisher.knows(it.event.ID) {
			continue
		}
		if why := it.event.CheckWire(s.maxPayload); why != nil {
			if err := s.park(ctx, it, why); err != nil {
				return err
			}
			continue
		}
		if !s.owners.has(it.event.Consumer) {
			waiting = append(waiting, it.seq)
			continue
		}
		if err := s.publisher.publish(ctx, it); err != nil {
			return err
		}
	}
	return s.setAside(ctx, waiting)
}

// setAside tracks pending rows, so that they are found without a look at what lies around.
func (s *session) setAside(ctx context.Context, seqs []int64) error {
	if len(seqs) == 0 {
		return nil
	}
	_, err := s.db.Exec(ctx, s.cfg.Schema.sql(`update {{schema}}.outbox set tracked_status = status where seq = any($1) and status = 'pending' and tracked_status is null`), seqs)
	if err != nil {
		return fmt.Errorf("set rows aside: %w", err)
	}
	return nil
}

// park fails a row that can never be published, so that it blocks nobody. Like every failure that is
// no handler's, it goes into the record first.
func (s *session) park(ctx context.Context, it *item, why error) error {
	s.log.Error().Err(why).Str("event_id", it.event.ID).Str("consumer", it.event.Consumer).Str("type", it.event.Type).
		Msg("event can never be published, parked as failed")
	_, err := s.operator().do(ctx, opPark, it.event.ID, Action{ErrorCode: mesh.CodeUnpublished, ErrorMessage: why.Error()})
	if moved := (*StateError)(nil); errors.As(err, &moved) {
		return nil // an operator was faster
	}
	if err != nil {
		return fmt.Errorf("park event %s: %w", it.event.ID, err)
	}
	s.stats.parked.Add(1)
	return nil
}

func (s *session) operator() Operator { return Operator{DB: s.db, Mesh: s.m, Schema: s.cfg.Schema} }
