package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"jetmesh/mesh"
)

// RelayConfig of a [Relay]. The zero value means the documented defaults.
type RelayConfig struct {
	Schema       Schema        // default "mesh"
	PollInterval time.Duration // fallback when no wake-up arrives; default 1s, 10ms to 1min
	BatchSize    int           // rows read at once; default 500, 1 to 10,000
	MaxInFlight  int           // messages published and not yet acked; default 4096, 1 to 65,536
	Logger       zerolog.Logger
}

const (
	markAfter     = 200 * time.Millisecond // an event settled sooner is never marked
	ackTimeout    = 10 * time.Second       // then a publish counts as unknown and is repeated
	bytesInFlight = 64 << 20
)

// trackInterval is the time between sweeps that let relay_low advance.
var trackInterval = 15 * time.Second

// A Relay publishes what was committed to an outbox, and settles its rows by the outcomes
// that come back. Any number of processes may run one for the same outbox: one works, the
// others wait to take over.
type Relay struct {
	db    *pgxpool.Pool
	m     *mesh.Mesh
	cfg   RelayConfig
	log   zerolog.Logger
	stats relayStats
}

type relayStats struct {
	published, duplicates, settled, ignored, parked, retried atomic.Int64
	active                                                   atomic.Bool
}

// RelayStats counts since the relay was made.
type RelayStats struct {
	Active     bool  // this relay works; false: it waits, or cannot
	Published  int64 // messages stored in the events stream for the first time
	Duplicates int64 // publishes that the stream had already
	Settled    int64 // rows settled by outcomes
	Ignored    int64 // outcomes that changed no row: doubled, overtaken, or of a purged row
	Parked     int64 // rows that can never be published
	Retried    int64 // publishes that were repeated because their fate was unknown
}

// NewRelay makes a relay; [Relay.Run] runs it. It never closes pool or connection. The pool
// needs at least 4 connections, and these must be sessions: the relay holds an advisory lock and
// listens, neither of which a transaction-pooling proxy between them carries.
func NewRelay(db *pgxpool.Pool, m *mesh.Mesh, cfg RelayConfig) (*Relay, error) {
	if cfg.Schema == "" {
		cfg.Schema = DefaultSchema
	}
	orElse(&cfg.PollInterval, time.Second)
	orElse(&cfg.BatchSize, 500)
	orElse(&cfg.MaxInFlight, 4096)
	errs := []error{cfg.Schema.check()}
	check := func(ok bool, field, want string, got any) {
		if !ok {
			errs = append(errs, &mesh.FieldError{Field: field, Reason: fmt.Sprintf("must be %s, not %v", want, got)})
		}
	}
	check(cfg.PollInterval >= 10*time.Millisecond && cfg.PollInterval <= time.Minute, "relay.pollInterval", "between 10ms and 1m", cfg.PollInterval)
	check(cfg.BatchSize >= 1 && cfg.BatchSize <= 10_000, "relay.batchSize", "between 1 and 10,000", cfg.BatchSize)
	check(cfg.MaxInFlight >= 1 && cfg.MaxInFlight <= 65_536, "relay.maxInFlight", "between 1 and 65,536", cfg.MaxInFlight)
	check(db.Config().MaxConns >= 4, "pool_max_conns", "at least 4", db.Config().MaxConns)
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Relay{db: db, m: m, cfg: cfg, log: cfg.Logger.With().Str("schema", string(cfg.Schema)).Logger()}, nil
}

func orElse[T comparable](field *T, def T) {
	var zero T
	if *field == zero {
		*field = def
	}
}

// Stats may be called at any time.
func (r *Relay) Stats() RelayStats {
	return RelayStats{
		Active: r.stats.active.Load(), Published: r.stats.published.Load(), Duplicates: r.stats.duplicates.Load(),
		Settled: r.stats.settled.Load(), Ignored: r.stats.ignored.Load(), Parked: r.stats.parked.Load(), Retried: r.stats.retried.Load(),
	}
}

// Run relays until ctx ends; then it waits for the acks of what it published and returns nil.
// It waits out faults of Postgres and NATS, and returns an error for what only a person
// can mend: a schema of another version, a topology that differs, a closed connection.
func (r *Relay) Run(ctx context.Context) error {
	pause := 100 * time.Millisecond
	for {
		began := time.Now()
		err := r.session(ctx)
		r.stats.active.Store(false)
		if ctx.Err() != nil {
			return nil
		}
		if fatal := (*fatalError)(nil); errors.As(err, &fatal) {
			return fatal.error
		}
		if errors.Is(err, nats.ErrConnectionClosed) {
			return fmt.Errorf("outbox: the relay's NATS connection was closed: %w", err)
		}
		if time.Since(began) > 10*time.Second {
			pause = 100 * time.Millisecond
		}
		r.log.Warn().Err(err).Dur("pause", pause).Msg("relay starts again")
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, 2*time.Second)
	}
}

// fatalError ends Run instead of being waited out.
type fatalError struct{ error }

// A session is one uninterrupted time at work: it ends with the first fault, and everything it
// kept in memory with it. The next one finds all of that in the table again.
type session struct {
	*Relay
	sourceID   string
	maxPayload int
	wake       *waker
	owners     owners
	waiting    map[string]int64 // consumers whose waiting rows are being read, and how far
	decidedAt  time.Time        // of the last look for operators' decisions
	holes      holes
	sweep      sync.Mutex   // a look into the holes and a sweep exclude each other
	cursor     int64        // every seq up to here was read, or is a hole; the reader's own
	progress   atomic.Int64 // up to here the rows that were read are with the publisher, or done
	low        atomic.Int64 // every row below is settled, tracked, or in a hole

	publisher *publisher
}

// session waits until no other relay works on this outbox, then works until ctx ends or
// something breaks.
func (r *Relay) session(ctx context.Context) (err error) {
	if err := r.validate(ctx); err != nil {
		return err
	}
	w, err := r.newWaker(ctx)
	if err != nil {
		return err
	}
	defer w.close()
	defer w.retire()
	s := &session{Relay: r, wake: w, waiting: map[string]int64{}}
	if err := s.open(ctx); err != nil {
		return err
	}
	r.stats.active.Store(true)
	r.log.Info().Str("source", s.sourceID).Int64("from_seq", s.cursor+1).Msg("relay works")

	// The parts end together. Acks of what was published are awaited by the reader;
	// marking and settling go on until it is done.
	reading, stopReading := context.WithCancelCause(ctx)
	defer stopReading(nil)
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	var wg sync.WaitGroup
	part := func(ctx context.Context, name string, run func(context.Context) error) {
		wg.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				stopReading(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	part(serving, "listen", w.listen)
	part(serving, "keep", s.keepLoop)
	part(serving, "owners", s.ownersLoop)
	part(serving, "decisions", s.decisionsLoop)
	err = s.read(reading)
	if cause := context.Cause(reading); cause != nil && ctx.Err() == nil {
		err = cause
	}
	s.publisher.drain()
	stopServing()
	wg.Wait()
	return err
}

// validate refuses to work on a schema of another version, or a topology that differs.
func (r *Relay) validate(ctx context.Context) error {
	conn, err := r.db.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	defer conn.Release()
	if err := conn.Ping(ctx); err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	err = r.cfg.Schema.ValidateMigrations(ctx, conn.Conn())
	if wrong := (*SchemaError)(nil); errors.As(err, &wrong) {
		return &fatalError{err}
	}
	if err != nil {
		return err
	}
	err = r.m.VerifyTopology(ctx, mesh.Topology{})
	if differs := (*mesh.TopologyError)(nil); errors.As(err, &differs) {
		return &fatalError{err}
	}
	return err
}

// open reads what the outbox says about itself and tells it the server's limit.
func (s *session) open(ctx context.Context) error {
	s.maxPayload = int(s.m.Conn().MaxPayload())
	var low int64
	err := s.db.QueryRow(ctx, s.cfg.Schema.sql(`
		update {{schema}}.meta set max_payload = $1, relay_asleep = false, home = {{schema}}.home(),
			source_id = case when home = {{schema}}.home() then source_id else gen_random_uuid() end,
			relay_low = case when relay_low <= (select last_value + 1 from {{schema}}.outbox_seq_seq) then relay_low else 0 end
		returning source_id::text, relay_low`), s.maxPayload).Scan(&s.sourceID, &low)
	if err != nil {
		return fmt.Errorf("read table meta: %w", err)
	}
	s.cursor = max(low-1, 0)
	s.low.Store(s.cursor + 1)
	s.progress.Store(s.cursor)
	s.owners.prefix = s.m.Names.OwnerDurable("")
	if err := s.refreshOwners(ctx); err != nil {
		return err
	}
	s.publisher, err = newPublisher(ctx, s)
	return err
}
