// Command jetmesh runs and operates a mesh: `jetmesh dev` on one machine with nothing
// configured, `jetmesh serve` against servers that exist.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes. Scripts depend on them.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	// The first signal drains; a second one, after the default action is back, kills.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// usageError marks an error of the command line, as against one of the work.
type usageError struct{ error }

// run is main without the process: answers go to stdout, logs and errors to stderr.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usageError{}):
		fmt.Fprintf(stderr, "jetmesh: %v\nRun `jetmesh help` for the commands and their flags.\n", err)
		return exitUsage
	default:
		fmt.Fprintf(stderr, "jetmesh: %v\n", err)
		return exitFailure
	}
}

func newRoot() *cobra.Command {
	var s settings
	root := &cobra.Command{
		Use:   "jetmesh",
		Short: "The event mesh for Go services on Postgres and NATS JetStream",
		Long: `The event mesh for Go services on Postgres and NATS JetStream.

Exit codes: 0 done, 1 failed, 2 the command line is wrong.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          usage(cobra.NoArgs),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	s.register(root.PersistentFlags())
	root.PersistentPreRunE = func(*cobra.Command, []string) error { return s.complete() }
	root.AddCommand(newServe(&s), newMigrate(&s), newDev(&s), newBench(&s), newNATSServer())
	return root
}

// usage makes what an argument check finds a usage error.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}
