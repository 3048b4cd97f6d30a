package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/internal/natsd"
	"jetmesh/mesh"
)

// startNATS starts the server as a child process on a store of its own, and connects.
func (b *bench) startNATS(ctx context.Context, dir string) error {
	conf := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(conf, b.NATSConf, 0o600); err != nil {
		return err
	}
	var err error
	b.nats, err = natsd.StartChild(ctx, b.Executable,
		[]string{"nats-server", "-store", filepath.Join(dir, "jetstream"), "-config", conf, "-port", "-1"}, nil)
	if err != nil {
		return err
	}
	b.closers = append(b.closers, b.nats.Stop)
	if b.nc, err = mesh.Connect(b.nats.URL()); err != nil {
		return err
	}
	b.closers = append(b.closers, func() error { b.nc.Close(); return nil })
	if b.mesh, err = mesh.New(b.nc, mesh.Config{Prefix: b.Prefix, Logger: b.Logger}); err != nil {
		return err
	}
	b.js = b.mesh.JetStream()
	b.result.NATSVersion = b.nc.ConnectedServerVersion()
	if b.result.NATSSyncInterval, err = syncInterval(b.NATSConf); err != nil {
		return err
	}
	b.say("NATS %s, a process of its own: sync_interval %s", b.result.NATSVersion, b.result.NATSSyncInterval)
	return nil
}

// syncInterval is how often a server with this configuration flushes what it has acked to
// disk. A running server does not tell; one that is made and not started fills in its defaults.
func syncInterval(conf []byte) (string, error) {
	opts := &server.Options{}
	if err := opts.ProcessConfigString(string(conf)); err != nil {
		return "", fmt.Errorf("NATS configuration: %w", err)
	}
	opts.NoSigs, opts.NoLog = true, true
	s, err := server.NewServer(opts)
	if err != nil {
		return "", fmt.Errorf("NATS configuration: %w", err)
	}
	s.Shutdown()
	if opts.SyncAlways {
		return "always", nil
	}
	return opts.SyncInterval.String(), nil
}

// resetStreams makes the mesh's streams anew, and with them the durables.
func (b *bench) resetStreams(ctx context.Context) error {
	names := b.js.StreamNames(ctx)
	for name := range names.Name() {
		if err := b.js.DeleteStream(ctx, name); err != nil {
			return fmt.Errorf("delete stream %s: %w", name, err)
		}
	}
	if err := names.Err(); err != nil {
		return fmt.Errorf("list streams: %w", err)
	}
	if err := b.mesh.ApplyTopology(ctx, mesh.Topology{}); err != nil {
		return err
	}
	events, err := b.events(ctx)
	if err != nil {
		return err
	}
	b.result.DedupeWindow = events.CachedInfo().Config.Duplicates.String()
	return nil
}

// events looks the events stream up, with its present state.
func (b *bench) events(ctx context.Context) (jetstream.Stream, error) {
	s, err := b.js.Stream(ctx, b.mesh.Names.EventsStream())
	if err != nil {
		return nil, fmt.Errorf("open stream %s: %w", b.mesh.Names.EventsStream(), err)
	}
	return s, nil
}

// ownerInfo is the state of the handlers' durable; nil while it does not exist.
func (b *bench) ownerInfo(ctx context.Context) (*jetstream.ConsumerInfo, error) {
	c, err := b.js.Consumer(ctx, b.mesh.Names.EventsStream(), b.mesh.Names.OwnerDurable(consumer))
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up the handlers' durable: %w", err)
	}
	return c.CachedInfo(), nil
}
