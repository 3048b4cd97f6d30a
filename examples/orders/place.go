package orders

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"jetmesh/mesh"
)

// Consumer is whom the events are for; PlacedType is their type. Both stand in stored
// events: renaming one strands those that are under way.
const (
	Consumer   = "order-booking"
	PlacedType = "order.placed"
)

// An Order as it is stored, and as it stands in the event.
type Order struct {
	ID       string `json:"id"` // letters, digits and . _ @ / -
	Customer string `json:"customer"`
	Product  string `json:"product"`
	Quantity int    `json:"quantity"` // at least 1
	Cents    int64  `json:"cents"`    // the total
}

// ErrInvalid: the order can never be placed as it is.
var ErrInvalid = errors.New("orders: invalid order")

// ErrDiffers: another order was placed under the same id.
var ErrDiffers = errors.New("another order has this id")

// check reports everything that is wrong with the order, as [ErrInvalid], and returns the key of
// placing it.
func (o *Order) check() (mesh.ScopedKey, error) {
	var errs []error
	key, err := mesh.NewScopedKey(Consumer, "order", "place", o.ID)
	if err != nil {
		errs = append(errs, err)
	}
	if o.Customer == "" {
		errs = append(errs, errors.New("no customer"))
	}
	if o.Product == "" {
		errs = append(errs, errors.New("no product"))
	}
	if o.Quantity < 1 {
		errs = append(errs, fmt.Errorf("quantity %d is less than 1", o.Quantity))
	}
	if o.Cents < 0 {
		errs = append(errs, fmt.Errorf("total %d is negative", o.Cents))
	}
	if err := errors.Join(errs...); err != nil {
		return mesh.ScopedKey{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return key, nil
}

// Place stores an order and its event in one transaction: both, or neither. Placing the same
// order again, as a client does that got no answer, changes nothing and returns nil.
// Errors are [ErrInvalid], [ErrDiffers], or Postgres's.
func (s *Service) Place(ctx context.Context, o Order) error {
	key, err := o.check()
	if err != nil {
		return err
	}
	payload, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("orders: encode order %s: %w", o.ID, err)
	}
	var placed bool
	err = s.schema.InTx(ctx, s.db, func(tx pgx.Tx) error {
		if placed, err = insert(ctx, tx, o); err != nil || !placed {
			return err // an order that is there already came with its event
		}
		_, err := s.schema.Write(ctx, tx, mesh.Event{
			Consumer: Consumer, Type: PlacedType,
			AggregateType: "order", AggregateID: o.ID,
			IdempotencyKey: key.String(), Payload: payload,
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("orders: place order %s: %w", o.ID, err)
	}
	if placed {
		s.placed.Add(1)
	}
	return nil
}

// insert reports whether the order is new.
func insert(ctx context.Context, tx pgx.Tx, o Order) (bool, error) {
	tag, err := tx.Exec(ctx, `
		insert into orders.orders (id, customer, product, quantity, cents) values ($1, $2, $3, $4, $5)
		on conflict (id) do nothing`, o.ID, o.Customer, o.Product, o.Quantity, o.Cents)
	if err != nil || tag.RowsAffected() == 1 {
		return err == nil, err
	}
	var same bool
	err = tx.QueryRow(ctx, `
		select (customer, product, quantity, cents) = ($2::text, $3::text, $4::int, $5::bigint)
		from orders.orders where id = $1`, o.ID, o.Customer, o.Product, o.Quantity, o.Cents).Scan(&same)
	if err == nil && !same {
		err = ErrDiffers
	}
	return false, err
}
