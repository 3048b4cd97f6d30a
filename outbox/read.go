package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"jetmesh/mesh"
)

// An item is a row on its way into the stream.
type item struct {
	seq    int64
	status string
	event  mesh.Event

	size        int
	msgID       string // under which it was published last
	tries       int    // publishes whose fate is unknown, or that the server refused
	notBefore   time.Time
	streamSeq   uint64
	publishedAt time.Time
	settled     bool // an outcome came before the mark
}

// Rows that are not pending are read for their number alone.
const itemColumns = `o.seq, o.status, o.id::text, o.consumer, o.event_type, o.aggregate_type, o.aggregate_id, coalesce(o.idempotency_key, ''),
	case when o.status = 'pending' then o.payload end, o.content_type, o.headers, o.trace_id, o.max_retries, o.generation, o.created_at`

func (s *session) scanItem(row pgx.CollectableRow) (*item, error) {
	return s.scan(row)
}

func (s *session) scan(row pgx.CollectableRow, before ...any) (*item, error) {
	it := &item{}
	e := &it.event
	var headers []byte
	var maxRetries *int
	err := row.Scan(append(before, &it.seq, &it.status, &e.ID, &e.Consumer, &e.Type, &e.AggregateType, &e.AggregateID, &e.IdempotencyKey,
		&e.Payload, &e.ContentType, &headers, &e.TraceID, &maxRetries, &e.Generation, &e.Time)...)
	if err != nil {
		return nil, err
	}
	e.Source = s.sourceID
	setMaxRetries(e, maxRetries)
	return it, setHeaders(e, headers)
}

// read finds rows and publishes them until ctx ends.
func (s *session) read(ctx context.Context) error {
	lookPause := minLook
	var lastLook time.Time
	for ctx.Err() == nil {
		if err := s.publisher.repeat(ctx); err != nil {
			return err
		}
		arrived, err := s.readNext(ctx)
		if err != nil {
			return err
		}
		if arrived == s.cfg.BatchSize {
			continue
		}
		for _, consumer := range s.owners.takeAppeared() {
			if err := s.readWaiting(ctx, consumer); err != nil {
				return err
			}
		}
		most := s.cfg.PollInterval
		if arrived > 0 {
			lookPause = minLook
		}
		if !s.holes.empty() {
			if time.Since(lastLook) >= lookPause {
				found, err := s.readHoles(ctx)
				if err != nil {
					return err
				}
				lastLook = time.Now()
				if lookPause = min(2*lookPause, s.cfg.PollInterval); found > 0 {
					lookPause = minLook
				}
			}
			most = lookPause
		}
		if at, waiting := s.publisher.nextRepeat(); waiting {
			most = min(most, max(time.Until(at), time.Millisecond))
		}
		if err := s.wake.wait(ctx, arrived, most); err != nil {
			return err
		}
	}
	return nil
}

// minLook is the least pause between two looks into the holes; it doubles while nothing is
// found, up to the poll interval.
const minLook = 10 * time.Millisecond

// readNext reads on from the cursor.
func (s *session) readNext(ctx context.Context) (int, error) {
	rows, err := s.db.Query(ctx, s.cfg.Schema.sql(`select `+itemColumns+` from {{schema}}.outbox o where o.seq > $1 order by o.seq limit $2`), s.cursor, s.cfg.BatchSize)
	if err != nil {
		return 0, fmt.Errorf("read rows: %w", err)
	}
	items, err := pgx.CollectRows(rows, s.scanItem)
	if err != nil {
		return 0, fmt.Errorf("read rows: %w", err)
	}
	for _, it := range items {
		if it.seq > s.cursor+1 {
			s.holes.add(s.cursor+1, it.seq-1)
		}
		s.cursor = it.seq
	}
	if err := s.publish(ctx, items); err != nil {
		return 0, err
	}
	s.progress.Store(s.cursor)
	return len(items), nil
}

// readHoles looks whether rows have come where none was.
func (s *session) readHoles(ctx context.Context) (int, error) {
	from, to := s.holes.ranges()
	rows, err := s.db.Query(ctx, s.cfg.Schema.sql(`
		with snapshot as materialized (select pg_current_snapshot() as s),
		late as (
			select o.* from unnest($1::bigint[], $2::bigint[]) as hole (a, b)
			cross join lateral (select * from {{schema}}.outbox r where r.seq between hole.a and hole.b) o
		)
		select pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint, o.seq is not null, coalesce(o.seq, 0), coalesce(o.status, ''),
			coalesce(o.id::text, ''), coalesce(o.consumer, ''), coalesce(o.event_type, ''), coalesce(o.aggregate_type, ''), coalesce(o.aggregate_id, ''), coalesce(o.idempotency_key, ''),
			case when o.status = 'pending' then o.payload end, coalesce(o.content_type, ''), o.headers, coalesce(o.trace_id, ''), o.max_retries, coalesce(o.generation, 0), coalesce(o.created_at, now())
		from snapshot left join late o on true order by o.seq`), from, to)
	if err != nil {
		return 0, fmt.Errorf("look for late rows: %w", err)
	}
	var oldest, next int64
	var found, below []int64
	var items []*item
	_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
		var real bool
		it, err := s.scan(row, &oldest, &next, &real)
		if err == nil && real {
			found = append(found, it.seq)
			if it.seq < s.low.Load() {
				below = append(below, it.seq)
			}
			items = append(items, it)
		}
		return struct{}{}, err
	})
	if err != nil {
		return 0, fmt.Errorf("look for late rows: %w", err)
	}
	// No sweep comes by here again.
	if err := s.setAside(ctx, below); err != nil {
		return 0, err
	}
	s.holes.looked(found, uint64(oldest), uint64(next))
	return len(items), s.publish(ctx, items)
}

// readWaiting publishes the rows of a consumer that had waited for its durable.
func (s *session) readWaiting(ctx context.Context, consumer string) error {
	var after int64
	for {
		rows, err := s.db.Query(ctx, s.cfg.Schema.sql(`select `+itemColumns+` from {{schema}}.outbox o
			where o.tracked_status = 'pending' and o.status = 'pending' and o.consumer = $1 and o.seq > $2 order by o.seq limit $3`), consumer, after, s.cfg.BatchSize)
		if err != nil {
			return fmt.Errorf("read waiting rows: %w", err)
		}
		items, err := pgx.CollectRows(rows, s.scanItem)
		if err != nil {
			return fmt.Errorf("read waiting rows: %w", err)
		}
		if len(items) == 0 {
			return nil
		}
		after = items[len(items)-1].seq
		if err := s.publish(ctx, items); err != nil {
			return err
		}
	}
}

// publish hands pending rows to the publisher and sets aside those nobody takes.
func (s *session) publish(ctx context.Context, items []*item) error {
	var waiting []int64
	for _, it := range items {
		switch {
		case it.status != StatusPending || s.publisher.knows(it.event.ID):
			continue
		case !s.owners.has(it.event.Consumer):
			waiting = append(waiting, it.seq)
			continue
		}
		if why := it.event.CheckWire(s.maxPayload); why != nil {
			if err := s.park(ctx, it, why); err != nil {
				return err
			}
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

// park fails a row that can never be published, so that it blocks nobody.
func (s *session) park(ctx context.Context, it *item, why error) error {
	s.log.Error().Err(why).Str("event_id", it.event.ID).Str("consumer", it.event.Consumer).Str("type", it.event.Type).
		Msg("event can never be published, parked as failed")
	_, err := s.db.Exec(ctx, s.cfg.Schema.sql(`
		update {{schema}}.outbox set status = 'failed', tracked_status = 'failed', retry_count = retry_count + 1, next_retry_at = null,
			error_code = $2, error_message = $3, updated_at = now()
		where seq = $1 and status = 'pending'`), it.seq, mesh.CodeUnpublished, why.Error())
	if err != nil {
		return fmt.Errorf("park event %s: %w", it.event.ID, err)
	}
	s.stats.parked.Add(1)
	return nil
}
