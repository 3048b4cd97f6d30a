package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/pgtest"
)

// A benchChild is `jetmesh bench` as a process of its own, with a folder of its own for
// temporary files.
type benchChild struct {
	cmd            *exec.Cmd
	folder         string
	stdout, stderr output
}

func newBenchChild(t *testing.T, args ...string) *benchChild {
	t.Helper()
	folder, err := os.MkdirTemp("", "jetmesh-bench-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o711); err != nil { // for the user of Postgres
		t.Fatal(err)
	}
	c := &benchChild{cmd: exec.Command(program(t), append([]string{"bench"}, args...)...), folder: folder}
	c.cmd.Env = append(cleanEnv(), "TMPDIR="+folder)
	c.cmd.Stdout, c.cmd.Stderr = &c.stdout, &c.stderr
	t.Cleanup(func() {
		if c.cmd.Process != nil {
			_ = c.cmd.Process.Kill() // fails only if it has ended
		}
		if t.Failed() {
			t.Logf("bench said: %s", c.stderr.String())
		}
	})
	return c
}

// checkClean checks that nothing is left of a run that has ended.
func (c *benchChild) checkClean(t *testing.T) {
	t.Helper()
	if left, err := filepath.Glob(filepath.Join(c.folder, "*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
	// The folder stands in the arguments of its servers, and in the environment of its relay.
	texts, _ := filepath.Glob("/proc/[0-9]*/*") // the pattern is valid
	for _, name := range texts {
		if base := filepath.Base(name); base != "cmdline" && base != "environ" {
			continue
		}
		if text, err := os.ReadFile(name); err == nil && bytes.Contains(text, []byte(c.folder)) {
			t.Errorf("still running: %s of %q", name, bytes.ReplaceAll(text, []byte{0}, []byte(" ")))
		}
	}
}

func TestBenchReportsEveryFigure(t *testing.T) {
	c := newBenchChild(t, "-o", "json", "--events", "2000", "--rate", "100", "--seconds", "1")
	if err := c.cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, c.stderr.String())
	}
	var got map[string]any
	if err := json.Unmarshal([]byte(c.stdout.String()), &got); err != nil {
		t.Fatalf("%v: %s", err, c.stdout.String())
	}
	figures := []string{"raw_publish_per_s", "raw_consume_per_s", "insert_per_s", "relay_per_s", "end_to_end_per_s", "relay_ratio", "end_to_end_ratio",
		"latency_p50_ms", "latency_p99_ms", "max_rss_mb", "cpus", "handler_concurrency", "insert_connections"}
	for _, key := range figures {
		if v, ok := got[key].(float64); !ok || v <= 0 {
			t.Errorf("%s is %v", key, got[key])
		}
		delete(got, key)
	}
	for _, key := range []string{"go_version", "postgres_version", "nats_version"} {
		if v, ok := got[key].(string); !ok || v == "" {
			t.Errorf("%s is %v", key, got[key])
		}
		delete(got, key)
	}
	want := map[string]any{"dedupe_window": "2m0s", "events": 2000.0, "payload": 300.0, "rate": 100.0, "seconds": 1.0,
		"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "nats_sync_interval": "2m0s"}
	if !maps.Equal(got, want) {
		t.Errorf("beside the figures: %v, want %v", got, want)
	}
	c.checkClean(t)
}

func TestBenchRefusesAPostgresThatForgets(t *testing.T) {
	server := pgtest.Server(t, true)
	conn, err := pgx.Connect(t.Context(), server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	execute := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	for _, setting := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		execute("alter system set " + setting + " = off")
		execute("select pg_reload_conf()")
		meshtest.Await(t, setting+" to be off", func() bool {
			var value string
			if err := conn.QueryRow(t.Context(), "show "+setting).Scan(&value); err != nil {
				t.Fatal(err)
			}
			return value == "off"
		})
		c := newBenchChild(t, "--database-url", server.URL("postgres"))
		err := c.cmd.Run()
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != exitFailure {
			t.Errorf("%s off: ended with %v", setting, err)
		}
		last := c.stderr.String()
		last = last[strings.LastIndex(strings.TrimSpace(last), "\n")+1:]
		if !strings.Contains(last, setting+" off") || strings.Count(last, " off") != 1 || c.stdout.String() != "" {
			t.Errorf("%s off: said %q and %q", setting, last, c.stdout.String())
		}
		c.checkClean(t)
		execute("alter system reset " + setting)
	}
	var left int
	if err := conn.QueryRow(t.Context(), "select count(*) from pg_database where datname like 'jetmesh%'").Scan(&left); err != nil || left != 0 {
		t.Errorf("%d databases left behind, %v", left, err)
	}
}

func TestInterruptedBenchLeavesNothingBehind(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no interrupts between processes")
	}
	c := newBenchChild(t, "--events", "1000", "--seconds", "600")
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.cmd.Wait() }()
	meshtest.Await(t, "the last phase, in which everything runs", func() bool {
		select {
		case err := <-ended:
			t.Fatalf("%v: %s", err, c.stderr.String())
		default:
		}
		return strings.Contains(c.stderr.String(), "phase latency")
	})
	if err := c.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	err := <-ended
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != exitFailure {
		t.Errorf("ended with %v", err)
	}
	if text := c.stderr.String(); !strings.Contains(text, "jetmesh: bench: interrupt") || c.stdout.String() != "" {
		t.Errorf("said %q and %q", text, c.stdout.String())
	}
	c.checkClean(t)
}

func TestBenchNamesEveryWrongFlag(t *testing.T) {
	for args, want := range map[string][]string{
		"--events 999 --payload 1 --rate 0 --seconds 0 -o xml": {"--output", "--events", "--payload", "--rate", "--seconds"},
		"--events 1000001 --payload 1000001":                   {"--events", "--payload"},
		"--events 100000 --payload 1000000":                    {"--payload 1000000 do not fit"},
		"--nats-url nats://127.0.0.1:1":                        {"--nats-url"},
		"--events many":                                        {"--events"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(t.Context(), append([]string{"bench"}, strings.Fields(args)...), &stdout, &stderr)
		unnamed := slices.DeleteFunc(slices.Clone(want), func(flag string) bool { return strings.Contains(stderr.String(), flag) })
		if code != exitUsage || len(unnamed) > 0 || stdout.Len() > 0 {
			t.Errorf("bench %s: exit code %d, unnamed %q: %s", args, code, unnamed, stderr.String())
		}
	}
}
