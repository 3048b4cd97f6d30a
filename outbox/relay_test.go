package outbox_test

import (
	"context"
	"testing"

	"jetmesh/internal/meshtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

func TestWrittenEventReachesItsHandlerAndIsDispatched(t *testing.T) {
	env := meshtest.New(t)
	got := make(chan mesh.Delivery[[]byte], 1)
	env.Relay(outbox.RelayConfig{})
	env.Handle(mesh.OnRaw("orders", "order.created", func(_ context.Context, d mesh.Delivery[[]byte]) error {
		got <- d
		return nil
	}))
	w := env.Write(meshtest.Event("orders"))[0]
	d := <-got
	if d.ID != w.Row.ID || string(d.Data) != `{"total":12}` || d.TraceID != w.Row.TraceID || d.Attempt != 1 {
		t.Errorf("delivered %+v, wrote %+v", d, w.Row)
	}
	row := env.AwaitStatus(w.Row.ID, outbox.StatusDispatched)
	if row.StreamSeq == 0 || row.PublishedAt == nil || row.SettledAt == nil || row.LockedBy == "" || row.RetryCount != 0 {
		t.Errorf("row %+v", row)
	}
}
