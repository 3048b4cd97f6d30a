// Command hello writes one event in a transaction, handles it and ends. It needs the
// two variables that `jetmesh dev` prints, and a relay: `jetmesh dev` or `jetmesh serve`.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5"

	"jetmesh/mesh"
	"jetmesh/outbox"
)

type greeting struct{ Name string }

func main() {
	ctx, done := context.WithCancel(context.Background())
	db := must(pgx.Connect(ctx, os.Getenv("JETMESH_DATABASE_URL")))
	m := must(mesh.New(must(mesh.Connect(os.Getenv("JETMESH_NATS_URL"))), mesh.Config{}))
	must(0, pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		_, err := outbox.Write(ctx, tx, mesh.Event{Consumer: "hello", Type: "person.met",
			AggregateType: "person", AggregateID: "42", Payload: []byte(`{"name":"world"}`)})
		return err
	}))
	m.Handle(mesh.On("hello", "person.met", func(_ context.Context, d mesh.Delivery[greeting]) error {
		fmt.Println("hello,", d.Data.Name)
		done() // Run acks this event, then returns
		return nil
	}))
	must(0, m.Run(ctx))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
