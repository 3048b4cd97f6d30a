package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"jetmesh/internal/postgres"
)

// Durability are the settings without which a commit does not wait for the disk.
type Durability struct {
	Fsync             string `json:"fsync" about:"of Postgres, as found"`
	SynchronousCommit string `json:"synchronous_commit" about:"of Postgres, as found"`
	FullPageWrites    string `json:"full_page_writes" about:"of Postgres, as found"`
}

func (d Durability) check() error {
	if slices.Contains([]string{d.Fsync, d.SynchronousCommit, d.FullPageWrites}, "off") {
		return fmt.Errorf("this Postgres does not keep what it commits (fsync %s, synchronous_commit %s, full_page_writes %s): all three must be on for figures that mean something",
			d.Fsync, d.SynchronousCommit, d.FullPageWrites)
	}
	return nil
}

// startPostgres makes a database for the run, on the given server or on a private one.
func (b *bench) startPostgres(ctx context.Context, dir string) error {
	server, whose := b.DatabaseURL, "the given server"
	if server == "" {
		private, err := postgres.Start(ctx, postgres.Config{Dir: dir, Durable: true})
		if err != nil {
			return err
		}
		b.closers = append(b.closers, private.Stop)
		b.postgresDone = private.Done()
		server, whose = private.URL("postgres"), "a private server"
	}
	name := "jetmesh_bench_" + strings.ToLower(rand.Text()[:8])
	var err error
	if b.databaseURL, err = withDatabase(server, name); err != nil {
		return err
	}
	if err := execute(ctx, server, "create database "+name); err != nil {
		return err
	}
	b.closers = append(b.closers, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		return execute(ctx, server, "drop database "+name+" with (force)")
	})

	cfg, err := pgxpool.ParseConfig(b.databaseURL)
	if err != nil {
		return errUnreadableURL
	}
	cfg.MaxConns = insertConnections + 4
	if b.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	b.closers = append(b.closers, func() error { b.pool.Close(); return nil })

	found, d := &b.result, &b.result.Durability
	const settings = `select current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes')`
	if err := b.pool.QueryRow(ctx, settings).Scan(&found.PostgresVersion, &d.Fsync, &d.SynchronousCommit, &d.FullPageWrites); err != nil {
		return fmt.Errorf("read Postgres's settings: %w", err)
	}
	found.PostgresVersion, _, _ = strings.Cut(found.PostgresVersion, " ") // the rest names the package
	b.say("Postgres %s, %s: fsync %s, synchronous_commit %s, full_page_writes %s",
		found.PostgresVersion, whose, d.Fsync, d.SynchronousCommit, d.FullPageWrites)
	return d.check()
}

// errUnreadableURL hides what the parser says: it may hold a password.
var errUnreadableURL = errors.New("the database URL cannot be parsed")

// withDatabase is a URL, or a list of keywords, for another database of the same server.
func withDatabase(server, name string) (string, error) {
	if !strings.HasPrefix(server, "postgres://") && !strings.HasPrefix(server, "postgresql://") {
		return server + " dbname=" + name, nil // the last one counts
	}
	u, err := url.Parse(server)
	if err != nil {
		return "", errUnreadableURL
	}
	u.Path = "/" + name
	query := u.Query()
	query.Del("dbname")
	query.Del("database")
	u.RawQuery = query.Encode()
	return u.String(), nil
}

// execute runs a statement on a connection of its own. Once it was sent, its end is waited for:
// of a statement that is cut off nobody knows what came of it.
func execute(ctx context.Context, server, statement string) error {
	conn, err := pgx.Connect(ctx, server)
	if parse := (*pgconn.ParseConfigError)(nil); errors.As(err, &parse) {
		return errUnreadableURL
	}
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}

// resetOutbox makes the schema anew.
func (b *bench) resetOutbox(ctx context.Context) error {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, "drop schema if exists "+pgx.Identifier{string(b.Schema)}.Sanitize()+" cascade"); err != nil {
		return fmt.Errorf("drop schema: %w", err)
	}
	return b.Schema.Migrate(ctx, conn.Conn())
}

// settleDisk leaves Postgres no work of the past to do while something is measured.
func (b *bench) settleDisk(ctx context.Context) error {
	if _, err := b.pool.Exec(ctx, "vacuum (analyze) "+b.table("outbox")); err != nil {
		return fmt.Errorf("vacuum: %w", err)
	}
	_, err := b.pool.Exec(ctx, "checkpoint")
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "42501" { // insufficient_privilege
		b.say("no checkpoint: the database's user may not take one")
		return nil
	}
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return nil
}

// table is a table of the outbox, for SQL.
func (b *bench) table(name string) string { return pgx.Identifier{string(b.Schema), name}.Sanitize() }
