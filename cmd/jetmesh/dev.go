package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"jetmesh/examples/orders"
	"jetmesh/internal/postgres"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// Bounds of --rate. More than that is the work of `jetmesh bench`.
const minRate, maxRate = 0.01, 1000

func newDev(s *settings) *cobra.Command {
	d := &dev{}
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a whole mesh on this machine, with nothing configured, until interrupted",
		Long: `Run a whole mesh on this machine, with nothing configured, until interrupted: a NATS server, a Postgres, the
relay, and an example service that places orders and books them.

It prints the two variables with which a program of yours takes part. Postgres is a private one, made from the
binaries that are installed, unless --database-url or JETMESH_DATABASE_URL names another. What was written is
there again at the next start. Interrupt to drain and stop everything that was started; interrupt again to kill it.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			flags := cmd.Flags()
			switch {
			case d.rate != 0 && !(d.rate >= minRate && d.rate <= maxRate): // not a number is neither
				return usageError{fmt.Errorf("--rate must be 0, or between %v and %v, not %v", minRate, maxRate, d.rate)}
			case d.natsPort < 0 || d.natsPort > 65535:
				return usageError{fmt.Errorf("--nats-port must be between 1 and 65535, not %d", d.natsPort)}
			case flags.Changed("nats-url"):
				return usageError{errors.New("--nats-url is not for dev, which runs a NATS server of its own: jetmesh serve uses a given one")}
			}
			d.settings = *s
			if !flags.Changed("database-url") {
				// Not DATABASE_URL: that may be the database of anything on a developer's machine.
				d.databaseURL = os.Getenv("JETMESH_DATABASE_URL")
			}
			d.screen = newScreen(cmd.OutOrStdout())
			d.log = d.screen.logger(s, cmd.ErrOrStderr())
			return d.run(cmd.Context())
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&d.data, "data", "", "folder of all state (default $XDG_STATE_HOME/jetmesh or ~/.local/state/jetmesh; for root /var/lib/jetmesh)")
	flags.Float64Var(&d.rate, "rate", 5, "orders a second that the example service places; 0 for none")
	flags.IntVar(&d.natsPort, "nats-port", 0, "port of NATS on 127.0.0.1 (default as nats.conf says: 4222)")
	return cmd
}

// dev is `jetmesh dev`: what it was told and what it started.
type dev struct {
	settings // with the URLs of the servers that were started
	data     string
	rate     float64
	natsPort int
	screen   *screen
	log      zerolog.Logger

	postgres *postgres.Server // nil: the database is the user's
	pool     *pgxpool.Pool
	nc       *nats.Conn
	relay    *outbox.Relay
	handlers *mesh.Mesh
	orders   *orders.Service

	stops []func() error // of what was started, in that order
}

// run starts everything, works until ctx ends or a part fails, and stops everything in the
// opposite order.
func (d *dev) run(ctx context.Context) error {
	err := d.start(ctx)
	if err == nil {
		err = d.work(ctx)
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = nil // interrupted while it started
	}
	for _, stop := range slices.Backward(d.stops) {
		err = errors.Join(err, stop())
	}
	return err
}

func (d *dev) onStop(stop func() error) { d.stops = append(d.stops, stop) }

// printReady tells how to take part. A password stands here only if dev made it.
func (d *dev) printReady(w io.Writer) {
	fmt.Fprintf(w, "jetmesh dev: ready\n\nFor a program of yours, in another terminal:\n\n")
	if d.postgres != nil {
		fmt.Fprintf(w, "  export JETMESH_DATABASE_URL='%s'\n", d.databaseURL)
	} else {
		fmt.Fprintf(w, "  export JETMESH_DATABASE_URL=…    # the one given to this command\n")
	}
	fmt.Fprintf(w, "  export JETMESH_NATS_URL='%s'\n\n", d.natsURL)
	fmt.Fprintf(w, "State is in %s. Interrupt (Ctrl-C) to stop.\n\n", d.data)
}
