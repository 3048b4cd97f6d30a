package natsd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/rs/zerolog"
)

// Config says what server to run. Only StoreDir is required. The server always has
// JetStream.
type Config struct {
	// ConfigText is the contents of a NATS configuration file; $NAMES in it are read
	// from the environment. Its store folder, log and signal settings do not count.
	// Default: no users, the server's own limits.
	ConfigText []byte
	// StoreDir is JetStream's folder. It is created if it is missing.
	StoreDir string
	// Host to listen on. Default: as ConfigText says, else 127.0.0.1.
	Host string
	// Port to listen on; -1 is a free one. Default: as ConfigText says, else 4222.
	Port int
	// DontListen leaves Conn as the only way in.
	DontListen bool
	// SyncAlways flushes every message to disk before it is acknowledged. Default: as
	// ConfigText says, else every two minutes.
	SyncAlways bool
	// MaxStore bounds JetStream's files, in bytes. Default: as ConfigText says, else
	// a share of the free disk.
	MaxStore int64
	// Logger gets a line when the server is ready and when it has stopped, its
	// warnings and errors, and at debug level what else it says. Default: none.
	Logger zerolog.Logger
}

// Server is a running NATS server in this process.
type Server struct {
	srv  *server.Server
	lock *flock.Flock
	log  zerolog.Logger
	stop sync.Once
	err  error // of stop
}

// Start runs a server and returns when it is ready: at once for an empty store, about
// a second per million stored messages. The caller must call Stop.
//
// Errors name a store folder that another process uses, a port that is taken, and
// what is wrong in the configuration.
func Start(cfg Config) (*Server, error) {
	s, err := start(cfg)
	if err != nil {
		return nil, fmt.Errorf("natsd: %w", err)
	}
	return s, nil
}

func start(cfg Config) (*Server, error) {
	opts, err := options(cfg)
	if err != nil {
		return nil, err
	}
	// The folders above may lead other users to their own, as to a private Postgres's.
	err = os.MkdirAll(filepath.Dir(opts.StoreDir), 0o711)
	if err == nil {
		err = os.MkdirAll(opts.StoreDir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("store folder: %w", err)
	}
	lock := flock.New(filepath.Join(opts.StoreDir, ".jetmesh.lock"))
	locked, err := lock.TryLock()
	if err != nil {
		return nil, fmt.Errorf("lock the store folder: %w", err)
	}
	if !locked {
		return nil, fmt.Errorf("store folder %s is in use: another process runs a NATS server on it", opts.StoreDir)
	}
	srv, err := run(opts, &logger{to: cfg.Logger})
	if err != nil {
		return nil, errors.Join(err, lock.Unlock())
	}
	s := &Server{srv: srv, lock: lock, log: cfg.Logger}
	s.log.Info().Str("url", s.URL()).Str("store", opts.StoreDir).Str("version", server.VERSION).Msg("nats ready")
	return s, nil
}

func options(cfg Config) (*server.Options, error) {
	opts := new(server.Options)
	if text := string(cfg.ConfigText); strings.TrimSpace(text) != "" {
		err := opts.ProcessConfigString(text)
		parts, ok := err.(interface{ Errors() []error }) // mere warnings have none
		if err != nil && (!ok || len(parts.Errors()) > 0) {
			return nil, fmt.Errorf("configuration: %s", strings.TrimSpace(err.Error()))
		}
	}
	if cfg.StoreDir == "" {
		return nil, errors.New("no StoreDir in the Config")
	}
	var err error
	if opts.StoreDir, err = filepath.Abs(cfg.StoreDir); err != nil {
		return nil, err
	}
	opts.JetStream = true
	opts.NoSigs, opts.NoLog = true, true
	opts.DontListen = cfg.DontListen
	if cfg.Host != "" {
		opts.Host = cfg.Host
	}
	if opts.Host == "" {
		opts.Host = "127.0.0.1" // the server's own default is every address
	}
	if cfg.Port != 0 {
		opts.Port = cfg.Port
	}
	if opts.Port == 0 {
		opts.Port = server.DEFAULT_PORT
	}
	if cfg.SyncAlways {
		opts.SyncAlways = true
	}
	if cfg.MaxStore != 0 {
		opts.JetStreamMaxStore = cfg.MaxStore
	}
	return opts, nil
}

// readyWithin is generous: a store is read before, so only listeners are missing.
const readyWithin = 10 * time.Second

func run(opts *server.Options, log *logger) (*server.Server, error) {
	if !opts.DontListen && opts.Port > 0 { // the server's own words for it are unclear
		l, err := net.Listen("tcp", net.JoinHostPort(opts.Host, strconv.Itoa(opts.Port)))
		if err != nil {
			return nil, fmt.Errorf("cannot listen: %w (is another NATS server running? choose another port)", err)
		}
		l.Close()
	}
	srv, err := server.NewServer(opts)
	if err != nil {
		return nil, err
	}
	srv.SetLoggerV2(log, opts.Debug, opts.Trace, opts.TraceVerbose)
	srv.Start()
	for deadline := time.Now().Add(readyWithin); ; {
		if err = log.failure(); err != nil {
			break
		}
		if srv.ReadyForConnections(50 * time.Millisecond) {
			if err = log.ready(); err == nil {
				return srv, nil
			}
			break
		}
		if time.Now().After(deadline) {
			err = fmt.Errorf("not ready within %s", readyWithin)
			break
		}
	}
	srv.Shutdown()
	srv.WaitForShutdown()
	return nil, err
}

// URL returns the address for clients on this machine, without credentials; empty with
// DontListen.
func (s *Server) URL() string {
	addr, ok := s.srv.Addr().(*net.TCPAddr)
	if !ok {
		return ""
	}
	scheme, _, _ := strings.Cut(s.srv.ClientURL(), "://") // nats or tls
	host := addr.IP.String()
	if addr.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return scheme + "://" + net.JoinHostPort(host, strconv.Itoa(addr.Port))
}

// Stop shuts the server down and waits until it is gone. Close clients first: they
// take it for an outage. Stopping again does nothing.
func (s *Server) Stop() error {
	s.stop.Do(func() {
		s.srv.Shutdown()
		s.srv.WaitForShutdown()
		if err := s.lock.Unlock(); err != nil {
			s.err = fmt.Errorf("natsd: %w", err)
		}
		s.log.Info().Msg("nats stopped")
	})
	return s.err
}
