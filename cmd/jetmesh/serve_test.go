package main

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/natstest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// The relay in a process of its own, the handler in this one; killed in the middle, another one
// takes over and every event is handled.
func TestServeRelaysAndIsTakenOverAfterAKill(t *testing.T) {
	pool := pgtest.Pool(t, meshtest.Migrate)
	url := pool.Config().ConnString()
	server := natstest.Child(t)
	serve := func() *exec.Cmd {
		t.Helper()
		cmd := exec.Command(program(t), "serve", "--log-level", "error")
		cmd.Env = append(os.Environ(), "JETMESH_DATABASE_URL="+url, "JETMESH_NATS_URL="+server.URL())
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			if strings.Contains(lines.Text(), "ready") {
				return cmd
			}
		}
		t.Fatal("serve ended before it was ready")
		return nil
	}
	first := serve()
	nc, err := mesh.Connect(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	env := meshtest.WithPool(t, pool)
	env.NC = nc
	handled := make(chan string, 1000)
	env.Handle(mesh.OnRaw("orders", mesh.AnyType, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		handled <- d.ID
		return nil
	}))
	serve() // waits for the first to end
	want := map[string]bool{}
	for i := range 200 {
		want[env.Write(meshtest.Event("orders"))[0].Row.ID] = true
		if i == 100 {
			first.Process.Kill()
		}
	}
	for len(want) > 0 {
		delete(want, <-handled)
	}
	env.AwaitCount(outbox.StatusDispatched, 200)
}
