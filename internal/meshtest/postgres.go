package meshtest

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"jetmesh/internal/pgtest"
	"jetmesh/internal/postgres"
)

// Postgres is a server of its own with a migrated database, for tests that restart it.
type Postgres struct {
	*postgres.Server
	Pool *pgxpool.Pool
}

// NewPostgres starts one; it keeps commits over a crash.
func NewPostgres(tb testing.TB) *Postgres {
	tb.Helper()
	s := pgtest.Server(tb, true)
	url := s.URL("postgres")
	if err := Migrate(tb.Context(), url); err != nil {
		tb.Fatal(err)
	}
	pool, err := pgxpool.New(tb.Context(), url+"&pool_max_conns=16")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	return &Postgres{s, pool}
}

// StopAndStart restarts the server in good order.
func (p *Postgres) StopAndStart(tb testing.TB) {
	tb.Helper()
	if err := p.Stop(); err != nil {
		tb.Fatal(err)
	}
	p.start(tb)
}

// KillAndStart kills the server and lets it recover.
func (p *Postgres) KillAndStart(tb testing.TB) {
	tb.Helper()
	if err := p.Kill(); err != nil {
		tb.Fatal(err)
	}
	p.start(tb)
}

func (p *Postgres) start(tb testing.TB) {
	tb.Helper()
	if err := p.Restart(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}
