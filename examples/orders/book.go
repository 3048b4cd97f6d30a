package orders

import (
	"context"
	"fmt"

	"jetmesh/mesh"
)

// Subscription books the orders that were placed.
func (s *Service) Subscription() mesh.Subscription {
	return mesh.On(Consumer, PlacedType, s.book)
}

// book is called at least once for each order. The primary key makes it exactly one
// booking: the second call finds it there and changes nothing.
func (s *Service) book(ctx context.Context, d mesh.Delivery[Order]) error {
	if _, err := d.Data.check(); err != nil {
		return mesh.Permanent(err) // it will be no better next time
	}
	tag, err := s.db.Exec(ctx, `
		insert into orders.bookings (order_id, event_id, customer, cents) values ($1, $2, $3, $4)
		on conflict do nothing`, d.Data.ID, d.ID, d.Data.Customer, d.Data.Cents)
	if err != nil {
		return fmt.Errorf("orders: book order %s: %w", d.Data.ID, err)
	}
	s.booked.Add(tag.RowsAffected())
	return nil
}
