package pgtest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

var (
	shared  home
	running atomic.Bool // Main or Run is at work and will clean up
)

// source is a database that others are copied from.
type source struct {
	name string
	err  error
}

// URL creates a database for this test and returns its address; it is dropped when
// the test ends, together with whatever is still connected to it. Parallel tests may
// call it.
//
// The database is a copy of one that template filled, given its address, once per
// process; nil stands for an empty database. Templates are told apart by their code:
// a function literal counts once for the place where it is written, whatever it
// captures.
func URL(tb testing.TB, template func(ctx context.Context, url string) error) string {
	tb.Helper()
	if !running.Load() {
		tb.Fatal("pgtest: the package needs: func TestMain(m *testing.M) { pgtest.Main(m) }")
	}
	url, drop, err := shared.clone(template)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	tb.Cleanup(func() {
		if err := drop(); err != nil {
			tb.Errorf("pgtest: %v", err)
		}
	})
	return url
}

// poolSize is more than the driver's default on a small machine, with which a test
// could run out of connections on one machine only.
const poolSize = 16

// Pool is URL with a pool of at most 16 connections to the database, closed when the
// test ends.
func Pool(tb testing.TB, template func(ctx context.Context, url string) error) *pgxpool.Pool {
	tb.Helper()
	cfg, err := pgxpool.ParseConfig(URL(tb, template))
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	cfg.MaxConns = poolSize
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	tb.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			pool.Close()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(10 * time.Second):
			tb.Errorf("pgtest: the test did not release %d connections of its pool", pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// clone copies the template's database, one at a time: the server copies files.
func (h *home) clone(template func(context.Context, string) error) (url string, drop func() error, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.open(); err != nil {
		return "", nil, err
	}
	from := "template0"
	if template != nil {
		s := h.source(template)
		if s.err != nil {
			return "", nil, fmt.Errorf("template: %w", s.err)
		}
		from = s.name
	}
	name, err := h.admin.create(from)
	if err != nil {
		return "", nil, err
	}
	return h.admin.url(name), func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.admin.drop(name)
	}, nil
}

// source returns the database that a template filled, and lets it do so the first time.
func (h *home) source(template func(context.Context, string) error) *source {
	key := reflect.ValueOf(template).Pointer()
	if s, ok := h.sources[key]; ok {
		return s
	}
	s := new(source)
	if h.sources == nil {
		h.sources = make(map[uintptr]*source)
	}
	h.sources[key] = s
	if s.name, s.err = h.admin.create("template0"); s.err != nil {
		return s
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	s.err = errors.New("it did not return") // as when it ends its test
	if s.err = template(ctx, h.admin.url(s.name)); s.err == nil {
		s.err = h.admin.seal(s.name)
	}
	return s
}
