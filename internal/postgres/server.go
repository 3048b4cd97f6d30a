package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"github.com/rs/zerolog"
)

// Config says where and how a server runs. Only Dir is required.
type Config struct {
	// Dir is the server's folder. It is created if it is missing; a cluster that is
	// already there is used again.
	Dir string
	// Durable keeps PostgreSQL's own promises: fsync, synchronous_commit and
	// full_page_writes as shipped. Default false: all three off, which is several
	// times faster, but Kill loses the commits of the last half second, and a crash
	// of the machine may lose the cluster.
	Durable bool
	// Port is the TCP port on 127.0.0.1. Default 0: a free one.
	Port int
	// Settings are further server parameters by name, as in postgresql.conf.
	Settings map[string]string
	// Logger gets one line when the server is ready and one when it has stopped.
	// What the server itself says is in Dir/postgres.log. Default: none.
	Logger zerolog.Logger
}

// Server is a running PostgreSQL. Its methods may be called concurrently.
type Server struct {
	cfg     Config
	cluster cluster
	life    sync.Mutex // one of Start, Stop, Kill, Restart at a time
	lock    *flock.Flock
	port    atomic.Int64
	proc    atomic.Pointer[process]

	stopWithin time.Duration // from SIGINT to SIGQUIT
	quitWithin time.Duration // from SIGQUIT to SIGKILL, and for children after it
}

// Start runs a server and returns once it accepts connections. A new cluster takes
// about a second, one that must recover as long as its log is. Canceling ctx gives up
// the start; it has no effect afterwards. The caller must call Stop, also after the
// server has ended by itself.
//
// Errors say what to do: ErrNoBinaries, a folder in use by another process, a cluster
// of another major version, a folder that the server's user may not enter, a port
// that is taken.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	s := &Server{cfg: cfg, stopWithin: 30 * time.Second, quitWithin: 10 * time.Second}
	if err := s.start(ctx); err != nil {
		if errors.Is(err, ErrNoBinaries) {
			return nil, err
		}
		return nil, fmt.Errorf("postgres: %w", err)
	}
	return s, nil
}

func (s *Server) start(ctx context.Context) error {
	if err := supported(); err != nil {
		return err
	}
	if s.cfg.Dir == "" {
		return errors.New("no Dir in the Config")
	}
	if s.cfg.Port < 0 || s.cfg.Port > 65535 {
		return fmt.Errorf("port %d in the Config is not between 0 and 65535", s.cfg.Port)
	}
	dir, err := filepath.Abs(s.cfg.Dir)
	if err != nil {
		return err
	}
	s.cluster.dir = dir
	if s.cluster.owner, err = findOwner(); err != nil {
		return err
	}
	if err := s.cluster.owner.makeDir(dir); err != nil {
		return err
	}
	s.life.Lock()
	defer s.life.Unlock()
	s.lock = flock.New(s.cluster.path("lock"))
	if err := s.takeLock(); err != nil {
		return err
	}
	if err = s.waitUnused(ctx); err == nil {
		if err = s.cluster.open(ctx, s.cfg.Durable); err == nil {
			err = s.launch(ctx)
		}
	}
	if err != nil {
		return errors.Join(err, s.lock.Unlock())
	}
	return nil
}

func (s *Server) takeLock() error {
	locked, err := s.lock.TryLock()
	if err != nil {
		return fmt.Errorf("lock %s: %w", s.cluster.dir, err)
	}
	if !locked {
		return fmt.Errorf("%s is in use: another process runs a server there", s.cluster.dir)
	}
	return nil
}

// URL returns the address of a database, with the superuser's password: a secret.
func (s *Server) URL(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(superuser, s.cluster.password),
		Host:     address(s.Port()),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Port returns the TCP port; it stays the same over Restart.
func (s *Server) Port() int { return int(s.port.Load()) }

// Pid returns the process id of the server's first process, the postmaster.
func (s *Server) Pid() int { return s.proc.Load().pid() }

// Done is closed when the server has ended, by itself or through Stop or Kill. Restart
// begins a new life with a new channel.
func (s *Server) Done() <-chan struct{} { return s.proc.Load().done }

// Err returns nil while the server runs and after Stop or Kill. After it ended by
// itself, it says how, with the last lines of its log.
func (s *Server) Err() error {
	p := s.proc.Load()
	select {
	case <-p.done:
		if !p.wanted.Load() {
			return fmt.Errorf("postgres: %w", p.failure())
		}
	default:
	}
	return nil
}

// Stop shuts the server down: clients are cut off, what is committed is kept. It
// returns when all its processes are gone, after 40 seconds at most; the error says
// that more than the usual shutdown was needed. Stopping again does nothing.
func (s *Server) Stop() error {
	s.life.Lock()
	defer s.life.Unlock()
	if !s.lock.Locked() {
		return nil
	}
	if err := errors.Join(s.stop(), s.lock.Unlock()); err != nil {
		return fmt.Errorf("postgres: stop: %w", err)
	}
	s.cfg.Logger.Info().Str("dir", s.cluster.dir).Msg("postgres stopped")
	return nil
}

// Kill ends the server as a crash does: SIGKILL to all its processes. With Durable,
// what was committed survives. Start and Restart work afterwards.
func (s *Server) Kill() error {
	s.life.Lock()
	defer s.life.Unlock()
	if !s.lock.Locked() {
		return nil
	}
	if err := errors.Join(s.kill(), s.lock.Unlock()); err != nil {
		return fmt.Errorf("postgres: kill: %w", err)
	}
	return nil
}

// Restart stops the server if it runs, and starts it again on the same port, so that
// URLs stay valid. After an error the server is stopped.
func (s *Server) Restart(ctx context.Context) error {
	s.life.Lock()
	defer s.life.Unlock()
	err := s.stop()
	if err == nil && !s.lock.Locked() {
		err = s.takeLock()
	}
	if err == nil {
		err = s.launch(ctx)
	}
	if err != nil {
		return fmt.Errorf("postgres: restart: %w", errors.Join(err, s.lock.Unlock()))
	}
	return nil
}

// stop ends the current process, whichever way it takes.
func (s *Server) stop() error {
	p := s.proc.Load()
	p.wanted.Store(true)
	for _, step := range []struct {
		signal syscall.Signal
		within time.Duration
	}{{syscall.SIGINT, s.stopWithin}, {syscall.SIGQUIT, s.quitWithin}} {
		p.signal(step.signal)
		select {
		case <-p.done:
			if step.signal == syscall.SIGQUIT {
				return fmt.Errorf("no shutdown within %s: the server was made to quit and will recover at the next start", s.stopWithin)
			}
			return s.waitGone()
		case <-time.After(step.within):
		}
	}
	return errors.Join(fmt.Errorf("no shutdown within %s: the server was killed and will recover at the next start",
		s.stopWithin+s.quitWithin), s.kill())
}

func (s *Server) kill() error {
	p := s.proc.Load()
	p.wanted.Store(true)
	select {
	case <-p.done:
	default:
		killFamily(p.cmd.Process)
		<-p.done
	}
	return s.waitGone()
}

// waitGone waits until no process of the server is left. Children whose postmaster
// died notice it and leave by themselves.
func (s *Server) waitGone() error {
	ctx, cancel := context.WithTimeout(context.Background(), s.quitWithin)
	defer cancel()
	return s.waitUnused(ctx)
}

func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
