package postgres

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

// helperDir makes the test binary another owner of a server in that folder.
const helperDir = "JETMESH_POSTGRES_HELPER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperDir); dir != "" {
		s, err := Start(context.Background(), Config{Dir: dir})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(s.Pid())
		<-s.Done()
		os.Exit(2)
	}
	goleak.VerifyTestMain(m)
}

// helper starts another owner; its first line on stdout is the postmaster's pid.
func helper(t *testing.T, dir string) (*exec.Cmd, func() string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperDir+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, func() string {
		line := make([]byte, 4096)
		n, _ := out.Read(line)
		return strings.TrimSpace(string(line[:n]))
	}
}

// tempDir is a folder that the server's user may enter, unlike testing's own.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "jetmesh-postgres-")
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

func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = tempDir(t)
	}
	s, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func startError(t *testing.T, cfg Config, parts ...string) {
	t.Helper()
	s, err := Start(t.Context(), cfg)
	if err == nil {
		_ = s.Stop()
		t.Fatalf("started, want an error with %q", parts)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not say %q", err, part)
		}
	}
}

// query returns the only value of the only row, as text.
func query(t *testing.T, s *Server, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	results, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	last := results[len(results)-1]
	if len(last.Rows) != 1 {
		return ""
	}
	return string(last.Rows[0][0])
}

func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20s: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// gone reports that a process has ended, buried or not: who buries orphans may be slow.
func gone(pid int) bool {
	if syscall.Kill(pid, 0) == syscall.ESRCH {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(stat), ") Z ")
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func exists(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}
