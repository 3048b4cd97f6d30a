package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// A waker knows when it is worth looking for new rows, and holds the lock that makes its relay
// the one that works.
//
// While few rows arrive, the relay sleeps: meta.relay_asleep tells writers to notify, and every
// commit wakes it at once. While many arrive it polls, since notifying commits queue behind one
// lock (measured with 64 writers: a quarter of their rate is left). Falling asleep it announces
// that first and looks once more; a commit that raced with the announcement is found by polls
// that follow at doubling pauses, or at the latest by the poll interval.
type waker struct {
	relay    *Relay
	conn     *pgx.Conn
	notified chan struct{}
	asleep   bool
	nextPoll time.Duration

	window time.Time // the current quarter of a second, in which rows counts arrivals
	rows   int
	busy   bool
}

const (
	busyWindow = 250 * time.Millisecond
	busyAbove  = 250 // rows in a window: a thousand a second
	idleBelow  = 100
	busyPause  = 2 * time.Millisecond
	pingEvery  = 10 * time.Second
)

// newWaker waits for the lock. A lock and a notification need a session of their own, so the
// connection leaves the pool.
func (r *Relay) newWaker(ctx context.Context) (*waker, error) {
	pooled, err := r.db.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect to Postgres: %w", err)
	}
	w := &waker{relay: r, conn: pooled.Hijack(), notified: make(chan struct{}, 1), nextPoll: busyPause}
	if err := w.lock(ctx); err != nil {
		w.close()
		return nil, err
	}
	// A relay whose machine vanished must not hold the lock for the hours that TCP would wait.
	const keepalives = `set tcp_keepalives_idle = 5; set tcp_keepalives_interval = 2; set tcp_keepalives_count = 3; set tcp_user_timeout = 10000`
	if _, err := w.conn.Exec(ctx, keepalives); err != nil {
		w.close()
		return nil, fmt.Errorf("set keepalives: %w", err)
	}
	if _, err := w.conn.Exec(ctx, "listen "+pgx.Identifier{r.cfg.Schema.channel()}.Sanitize()); err != nil {
		w.close()
		return nil, fmt.Errorf("listen: %w", err)
	}
	return w, nil
}

func (w *waker) lock(ctx context.Context) error {
	const tryLock = `select pg_try_advisory_lock(hashtextextended('jetmesh.relay.' || $1, 0))`
	for waiting := false; ; waiting = true {
		var got bool
		if err := w.conn.QueryRow(ctx, tryLock, string(w.relay.cfg.Schema)).Scan(&got); err != nil {
			return fmt.Errorf("take the relay's lock: %w", err)
		}
		if got {
			return nil
		}
		if !waiting {
			w.relay.log.Info().Msg("another relay works on this outbox, waiting to take over")
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(w.relay.cfg.PollInterval):
		}
	}
}

func (w *waker) close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	w.conn.Close(ctx)
}

// listen turns notifications into wake-ups, and notices a connection that died silently.
func (w *waker) listen(ctx context.Context) error {
	for {
		waiting, cancel := context.WithTimeout(ctx, pingEvery)
		_, err := w.conn.WaitForNotification(waiting)
		cancel()
		switch {
		case err == nil:
			w.signal()
		case ctx.Err() != nil:
			return nil
		case !errors.Is(err, context.DeadlineExceeded):
			return err
		default:
			pinging, cancel := context.WithTimeout(ctx, pingEvery/2)
			err := w.conn.Ping(pinging)
			cancel()
			if err != nil {
				return fmt.Errorf("ping: %w", err)
			}
		}
	}
}

func (w *waker) signal() {
	select {
	case w.notified <- struct{}{}:
	default:
	}
}

// arrived notes how many rows the last look found; when they become many, writers are told not
// to notify.
func (w *waker) arrived(ctx context.Context, n int) error {
	now := time.Now()
	if now.Sub(w.window) > busyWindow {
		if w.rows < idleBelow {
			w.busy = false
		}
		w.window, w.rows = now, 0
	}
	if w.rows += n; w.rows > busyAbove {
		w.busy = true
	}
	if w.busy && w.asleep {
		return w.announce(ctx, false)
	}
	return nil
}

// wait returns when it is worth looking again, at the latest after most.
func (w *waker) wait(ctx context.Context, most time.Duration) error {
	if !w.busy && !w.asleep {
		w.nextPoll = busyPause
		return w.announce(ctx, true) // and look once more
	}
	pause := busyPause
	if w.asleep {
		pause = w.nextPoll
		w.nextPoll = min(2*w.nextPoll, w.relay.cfg.PollInterval)
	}
	timer := time.NewTimer(min(pause, most))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-w.notified:
	}
	return nil
}

// retire tells writers that nobody listens any more.
func (w *waker) retire() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if w.asleep {
		w.announce(ctx, false)
	}
}

// announce tells writers whether to notify. It need not survive a crash, so it does not wait
// for the disk.
func (w *waker) announce(ctx context.Context, asleep bool) error {
	w.asleep = w.asleep || asleep // even if the answer never comes
	batch := &pgx.Batch{}
	batch.Queue(`select set_config('synchronous_commit', 'off', true)`)
	batch.Queue(w.relay.cfg.Schema.sql(`update {{schema}}.meta set relay_asleep = $1`), asleep)
	if err := w.relay.db.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	w.asleep = asleep
	return nil
}
