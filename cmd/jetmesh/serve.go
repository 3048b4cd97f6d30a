package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"

	"jetmesh/mesh"
	"jetmesh/outbox"
)

func newServe(s *settings) *cobra.Command {
	var topology mesh.Topology
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the mesh's relay against given servers, until interrupted",
		Long: `Run the mesh's relay against given servers, until interrupted.

Streams and buckets that do not exist are created; the schema must be migrated (jetmesh migrate up). Several
processes may serve the same outbox: one works, the others take over when it ends.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			log := s.logger(cmd.ErrOrStderr())
			pool, err := s.pool(ctx, 8)
			if err != nil {
				return err
			}
			defer pool.Close()
			nc, err := s.connectNATS(ctx, log)
			if err != nil {
				return err
			}
			defer nc.Close()
			relay, err := s.relay(ctx, pool, nc, topology, log)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "jetmesh serve: ready")
			return relay.Run(ctx)
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&topology.Replicas, "replicas", 0, "replicas of the streams to create: 1 or 3 (default 1)")
	flags.Int64Var(&topology.MaxBytes, "max-bytes", 0, "size of the events stream to create, in bytes (default 4 GiB)")
	return cmd
}

// relay prepares the streams and makes a relay that is ready to run.
func (s *settings) relay(ctx context.Context, pool *pgxpool.Pool, nc *nats.Conn, topology mesh.Topology, log zerolog.Logger) (*outbox.Relay, error) {
	m, err := mesh.New(nc, mesh.Config{Prefix: s.prefix, Logger: log})
	if err != nil {
		return nil, err
	}
	if err := m.ApplyTopology(ctx, topology); err != nil {
		return nil, err
	}
	return outbox.NewRelay(pool, m, outbox.RelayConfig{Schema: outbox.Schema(s.schema), Logger: log})
}
