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

const markRows = `
update {{schema}}.outbox o set
	status = case when o.status = 'pending' then 'dispatching' else o.status end,
	tracked_status = case when o.tracked_status is null then null when o.status = 'pending' then 'dispatching' else 'failed' end,
	stream_seq = u.stream_seq, published_at = now() - u.age * interval '1 ms', updated_at = now()
from unnest($1::bigint[], $2::bigint[], $3::float8[]) as u (seq, stream_seq, age)
where o.seq = u.seq and (o.status = 'pending' or o.tracked_status = 'retry')`

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
		seqs, streamSeqs, ages := make([]int64, len(chunk)), make([]int64, len(chunk)), make([]float64, len(chunk))
		now := time.Now()
		for i, it := range chunk {
			seqs[i], streamSeqs[i], ages[i] = it.seq, int64(it.streamSeq), float64(now.Sub(it.publishedAt))/float64(time.Millisecond)
		}
		// A mark that a crash forgets is made again after the row was published again under the same
		// message id, so the disk is not waited for.
		batch := &pgx.Batch{}
		batch.Queue(`select set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '3s', true)`)
		batch.Queue(s.cfg.Schema.sql(markRows), seqs, streamSeqs, ages)
		if err := s.db.SendBatch(ctx, batch).Close(); lockTimeout(err) {
			// Somebody holds one of the rows. They stay pending, and are tracked in time.
			s.log.Warn().Err(err).Msg("rows are locked and were not marked as dispatching")
		} else if err != nil {
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
	if upTo <= low {
		return nil
	}
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
		update {{schema}}.meta set relay_low = greatest(relay_low, $1) returning (select last_value from {{schema}}.outbox_seq_seq)`), persist).Scan(&last)
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
