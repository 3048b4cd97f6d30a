package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"jetmesh/internal/postgres"
)

const urlVariable = "JETMESH_TEST_DATABASE_URL"

// Main is a whole TestMain: it runs the tests, removes what they used, and exits.
func Main(m *testing.M) { os.Exit(Run(m)) }

// Run is Main without the exit, for a TestMain with more to check, such as
// goroutines that were left behind.
func Run(m *testing.M) (code int) {
	running.Store(true)
	code = m.Run()
	running.Store(false)
	if err := shared.close(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		code = max(code, 1)
	}
	return code
}

// home is where the databases of this process live.
type home struct {
	mu      sync.Mutex
	opened  bool
	err     error // of opening; the same for every test
	server  *postgres.Server
	dir     string
	admin   *admin
	sources map[uintptr]*source
}

// timeout bounds what a test waits for the server, on a busy machine.
const timeout = 2 * time.Minute

// open starts the server or finds the one that was named. The caller holds mu.
func (h *home) open() error {
	if h.opened {
		return h.err
	}
	h.opened = true
	h.err = func() error {
		url := os.Getenv(urlVariable)
		if url == "" {
			var err error
			if h.dir, err = os.MkdirTemp("", "jetmesh-pgtest-"); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			h.server, err = postgres.Start(ctx, postgres.Config{
				Dir:      h.dir,
				Settings: map[string]string{"max_connections": "300"},
			})
			if err != nil {
				return err
			}
			url = h.server.URL("postgres")
		}
		var err error
		h.admin, err = newAdmin(url)
		return err
	}()
	return h.err
}

func (h *home) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	if h.admin != nil {
		if h.server == nil { // somebody else's: leave nothing behind
			for _, s := range h.sources {
				errs = append(errs, h.admin.drop(s.name))
			}
		}
		errs = append(errs, h.admin.close())
	}
	if h.server != nil {
		errs = append(errs, h.server.Stop())
	}
	if h.dir != "" {
		errs = append(errs, os.RemoveAll(h.dir))
	}
	return errors.Join(errs...)
}
