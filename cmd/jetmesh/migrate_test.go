package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"jetmesh/internal/pgtest"
)

// command runs a command line in this process.
func command(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestMigrateCommands(t *testing.T) {
	url := pgtest.URL(t, nil)
	db := func(args ...string) (int, string, string) {
		t.Helper()
		return command(t, append([]string{"migrate"}, append(args, "--database-url", url)...)...)
	}
	expect := func(wantCode int, wantOut, wantErr string, args ...string) {
		t.Helper()
		code, out, errs := db(args...)
		if code != wantCode || !strings.Contains(out, wantOut) || !strings.Contains(errs, wantErr) {
			t.Errorf("migrate %v: code %d, stdout %q, stderr %q", args, code, out, errs)
		}
	}
	expect(exitOK, "outbox  no", "", "status")
	expect(exitFailure, "", "jetmesh migrate up", "validate")
	expect(exitOK, "outbox  2", "", "up") // the year
	expect(exitOK, "at this program's version", "", "validate")
	expect(exitUsage, "", "--to", "down")
	expect(exitOK, "outbox  no", "", "down", "--to", "0")
	expect(exitOK, "VERSION", "", "up", "--schema", "billing")
	expect(exitFailure, "", "schema must be", "up", "--schema", "Bad Name")

	_, sql, _ := command(t, "migrate", "sql", "--schema", "shop")
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
	expect(exitOK, "schema shop is at", "", "validate", "--schema", "shop")
}

func TestErrorsShowNoPasswordAndNameTheSetting(t *testing.T) {
	t.Setenv("JETMESH_DATABASE_URL", "")
	t.Setenv("DATABASE_URL", "")
	t.Setenv("JETMESH_NATS_URL", "")
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"migrate", "up"}, exitUsage, "JETMESH_DATABASE_URL"},
		{[]string{"serve"}, exitUsage, "JETMESH_DATABASE_URL"},
		{[]string{"migrate", "up", "--database-url", "postgres://u:s3cret@127.0.0.1:1/db"}, exitFailure, "connect to Postgres"},
		{[]string{"migrate", "up", "--database-url", "postgres://u:s3cret@[bad"}, exitUsage, "postgres://user:password@host"},
		{[]string{"migrate", "up", "--database-url", "postgres://u:s3cret@h:99999999/db"}, exitUsage, ""},
		{[]string{"serve", "--log-level", "loud"}, exitUsage, "--log-level"},
		{[]string{"serve", "--nonsense"}, exitUsage, "nonsense"},
		{[]string{"nonsense"}, exitUsage, "nonsense"},
		{[]string{"migrate", "up", "extra"}, exitUsage, "extra"},
	} {
		code, _, errs := command(t, c.args...)
		if code != c.code || !strings.Contains(errs, c.want) || strings.Contains(errs, "s3cret") {
			t.Errorf("%v: code %d, stderr %q", c.args, code, errs)
		}
	}
}
