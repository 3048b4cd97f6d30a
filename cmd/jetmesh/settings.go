package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/pflag"

	"jetmesh/mesh"
	"jetmesh/outbox"
)

// settings are the flags that several commands share; where a flag is not given, its
// environment variable counts.
type settings struct {
	databaseURL string
	natsURL     string
	schema      string
	prefix      string
	logLevel    string

	level zerolog.Level
}

func (s *settings) register(flags *pflag.FlagSet) {
	flags.StringVar(&s.databaseURL, "database-url", "", "Postgres to use (JETMESH_DATABASE_URL, DATABASE_URL)")
	flags.StringVar(&s.natsURL, "nats-url", "", "NATS to use (JETMESH_NATS_URL)")
	flags.StringVar(&s.schema, "schema", string(outbox.DefaultSchema), "Postgres schema of the outbox")
	flags.StringVar(&s.prefix, "prefix", "mesh", "prefix of streams, subjects and buckets")
	flags.StringVar(&s.logLevel, "log-level", "info", "trace, debug, info, warn or error; logs go to stderr")
}

func (s *settings) complete() error {
	s.databaseURL = cmp.Or(s.databaseURL, os.Getenv("JETMESH_DATABASE_URL"), os.Getenv("DATABASE_URL"))
	s.natsURL = cmp.Or(s.natsURL, os.Getenv("JETMESH_NATS_URL"))
	level, err := zerolog.ParseLevel(s.logLevel)
	if err != nil || level == zerolog.NoLevel {
		return usageError{fmt.Errorf("--log-level must be trace, debug, info, warn or error, not %q", s.logLevel)}
	}
	s.level = level
	return nil
}

// logger writes one line per entry: for a person on a terminal, JSON elsewhere.
func (s *settings) logger(stderr io.Writer) zerolog.Logger {
	if f, ok := stderr.(*os.File); ok && isTerminal(f) {
		stderr = zerolog.ConsoleWriter{Out: stderr, TimeFormat: time.TimeOnly, NoColor: os.Getenv("NO_COLOR") != ""}
	}
	return zerolog.New(stderr).Level(s.level).With().Timestamp().Logger()
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

var errNoDatabase = usageError{errors.New("which Postgres? Give --database-url or set JETMESH_DATABASE_URL")}
var errNoNATS = usageError{errors.New("which NATS? Give --nats-url or set JETMESH_NATS_URL")}

// connectDB opens one connection. Errors do not show the URL, which may hold a password.
func (s *settings) connectDB(ctx context.Context) (*pgx.Conn, error) {
	if s.databaseURL == "" {
		return nil, errNoDatabase
	}
	conn, err := pgx.Connect(ctx, s.databaseURL)
	if err != nil {
		return nil, databaseError(err)
	}
	return conn, nil
}

// pool opens a pool of at least least connections.
func (s *settings) pool(ctx context.Context, least int32) (*pgxpool.Pool, error) {
	if s.databaseURL == "" {
		return nil, errNoDatabase
	}
	cfg, err := pgxpool.ParseConfig(s.databaseURL)
	if err != nil {
		return nil, databaseError(err)
	}
	cfg.MaxConns = max(cfg.MaxConns, least)
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, databaseError(err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, databaseError(err)
	}
	return pool, nil
}

func databaseError(err error) error {
	if parse := (*pgconn.ParseConfigError)(nil); errors.As(err, &parse) {
		return usageError{errors.New("the database URL cannot be parsed: it must look like postgres://user:password@host:5432/database")}
	}
	return fmt.Errorf("connect to Postgres: %w", err)
}

// connectNATS opens a connection and waits until it stands.
func (s *settings) connectNATS(ctx context.Context, log zerolog.Logger) (*nats.Conn, error) {
	if s.natsURL == "" {
		return nil, errNoNATS
	}
	nc, err := mesh.Connect(s.natsURL,
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { log.Warn().Err(err).Msg("NATS") }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // nil when we close it ourselves
				log.Warn().Err(err).Msg("NATS is away")
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) { log.Info().Msg("NATS is back") }),
	)
	if err != nil {
		return nil, err
	}
	for waited := false; !nc.IsConnected(); waited = true {
		if !waited {
			log.Warn().AnErr("error", nc.LastError()).Msg("NATS does not answer yet, waiting")
		}
		select {
		case <-ctx.Done():
			nc.Close()
			return nil, fmt.Errorf("connect to NATS: %w", ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nc, nil
}
