package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := Run(m)
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

var migrations atomic.Int32

func migrate(ctx context.Context, url string) error {
	migrations.Add(1)
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	// Left open on purpose: a template that is in use cannot be copied.
	_, err = conn.Exec(ctx, "create table note (text text); insert into note values ('from the template')")
	return err
}

func TestEveryTestHasItsOwnDatabase(t *testing.T) {
	t.Run("parallel", func(t *testing.T) {
		for i := range 8 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				pool := Pool(t, migrate)
				var notes []string
				mine := fmt.Sprint("test ", i)
				if _, err := pool.Exec(t.Context(), "insert into note values ($1)", mine); err != nil {
					t.Fatal(err)
				}
				rows, err := pool.Query(t.Context(), "select text from note")
				if err == nil {
					notes, err = pgx.CollectRows(rows, pgx.RowTo[string])
				}
				if err != nil {
					t.Fatal(err)
				}
				if want := "from the template," + mine; strings.Join(notes, ",") != want {
					t.Errorf("notes %q, want %q", notes, want)
				}
			})
		}
	})
	before := migrations.Load()
	URL(t, migrate)
	if before == 0 || migrations.Load() != before {
		t.Errorf("the template ran %d times and again, want once", before)
	}
}

func TestDatabaseIsDroppedWithItsConnections(t *testing.T) {
	var conn *pgx.Conn
	var name string
	t.Run("its user", func(t *testing.T) {
		var err error
		if conn, err = pgx.Connect(t.Context(), URL(t, nil)); err != nil {
			t.Fatal(err)
		}
		name = conn.Config().Database
	})
	defer conn.Close(t.Context())
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("still connected")
	}
	if got := databases(t, Pool(t, nil).Config().ConnString(), name); got != 0 {
		t.Errorf("database %s is still there", name)
	}
}

func TestPoolDoesNotDependOnTheMachine(t *testing.T) {
	pool := Pool(t, nil)
	for range poolSize {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
	}
	if n := pool.Stat().AcquiredConns(); n != poolSize {
		t.Errorf("%d connections at once, want %d", n, poolSize)
	}
}

func TestEmptyDatabase(t *testing.T) {
	var tables int
	err := Pool(t, nil).QueryRow(t.Context(), "select count(*) from pg_tables where schemaname = 'public'").Scan(&tables)
	if err != nil || tables != 0 {
		t.Errorf("%d tables (%v), want none", tables, err)
	}
}

func TestTemplateThatFails(t *testing.T) {
	URL(t, nil) // the server is there
	h := &home{opened: true, admin: shared.admin}
	broken, runs := errors.New("migration 3"), 0
	for name, template := range map[string]func(context.Context, string) error{
		"migration 3":       func(context.Context, string) error { runs++; return broken },
		"it did not return": func(context.Context, string) error { runs++; panic(broken) },
	} {
		for range 2 {
			_, _, err := func() (_ string, _ func() error, err error) {
				defer func() {
					if recover() != nil {
						err = errors.New("template: it did not return")
					}
				}()
				return h.clone(template)
			}()
			if err == nil || !strings.Contains(err.Error(), "template: "+name) {
				t.Errorf("clone() = %v, want %q", err, name)
			}
		}
	}
	if runs != 2 {
		t.Errorf("%d runs of two templates, want one each", runs)
	}
	for _, s := range h.sources {
		if err := h.admin.drop(s.name); err != nil {
			t.Error(err)
		}
	}
}

func TestServerOfItsOwn(t *testing.T) {
	s := Server(t, true)
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "create database kept"); err != nil {
		t.Fatal(err)
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("still connected after Kill")
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := databases(t, s.URL("postgres"), "kept"); got != 1 {
		t.Error("what was committed is lost")
	}
}

func TestNothingStaysOnANamedServer(t *testing.T) {
	s := Server(t, false)
	t.Setenv(urlVariable, s.URL("postgres"))
	var h home
	url, drop, err := h.clone(migrate)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(url, fmt.Sprint(s.Port())) {
		t.Error("the database is not on the server that was named")
	}
	if got := databases(t, s.URL("postgres"), "jetmesh_test_%"); got != 2 {
		t.Errorf("%d databases, want the template and its copy", got)
	}
	if err := errors.Join(drop(), h.close()); err != nil {
		t.Fatal(err)
	}
	if got := databases(t, s.URL("postgres"), "jetmesh_test_%"); got != 0 {
		t.Errorf("%d databases left", got)
	}

	t.Setenv(urlVariable, "host=localhost")
	if _, _, err := new(home).clone(nil); err == nil || !strings.Contains(err.Error(), urlVariable) {
		t.Errorf("clone() = %v, want that the variable holds no URL", err)
	}
}

func databases(t *testing.T, url, like string) (n int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), "select count(*) from pg_database where datname like $1", like).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}
