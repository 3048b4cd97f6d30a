package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"jetmesh/mesh"
)

// insert measures transactions of one event each.
func (b *bench) insert(ctx context.Context, _ *phase) error {
	conns := make([]*pgxpool.Conn, insertConnections)
	for i := range conns {
		conn, err := b.pool.Acquire(ctx)
		if err != nil {
			return fmt.Errorf("connect to Postgres: %w", err)
		}
		defer conn.Release()
		conns[i] = conn
		if err := b.write(ctx, conn, b.event("warm", i)); err != nil { // prepares the statement
			return err
		}
	}
	if err := b.settleDisk(ctx); err != nil {
		return err
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, len(conns))
	began := time.Now()
	for i, conn := range conns {
		wg.Go(func() {
			for errs[i] == nil {
				n := int(next.Add(1) - 1)
				if n >= b.Events {
					return
				}
				errs[i] = b.write(ctx, conn, b.event("insert", n))
			}
			next.Store(int64(b.Events)) // the others need not go on
		})
	}
	wg.Wait()
	took := time.Since(began)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	b.result.Insert = perSecond(b.Events, took)
	b.say("insert_per_s %.0f", b.result.Insert)
	return nil
}

type beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// write commits an event in a transaction of its own.
func (b *bench) write(ctx context.Context, db beginner, e mesh.Event) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		_, err := b.Schema.Write(ctx, tx, e)
		return err
	})
}

// fill commits a backlog.
func (b *bench) fill(ctx context.Context, phase string) error {
	const most, mostBytes = 500, 8 << 20
	batch := max(1, min(most, mostBytes/b.Payload))
	for from := 0; from < b.Events; from += batch {
		var events []mesh.Event
		for i := from; i < min(from+batch, b.Events); i++ {
			events = append(events, b.event(phase, i))
		}
		err := pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
			_, err := b.Schema.WriteMany(ctx, tx, events)
			return err
		})
		if err != nil {
			return err
		}
	}
	b.say("a backlog of %d events is committed", b.Events)
	return b.settleDisk(ctx)
}
