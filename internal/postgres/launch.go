package postgres

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// launch starts a process on the cluster and waits until it is ready.
func (s *Server) launch(ctx context.Context) error {
	begin := time.Now()
	port := s.Port()
	if port == 0 {
		port = s.cfg.Port
	}
	var err error
	if port != 0 {
		if err = free(port); err != nil {
			return fmt.Errorf("port %d of 127.0.0.1 is taken: choose another or end the program that has it: %w", port, err)
		}
		err = s.run(ctx, port)
	} else {
		for range 5 { // another program may take the port between our look and the server's
			if err = s.run(ctx, freePort()); err == nil || !strings.Contains(err.Error(), "could not bind") {
				break
			}
		}
	}
	if err != nil {
		return err
	}
	s.cfg.Logger.Info().Str("dir", s.cluster.dir).Int("port", s.Port()).Str("version", s.cluster.version).
		Dur("took", time.Since(begin)).Msg("postgres ready")
	return nil
}

func (s *Server) run(ctx context.Context, port int) error {
	out, log, err := openLog(s.cluster.path("postgres.log"))
	if err != nil {
		return err
	}
	defer out.Close()
	running, err := lockRunning(s.cluster.path("running.lock"))
	if err != nil {
		return err
	}

	cmd := exec.Command(filepath.Join(s.cluster.bin, "postgres"), s.arguments(port)...)
	cmd.Dir, cmd.Env, cmd.SysProcAttr = s.cluster.dir, environment(), attributes(s.cluster.owner, syscall.SIGINT)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = out, out, []*os.File{running}
	p, err := spawn(cmd, log)
	running.Close() // from now on only the server's processes hold it
	if err != nil {
		return err
	}
	s.proc.Store(p)
	before := s.port.Swap(int64(port))
	if err := s.ready(ctx, p); err != nil {
		s.port.Store(before)
		return errors.Join(err, s.kill())
	}
	return nil
}

func (s *Server) arguments(port int) []string {
	args := []string{"-D", s.cluster.path("data")}
	set := func(name, value string) { args = append(args, "-c", name+"="+value) }
	if !s.cfg.Durable {
		set("fsync", "off")
		set("synchronous_commit", "off")
		set("full_page_writes", "off")
	}
	for _, name := range slices.Sorted(maps.Keys(s.cfg.Settings)) {
		set(name, s.cfg.Settings[name])
	}
	// The last one counts: these are not the caller's to change.
	set("listen_addresses", "127.0.0.1")
	set("port", strconv.Itoa(port))
	set("unix_socket_directories", "")
	set("logging_collector", "off")
	return args
}

// ready connects until the server lets us in or has ended.
func (s *Server) ready(ctx context.Context, p *process) error {
	cfg, err := pgx.ParseConfig(s.URL("postgres"))
	if err != nil {
		return err
	}
	cfg.ConnectTimeout = 5 * time.Second
	for {
		conn, err := pgx.ConnectConfig(ctx, cfg)
		if err == nil {
			return conn.Close(ctx)
		}
		if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "28P01" { // invalid_password
			return fmt.Errorf("the password in %s is not the cluster's: restore the file, or remove %s to start empty",
				s.cluster.path("password"), s.cluster.dir)
		}
		select {
		case <-p.done:
			return p.failure()
		case <-ctx.Done():
			return fmt.Errorf("%w before the server was ready; the end of %s:\n%s", ctx.Err(), p.log.path, p.log.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// waitUnused waits until no process of an earlier server is left in the folder. One
// whose owner was killed may still be shutting down.
func (s *Server) waitUnused(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		f, err := lockRunning(s.cluster.path("running.lock"))
		if err == nil {
			return f.Close()
		}
		if !errors.Is(err, errRunning) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w, working on %s: end them (postmaster.pid in it names the first)", err, s.cluster.path("data"))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// freePort looks below the ranges from which systems choose ports for outgoing
// connections, so that the port is still free when the server is started again.
func freePort() int {
	const from, to = 20000, 32000
	for {
		if port := from + rand.IntN(to-from); free(port) == nil {
			return port
		}
	}
}

func free(port int) error {
	l, err := net.Listen("tcp", address(port))
	if err != nil {
		return err
	}
	return l.Close()
}
