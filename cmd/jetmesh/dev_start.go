package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/gofrs/flock"

	"jetmesh"
	"jetmesh/examples/orders"
	"jetmesh/internal/natsd"
	"jetmesh/internal/postgres"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// start brings up the servers and everything that works on them, but lets nothing work yet.
func (d *dev) start(ctx context.Context) error {
	for _, step := range []func(context.Context) error{d.openData, d.startPostgres, d.startNATS, d.connect, d.migrate, d.assemble} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// openData makes the folder of all state and keeps others off it.
func (d *dev) openData(context.Context) (err error) {
	if d.data == "" {
		if d.data, err = stateDir(os.Geteuid() == 0); err != nil {
			return err
		}
	}
	if d.data, err = filepath.Abs(d.data); err != nil {
		return err
	}
	if err := makeDataDir(d.data, os.Geteuid() == 0); err != nil {
		return fmt.Errorf("folder of the state: %w (choose one with --data)", err)
	}
	lock := flock.New(filepath.Join(d.data, "dev.lock"))
	locked, err := lock.TryLock()
	if err != nil {
		return fmt.Errorf("lock %s: %w (choose another folder with --data)", d.data, err)
	}
	if !locked {
		return fmt.Errorf("another `jetmesh dev` works in %s: stop it, or choose another folder with --data", d.data)
	}
	d.onStop(lock.Unlock)
	return nil
}

// stateDir is where the state of a user's programs belongs by the XDG specification. Root's
// home is closed to the user that runs Postgres for root.
func stateDir(root bool) (string, error) {
	if root {
		return "/var/lib/jetmesh", nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) { // the specification ignores others
		return filepath.Join(dir, "jetmesh"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("where to keep the state? %w: give --data", err)
	}
	return filepath.Join(home, ".local", "state", "jetmesh"), nil
}

// makeDataDir makes the folder, or takes an empty one as made for us. For root the user
// that runs Postgres must be able to pass through it.
func makeDataDir(dir string, root bool) error {
	mode := os.FileMode(0o700)
	if root {
		mode = 0o711
	}
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		return err
	}
	return os.Chmod(dir, mode)
}

// startPostgres runs the private server on the port it had before, if that is still free:
// URLs that users noted stay valid.
func (d *dev) startPostgres(ctx context.Context) error {
	if d.databaseURL != "" {
		return nil
	}
	note := filepath.Join(d.data, "postgres.port")
	cfg := postgres.Config{Dir: filepath.Join(d.data, "postgres"), Durable: true, Port: readPort(note), Logger: d.log}
	server, err := postgres.Start(ctx, cfg)
	if cfg.Port != 0 && errors.Is(err, syscall.EADDRINUSE) {
		d.log.Warn().Int("port", cfg.Port).Msg("the last port of Postgres is taken by another program, choosing a new one")
		cfg.Port = 0
		server, err = postgres.Start(ctx, cfg)
	}
	if err != nil {
		return err
	}
	d.onStop(server.Stop)
	d.postgres, d.databaseURL = server, server.URL("postgres")
	if err := os.WriteFile(note, fmt.Appendln(nil, server.Port()), 0o600); err != nil {
		return fmt.Errorf("note the port of Postgres: %w", err)
	}
	return nil
}

// readPort returns 0 if no port was noted.
func readPort(note string) int {
	text, err := os.ReadFile(note)
	if err != nil {
		return 0
	}
	port, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || port < 1 || port > 65535 {
		return 0
	}
	return port
}

func (d *dev) startNATS(context.Context) error {
	server, err := natsd.Start(natsd.Config{
		ConfigText: jetmesh.NATSConf, StoreDir: filepath.Join(d.data, "nats"), Port: d.natsPort, Logger: d.log,
	})
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w: give one with --nats-port", err)
	}
	if err != nil {
		return err
	}
	d.onStop(server.Stop)
	d.natsURL = server.URL()
	return nil
}

// connect connects as every program does, over TCP.
func (d *dev) connect(ctx context.Context) (err error) {
	if d.pool, err = d.settings.pool(ctx, 16); err != nil {
		return err
	}
	d.onStop(func() error { d.pool.Close(); return nil })
	if d.nc, err = d.connectNATS(ctx, d.log); err != nil {
		return err
	}
	d.onStop(func() error {
		d.nc.SetDisconnectErrHandler(nil) // which would report this as a loss
		d.nc.Close()
		return nil
	})
	return nil
}

func (d *dev) migrate(ctx context.Context) error {
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	defer conn.Release()
	if err := outbox.Schema(d.schema).Migrate(ctx, conn.Conn()); err != nil {
		return err
	}
	return orders.Prepare(ctx, d.pool)
}

// assemble makes what is going to run.
func (d *dev) assemble(ctx context.Context) (err error) {
	if d.relay, err = d.settings.relay(ctx, d.pool, d.nc, mesh.Topology{}, d.log); err != nil {
		return err
	}
	if d.handlers, err = mesh.New(d.nc, mesh.Config{Prefix: d.prefix, Logger: d.log}); err != nil {
		return err
	}
	d.orders = orders.New(d.pool, outbox.Schema(d.schema))
	d.handlers.Handle(d.orders.Subscription())
	return nil
}
