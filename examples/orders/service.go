package orders

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"jetmesh/outbox"
)

// A Service takes orders and books them. Its methods are safe for concurrent use.
type Service struct {
	db     *pgxpool.Pool
	schema outbox.Schema

	placed, booked atomic.Int64
}

// New makes a service on a database that [Prepare] has seen and whose outbox is migrated.
// An empty schema means [outbox.DefaultSchema].
func New(db *pgxpool.Pool, schema outbox.Schema) *Service {
	return &Service{db: db, schema: cmp.Or(schema, outbox.DefaultSchema)}
}

// Prepare creates the service's tables if they are missing. Any number of processes may call
// it at once.
func Prepare(ctx context.Context, db *pgxpool.Pool) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// "if not exists" alone does not keep two processes from creating the same.
		if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('orders.prepare', 0))`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, tables)
		return err
	})
	if err != nil {
		return fmt.Errorf("orders: create tables: %w", err)
	}
	return nil
}

// No foreign key leads from a booking to its order: in a larger system, booking is
// another service's, with a database of its own.
const tables = `
create schema if not exists orders;

create table if not exists orders.orders (
    id        text primary key,
    customer  text not null,
    product   text not null,
    quantity  integer not null check (quantity > 0),
    cents     bigint not null check (cents >= 0),
    placed_at timestamptz not null default now()
);

create table if not exists orders.bookings (
    order_id  text primary key,
    event_id  uuid not null,
    customer  text not null,
    cents     bigint not null,
    booked_at timestamptz not null default clock_timestamp()
);

create index if not exists bookings_booked_at on orders.bookings (booked_at);`

// Stats counts since [New].
type Stats struct {
	Placed int64 // orders committed
	Booked int64 // bookings made by this process
}

// Stats may be called at any time.
func (s *Service) Stats() Stats {
	return Stats{Placed: s.placed.Load(), Booked: s.booked.Load()}
}

// Latency is the median time from the beginning of an order's transaction to its booking,
// over the bookings of the last window; ok is false when there were none.
func (s *Service) Latency(ctx context.Context, window time.Duration) (median time.Duration, ok bool, err error) {
	var seconds float64
	err = s.db.QueryRow(ctx, `
		select percentile_cont(0.5) within group (order by extract(epoch from b.booked_at - o.placed_at))
		from orders.bookings b join orders.orders o on o.id = b.order_id
		where b.booked_at > clock_timestamp() - make_interval(secs => $1)
		having count(*) > 0`, window.Seconds()).Scan(&seconds)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("orders: read latency: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), true, nil
}
