package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// markLoop marks rows as dispatching that were published a while ago and are still unsettled. The
// last round marks everything, so that the next relay need not publish it again.
func (s *session) markLoop(ctx context.Context) error {
	tick := time.NewTicker(markAfter / 2)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			return s.mark(ctx, s.publisher.due(time.Now().Add(time.Hour)))
		case now := <-tick.C:
			if err := s.mark(ctx, s.publisher.due(now.Add(-markAfter))); err != nil {
				return err
			}
		}
	}
}

const markRows = `
update {{schema}}.outbox o set status = 'dispatching', stream_seq = u.stream_seq, published_at = now() - u.age * interval '1 ms', updated_at = now()
from unnest($1::bigint[], $2::bigint[], $3::float8[]) as u (seq, stream_seq, age)
where o.seq = u.seq and o.status = 'pending'`

func (s *session) mark(ctx context.Context, items []*item) error {
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
		batch.Queue(`select set_config('synchronous_commit', 'off', true)`)
		batch.Queue(s.cfg.Schema.sql(markRows), seqs, streamSeqs, ages)
		if err := s.db.SendBatch(ctx, batch).Close(); err != nil {
			return fmt.Errorf("mark rows: %w", err)
		}
		s.publisher.marked(chunk)
	}
	return nil
}

// trackLoop lets meta.relay_low advance: what lies below the place the relay had reached one
// interval ago, and is unsettled still, becomes tracked.
func (s *session) trackLoop(ctx context.Context) error {
	tick := time.NewTicker(trackInterval)
	defer tick.Stop()
	reached := s.reached()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := s.track(ctx, reached); err != nil {
			return err
		}
		reached = s.reached()
	}
}

// reached is the number below which every row that was read is published and marked.
func (s *session) reached() int64 {
	reached := s.progress.Load() + 1
	if seq, any := s.publisher.lowest(); any {
		reached = min(reached, seq)
	}
	return reached
}

func (s *session) track(ctx context.Context, upTo int64) error {
	low := s.low.Load()
	if upTo <= low {
		return nil
	}
	_, err := s.db.Exec(ctx, s.cfg.Schema.sql(`
		update {{schema}}.outbox set tracked = true
		where seq >= $1 and seq < $2 and status in ('pending', 'dispatching') and not tracked`), low, upTo)
	if err != nil {
		return fmt.Errorf("track rows: %w", err)
	}
	s.low.Store(upTo)
	// A row that may still come must be found by a relay that starts anew.
	persist := upTo
	if seq, any := s.holes.lowest(); any {
		persist = min(persist, seq)
	}
	if _, err := s.db.Exec(ctx, s.cfg.Schema.sql(`update {{schema}}.meta set relay_low = greatest(relay_low, $1)`), persist); err != nil {
		return fmt.Errorf("note progress: %w", err)
	}
	return nil
}
