package mesh

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
)

// Config of a [Mesh]. The zero value means the documented defaults.
type Config struct {
	Prefix       string        // of streams, subjects and buckets; default "mesh"
	Instance     string        // names this process in the delivery log; default host-pid-random
	DrainTimeout time.Duration // how long Run waits for handlers when it ends; default 30s
	Topology     Topology      // sizes; a zero size is not compared with what exists
	Logger       zerolog.Logger
}

// A Mesh runs subscriptions on one NATS connection. Its methods are safe for concurrent
// use.
type Mesh struct {
	Names Names

	nc       *nats.Conn
	js       jetstream.JetStream
	cfg      Config
	log      zerolog.Logger
	ledger   ledger
	outcomes chan settled

	mu      sync.Mutex
	subs    []Subscription
	running bool
}

// New makes a mesh on a connection, see [Connect]. It starts nothing and never closes
// the connection.
func New(nc *nats.Conn, cfg Config) (*Mesh, error) {
	names, err := NewNames(cfg.Prefix)
	if err != nil {
		return nil, err
	}
	orElse(&cfg.Instance, defaultInstance())
	orElse(&cfg.DrainTimeout, 30*time.Second)
	if err := checkText("instance", cfg.Instance, maxAggregate); err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(5*time.Second))
	if err != nil {
		return nil, fmt.Errorf("mesh: open JetStream: %w", err)
	}
	return &Mesh{
		Names: names, nc: nc, js: js, cfg: cfg,
		log:      cfg.Logger.With().Str("instance", cfg.Instance).Logger(),
		ledger:   ledger{js: js, names: names},
		outcomes: make(chan settled, outcomeBatch),
	}, nil
}

func defaultInstance() string {
	host, err := os.Hostname()
	if err != nil || hasControl(host) {
		host = "unknown"
	}
	return fmt.Sprintf("%.100s-%d-%s", host, os.Getpid(), strings.ToLower(uuid.NewString()[:4]))
}

// Conn is the connection the mesh was made on.
func (m *Mesh) Conn() *nats.Conn { return m.nc }

// JetStream is the mesh's JetStream context.
func (m *Mesh) JetStream() jetstream.JetStream { return m.js }

// Instance names this process in the delivery log.
func (m *Mesh) Instance() string { return m.cfg.Instance }

// Handle adds subscriptions; what is wrong with them is reported by [Mesh.Run], all at
// once. It panics when Run was already called.
func (m *Mesh) Handle(subs ...Subscription) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.running {
		panic("mesh: Handle called after Run")
	}
	m.subs = append(m.subs, subs...)
}

// Run verifies the topology, binds each subscription's durable (creating it when it does
// not exist) and runs handlers until ctx ends. Then it stops taking messages, lets running
// handlers finish on a context of their own for up to DrainTimeout, stores their outcomes,
// acks, and returns nil. A handler that was cut off counts no attempt; its event is
// delivered again.
//
// It returns an error when a setting, the topology or a durable is wrong. Faults of the
// network and the server it waits out.
func (m *Mesh) Run(ctx context.Context) error {
	m.mu.Lock()
	if m.running {
		m.mu.Unlock()
		return errors.New("mesh: Run called twice")
	}
	m.running = true
	subs, err := merge(m.subs)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	runners, err := m.start(ctx, subs)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}

	// Handlers outlive ctx, outcomes outlive handlers.
	settling, stopSettling := context.WithCancel(context.WithoutCancel(ctx))
	defer stopSettling()
	var writer, running sync.WaitGroup
	writer.Go(func() { m.writeOutcomes(settling) })
	for _, r := range runners {
		running.Go(func() { r.run(ctx) })
	}
	running.Wait()
	close(m.outcomes)
	stop := time.AfterFunc(m.cfg.DrainTimeout, stopSettling)
	writer.Wait()
	stop.Stop()
	return m.flush()
}

// start verifies the topology and binds the subscriptions. It waits while the server cannot be
// reached.
func (m *Mesh) start(ctx context.Context, subs []*Subscription) ([]*runner, error) {
	runners := make([]*runner, len(subs))
	for i, s := range subs {
		runners[i] = newRunner(m, s)
	}
	attempt := func() error {
		if err := m.VerifyTopology(ctx, m.cfg.Topology); err != nil {
			return err
		}
		for _, r := range runners {
			if err := r.bind(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	var refused error
	m.persist(ctx, "start", func() error {
		err := attempt()
		if unreachable(err) {
			return err
		}
		refused = err
		return nil
	})
	return runners, refused
}

// unreachable tells a server that is away, or busy electing a leader, from one that says no.
func unreachable(err error) bool {
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.ErrorCode == 10008 // JetStream temporarily unavailable
	}
	for _, away := range []error{nats.ErrDisconnected, nats.ErrReconnectBufExceeded, nats.ErrTimeout, context.DeadlineExceeded} {
		if errors.Is(err, away) {
			return true
		}
	}
	return false
}

// flush sends what is still in the client's buffer, the last acks among it.
func (m *Mesh) flush() error {
	if !m.nc.IsConnected() {
		return nil
	}
	if err := m.nc.FlushTimeout(5 * time.Second); err != nil {
		m.log.Warn().Err(err).Msg("last acks may not have reached the server; their events are delivered again")
	}
	return nil
}

// clip cuts a text to a length in bytes and makes it valid UTF-8, as JSON and Postgres want it.
func clip(s string, limit int) string {
	if len(s) <= limit {
		return strings.ToValidUTF8(s, "\ufffd")
	}
	return strings.ToValidUTF8(s[:limit], "") + "…"
}
