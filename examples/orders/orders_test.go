package orders_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"jetmesh/examples/orders"
	"jetmesh/internal/meshtest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

func TestMain(m *testing.M) {
	code := pgtest.Run(m)
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// newService is the service with everything it needs, except what runs: relay and handlers.
func newService(t *testing.T) (*orders.Service, *meshtest.Env) {
	t.Helper()
	env := meshtest.New(t)
	if err := orders.Prepare(t.Context(), env.Pool); err != nil {
		t.Fatal(err)
	}
	return orders.New(env.Pool, ""), env
}

func order(id string) orders.Order {
	return orders.Order{ID: id, Customer: "Ada", Product: "tea", Quantity: 2, Cents: 1290}
}

func count(t *testing.T, db *pgxpool.Pool, table string) (n int) {
	t.Helper()
	if err := db.QueryRow(t.Context(), "select count(*) from "+table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func place(t *testing.T, s *orders.Service, o orders.Order) {
	t.Helper()
	if err := s.Place(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

func TestPlacedOrderIsBookedOnceHoweverOftenItIsTold(t *testing.T) {
	s, env := newService(t)
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.Subscription())
	place(t, s, order("O-1"))
	env.AwaitCount(outbox.StatusDispatched, 1)

	// The same fact in two more events: the handler is called again, and again.
	again := mesh.Event{Consumer: orders.Consumer, Type: orders.PlacedType, AggregateType: "order", AggregateID: "O-1",
		Payload: []byte(`{"id":"O-1","customer":"Ada","product":"tea","quantity":2,"cents":1290}`)}
	env.Write(again, again)
	env.AwaitCount(outbox.StatusDispatched, 3)

	var id, customer string
	var cents int64
	err := env.Pool.QueryRow(t.Context(), `select order_id, customer, cents from orders.bookings`).Scan(&id, &customer, &cents)
	if err != nil {
		t.Fatal(err)
	}
	if n := count(t, env.Pool, "orders.bookings"); n != 1 || id != "O-1" || customer != "Ada" || cents != 1290 {
		t.Errorf("%d bookings, one of them %s for %s, %d cents", n, id, customer, cents)
	}
	if got, want := s.Stats(), (orders.Stats{Placed: 1, Booked: 1}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
}

func TestOrderWhoseCommitFailsIsNotBooked(t *testing.T) {
	s, env := newService(t)
	// By the commit, order and event are both written.
	if _, err := env.Pool.Exec(t.Context(), `
		create function refuse() returns trigger language plpgsql as $$ begin raise exception 'credit exceeded'; end $$;
		create constraint trigger credit after insert on orders.orders deferrable initially deferred
		for each row when (new.customer = 'Mallory') execute function refuse()`); err != nil {
		t.Fatal(err)
	}
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.Subscription())
	refused := order("O-1")
	refused.Customer = "Mallory"
	if err := s.Place(t.Context(), refused); err == nil || !strings.Contains(err.Error(), "credit exceeded") {
		t.Fatalf("Place() = %v, want the database's refusal", err)
	}
	place(t, s, order("O-2")) // comes after it, and is booked
	env.AwaitCount(outbox.StatusDispatched, 1)
	for _, table := range []string{"orders.orders", "orders.bookings", "mesh.outbox"} {
		if n := count(t, env.Pool, table); n != 1 {
			t.Errorf("%d rows in %s, want only that of O-2", n, table)
		}
	}
	if got, want := s.Stats(), (orders.Stats{Placed: 1, Booked: 1}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
}

func TestInvalidOrderWritesNothing(t *testing.T) {
	s, env := newService(t)
	for want, spoil := range map[string]func(*orders.Order){
		"businessId":     func(o *orders.Order) { o.ID = "" },
		"no customer":    func(o *orders.Order) { o.Customer = "" },
		"no product":     func(o *orders.Order) { o.Product = "" },
		"quantity 0":     func(o *orders.Order) { o.Quantity = 0 },
		"total -1":       func(o *orders.Order) { o.Cents = -1 },
		"part busines":   func(o *orders.Order) { o.ID = "no spaces" },
		"characters lon": func(o *orders.Order) { o.ID = strings.Repeat("9", 200) },
	} {
		o := order("O-1")
		spoil(&o)
		if err := s.Place(t.Context(), o); !errors.Is(err, orders.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("Place(%+v) = %v, want ErrInvalid with %q", o, err, want)
		}
	}
	// What only the outbox finds, when the order is inserted already: too large a payload.
	o := order("O-1")
	o.Product = strings.Repeat("x", mesh.DefaultMaxPayload)
	if err := s.Place(t.Context(), o); err == nil || !strings.Contains(err.Error(), "payload") {
		t.Errorf("Place() of a huge order = %v, want the outbox's refusal", err)
	}
	for _, table := range []string{"orders.orders", "mesh.outbox"} {
		if n := count(t, env.Pool, table); n != 0 {
			t.Errorf("%d rows in %s", n, table)
		}
	}
}

func TestPlacingAgainChangesNothing(t *testing.T) {
	s, env := newService(t)
	place(t, s, order("O-1"))
	place(t, s, order("O-1"))
	other := order("O-1")
	other.Cents++
	if err := s.Place(t.Context(), other); !errors.Is(err, orders.ErrDiffers) {
		t.Errorf("Place() of another order = %v, want ErrDiffers", err)
	}
	if n := env.Count(outbox.StatusPending); n != 1 {
		t.Errorf("%d events, want 1", n)
	}
	if got := s.Stats().Placed; got != 1 {
		t.Errorf("placed %d, want 1", got)
	}
}

func TestEventThatTellsOfNoOrderIsADeadLetter(t *testing.T) {
	s, env := newService(t)
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.Subscription())
	w := env.Write(mesh.Event{Consumer: orders.Consumer, Type: orders.PlacedType, AggregateType: "order", AggregateID: "O-1",
		Payload: []byte(`{"id":"O-1"}`)})[0]
	row := env.AwaitStatus(w.Row.ID, outbox.StatusFailed)
	if row.NextRetryAt != nil || !strings.Contains(row.ErrorMessage, "no customer") {
		t.Errorf("row %+v, want it exhausted at once", row)
	}
	if n := count(t, env.Pool, "orders.bookings"); n != 0 {
		t.Errorf("%d bookings", n)
	}
}

func TestLatencyIsTheMedian(t *testing.T) {
	s, env := newService(t)
	if _, ok, err := s.Latency(t.Context(), time.Minute); ok || err != nil {
		t.Errorf("Latency() without bookings: ok is %t, error %v", ok, err)
	}
	err := pgx.BeginFunc(t.Context(), env.Pool, func(tx pgx.Tx) error {
		for i, ms := range []int{10, 20, 900, 1} { // the last one was booked long ago
			_, err := tx.Exec(t.Context(), `
				with b as (
					insert into orders.bookings (order_id, event_id, customer, cents, booked_at)
					values ($1, gen_random_uuid(), 'Ada', 1, now() - make_interval(hours => $3)) returning booked_at
				)
				insert into orders.orders (id, customer, product, quantity, cents, placed_at)
				select $1, 'Ada', 'tea', 1, 1, booked_at - make_interval(secs => $2) from b`, fmt.Sprint(i), float64(ms)/1000, i/3)
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	got, ok, err := s.Latency(t.Context(), time.Minute)
	if err != nil || !ok || got.Milliseconds() != 20 {
		t.Errorf("Latency() = %s, %t, %v, want 20ms", got, ok, err)
	}
}

func TestPrepareInManyProcessesAtOnce(t *testing.T) {
	pool := pgtest.Pool(t, nil)
	errs := make(chan error)
	for range 4 {
		go func() { errs <- orders.Prepare(context.WithoutCancel(t.Context()), pool) }()
	}
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := count(t, pool, "orders.bookings"); n != 0 {
		t.Errorf("%d bookings", n)
	}
}
