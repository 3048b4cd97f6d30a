package natsd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"jetmesh/internal/natsd"
	"jetmesh/internal/natstest"
)

func TestKilledChildKeepsWhatItAcknowledged(t *testing.T) {
	c := natstest.Child(t, "-sync-always")
	url, done := c.URL(), c.Done()
	js, str := stream(t, connect(t, url))
	publish(t, js, 100)
	c.Kill()
	c.Kill()
	<-done
	if err := c.Stop(); err != nil {
		t.Errorf("Stop after Kill: %v", err)
	}
	if err := c.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c.URL() != url {
		t.Errorf("URL %s after Restart, want %s", c.URL(), url)
	}
	publish(t, js, 1) // the client comes back by itself
	if n := messages(t, str); n != 101 {
		t.Errorf("%d messages, want 101", n)
	}
}

func TestRestartOfARunningChild(t *testing.T) {
	c := natstest.Child(t)
	before, pid := c.Done(), c.Pid()
	if err := c.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-before
	if c.Pid() == pid {
		t.Error("the same process after Restart")
	}
	if err := connect(t, c.URL()).Flush(); err != nil {
		t.Error(err)
	}
}

func TestPausedChild(t *testing.T) {
	c := natstest.Child(t)
	nc := connect(t, c.URL())
	if err := c.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := nc.FlushTimeout(50 * time.Millisecond); err == nil {
		t.Error("a paused server answers")
	}
	if err := c.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Errorf("after Resume: %v", err)
	}
	if err := c.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(); err != nil {
		t.Errorf("Stop of a paused child: %v", err)
	}
	if c.Pause() == nil || c.Resume() == nil {
		t.Error("paused or resumed a child that has ended")
	}
}

func TestChildThatDoesNotStart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte("prot: 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := []string{natsd.ChildVariable + "=1"}
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"-bogus"}, "bogus"},
		{[]string{"-store", t.TempDir(), "more"}, "more"},
		{[]string{"-port", "-1"}, "StoreDir"},
		{[]string{"-store", t.TempDir(), "-config", file}, "prot"},
		{[]string{"-store", t.TempDir(), "-config", file + "x"}, "no such file"},
	} {
		c, err := natsd.StartChild(t.Context(), os.Args[0], test.args, env)
		if err == nil {
			c.Kill()
			t.Errorf("started with %q", test.args)
		} else if !strings.Contains(err.Error(), test.want) {
			t.Errorf("error %q does not say %q", err, test.want)
		}
	}
	if _, err := natsd.StartChild(t.Context(), filepath.Join(t.TempDir(), "none"), nil, nil); err == nil {
		t.Error("started a program that does not exist")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := natsd.StartChild(ctx, "sleep", []string{"1000"}, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("StartChild() of a program that is never ready = %v", err)
	}
}

func TestChildReadsItsConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte("authorization { token: secret }"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := natstest.Child(t, "-config", file)
	if err := connect(t, strings.Replace(c.URL(), "//", "//secret@", 1)).Flush(); err != nil {
		t.Error(err)
	}
}

func TestChildEndsWithItsParent(t *testing.T) {
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentOf+"="+t.TempDir())
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 100)
	n, _ := out.Read(line)
	child, err := strconv.Atoi(string(bytes.TrimSpace(line[:n])))
	_ = parent.Process.Kill()
	_ = parent.Wait()
	if err != nil {
		t.Fatalf("the parent says %q", line[:n])
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child))
		if err != nil || bytes.Contains(stat, []byte(") Z ")) { // who buries orphans may be slow
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the child is still there")
		}
	}
}
