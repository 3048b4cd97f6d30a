package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// trackMost bounds the rows of one statement that tracks.
const trackMost = 10_000

// What an operator decided after the publish is to be published for itself.
const markRows = `
update {{schema}}.outbox o set
	status = case when o.status = 'pending' then 'dispatching' else o.status end,
	tracked_status = case when o.tracked_status is null then null when o.status = 'pending' then 'dispatching' else 'failed' end,
	stream_seq = u.stream_seq, published_at = now() - u.age * interval '1 ms', updated_at = now()
from unnest($1::bigint[], $2::bigint[], $3::float8[], $4::int[]) as u (seq, stream_seq, age, generation)
where o.seq = u.seq and o.generation = u.generation and (o.status = 'pending' or o.tracked_status = 'retry')`

// Rows that somebody locks are left out of markRows: they stay pending, and are tracked in time.
// Only where it must be, since each row is then locked before it is updated.
const skipLockedMarks = ` and o.seq in (select l.seq from {{schema}}.outbox l where l.seq = any($1) for update skip locked)`

// mark marks rows as dispatching that were published a while ago and are still unsettled.
func (s *session) mark(ctx context.Context, items []*item) error {
	if len(items) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for len(items) > 0 {
		chunk := items[:min(len(items), 1000)]
		items = items[len(chunk):]
		seqs, streamSeqs, ages, generations := make([]int64, len(chunk)), make([]int64, len(chunk)), make([]float64, len(chunk)), make([]int, len(chunk))
		now := time.Now()
		for i, it := range chunk {
			seqs[i], streamSeqs[i], ages[i] = it.seq, int64(it.streamSeq), float64(now.Sub(it.publishedAt))/float64(time.Millisecond)
			generations[i] = it.event.Generation
		}
		update := func(statement string) error {
			// A mark that a crash forgets is made again after the row was published again under the
			// same message id, so the disk is not waited for.
			batch := &pgx.Batch{}
			batch.Queue(`select set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '1s', true)`)
			batch.Queue(s.cfg.Schema.sql(statement), seqs, streamSeqs, ages, generations)
			return s.db.SendBatch(ctx, batch).Close()
		}
		err := update(markRows)
		if lockTimeout(err) {
			err = update(markRows + skipLockedMarks)
		}
		if err != nil {
			return fmt.Errorf("mark rows: %w", err)
		}
		s.publisher.marked(chunk)
	}
	return nil
}

// reached is the number below which every row that was read is published and marked.
func (s *session) reached() int64 {
	reached := s.progress.Load() + 1
	if seq, any := s.publisher.lowest(); any {
		reached = min(reached, seq)
	}
	return reached
}

// track lets meta.relay_low advance: what lies below the place that the relay had reached one
// interval ago, and is unsettled still, becomes tracked.
func (s *session) track(ctx context.Context, upTo int64) error {
	s.sweep.Lock()
	defer s.sweep.Unlock()
	low := s.low.Load()
	upTo = max(upTo, low)
	for from := low; from < upTo; from += trackMost {
		batch := &pgx.Batch{}
		batch.Queue(`select set_config('lock_timeout', '3s', true)`)
		batch.Queue(s.cfg.Schema.sql(`
			update {{schema}}.outbox set tracked_status = status
			where seq >= $1 and seq < $2 and status in ('pending', 'dispatching') and tracked_status is null`), from, min(from+trackMost, upTo))
		if err := s.db.SendBatch(ctx, batch).Close(); lockTimeout(err) {
			s.log.Warn().Err(err).Msg("rows are locked; a new relay would read from before them")
			return nil
		} else if err != nil {
			return fmt.Errorf("track rows: %w", err)
		}
	}
	s.low.Store(upTo)
	// A row that may still come must be found by a relay that starts anew.
	persist := upTo
	if seq, any := s.holes.lowest(); any {
		persist = min(persist, seq)
	}
	var last int64
	err := s.db.QueryRow(ctx, s.cfg.Schema.sql(`
		with moved as (update {{schema}}.meta set relay_low = $1 where relay_low < $1)
		select last_value from {{schema}}.outbox_seq_seq`), persist).Scan(&last)
	if err != nil {
		return fmt.Errorf("note progress: %w", err)
	}
	if last < s.progress.Load() {
		return errors.New("the numbers of the outbox began anew (truncated, or restored)")
	}
	return nil
}

// lockTimeout recognises that a statement gave up because somebody holds a row.
func lockTimeout(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "55P03"
}
