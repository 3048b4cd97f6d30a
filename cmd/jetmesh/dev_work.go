package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/examples/orders"
)

// work lets everything work until ctx ends or a part fails. Then the parts stop in the order
// in which events pass them: nothing new is placed, handlers finish, the relay settles.
func (d *dev) work(ctx context.Context) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	placing, stopPlacing := detached(ctx)
	defer stopPlacing()
	handling, stopHandling := detached(ctx)
	defer stopHandling()
	relaying, stopRelaying := detached(ctx)
	defer stopRelaying()

	failures := make(chan error, 5) // one of each part
	part := func(wg *sync.WaitGroup, ctx context.Context, run func(context.Context) error) {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				failures <- err
				end()
			}
		})
	}
	var servers, handlers, relay, placers sync.WaitGroup
	part(&servers, ctx, d.watchPostgres)
	// The handlers first: a relay that finds their durable leaves no event behind.
	part(&handlers, handling, d.handlers.Run)
	err := d.awaitBound(ctx)
	if err == nil {
		part(&relay, relaying, d.relay.Run)
		err = d.awaitRelay(ctx)
	}
	ready := err == nil
	if ready {
		d.printReady(d.screen)
		part(&placers, placing, d.place)
		part(&placers, placing, d.showFigures)
		<-ctx.Done()
		d.screen.endLine()
		d.log.Info().Msg("draining")
	} else if ctx.Err() != nil {
		err = nil // ended while it waited
	}

	end()
	stopPlacing()
	placers.Wait()
	stopHandling()
	handlers.Wait()
	stopRelaying()
	relay.Wait()
	servers.Wait()
	if ready {
		d.printFigures(context.WithoutCancel(ctx))
	}
	close(failures)
	for failure := range failures {
		err = errors.Join(err, failure)
	}
	return err
}

// detached is a context that ends by its own cancel only.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithCancel(context.WithoutCancel(ctx))
}

// watchPostgres reports a private Postgres that ends by itself. One that is the user's may
// go away and come back.
func (d *dev) watchPostgres(ctx context.Context) error {
	if d.postgres == nil {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-d.postgres.Done():
		return d.postgres.Err()
	}
}

// awaitBound waits until the handlers have their durable.
func (d *dev) awaitBound(ctx context.Context) error {
	names := d.handlers.Names
	return await(ctx, func() (bool, error) {
		_, err := d.handlers.JetStream().Consumer(ctx, names.EventsStream(), names.OwnerDurable(orders.Consumer))
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			return false, nil
		}
		return err == nil, err
	})
}

// awaitRelay waits until the relay works: in a database of the user's, another may be at work.
func (d *dev) awaitRelay(ctx context.Context) error {
	return await(ctx, func() (bool, error) { return d.relay.Stats().Active, nil })
}

func await(ctx context.Context, holds func() (bool, error)) error {
	for {
		if ok, err := holds(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// place keeps the rate with as many customers as it needs, each one order at a time.
func (d *dev) place(ctx context.Context) error {
	if d.rate == 0 {
		return nil
	}
	n := min(1+int(d.rate/50), 16) // an order takes some milliseconds
	interval := time.Duration(float64(n) / d.rate * float64(time.Second))
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() { d.placeEvery(ctx, interval) })
	}
	wg.Wait()
	return nil
}

// placeEvery waits out a database that is away.
func (d *dev) placeEvery(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		// What has begun is not cut off by the end: it takes milliseconds, or its time-out.
		placing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		err := d.orders.Place(placing, randomOrder())
		cancel()
		if err == nil {
			continue
		}
		d.log.Warn().Err(err).Msg("an order was not placed")
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}

var (
	customers = []string{"Ada", "Grace", "Barbara", "Edsger", "Leslie", "Tony"}
	products  = []struct {
		name  string
		cents int64
	}{{"tea", 490}, {"coffee", 890}, {"cup", 1250}, {"kettle", 5900}}
)

func randomOrder() orders.Order {
	product, quantity := products[rand.IntN(len(products))], 1+rand.IntN(4)
	return orders.Order{
		ID:       fmt.Sprintf("O-%s", uuid.NewString()),
		Customer: customers[rand.IntN(len(customers))],
		Product:  product.name, Quantity: quantity, Cents: product.cents * int64(quantity),
	}
}
