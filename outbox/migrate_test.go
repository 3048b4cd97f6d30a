package outbox_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/pgtest"
	"jetmesh/outbox"
)

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// shape describes every column, index and setting of the schema.
func shape(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	var s string
	err := conn.QueryRow(t.Context(), `select coalesce(string_agg(line, E'\n' order by line), '') from (
		select format('%s.%s %s %s %s', table_name, column_name, data_type, is_nullable, column_default) as line from information_schema.columns where table_schema = 'mesh'
		union all select indexdef from pg_indexes where schemaname = 'mesh'
		union all select format('%s %s', relname, reloptions) from pg_class where relnamespace = to_regnamespace('mesh') and relkind = 'r'
	) lines`).Scan(&s)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestMigrationsStartedAtOnceApplyOnce(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, nil)
	var wg sync.WaitGroup
	for range 8 {
		conn := connect(t, url)
		wg.Go(func() {
			if err := outbox.Migrate(t.Context(), conn); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := outbox.DefaultSchema.ValidateMigrations(t.Context(), connect(t, url)); err != nil {
		t.Error(err)
	}
}

func TestMigrateUpDownUpAndBySQL(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.URL(t, nil))
	schema := outbox.DefaultSchema
	if err := schema.ValidateMigrations(t.Context(), conn); err == nil || !strings.Contains(err.Error(), "not applied") {
		t.Errorf("validate an empty database: %v", err)
	}
	up := func() {
		t.Helper()
		if err := schema.Migrate(t.Context(), conn); err != nil {
			t.Fatal(err)
		}
	}
	up()
	want := shape(t, conn)
	if !strings.Contains(want, "fillfactor=40") {
		t.Errorf("shape:\n%s", want)
	}
	up() // changes nothing
	if err := schema.MigrateDown(t.Context(), conn, 0, false); err != nil {
		t.Fatal(err)
	}
	if left := shape(t, conn); strings.Contains(left, "outbox") {
		t.Errorf("left after down:\n%s", left)
	}
	up()
	if again := shape(t, conn); again != want {
		t.Errorf("up, down, up:\n%s\nwant:\n%s", again, want)
	}

	bySQL := connect(t, pgtest.URL(t, nil))
	sql, err := schema.MigrationSQL(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bySQL.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
	if err := schema.ValidateMigrations(t.Context(), bySQL); err != nil {
		t.Error(err)
	}
	if got := shape(t, bySQL); got != want {
		t.Errorf("by SQL:\n%s\nwant:\n%s", got, want)
	}
}

func TestDownRefusesToDeleteUnsettledEvents(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, meshtest.Migrate)
	conn := connect(t, url)
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := outbox.Write(t.Context(), tx, meshtest.Event("orders")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := outbox.DefaultSchema.MigrateDown(t.Context(), conn, 0, false); err == nil || !strings.Contains(err.Error(), "unsettled") {
		t.Errorf("error %v", err)
	}
	if err := outbox.DefaultSchema.MigrateDown(t.Context(), conn, 0, true); err != nil {
		t.Error(err)
	}
}

func TestSchemaOfAnotherProgramIsRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ change, want string }{
		"changed migration": {`update mesh.schema_version set checksum = 'x'`, "checksum"},
		"newer schema":      {`insert into mesh.schema_version (version, name, checksum) values (999, 'later', 'x')`, "newer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := connect(t, pgtest.URL(t, meshtest.Migrate))
			if _, err := conn.Exec(t.Context(), c.change); err != nil {
				t.Fatal(err)
			}
			for _, err := range []error{
				outbox.DefaultSchema.ValidateMigrations(t.Context(), conn),
				outbox.Migrate(t.Context(), conn),
				outbox.DefaultSchema.MigrateDown(t.Context(), conn, 0, true),
			} {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("error %v", err)
				}
			}
		})
	}
}
