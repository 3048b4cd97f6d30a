package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/mesh"
)

// settleMost bounds the outcomes that one statement applies.
const settleMost = 4000

// arrived is a message of the outcomes stream, decoded.
type arrived struct {
	msg   jetstream.Msg
	batch mesh.OutcomeBatch
}

// keepLoop keeps the table up to date: it applies outcomes and acks them after the commit, marks
// what stays unsettled, and tracks what stays so for long. It is one loop because these statements
// take many rows in different orders and would deadlock; and so that marks, which a waiting outcome
// is about to make needless, come last.
func (s *session) keepLoop(ctx context.Context) error {
	stream, err := s.m.JetStream().Stream(ctx, s.m.Names.OutcomesStream())
	if err != nil {
		return fmt.Errorf("open stream %s: %w", s.m.Names.OutcomesStream(), err)
	}
	durable, err := stream.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
		Durable:       s.m.Names.OutcomesDurable(s.sourceID),
		Description:   "outcomes of an outbox",
		FilterSubject: s.m.Names.OutcomeSubject(s.sourceID),
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       10 * time.Second, // what a relay that was killed held comes to the next one
		MaxDeliver:    -1,
		MaxAckPending: 256, // messages, of up to 500 outcomes each
	})
	if err != nil {
		return fmt.Errorf("bind durable %s: %w", s.m.Names.OutcomesDurable(s.sourceID), err)
	}
	queue := make(chan arrived, 64)
	stopped := make(chan struct{})
	cc, err := durable.Consume(
		func(msg jetstream.Msg) {
			batch, err := mesh.ParseOutcomes(msg.Data())
			if err != nil {
				s.log.Error().Err(err).Str("subject", msg.Subject()).Msg("outcomes are unreadable, their events stay unsettled")
				msg.TermWithReason("unreadable")
				return
			}
			select {
			case queue <- arrived{msg, batch}:
			case <-stopped:
				msg.Nak()
			}
		},
		jetstream.PullMaxMessages(128), jetstream.PullExpiry(5*time.Second), jetstream.PullHeartbeat(time.Second),
		jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) { s.log.Debug().Err(err).Msg("pull outcomes") }),
	)
	if err != nil {
		return fmt.Errorf("consume outcomes: %w", err)
	}
	// What is not settled here goes back at once; otherwise it would come again only after the
	// durable's AckWait.
	unsettled := func() {
		close(stopped)
		cc.Drain()
		<-cc.Closed()
		close(queue)
		for a := range queue {
			a.msg.Nak()
		}
	}
	defer unsettled()

	// What is begun is finished: the end of ctx must not cut a statement off, only what follows it.
	work := context.WithoutCancel(ctx)
	marks := time.NewTicker(markAfter / 2)
	defer marks.Stop()
	tracks := time.NewTicker(trackInterval)
	defer tracks.Stop()
	reached := s.reached()
	for ctx.Err() == nil {
		// First what would otherwise starve while outcomes keep arriving.
		select {
		case <-tracks.C:
			if err := s.track(work, reached); err != nil {
				return err
			}
			reached = s.reached()
		case <-cc.Closed():
			return fmt.Errorf("the consumer of durable %s was closed: the durable was deleted, or the connection closed", s.m.Names.OutcomesDurable(s.sourceID))
		default:
		}
		if err := s.mark(work, s.publisher.overdue()); err != nil {
			return err
		}
		select {
		case first := <-queue:
			if err := s.settle(work, gather(queue, first)); err != nil {
				return err
			}
			continue
		default:
		}
		select {
		case <-ctx.Done():
		case <-cc.Closed():
		case first := <-queue:
			if err := s.settle(work, gather(queue, first)); err != nil {
				return err
			}
		case now := <-marks.C:
			if err := s.mark(work, s.publisher.due(now.Add(-markAfter))); err != nil {
				return err
			}
		}
	}
	// Everything, so that the next relay need not publish it again.
	return s.mark(work, s.publisher.due(time.Now().Add(time.Hour)))
}

// gather takes what is there already, without waiting for more.
func gather(queue chan arrived, first arrived) []arrived {
	got, n := []arrived{first}, len(first.batch.Outcomes)
	for n < settleMost {
		select {
		case a := <-queue:
			got, n = append(got, a), n+len(a.batch.Outcomes)
		default:
			return got
		}
	}
	return got
}

// settleRows applies the last outcome of each event. Of two runs of one attempt the success wins. An outcome of
// an older generation or attempt changes nothing, and neither does any outcome of a row that is dispatched or skipped.
// What a success sets leaves tracked_status and the error columns as they are unless the event had
// failed: see the table's indexes.
const settleRows = `
update {{schema}}.outbox o set
	status = u.status, tracked_status = nullif(u.status, 'dispatched'), generation = u.generation, attempt = u.attempt, retry_count = greatest(o.retry_count, u.retry_count),
	next_retry_at = now() + u.retry_in * interval '1 ms', error_code = u.code, error_message = u.message,
	locked_by = u.instance, locked_at = u.started_at, started_at = u.started_at, duration_ms = u.duration_ms,
	stream_seq = u.stream_seq, published_at = coalesce(o.published_at, u.published_at), updated_at = now(),
	settled_at = case when u.status = 'dispatched' then now() end
from unnest($1::uuid[], $2::int[], $3::int[], $4::text[], $5::int[], $6::float8[], $7::text[], $8::text[], $9::text[], $10::timestamptz[], $11::float8[], $12::bigint[], $13::timestamptz[])
	as u (id, generation, attempt, status, retry_count, retry_in, code, message, instance, started_at, duration_ms, stream_seq, published_at)
where o.id = u.id and o.status in ('pending', 'dispatching', 'failed') and ((u.generation, u.attempt) > (o.generation, o.attempt)
	or (u.generation, u.attempt) = (o.generation, o.attempt) and u.status = 'dispatched')`

const logAttempts = `
insert into {{schema}}.outbox_attempt (event_id, generation, attempt, instance, started_at, duration_ms, error_code, error_message)
select * from unnest($1::uuid[], $2::int[], $3::int[], $4::text[], $5::timestamptz[], $6::float8[], $7::text[], $8::text[])
on conflict do nothing`

const logLate = `
insert into {{schema}}.outbox_attempt (event_id, generation, attempt, instance, started_at, duration_ms, error_code, error_message)
select u.id, u.generation, u.attempt, u.instance, u.started_at, u.duration_ms, '', ''
from unnest($1::uuid[], $2::int[], $3::int[], $4::text[], $5::text[], $6::timestamptz[], $7::float8[])
	as u (id, generation, attempt, status, instance, started_at, duration_ms)
join {{schema}}.outbox o on o.id = u.id
where u.status = 'dispatched' and u.generation < o.generation
on conflict do nothing`

// Rows that somebody locks are left out of settleRows.
const skipLocked = ` and o.id in (select l.id from {{schema}}.outbox l where l.id = any($1) for update skip locked)`

// settle applies messages of outcomes. When Postgres refuses them for what they hold, each is tried
// alone; when somebody locks a row, all but that one are settled, and the messages come again: one
// outcome must not keep the others from being settled.
func (s *session) settle(ctx context.Context, got []arrived) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err := s.applyOutcomes(ctx, got, settleRows)
	locked := lockTimeout(err)
	if locked {
		s.log.Warn().Err(err).Msg("rows are locked, their outcomes wait")
		err = s.applyOutcomes(ctx, got, settleRows+skipLocked)
	}
	switch {
	case err == nil && locked:
		for _, a := range got {
			a.msg.NakWithDelay(5 * time.Second)
		}
		return nil
	case err == nil:
		for _, a := range got {
			if err := a.msg.Ack(); err != nil {
				s.log.Debug().Err(err).Msg("ack of outcomes; they come again")
			}
		}
		return nil
	case !refusedContent(err):
		for _, a := range got {
			a.msg.Nak()
		}
		return err
	case len(got) > 1:
		for _, a := range got {
			if err := s.settle(ctx, []arrived{a}); err != nil {
				return err
			}
		}
		return nil
	default:
		s.log.Error().Err(err).Str("instance", got[0].batch.Instance).Msg("outcomes cannot be stored, their events stay unsettled")
		got[0].msg.TermWithReason("cannot be stored")
		return nil
	}
}

// refusedContent recognises data that no repetition will make acceptable: what Postgres calls a
// data exception or a violated constraint.
func refusedContent(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (strings.HasPrefix(pg.Code, "22") || strings.HasPrefix(pg.Code, "23"))
}

func (s *session) applyOutcomes(ctx context.Context, got []arrived, update string) error {
	last := map[string]int{} // event id → index in rows
	var rows settleColumns
	var failed attemptColumns
	total := 0
	for _, a := range got {
		instance := cleanText(a.batch.Instance)
		for i := range a.batch.Outcomes {
			o := &a.batch.Outcomes[i]
			if why := checkOutcome(o); why != nil {
				s.log.Error().Err(why).Str("event_id", o.EventID).Msg("outcome cannot be stored, ignored")
				continue
			}
			total++
			if !o.Succeeded() {
				failed.add(o, instance)
			}
			if at, twice := last[o.EventID]; !twice {
				last[o.EventID] = rows.add(o, instance)
			} else if rows.older(at, o) {
				rows.set(at, o, instance)
			}
		}
	}
	batch := &pgx.Batch{}
	batch.Queue(`select set_config('lock_timeout', '3s', true)`)
	batch.Queue(s.cfg.Schema.sql(update), rows.args()...)
	if len(failed.ids) > 0 {
		batch.Queue(s.cfg.Schema.sql(logAttempts), failed.args()...)
	}
	results := s.db.SendBatch(ctx, batch)
	_, err := results.Exec()
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = results.Exec()
	}
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("settle rows: %w", err)
	}
	if int(tag.RowsAffected()) < len(rows.ids) {
		// Among those that changed nothing may be successes that an operator had overtaken.
		if _, err := s.db.Exec(ctx, s.cfg.Schema.sql(logLate), rows.ids, rows.generations, rows.attempts, rows.statuses, rows.instances, rows.started, rows.durations); err != nil {
			return fmt.Errorf("log late successes: %w", err)
		}
	}
	s.stats.settled.Add(tag.RowsAffected())
	s.stats.ignored.Add(int64(total) - tag.RowsAffected())
	for _, id := range rows.ids {
		s.publisher.settledEvent(id)
	}
	return nil
}

// checkOutcome refuses numbers that no column takes.
func checkOutcome(o *mesh.Outcome) error {
	for _, n := range []int{o.Generation, o.Attempt, o.RetryCount} {
		if n < 0 || n > math.MaxInt32 {
			return fmt.Errorf("number %d is out of range", n)
		}
	}
	if o.StreamSeq > math.MaxInt64 {
		return fmt.Errorf("stream sequence %d is out of range", o.StreamSeq)
	}
	return checkUUID("id", o.EventID)
}

// settleColumns are the arguments of settleRows.
type settleColumns struct {
	ids                   []string
	generations, attempts []int
	statuses              []string
	retryCounts           []int
	retryIn               []*float64
	codes, messages       []*string
	instances             []string
	started               []time.Time
	durations             []float64
	streamSeqs            []int64
	published             []time.Time
}

func (c *settleColumns) add(o *mesh.Outcome, instance string) int {
	at := len(c.ids)
	c.ids = append(c.ids, "")
	c.generations, c.attempts = append(c.generations, 0), append(c.attempts, 0)
	c.statuses = append(c.statuses, "")
	c.retryCounts, c.retryIn = append(c.retryCounts, 0), append(c.retryIn, nil)
	c.codes, c.messages = append(c.codes, nil), append(c.messages, nil)
	c.instances = append(c.instances, "")
	c.started, c.durations = append(c.started, time.Time{}), append(c.durations, 0)
	c.streamSeqs, c.published = append(c.streamSeqs, 0), append(c.published, time.Time{})
	c.set(at, o, instance)
	return at
}

func (c *settleColumns) set(at int, o *mesh.Outcome, instance string) {
	c.ids[at], c.generations[at], c.attempts[at] = o.EventID, o.Generation, o.Attempt
	c.statuses[at], c.retryIn[at], c.codes[at], c.messages[at] = StatusDispatched, nil, nil, nil
	if !o.Succeeded() {
		code, message := cleanText(o.Code), cleanText(o.Message)
		c.statuses[at], c.codes[at], c.messages[at] = StatusFailed, &code, &message
		if !o.Exhausted {
			ms := milliseconds(o.RetryIn)
			c.retryIn[at] = &ms
		}
	}
	c.retryCounts[at] = o.RetryCount
	c.instances[at], c.started[at], c.durations[at] = instance, o.StartedAt, milliseconds(o.Duration)
	c.streamSeqs[at], c.published[at] = int64(o.StreamSeq), o.PublishedAt
}

// older reports whether the outcome at a place is older than o.
func (c *settleColumns) older(at int, o *mesh.Outcome) bool {
	if c.generations[at] != o.Generation {
		return c.generations[at] < o.Generation
	}
	if c.attempts[at] != o.Attempt {
		return c.attempts[at] < o.Attempt
	}
	return o.Succeeded() && c.statuses[at] == StatusFailed
}

func (c *settleColumns) args() []any {
	return []any{c.ids, c.generations, c.attempts, c.statuses, c.retryCounts, c.retryIn, c.codes, c.messages, c.instances, c.started, c.durations, c.streamSeqs, c.published}
}

// attemptColumns are the arguments of logAttempts.
type attemptColumns struct {
	ids                   []string
	generations, attempts []int
	instances             []string
	started               []time.Time
	durations             []float64
	codes, messages       []string
}

func (c *attemptColumns) add(o *mesh.Outcome, instance string) {
	c.ids = append(c.ids, o.EventID)
	c.generations, c.attempts = append(c.generations, o.Generation), append(c.attempts, o.Attempt)
	c.instances = append(c.instances, instance)
	c.started, c.durations = append(c.started, o.StartedAt), append(c.durations, milliseconds(o.Duration))
	c.codes, c.messages = append(c.codes, cleanText(o.Code)), append(c.messages, cleanText(o.Message))
}

func (c *attemptColumns) args() []any {
	return []any{c.ids, c.generations, c.attempts, c.instances, c.started, c.durations, c.codes, c.messages}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
