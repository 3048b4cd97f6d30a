package mesh

import (
	"context"
	"errors"
	"time"
)

// What is delivered again may have come to something before: the record knows.

func (d *delivery) loadRecord(ctx context.Context) bool {
	return d.r.m.persist(ctx, "read failure record", func() (err error) {
		d.record, d.revision, err = d.r.m.ledger.get(ctx, d.r.sub.Name, d.event.ID)
		return err
	})
}

// decided acts on what the record already says, or reports false: the next attempt is due.
func (d *delivery) decided(ctx context.Context) bool {
	rec := d.record
	switch {
	case rec == nil:
		return false
	case rec.Generation > d.event.Generation:
		// Replayed, skipped or marked since: this message speaks for nobody any more.
		d.finish(ctx, settled{answer: d.msg.Ack})
	case rec.Generation < d.event.Generation:
		return false
	case rec.Status == RecordDispatched:
		d.finish(ctx, settled{source: d.event.Source, outcome: d.outcomeOf(rec), answer: d.msg.Ack})
	case rec.Exhausted:
		d.dead(ctx)
	case time.Until(rec.NextRetryAt) > 0:
		d.retry(ctx)
	default:
		d.attempt = rec.attempt() + 1
		d.retell(ctx)
		return false
	}
	return true
}

// retell stores the last attempt's outcome once more if that attempt was another process's: it may
// have been killed before it could, and the attempt would be missing in the delivery log.
func (d *delivery) retell(ctx context.Context) {
	rec := d.record
	if rec.Status != RecordFailed || len(rec.Attempts) == 0 {
		return
	}
	last := rec.Attempts[len(rec.Attempts)-1]
	if last.Instance == d.r.m.cfg.Instance || last.ErrorCode != rec.ErrorCode || last.ErrorMessage != rec.ErrorMessage {
		return // told, or what failed since was no attempt
	}
	d.r.m.tell(ctx, settled{source: d.event.Source, outcome: d.outcomeOf(rec), answer: func() error { return nil }})
}

// crashLoop is the number of starts without an outcome after which a handler is taken to kill its
// process. From crashSuspect on it may be one that only ran beside the culprit each time: of such
// events a process runs one at a time, the others come back later.
const (
	crashSuspect = 2
	crashLoop    = 5
)

// begin records that the handler of a redelivered event starts. A handler that takes its process
// with it leaves nothing but these.
func (d *delivery) begin(ctx context.Context) bool {
	for {
		rec := d.base()
		if rec.Starts >= crashLoop {
			f := failuref(CodeCrashLoop, "the handler was started %d times and never came to an end: it seems to kill its process", rec.Starts+1)
			f.permanent = true
			d.settle(ctx, f)
			return false
		}
		if rec.Starts >= crashSuspect && !d.r.suspected(d) {
			d.finish(ctx, settled{answer: func() error { return d.msg.NakWithDelay(d.r.sub.AckWait) }})
			return false
		}
		rec.Starts++
		switch stored, ok := d.put(ctx, rec); {
		case !ok:
			d.r.forget(d)
			return false
		case stored:
			return true
		}
		if !d.loadRecord(ctx) || d.decided(ctx) {
			return false
		}
	}
}

// put stores the record, waiting out faults: stored is false if somebody changed it meanwhile, ok
// is false if ctx ended.
func (d *delivery) put(ctx context.Context, rec *Record) (stored, ok bool) {
	ok = d.r.m.persist(ctx, "write failure record", func() error {
		revision, err := d.r.m.ledger.put(ctx, rec, d.revision)
		if errors.Is(err, errRecordChanged) {
			return nil
		}
		if stored = err == nil; stored {
			d.record, d.revision = rec, revision
		}
		return err
	})
	return stored, ok
}
