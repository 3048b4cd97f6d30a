// Package natstest gives tests a NATS server with JetStream: in this process, or as a
// child process that can be killed, paused and restarted.
package natstest

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"jetmesh/internal/natsd"
)

const noUsers = "jetstream { max_memory_store: 64MB, max_file_store: 4GB }"

// Start runs a server in this process, with an empty store and no users, on a free port
// of 127.0.0.1, and connects to it. Both end when the test ends.
func Start(tb testing.TB) (*natsd.Server, *nats.Conn) {
	tb.Helper()
	s := Run(tb, natsd.Config{})
	nc, err := s.Conn()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(nc.Close)
	return s, nc
}

// Run is Start with the caller's configuration and without a connection. Its zero
// fields mean: no users, a temporary store folder, a free port. In a synctest bubble,
// set DontListen: a listener's goroutine would keep its clock from moving.
func Run(tb testing.TB, cfg natsd.Config) *natsd.Server {
	tb.Helper()
	if cfg.ConfigText == nil {
		cfg.ConfigText = []byte(noUsers)
	}
	if cfg.StoreDir == "" {
		cfg.StoreDir = tb.TempDir()
	}
	if cfg.Port == 0 {
		cfg.Port = -1
	}
	s, err := natsd.Start(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Stop(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// Child runs this test binary again as a server with an empty store and no users, on a
// port that stays the same over Restart; killed when the test ends. Further arguments
// are those of natsd.RunChild. TestMain must begin with natsd.MaybeChildMain.
func Child(tb testing.TB, args ...string) *natsd.Child {
	tb.Helper()
	if os.Getenv(natsd.ChildVariable) != "" {
		tb.Fatal("natstest: TestMain does not begin with natsd.MaybeChildMain()")
	}
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	args = append([]string{"-store", tb.TempDir(), "-port", strconv.Itoa(freePort())}, args...)
	c, err := natsd.StartChild(ctx, exe, args, []string{natsd.ChildVariable + "=1"})
	if err != nil {
		tb.Fatalf("%v (does TestMain begin with natsd.MaybeChildMain()?)", err)
	}
	tb.Cleanup(c.Kill)
	return c
}

// freePort looks below the ranges from which systems choose ports for outgoing
// connections, so that the port is still free when the child is started again.
func freePort() int {
	const from, to = 20000, 32000
	for {
		port := from + rand.IntN(to-from)
		if l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))); err == nil {
			l.Close()
			return port
		}
	}
}
