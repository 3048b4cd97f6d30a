package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"jetmesh"
	"jetmesh/internal/bench"
	"jetmesh/internal/natsd"
	"jetmesh/outbox"
)

func newBench(s *settings) *cobra.Command {
	var flags benchFlags
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure throughput, latency and memory on this machine",
		Long: `Measure throughput, latency and memory on this machine.

NATS and the relay run as processes of their own, handlers in this one. Without a database URL a private Postgres
is started; with one, a database of its own is created on that server and dropped afterwards. Postgres must be set
to keep what it commits: with fsync, synchronous_commit or full_page_writes off, bench refuses. Figures go to
stdout, what happens to stderr. Nothing else should run on the machine meanwhile.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("nats-url") {
				return usageError{errors.New("--nats-url has no meaning here: bench starts a NATS server of its own")}
			}
			if err := flags.check(); err != nil {
				return usageError{err}
			}
			// A reader that goes away, as head does, must not end the process before it has cleaned up.
			broken := make(chan os.Signal, 1)
			signal.Notify(broken, syscall.SIGPIPE)
			defer signal.Stop(broken)
			exe, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program's file: %w", err)
			}
			result, err := bench.Run(cmd.Context(), bench.Config{
				Executable: exe, NATSConf: jetmesh.NATSConf,
				DatabaseURL: s.databaseURL, Schema: outbox.Schema(s.schema), Prefix: s.prefix,
				Events: flags.events, Payload: flags.payload, Rate: flags.rate, Duration: time.Duration(flags.seconds) * time.Second,
				Progress: cmd.ErrOrStderr(), Logger: s.logger(cmd.ErrOrStderr()),
			})
			if err != nil {
				return err
			}
			if flags.output == "json" {
				return result.WriteJSON(cmd.OutOrStdout())
			}
			return result.WriteTable(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&flags.output, "output", "o", "table", "table or json")
	f.IntVar(&flags.events, "events", 100_000, "events of each throughput phase")
	f.IntVar(&flags.payload, "payload", 300, "bytes of each event, without headers")
	f.IntVar(&flags.rate, "rate", 200, "events per second while latency is measured")
	f.IntVar(&flags.seconds, "seconds", 10, "how long latency is measured")
	return cmd
}

type benchFlags struct {
	output                         string
	events, payload, rate, seconds int
}

// check reports everything that is wrong at once.
func (f benchFlags) check() error {
	var errs []error
	if f.output != "table" && f.output != "json" {
		errs = append(errs, fmt.Errorf("--output must be table or json, not %q", f.output))
	}
	within := func(flag string, value, least, most int) {
		if value < least || value > most {
			errs = append(errs, fmt.Errorf("--%s must be %d to %d, not %d", flag, least, most, value))
		}
	}
	within("events", f.events, 1000, 1_000_000)
	within("payload", f.payload, 2, 1_000_000)
	within("rate", f.rate, 1, 10_000)
	within("seconds", f.seconds, 1, 600)
	// The events stream keeps everything, headers too, up to its default size.
	const stream, headers = 4 << 30, 1024
	if n := max(f.events, f.rate*(f.seconds+2)); errs == nil && n*(f.payload+headers) > stream {
		errs = append(errs, fmt.Errorf("%d events of --payload %d do not fit the events stream of 4 GiB", n, f.payload))
	}
	return errors.Join(errs...)
}

// newNATSServer is the child process that bench measures with.
func newNATSServer() *cobra.Command {
	return &cobra.Command{
		Use:                "nats-server",
		Short:              "Run a NATS server alone",
		Hidden:             true,
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			log := zerolog.New(cmd.ErrOrStderr()).Level(zerolog.WarnLevel)
			return natsd.RunChild(cmd.Context(), args, cmd.OutOrStdout(), log)
		},
	}
}
