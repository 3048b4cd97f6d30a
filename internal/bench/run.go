package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/internal/natsd"
	"jetmesh/mesh"
)

// bench is a run and the servers it runs on.
type bench struct {
	Config
	pool         *pgxpool.Pool
	databaseURL  string          // of the run's database: a secret
	postgresDone <-chan struct{} // of the private server; else nil
	nats         *natsd.Child
	nc           *nats.Conn // for the raw loops, and for looking on
	js           jetstream.JetStream
	mesh         *mesh.Mesh // runs nothing
	source       string     // of the raw loops' events
	payload      []byte
	result       Result

	closers []func() error
}

// Run measures everything, one phase after the other. Servers, processes and folders that
// it starts are gone when it returns, also when ctx ends early.
func Run(ctx context.Context, cfg Config) (Result, error) {
	b := &bench{Config: cfg, source: uuid.NewString(), payload: payload(cfg.Payload)}
	err := b.run(ctx)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	for i := len(b.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, b.closers[i]())
	}
	if err != nil {
		return Result{}, fmt.Errorf("bench: %w", err)
	}
	b.result.finish()
	return b.result, nil
}

func (b *bench) run(ctx context.Context) error {
	if err := b.start(ctx); err != nil {
		return err
	}
	for _, p := range []struct {
		name string
		run  func(context.Context, *phase) error
	}{
		{"raw", b.raw}, {"insert", b.insert}, {"relay", b.relay}, {"end_to_end", b.endToEnd}, {"latency", b.latency},
	} {
		if err := b.phase(ctx, p.name, p.run); err != nil {
			return fmt.Errorf("phase %s: %w", p.name, err)
		}
	}
	return nil
}

func (b *bench) start(ctx context.Context) error {
	dir, err := makeFolder()
	if err != nil {
		return err
	}
	b.closers = append(b.closers, func() error { return os.RemoveAll(dir) })
	b.result.Events, b.result.Payload, b.result.Rate, b.result.Seconds = b.Events, b.Payload, b.Rate, b.Duration.Seconds()
	b.result.Concurrency, b.result.Connections = handlerConcurrency, insertConnections
	b.result.CPUs, b.result.GoVersion = runtime.NumCPU(), runtime.Version()
	if err := b.startPostgres(ctx, filepath.Join(dir, "postgres")); err != nil {
		return err
	}
	return b.startNATS(ctx, dir)
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.Progress, "jetmesh bench: "+format+"\n", args...)
}
