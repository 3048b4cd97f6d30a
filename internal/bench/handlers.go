package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"jetmesh/mesh"
)

// startHandlers runs fn for every event, until the phase ends. It returns when the durable
// exists and waits for messages.
func (p *phase) startHandlers(ctx context.Context, fn mesh.Handler) error {
	stop, err := p.runHandlers(ctx, fn)
	if err == nil {
		p.stops = append(p.stops, stop)
	}
	return err
}

// makeDurable leaves the handlers' durable behind, without handlers.
func (p *phase) makeDurable(ctx context.Context) error {
	stop, err := p.runHandlers(ctx, func(context.Context, mesh.Delivery[[]byte]) error {
		return errors.New("there is no event yet")
	})
	if err != nil {
		return err
	}
	return stop()
}

func (p *phase) runHandlers(ctx context.Context, fn mesh.Handler) (stop func() error, err error) {
	nc, err := mesh.Connect(p.nats.URL())
	if err != nil {
		return nil, err
	}
	m, err := mesh.New(nc, mesh.Config{Prefix: p.Prefix, Logger: p.Logger})
	if err != nil {
		nc.Close()
		return nil, err
	}
	sub := mesh.OnRaw(consumer, mesh.AnyType, fn)
	sub.Concurrency = handlerConcurrency
	m.Handle(sub)

	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() {
		err := m.Run(running)
		if err != nil {
			p.fail(fmt.Errorf("the handlers ended: %w", err))
		}
		ended <- err
	}()
	stop = func() error {
		cancel()
		err := <-ended
		nc.Close()
		return err
	}
	err = await(ctx, "the handlers to begin", 5*time.Millisecond, func() (int, error) {
		info, err := p.ownerInfo(ctx)
		if err != nil || info != nil && info.NumWaiting > 0 {
			return 0, err
		}
		return 1, nil
	})
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}
