package mesh

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// A delivery is one message in the hands of a runner, from the moment it was taken until
// it was answered.
type delivery struct {
	r         *runner
	msg       jetstream.Msg
	meta      *jetstream.MsgMetadata
	event     Event
	record    *Record // nil while the event never failed here
	revision  uint64  // of the record
	attempt   int
	startedAt time.Time
	signs     uint64       // of the runner, when the message was taken
	deadline  atomic.Int64 // Unix nanoseconds; after it a running handler is given up; 0 while none runs
	failure   *failure     // what the handler came to; nil for success

	mu    sync.Mutex
	over  bool // somebody settles it: the handler's return, or the watch
	moved bool // the handler's goroutine was given up and has no slot any more
}

// run handles the message and settles it. handlers ends when the runner cuts handlers off.
func (d *delivery) run(handlers context.Context) {
	called := d.prepare(handlers)
	defer d.end(handlers, called) // deferred, since a handler may end its goroutine
	if called {
		d.call(handlers)
	}
}

// handBack returns a message to the server that was not started.
func (d *delivery) handBack() {
	if err := d.msg.Nak(); err != nil {
		d.r.log.Debug().Err(err).Msg("hand back")
	}
	d.r.forget(d)
}

// end settles what the handler came to, unless that was done without it, and makes room.
func (d *delivery) end(handlers context.Context, called bool) {
	d.mu.Lock()
	late, moved := d.over, d.moved
	d.over = true
	d.mu.Unlock()
	switch {
	case late:
		d.r.log.Warn().Str("event_id", d.event.ID).Dur("after", time.Since(d.startedAt)).Msg("a handler that had been given up has returned")
	case called:
		fault("handled")
		d.settle(handlers, d.failure)
	}
	d.r.release(handlers, moved)
	if !late {
		d.r.running.Done()
	}
}

// abandon settles a delivery whose handler does not return. The handler's goroutine cannot be
// stopped; as many of them as the subscription's Concurrency are tolerated beside the
// running ones, beyond that they keep their slot.
func (d *delivery) abandon(handlers context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over || d.deadline.Load() == 0 {
		return
	}
	d.over = true
	d.moved = d.r.giveUp(handlers)
	d.r.log.Error().Str("event_id", d.event.ID).Str("type", d.event.Type).
		Msg("handler ignores the end of its context and was given up; its goroutine still runs")
	go func() {
		defer d.r.running.Done()
		d.settle(handlers, failuref(CodeTimeout, "handler did not return within %s and ignores its context", d.r.sub.Timeout))
	}()
}

// prepare reads the event and decides whether the handler is to run. When it is not, the
// message was dealt with.
func (d *delivery) prepare(ctx context.Context) (call bool) {
	var err error
	if d.meta, err = d.msg.Metadata(); err != nil {
		d.r.log.Error().Err(err).Msg("message without JetStream metadata")
		d.r.forget(d)
		return false
	}
	if d.event, err = ParseMessage(d.msg.Headers(), d.msg.Data()); err != nil {
		d.reject(ctx, err)
		return false
	}
	d.attempt = 1
	if d.meta.NumDelivered == 1 && d.event.Generation == 0 && !d.r.decided.has(d.event.ID) && !d.r.past.mayHold(d.event.ID, d.signs) {
		return true
	}
	// An earlier attempt may have come to something, or an operator decided.
	if !d.loadRecord(ctx) || d.decided(ctx) {
		return false
	}
	return d.meta.NumDelivered == 1 || d.begin(ctx)
}

// call runs the handler and turns whatever it does into a failure or none.
func (d *delivery) call(handlers context.Context) {
	h, ok := d.r.sub.handler(&d.event)
	if !ok {
		d.failure = failuref(CodeNoHandler, "subscription %s has no handler for event type %s of consumer %s", d.r.sub.Name, d.event.Type, d.event.Consumer)
		return
	}
	d.startedAt = time.Now()
	d.deadline.Store(d.startedAt.Add(d.r.sub.Timeout + abandonAfter).UnixNano())
	ctx, cancel := context.WithTimeout(d.event.traceContext(handlers), d.r.sub.Timeout)
	defer cancel()
	d.failure = failuref(CodePanic, "handler ended its goroutine (runtime.Goexit)") // unless it gets further
	defer func() {
		if p := recover(); p != nil {
			d.failure = failuref(CodePanic, "panic: %v\n%s", p, debug.Stack())
		}
	}()
	err := h(ctx, Delivery[[]byte]{
		Event: d.event, Data: d.event.Payload, Subscription: d.r.sub.Name,
		Attempt: d.attempt, Redelivered: d.meta.NumDelivered > 1,
	})
	f := classify(err) // here, since an error's own methods may panic too
	if f != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		f.code, f.text = CodeTimeout, fmt.Sprintf("handler ran into its timeout of %s: %s", d.r.sub.Timeout, f.text)
	}
	d.failure = f
}

// settle turns the handler's result into record, dead letter, outcome and answer.
func (d *delivery) settle(handlers context.Context, f *failure) {
	took := time.Since(d.startedAt)
	alone := d.signs == d.r.signs()
	switch {
	case f == nil && d.record == nil && alone:
		o := d.outcome()
		o.Duration = took
		d.finish(handlers, settled{source: d.event.Source, outcome: o, answer: d.msg.Ack})
		return
	case handlers.Err() != nil:
		// Cut off at shutdown: no attempt, no start, and the next one may begin at once.
		if d.record != nil && d.record.Starts > 0 {
			rec := d.base()
			rec.Starts--
			ctx, cancel := context.WithTimeout(context.WithoutCancel(handlers), 2*time.Second)
			defer cancel()
			if _, err := d.r.m.ledger.put(ctx, rec, d.revision); err != nil {
				d.r.log.Debug().Err(err).Str("event_id", d.event.ID).Msg("take back a recorded start")
			}
		}
		d.finish(handlers, settled{answer: d.msg.Nak})
		return
	case f != nil && d.record == nil && !alone:
		// Another run may have succeeded meanwhile, without a trace: no attempt either.
		delay := d.r.sub.Backoff.delay(1)
		d.finish(handlers, settled{answer: func() error { return d.msg.NakWithDelay(delay) }})
		return
	}
	for {
		stored, ok := d.put(handlers, d.next(f, took))
		if !ok {
			d.r.forget(d)
			return
		}
		if stored {
			break
		}
		// Another run of the same event was faster. If it settled this attempt too, the
		// attempt counts once.
		mine := d.attempt
		if !d.loadRecord(handlers) {
			d.r.forget(d)
			return
		}
		if f == nil && d.record != nil && d.record.Generation == d.event.Generation && d.record.Status == RecordFailed {
			d.attempt = d.record.attempt() + 1 // it failed there, but it succeeded here
			continue
		}
		if d.decided(handlers) {
			return
		}
		if d.record != nil && d.record.attempt() >= mine && f != nil {
			d.retry(handlers)
			return
		}
	}
	fault("recorded")
	switch {
	case f == nil:
		d.finish(handlers, settled{source: d.event.Source, outcome: d.outcomeOf(d.record), answer: d.msg.Ack})
	case d.record.Exhausted:
		d.dead(handlers)
	default:
		d.retry(handlers)
	}
}

// base is a copy of the record, or a new one.
func (d *delivery) base() *Record {
	now := time.Now()
	rec := &Record{
		Status:  RecordStarted,
		EventID: d.event.ID, Subscription: d.r.sub.Name, Source: d.event.Source,
		Consumer: d.event.Consumer, EventType: d.event.Type,
		AggregateType: d.event.AggregateType, AggregateID: d.event.AggregateID,
		IdempotencyKey: d.event.IdempotencyKey, TraceID: d.event.TraceID,
		RetryCount: d.event.Failures, MaxRetries: d.maxRetries(), CreatedAt: now,
	}
	if d.record != nil {
		*rec = *d.record
		rec.Attempts = append([]Attempt(nil), d.record.Attempts...)
	}
	rec.Generation = d.event.Generation
	rec.UpdatedAt = now
	return rec
}

// next is the record after this attempt.
func (d *delivery) next(f *failure, took time.Duration) *Record {
	rec := d.base()
	rec.Starts = 0
	attempt := Attempt{Number: d.attempt, Instance: d.r.m.cfg.Instance, StartedAt: d.startedAt, Duration: took}
	rec.NextRetryAt, rec.ErrorCode, rec.ErrorMessage, rec.Exhausted = time.Time{}, "", "", false
	if f == nil {
		rec.Status = RecordDispatched
		rec.add(attempt)
		return rec
	}
	rec.Status = RecordFailed
	rec.RetryCount++
	rec.ErrorCode, rec.ErrorMessage = f.code, clip(f.text, maxErrorText)
	attempt.ErrorCode, attempt.ErrorMessage = rec.ErrorCode, rec.ErrorMessage
	rec.add(attempt)
	rec.Exhausted = f.permanent || rec.exhausted()
	if !rec.Exhausted {
		delay := f.delay
		if delay < 0 {
			delay = d.r.sub.Backoff.delay(rec.RetryCount)
		}
		rec.NextRetryAt = rec.UpdatedAt.Add(delay)
	}
	return rec
}

// maxRetries that bind this event here: its own, else the subscription's.
func (d *delivery) maxRetries() int {
	n := d.event.MaxRetries
	if n == 0 {
		n = d.r.sub.MaxRetries
	}
	return max(n, 0)
}

// retry stores the failed outcome and asks for the message again when the record says.
func (d *delivery) retry(ctx context.Context) {
	at := d.record.NextRetryAt
	d.finish(ctx, settled{source: d.event.Source, outcome: d.outcomeOf(d.record), answer: func() error {
		return d.msg.NakWithDelay(max(time.Until(at), 0))
	}})
}

// dead buries the exhausted event, stores its outcome and ends the message.
func (d *delivery) dead(ctx context.Context) {
	d.bury(ctx, &d.event, d.record, settled{source: d.event.Source, outcome: d.outcomeOf(d.record)})
}

// reject buries a message that is no event of the mesh; there is no row to settle.
func (d *delivery) reject(ctx context.Context, why error) {
	d.r.log.Error().Err(why).Str("subject", d.msg.Subject()).Uint64("stream_seq", d.meta.Sequence.Stream).
		Msg("message is no event of the mesh, dead-lettered")
	// Nobody kept room in it for a dead letter's headers.
	payload := d.msg.Data()[:min(len(d.msg.Data()), int(d.r.m.nc.MaxPayload())-wireReserve)]
	e := Event{ID: fmt.Sprintf("seq-%d", d.meta.Sequence.Stream), Payload: payload}
	e.Consumer, e.Type = d.r.m.Names.parseEventSubject(d.msg.Subject())
	rec := &Record{Subscription: d.r.sub.Name, ErrorCode: CodeMalformed, ErrorMessage: why.Error(), UpdatedAt: time.Now()}
	d.bury(ctx, &e, rec, settled{})
}

// bury stores a dead letter and then ends the message. While the dead letter cannot be stored
// the message comes back, without its handler, and holds up no others.
func (d *delivery) bury(ctx context.Context, e *Event, rec *Record, s settled) {
	if err := d.r.m.bury(ctx, e, rec, d.meta.Sequence.Stream); err != nil {
		d.r.log.Warn().Err(err).Str("event_id", e.ID).Msg("dead letter not stored, trying again later")
		delay := d.r.sub.Backoff.delay(int(d.meta.NumDelivered))
		d.finish(ctx, settled{answer: func() error { return d.msg.NakWithDelay(delay) }})
		return
	}
	fault("buried")
	s.answer = func() error { return d.msg.TermWithReason(rec.ErrorCode) }
	d.finish(ctx, s)
}

func (d *delivery) outcome() Outcome {
	return Outcome{
		EventID: d.event.ID, Generation: d.event.Generation, Attempt: d.attempt,
		StartedAt: d.startedAt, StreamSeq: d.meta.Sequence.Stream, PublishedAt: d.meta.Timestamp,
	}
}

// outcomeOf is the outcome of the record's last attempt.
func (d *delivery) outcomeOf(rec *Record) Outcome {
	o := d.outcome()
	o.RetryCount = rec.RetryCount
	o.Code, o.Message, o.Exhausted = rec.ErrorCode, rec.ErrorMessage, rec.Exhausted
	if n := len(rec.Attempts); n > 0 {
		last := rec.Attempts[n-1]
		o.Attempt, o.StartedAt, o.Duration = last.Number, last.StartedAt, last.Duration
	}
	if !rec.NextRetryAt.IsZero() {
		o.RetryIn = max(time.Until(rec.NextRetryAt), 0)
	}
	return o
}

// finish hands the delivery to the outcome writer, which answers the message after the
// outcome is stored. When ctx ends before the writer has room, the event is delivered again.
func (d *delivery) finish(ctx context.Context, s settled) {
	answer := s.answer
	s.answer = func() error {
		err := answer()
		if err == nil || errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
			d.r.forget(d)
			return nil
		}
		return err
	}
	if !d.r.m.tell(ctx, s) {
		d.r.forget(d)
	}
}
