package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// beginner is a pool or a connection.
type beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// InTx runs fn in a transaction: it commits if fn returns nil and rolls back otherwise.
// After the commit it wakes the relay, if that sleeps; the notification stays out of the
// transaction, where notifying commits would queue behind one another. An error of that
// wake-up is not reported: the events are committed, and the relay looks by itself
// within its poll interval.
func InTx(ctx context.Context, db beginner, fn func(tx pgx.Tx) error) error {
	return DefaultSchema.InTx(ctx, db, fn)
}

// InTx is [InTx] for this schema.
func (s Schema) InTx(ctx context.Context, db beginner, fn func(tx pgx.Tx) error) error {
	if err := s.check(); err != nil {
		return err
	}
	var wrote, began bool
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		began = true
		return fn(&ownedTx{Tx: tx, wrote: &wrote})
	})
	if err != nil {
		if !began {
			return fmt.Errorf("outbox: begin transaction: %w", err)
		}
		return err
	}
	if wrote {
		db.Exec(ctx, s.sql(`select pg_notify($1, '') from {{schema}}.meta where relay_asleep`), s.channel())
	}
	return nil
}

// ownedTx is a transaction that [InTx] opened.
type ownedTx struct {
	pgx.Tx
	wrote *bool
}

// Begin opens a savepoint, in which a write is as quiet as outside.
func (tx *ownedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	nested, err := tx.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &ownedTx{Tx: nested, wrote: tx.wrote}, nil
}
