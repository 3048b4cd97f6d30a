package postgres

import (
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
)

func TestOnlyThePasswordOpensTheServer(t *testing.T) {
	s := start(t, Config{})
	if got := query(t, s, "select current_user"); got != superuser {
		t.Errorf("current user is %q", got)
	}
	u, err := url.Parse(s.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	for _, user := range []*url.Userinfo{url.User(superuser), url.UserPassword(superuser, "wrong")} {
		u.User = user
		if conn, err := pgx.Connect(t.Context(), u.String()); err == nil {
			conn.Close(t.Context())
			t.Errorf("connected as %q", user)
		}
	}
	if got := query(t, s, "show unix_socket_directories"); got != "" {
		t.Errorf("Unix sockets in %q", got)
	}
	if got := query(t, s, "show listen_addresses"); got != "127.0.0.1" {
		t.Errorf("listens on %q", got)
	}
	for _, name := range []string{"password", "postgres.log"} {
		info, err := os.Stat(filepath.Join(s.cluster.dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("mode of %s is %o", name, info.Mode().Perm())
		}
	}
}

func TestSettings(t *testing.T) {
	names := []string{"fsync", "synchronous_commit", "full_page_writes", "max_connections", "listen_addresses"}
	for _, test := range []struct {
		cfg  Config
		want []string
	}{
		{Config{}, []string{"off", "off", "off", "100", "127.0.0.1"}},
		{Config{Durable: true}, []string{"on", "on", "on", "100", "127.0.0.1"}},
		{
			Config{Settings: map[string]string{"max_connections": "33", "synchronous_commit": "on", "listen_addresses": "*"}},
			[]string{"off", "on", "off", "33", "127.0.0.1"},
		},
	} {
		s := start(t, test.cfg)
		var got []string
		for _, name := range names {
			got = append(got, query(t, s, "show "+name))
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("settings for %+v (-want +got):\n%s", test.cfg, diff)
		}
	}
}

func TestClusterIsUsedAgain(t *testing.T) {
	s := start(t, Config{Durable: true})
	query(t, s, "create table kept as select 7 as n")
	for range 2 { // again and twice: a second Stop does nothing
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Err(); err != nil {
		t.Errorf("after Stop: %v", err)
	}
	again := start(t, Config{Dir: s.cfg.Dir, Durable: true})
	if got := query(t, again, "select n from kept"); got != "7" {
		t.Errorf("kept %q, want 7", got)
	}
}

func TestKillLosesNothingThatWasCommitted(t *testing.T) {
	s := start(t, Config{Durable: true})
	url, postmaster := s.URL("postgres"), s.Pid()
	query(t, s, "create table kept as select 7 as n")

	// A backend that is busy and does not look whether its postmaster is alive.
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	busy := make(chan error)
	go func() {
		_, err := conn.Exec(t.Context(), "select count(*) from generate_series(1, 1000000000)")
		busy <- err
	}()
	backend := number(t, query(t, s, "select pid from pg_stat_activity "+
		"where pid <> pg_backend_pid() and backend_type = 'client backend'"))

	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-busy; err == nil {
		t.Error("the query outlived its server")
	}
	conn.Close(t.Context())
	for _, pid := range []int{postmaster, backend} {
		until(t, "process gone after Kill", func() bool { return gone(pid) })
	}
	if !exists(s.cfg.Dir, "data/postmaster.pid") {
		t.Error("the killed server removed its pid file: not a crash")
	}

	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.URL("postgres"); got != url {
		t.Error("another URL after Restart")
	}
	if got := query(t, s, "select n from kept"); got != "7" {
		t.Errorf("kept %q, want 7", got)
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	again := start(t, Config{Dir: s.cfg.Dir, Durable: true})
	if got := query(t, again, "select n from kept"); got != "7" {
		t.Errorf("kept %q after a new Start, want 7", got)
	}
}

func TestRestartOfARunningServer(t *testing.T) {
	s := start(t, Config{})
	before, done := s.Pid(), s.Done()
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-done
	if s.Pid() == before {
		t.Error("the same process after Restart")
	}
	select {
	case <-s.Done():
		t.Error("done after Restart")
	default:
	}
}

func TestServerThatEndsByItself(t *testing.T) {
	s := start(t, Config{})
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(s.Pid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-s.Done()
	if err := s.Err(); err == nil || !strings.Contains(err.Error(), "smart shutdown request") {
		t.Errorf("Err() = %v, want the end of the log", err)
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	query(t, s, "select 1")
}

func TestServerThatDoesNotStop(t *testing.T) {
	s := start(t, Config{Durable: true})
	query(t, s, "create table kept as select 7 as n")
	s.stopWithin, s.quitWithin = 50*time.Millisecond, 50*time.Millisecond
	if err := syscall.Kill(s.Pid(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("Stop() = %v, want that it was killed", err)
	}
	again := start(t, Config{Dir: s.cfg.Dir})
	if got := query(t, again, "select n from kept"); got != "7" {
		t.Errorf("kept %q, want 7", got)
	}
}

func TestConcurrentCalls(t *testing.T) {
	s := start(t, Config{})
	url := s.URL("postgres")
	var wg sync.WaitGroup
	for range 3 {
		for name, call := range map[string]func() error{
			"Kill":    s.Kill,
			"Stop":    s.Stop,
			"Restart": func() error { return s.Restart(t.Context()) },
			"Err":     s.Err,
		} {
			wg.Go(func() {
				if err := call(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				_, _ = s.Pid(), s.Done()
			})
		}
	}
	wg.Wait()
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := s.URL("postgres"); got != url {
		t.Error("another URL")
	}
	query(t, s, "select 1")
}
