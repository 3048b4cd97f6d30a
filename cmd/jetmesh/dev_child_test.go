package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"jetmesh/internal/meshtest"
)

// A devChild is `jetmesh dev` as a process of its own, killed when the test ends.
type devChild struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdout, stderr output
	ended          chan struct{}

	databaseURL, natsURL string // as it printed them; valid once it is ready
}

// launchDev starts it with nothing of this process's settings, but env.
func launchDev(t *testing.T, env []string, args ...string) *devChild {
	t.Helper()
	c := &devChild{t: t, cmd: exec.Command(program(t), append([]string{"dev"}, args...)...), ended: make(chan struct{})}
	c.cmd.Env = append(cleanEnv(), env...)
	c.cmd.Stdout, c.cmd.Stderr = &c.stdout, &c.stderr
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = c.cmd.Wait() // its exit code is asked for later
		close(c.ended)
	}()
	t.Cleanup(c.kill)
	return c
}

func cleanEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "JETMESH_") || strings.HasPrefix(v, "DATABASE_URL=")
	})
}

// startDev launches it and waits until it is ready.
func startDev(t *testing.T, env []string, args ...string) *devChild {
	t.Helper()
	c := launchDev(t, env, args...)
	meshtest.Await(t, "jetmesh dev to be ready or to end", func() bool {
		return strings.Contains(c.stdout.String(), "State is in ") || c.hasEnded()
	})
	text := c.stdout.String()
	if c.hasEnded() || !strings.Contains(text, "jetmesh dev: ready\n") {
		t.Fatalf("not ready: %s%s", text, c.stderr.String())
	}
	c.databaseURL, c.natsURL = exported(text, "JETMESH_DATABASE_URL"), exported(text, "JETMESH_NATS_URL")
	return c
}

// exported finds what a user would paste into another terminal.
func exported(text, variable string) string {
	if m := regexp.MustCompile(`(?m)^  export ` + variable + `='([^']*)'$`).FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

func (c *devChild) kill() {
	_ = c.cmd.Process.Kill() // fails only if it has ended
	<-c.ended
}

func (c *devChild) hasEnded() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// wait expects the end, with that exit code, in the time that a user has.
func (c *devChild) wait(code int) {
	c.t.Helper()
	select {
	case <-c.ended:
	case <-time.After(45 * time.Second):
		c.t.Fatalf("it did not end: %s%s", c.stdout.String(), c.stderr.String())
	}
	if got := c.cmd.ProcessState.ExitCode(); got != code {
		c.t.Fatalf("exit code %d, want %d: %s%s", got, code, c.stdout.String(), c.stderr.String())
	}
}

// interrupt is Ctrl-C.
func (c *devChild) interrupt() {
	c.t.Helper()
	if err := c.cmd.Process.Signal(os.Interrupt); err != nil {
		c.t.Fatal(err)
	}
	c.wait(exitOK)
}

// ask runs a query that returns one number.
func (c *devChild) ask(query string) (n int64) {
	c.t.Helper()
	conn, err := pgx.Connect(c.t.Context(), c.databaseURL)
	if err != nil {
		c.t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if err := conn.QueryRow(c.t.Context(), query).Scan(&n); err != nil {
		c.t.Fatal(err)
	}
	return n
}

// output is what a process wrote so far.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// dataDir is a folder that the user of Postgres may enter, unlike testing's own.
func dataDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "jetmesh-dev-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// freePort is free at the moment.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}
