package natsd

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/rs/zerolog"
)

// ChildVariable makes a program that calls MaybeChildMain a server.
const ChildVariable = "JETMESH_NATSD_CHILD"

// readyPrefix begins the line by which a parent knows that its child is ready.
const readyPrefix = "nats ready url="

// RunChild runs a server until ctx is canceled. It prints "nats ready url=<url>" to
// out once clients can connect. The arguments:
//
//	-store DIR     JetStream's folder; required
//	-port N        default 0: as the configuration says, else 4222; -1: a free one
//	-config FILE   a NATS configuration file; default: no users, the server's limits
//	-sync-always   flush every message to disk before it is acknowledged
func RunChild(ctx context.Context, args []string, out io.Writer, log zerolog.Logger) error {
	cfg := Config{Logger: log}
	var file string
	flags := flag.NewFlagSet("nats-server", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // the error is returned
	flags.StringVar(&cfg.StoreDir, "store", "", "")
	flags.StringVar(&file, "config", "", "")
	flags.IntVar(&cfg.Port, "port", 0, "")
	flags.BoolVar(&cfg.SyncAlways, "sync-always", false, "")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("natsd: %w", err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("natsd: unknown arguments %q", flags.Args())
	}
	if file != "" {
		var err error
		if cfg.ConfigText, err = os.ReadFile(file); err != nil {
			return fmt.Errorf("natsd: configuration: %w", err)
		}
	}
	s, err := Start(cfg)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, readyPrefix+s.URL()); err != nil {
		return fmt.Errorf("natsd: %w", err)
	}
	<-ctx.Done()
	return s.Stop()
}

// ChildMain is RunChild as a program: with the arguments from the first flag on (a
// command's name may come before), until SIGINT or SIGTERM, with warnings on stderr.
// On an error it says so on stderr and exits with code 1.
func ChildMain() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	args := os.Args[1:]
	if first := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "-") }); first >= 0 {
		args = args[first:]
	}
	log := zerolog.New(os.Stderr).Level(zerolog.WarnLevel)
	if err := RunChild(ctx, args, os.Stdout, log); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// MaybeChildMain runs ChildMain and exits if ChildVariable is set, else it does
// nothing. A TestMain calls it first, so that its test binary can be a server too.
func MaybeChildMain() {
	if os.Getenv(ChildVariable) != "" {
		ChildMain()
		os.Exit(0)
	}
}
