package postgres

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOneServerPerFolder(t *testing.T) {
	s := start(t, Config{})
	startError(t, Config{Dir: s.cfg.Dir}, s.cfg.Dir, "is in use")

	_, output := helper(t, s.cfg.Dir)
	if got := output(); !strings.Contains(got, "is in use") {
		t.Errorf("another process says %q", got)
	}
	query(t, s, "select 1")
}

func TestOutOfReachOfTheTerminal(t *testing.T) {
	s := start(t, Config{})
	group, err := syscall.Getpgid(s.Pid())
	if err != nil {
		t.Fatal(err)
	}
	if group != s.Pid() {
		t.Errorf("process group %d, want one of its own (%d)", group, s.Pid())
	}
}

func TestInterruptedInitdb(t *testing.T) {
	dir := tempDir(t)
	owner, _ := helper(t, dir)
	until(t, "initdb at work", func() bool { return exists(dir, "data.new/PG_VERSION") })
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()
	if exists(dir, "data") {
		t.Skip("initdb was too fast to be interrupted")
	}
	s := start(t, Config{Dir: dir})
	query(t, s, "select 1")
	if exists(dir, "data.new") {
		t.Error("the rest of the interrupted initdb is still there")
	}
}

func TestCanceledStart(t *testing.T) {
	dir := tempDir(t)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := Start(ctx, Config{Dir: dir})
		failed <- err
	}()
	until(t, "initdb at work", func() bool { return exists(dir, "data.new/PG_VERSION") })
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("Start() = %v, want that it was canceled", err)
	}
	query(t, start(t, Config{Dir: dir}), "select 1")
}

func TestStartSaysWhatIsWrong(t *testing.T) {
	s := start(t, Config{})
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	dir := s.cfg.Dir

	startError(t, Config{}, "Dir")
	startError(t, Config{Dir: dir, Port: 65536}, "65536")
	startError(t, Config{Dir: dir, Settings: map[string]string{"shared_preload_libraries": "nothing_like_it"}},
		"could not access file", "nothing_like_it", "postgres.log")

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	startError(t, Config{Dir: dir, Port: number(t, port)}, port, "taken")

	password := filepath.Join(dir, "password")
	if err := os.WriteFile(password, []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	startError(t, Config{Dir: dir}, password, "not the cluster's")
	if err := os.Remove(password); err != nil {
		t.Fatal(err)
	}
	startError(t, Config{Dir: dir}, password, "restore")

	if err := os.WriteFile(filepath.Join(dir, "data/PG_VERSION"), []byte("9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	startError(t, Config{Dir: dir}, "made by PostgreSQL 9", "installed is PostgreSQL "+s.cluster.version)
}

func TestFolderThatTheServersUserMayNotEnter(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root runs the server as another user")
	}
	closed := t.TempDir()
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(closed, "deeper", "still")
	_, err := Start(t.Context(), Config{Dir: dir})
	// testing's own folders are closed too, and the first one counts.
	if err == nil || !strings.Contains(err.Error(), "may not enter /") || !strings.Contains(err.Error(), "chmod o+x") {
		t.Fatalf("Start() = %v, want the folder and the fix", err)
	}
	_, rest, _ := strings.Cut(err.Error(), "may not enter ")
	folder, _, _ := strings.Cut(rest, " ")
	if !strings.HasPrefix(dir, folder) {
		t.Errorf("names %q, not a folder on the way to %q", folder, dir)
	}
	info, err := os.Stat(folder)
	if err != nil || info.Mode()&1 != 0 {
		t.Errorf("names %q, which everybody may enter (%v)", folder, err)
	}
}

func TestBinaries(t *testing.T) {
	root := t.TempDir()
	bin := func(name string, programs ...string) string {
		dir := filepath.Join(root, name, "bin")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, program := range programs {
			if err := os.WriteFile(filepath.Join(dir, program), nil, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	nine := bin("9.6", "initdb", "postgres")
	twelve := bin("12", "initdb", "postgres")
	bin("17", "postgres") // a client's package is no server
	onPath := bin("path", "initdb", "postgres")
	patterns := []string{filepath.Join(root, "[0-9]*", "bin")}

	t.Setenv("PATH", t.TempDir())
	if diff := cmp.Diff([]string{twelve, nine}, installed(patterns)); diff != "" {
		t.Errorf("without PATH (-want +got):\n%s", diff)
	}
	links := t.TempDir()
	for _, program := range []string{"initdb", "postgres"} {
		if err := os.Symlink(filepath.Join(onPath, program), filepath.Join(links, program)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", links)
	if diff := cmp.Diff([]string{onPath, twelve, nine}, installed(patterns)); diff != "" {
		t.Errorf("with links on PATH (-want +got):\n%s", diff)
	}

	t.Setenv("PATH", t.TempDir())
	defer func(before []string) { places = before }(places)
	places = nil
	if _, err := FindBinaries(); !errors.Is(err, ErrNoBinaries) {
		t.Errorf("FindBinaries() = %v", err)
	}
	if _, err := Start(t.Context(), Config{Dir: t.TempDir()}); !errors.Is(err, ErrNoBinaries) {
		t.Errorf("Start() = %v", err)
	}
}
