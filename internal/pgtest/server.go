package pgtest

import (
	"context"
	"os"
	"testing"

	"jetmesh/internal/postgres"
)

// Server starts a server for this test alone, to be killed or restarted; it is
// stopped and removed when the test ends. durable is [postgres.Config.Durable]: a test
// that kills the server and counts what was committed needs it.
func Server(tb testing.TB, durable bool) *postgres.Server {
	tb.Helper()
	dir, err := os.MkdirTemp("", "jetmesh-pgtest-")
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Errorf("pgtest: %v", err)
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	s, err := postgres.Start(ctx, postgres.Config{Dir: dir, Durable: durable})
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	tb.Cleanup(func() {
		if err := s.Stop(); err != nil {
			tb.Errorf("pgtest: %v", err)
		}
	})
	return s
}
