package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/natstest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// drillVariable makes the test binary a service on that NATS server whose handler fails while a
// file exists.
const (
	drillVariable = "JETMESH_TEST_DRILL_NATS_URL"
	drillDown     = "JETMESH_TEST_DRILL_DOWN"
)

func maybeDrillMain() {
	url := os.Getenv(drillVariable)
	if url == "" {
		return
	}
	go func() { // the test's end of the pipe goes with the test, however it ends
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	if err := drillMain(url, os.Getenv(drillDown)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func drillMain(url, down string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	nc, err := mesh.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	m, err := mesh.New(nc, mesh.Config{})
	if err != nil {
		return err
	}
	sub := mesh.OnRaw("orders", mesh.AnyType, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		fmt.Println("called", d.ID)
		if _, err := os.Stat(down); !errors.Is(err, fs.ErrNotExist) {
			return errors.New("the ledger is down")
		}
		return nil
	})
	sub.Backoff = mesh.Backoff{Base: time.Hour, Cap: time.Hour}
	m.Handle(sub)
	return m.Run(ctx)
}

// startProcess starts a process that ends with the test, and returns what it prints.
func startProcess(t *testing.T, cmd *exec.Cmd) *bufio.Scanner {
	t.Helper()
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		_, err = cmd.StdinPipe()
	}
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // fails only if it has ended
		_ = cmd.Wait()
	})
	return bufio.NewScanner(out)
}

// The drill with each part in a process of its own: the handler fails, its event is failed; an
// operator replays it, the handler comes back repaired, the event is dispatched and its trail kept.
func TestDrillOverSeparateProcesses(t *testing.T) {
	pool := pgtest.Pool(t, meshtest.Migrate)
	server := natstest.Child(t)
	relay := exec.Command(program(t), "serve", "--log-level", "error")
	relay.Env = append(cleanEnv(), "JETMESH_DATABASE_URL="+pool.Config().ConnString(), "JETMESH_NATS_URL="+server.URL())
	if lines := startProcess(t, relay); !lines.Scan() || !strings.Contains(lines.Text(), "ready") {
		t.Fatalf("serve says %q", lines.Text())
	}
	down := filepath.Join(t.TempDir(), "down")
	if err := os.WriteFile(down, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	service := func() (*exec.Cmd, *bufio.Scanner) {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(cleanEnv(), drillVariable+"="+server.URL(), drillDown+"="+down)
		return cmd, startProcess(t, cmd)
	}
	called := func(lines *bufio.Scanner, id string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != "called "+id {
			t.Fatalf("the service says %q, want the call for event %s", lines.Text(), id)
		}
	}
	env := meshtest.WithPool(t, pool)
	nc, err := mesh.Connect(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	m, err := mesh.New(nc, mesh.Config{Logger: env.Log})
	if err != nil {
		t.Fatal(err)
	}
	operator := outbox.Operator{DB: pool, Mesh: m}

	broken, lines := service()
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	called(lines, id)
	row := env.AwaitStatus(id, outbox.StatusFailed)
	if row.RetryCount != 1 || row.ErrorMessage != "the ledger is down" || row.NextRetryAt == nil {
		t.Errorf("failed: %+v", row)
	}
	if err := broken.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := broken.Wait(); err != nil {
		t.Fatalf("the service ended by %v", err)
	}
	row, err = operator.Replay(t.Context(), id, outbox.Action{By: "ada", Reason: "the ledger is back"})
	if err != nil || row.Status != outbox.StatusPending || row.RetryCount != 1 || row.Generation != 1 {
		t.Fatalf("replayed: %+v, %v", row, err)
	}
	if err := os.Remove(down); err != nil {
		t.Fatal(err)
	}
	_, lines = service()
	called(lines, id)
	row = env.AwaitStatus(id, outbox.StatusDispatched)
	if row.RetryCount != 1 || row.Generation != 1 || row.ErrorCode != "" || row.NextRetryAt != nil || row.SettledAt == nil {
		t.Errorf("dispatched: %+v", row)
	}
	_, attempts := env.Row(id)
	if len(attempts) != 1 || attempts[0].ErrorMessage != "the ledger is down" || attempts[0].Generation != 0 {
		t.Errorf("attempts %+v", attempts)
	}
	rec, _, err := m.Record(t.Context(), "orders", id)
	if err != nil || rec.Status != mesh.RecordDispatched || rec.RetryCount != 1 || rec.Generation != 1 || rec.DecidedBy != "ada" || rec.Reason != "the ledger is back" {
		t.Fatalf("record %+v, %v", rec, err)
	}
	if len(rec.Attempts) != 2 || rec.Attempts[0].ErrorMessage != "the ledger is down" || rec.Attempts[1].ErrorCode != "" ||
		rec.Attempts[0].Instance == rec.Attempts[1].Instance {
		t.Errorf("attempts %+v", rec.Attempts)
	}
}
