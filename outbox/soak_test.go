//go:build soak

package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/natstest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// writeUntil commits an event every few milliseconds until ctx ends, every tenth transaction rolls back, and
// returns how many were committed.
func writeUntil(ctx context.Context, t *testing.T, env *meshtest.Env) (committed int) {
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return committed
		case <-tick.C:
		}
		err := outbox.InTx(context.WithoutCancel(ctx), env.Pool, func(tx pgx.Tx) error {
			e := meshtest.Event("orders")
			e.IdempotencyKey = fmt.Sprintf("soak:%d", i)
			if _, err := outbox.Write(ctx, tx, e); err != nil {
				return err
			}
			if i%10 == 0 {
				return errors.New("roll back")
			}
			return nil
		})
		if err == nil {
			committed++
		}
	}
}

func TestSoakTransactionHeldOpenElsewhereFor30Seconds(t *testing.T) {
	env := meshtest.New(t)
	var s sink
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.on("orders"))
	stranger := begin(t, env.Pool)
	if _, err := stranger.Exec(t.Context(), `create table stranger (n int)`); err != nil {
		t.Fatal(err)
	}
	slow := begin(t, env.Pool)
	held, err := outbox.Write(t.Context(), slow, meshtest.Event("orders"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	committed := writeUntil(ctx, t, env)
	env.AwaitCount(outbox.StatusDispatched, committed) // while both are still open
	if err := slow.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	env.AwaitStatus(held.Row.ID, outbox.StatusDispatched)
	if s.count() != committed+1 || len(s.twice()) > 0 {
		t.Errorf("committed %d, handled %d, twice %v", committed+1, s.count(), s.twice())
	}
}

func TestSoakNATSAwayForAMinute(t *testing.T) {
	server := natstest.Child(t)
	nc, err := mesh.Connect(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	env := meshtest.On(t, pgtest.Pool(t, meshtest.Migrate), nc)
	var s sink
	env.Relay(outbox.RelayConfig{})
	env.Handle(s.on("orders"))
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	restarted := make(chan error, 1)
	go func() {
		time.Sleep(15 * time.Second) // the scenario's own times
		server.Kill()
		time.Sleep(60 * time.Second)
		restarted <- server.Restart(context.WithoutCancel(ctx))
	}()
	committed := writeUntil(ctx, t, env)
	if err := <-restarted; err != nil {
		t.Fatal(err)
	}
	env.AwaitCount(outbox.StatusDispatched, committed)
	if s.count() != committed {
		t.Errorf("committed %d, handled %d", committed, s.count())
	}
	t.Logf("%d events, %d of them handled twice", committed, len(s.twice()))
}
