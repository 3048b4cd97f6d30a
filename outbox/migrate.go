package outbox

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

// A Migration is one version of the schema.
type Migration struct {
	Version   int
	Name      string
	Checksum  string    // SHA-256 of the up file, hexadecimal
	AppliedAt time.Time // zero: not applied
	up, down  string
}

// A SchemaError says how the schema in the database differs from the program's.
type SchemaError struct{ Reason string }

func (e *SchemaError) Error() string { return "outbox: " + e.Reason }

// minServerVersion of Postgres: gen_random_uuid and pg_current_xact_id are built in since 13.
const minServerVersion = 130000

// Migrate brings the schema to the newest version, see [Schema.Migrate].
func Migrate(ctx context.Context, conn *pgx.Conn) error { return DefaultSchema.Migrate(ctx, conn) }

// Migrate creates the schema and applies every migration it lacks, each in a transaction of
// its own. It is safe in many processes at once: an advisory lock lets one work while the
// others wait. It refuses a schema whose applied migrations differ from this program's.
func (s Schema) Migrate(ctx context.Context, conn *pgx.Conn) error {
	return s.locked(ctx, conn, func(all []Migration) error {
		for _, m := range all {
			if !m.AppliedAt.IsZero() {
				continue
			}
			if err := s.apply(ctx, conn, m); err != nil {
				return err
			}
		}
		return nil
	})
}

// MigrateDown takes back the migrations above version, newest first; 0 takes back all,
// and the events with them. It refuses while the outbox holds unsettled events, unless
// force is set.
func (s Schema) MigrateDown(ctx context.Context, conn *pgx.Conn, version int, force bool) error {
	return s.locked(ctx, conn, func(all []Migration) error {
		if !force && version < 1 && len(all) > 0 && !all[0].AppliedAt.IsZero() {
			var unsettled bool
			if err := conn.QueryRow(ctx, s.sql(`select exists (select from {{schema}}.outbox where status in ('pending', 'dispatching', 'failed'))`)).Scan(&unsettled); err != nil {
				return fmt.Errorf("outbox: look for unsettled events: %w", err)
			}
			if unsettled {
				return errors.New("outbox: the outbox holds unsettled events, which this would delete; settle them, or force it")
			}
		}
		for i := len(all) - 1; i >= 0; i-- {
			if m := all[i]; m.Version > version && !m.AppliedAt.IsZero() {
				if err := s.takeBack(ctx, conn, m); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// MigrationStatus lists all migrations and when they were applied. It writes nothing.
func (s Schema) MigrationStatus(ctx context.Context, conn *pgx.Conn) ([]Migration, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	return s.status(ctx, conn)
}

// ValidateMigrations returns an error unless the schema is exactly at this program's newest version.
func (s Schema) ValidateMigrations(ctx context.Context, conn *pgx.Conn) error {
	all, err := s.MigrationStatus(ctx, conn)
	if err != nil {
		return err
	}
	for _, m := range all {
		if m.AppliedAt.IsZero() {
			return &SchemaError{fmt.Sprintf("migration %d (%s) is not applied to schema %s: run `jetmesh migrate up`", m.Version, m.Name, string(s))}
		}
	}
	return nil
}

// MigrationSQL is the SQL of all migrations above version, for those who run it with a
// tool of their own. It records itself like Migrate does.
func (s Schema) MigrationSQL(version int) (string, error) {
	if err := s.check(); err != nil {
		return "", err
	}
	all, err := migrations()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(s.sql(createVersions))
	for _, m := range all {
		if m.Version > version {
			fmt.Fprintf(&b, "\n-- %04d %s\n%s", m.Version, m.Name, s.sql(m.up))
			fmt.Fprintf(&b, s.sql("\ninsert into {{schema}}.schema_version (version, name, checksum) values (%d, '%s', '%s');\n"), m.Version, m.Name, m.Checksum)
		}
	}
	return b.String(), nil
}

const createVersions = `create schema if not exists {{schema}};
create table if not exists {{schema}}.schema_version (
    version    integer primary key,
    name       text not null,
    checksum   text not null,
    applied_at timestamptz not null default now()
);
`

// locked runs do while no other process migrates this schema.
func (s Schema) locked(ctx context.Context, conn *pgx.Conn, do func([]Migration) error) (err error) {
	if err := s.check(); err != nil {
		return err
	}
	var server int
	if err := conn.QueryRow(ctx, `select current_setting('server_version_num')::int`).Scan(&server); err != nil {
		return fmt.Errorf("outbox: ask for the server's version: %w", err)
	}
	if server < minServerVersion {
		return fmt.Errorf("outbox: Postgres %d is too old, 13 or newer is needed", server/10000)
	}
	const lock, unlock = `select pg_advisory_lock(hashtextextended('jetmesh.migrate.' || $1, 0))`, `select pg_advisory_unlock(hashtextextended('jetmesh.migrate.' || $1, 0))`
	if _, err := conn.Exec(ctx, lock, string(s)); err != nil {
		return fmt.Errorf("outbox: wait for other migrations: %w", err)
	}
	defer func() {
		_, unlockErr := conn.Exec(context.WithoutCancel(ctx), unlock, string(s))
		err = errors.Join(err, unlockErr)
	}()
	if _, err := conn.Exec(ctx, s.sql(createVersions)); err != nil {
		return fmt.Errorf("outbox: create schema %s: %w", string(s), err)
	}
	all, err := s.status(ctx, conn)
	if err != nil {
		return err
	}
	return do(all)
}

func (s Schema) apply(ctx context.Context, conn *pgx.Conn, m Migration) error {
	return s.step(ctx, conn, m, m.up, `insert into {{schema}}.schema_version (version, name, checksum) values ($1, $2, $3)`, m.Version, m.Name, m.Checksum)
}

func (s Schema) takeBack(ctx context.Context, conn *pgx.Conn, m Migration) error {
	return s.step(ctx, conn, m, m.down, `delete from {{schema}}.schema_version where version = $1`, m.Version)
}

// step runs one file and its bookkeeping in a transaction. It gives up rather than queue
// behind a long transaction, which would block every writer behind it.
func (s Schema) step(ctx context.Context, conn *pgx.Conn, m Migration, file, note string, args ...any) error {
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `set local lock_timeout = '10s'`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, s.sql(file)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, s.sql(note), args...)
		return err
	})
	if err != nil {
		return fmt.Errorf("outbox: migration %d (%s): %w", m.Version, m.Name, err)
	}
	return nil
}

// status joins the program's migrations with those applied, and refuses what does not
// belong together.
func (s Schema) status(ctx context.Context, conn *pgx.Conn) ([]Migration, error) {
	all, err := migrations()
	if err != nil {
		return nil, err
	}
	var exists bool
	if err := conn.QueryRow(ctx, `select to_regclass($1) is not null`, string(s)+".schema_version").Scan(&exists); err != nil {
		return nil, fmt.Errorf("outbox: look for schema %s: %w", string(s), err)
	}
	if !exists {
		return all, nil
	}
	rows, err := conn.Query(ctx, s.sql(`select version, name, checksum, applied_at from {{schema}}.schema_version order by version`))
	if err != nil {
		return nil, fmt.Errorf("outbox: read applied migrations: %w", err)
	}
	applied, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (m Migration, err error) {
		err = row.Scan(&m.Version, &m.Name, &m.Checksum, &m.AppliedAt)
		return m, err
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: read applied migrations: %w", err)
	}
	for i, m := range applied {
		switch {
		case i >= len(all):
			return nil, &SchemaError{fmt.Sprintf("schema %s is at version %d, newer than this program knows (%d): upgrade the program", string(s), m.Version, len(all))}
		case m.Version != all[i].Version || m.Checksum != all[i].Checksum:
			return nil, &SchemaError{fmt.Sprintf("migration %d (%s) of schema %s is not the one of this program: its checksum is %.12s, not %.12s", m.Version, m.Name, string(s), m.Checksum, all[i].Checksum)}
		}
		all[i].AppliedAt = m.AppliedAt
	}
	return all, nil
}

// migrations reads the embedded files, NNNN_name.up.sql and NNNN_name.down.sql.
func migrations() ([]Migration, error) {
	ups, err := fs.Glob(migrationFiles, "migrations/*.up.sql")
	if err != nil {
		return nil, fmt.Errorf("outbox: list migrations: %w", err)
	}
	var all []Migration
	for i, path := range ups {
		base := strings.TrimSuffix(strings.TrimPrefix(path, "migrations/"), ".up.sql")
		number, name, _ := strings.Cut(base, "_")
		version, err := strconv.Atoi(number)
		if err != nil || version != i+1 {
			return nil, fmt.Errorf("outbox: migration file %s is out of sequence", path)
		}
		up, err := migrationFiles.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("outbox: read migration %s: %w", path, err)
		}
		down, err := migrationFiles.ReadFile(strings.Replace(path, ".up.", ".down.", 1))
		if err != nil {
			return nil, fmt.Errorf("outbox: read migration %s: %w", path, err)
		}
		sum := sha256.Sum256(up)
		all = append(all, Migration{Version: version, Name: name, Checksum: hex.EncodeToString(sum[:]), up: string(up), down: string(down)})
	}
	return all, nil
}
