package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"jetmesh/outbox"
)

func newMigrate(s *settings) *cobra.Command {
	cmd := &cobra.Command{Use: "migrate", Short: "Bring the outbox's Postgres schema to this program's version, or back", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	with := func(do func(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, schema outbox.Schema) error) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, _ []string) error {
			conn, err := s.connectDB(cmd.Context())
			if err != nil {
				return err
			}
			defer conn.Close(context.Background())
			return do(cmd.Context(), cmd, conn, outbox.Schema(s.schema))
		}
	}
	up := &cobra.Command{Use: "up", Short: "Create the schema and apply what it lacks; safe in many processes at once", Args: usage(cobra.NoArgs),
		RunE: with(func(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, schema outbox.Schema) error {
			if err := schema.Migrate(ctx, conn); err != nil {
				return err
			}
			return printStatus(ctx, cmd, conn, schema)
		})}

	var target int
	var force bool
	down := &cobra.Command{Use: "down", Short: "Take back the migrations above a version", Args: usage(cobra.NoArgs),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("to") {
				return usageError{errors.New("migrate down: to which version? Give --to; 0 takes back everything")}
			}
			return nil
		},
		RunE: with(func(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, schema outbox.Schema) error {
			if err := schema.MigrateDown(ctx, conn, target, force); err != nil {
				return err
			}
			return printStatus(ctx, cmd, conn, schema)
		})}
	down.Flags().IntVar(&target, "to", 0, "version to go back to; 0 takes back everything, events included")
	down.Flags().BoolVar(&force, "force", false, "also when the outbox holds unsettled events")

	status := &cobra.Command{Use: "status", Short: "List the migrations and when they were applied", Args: usage(cobra.NoArgs), RunE: with(printStatus)}
	validate := &cobra.Command{Use: "validate", Short: "Fail unless the schema is exactly at this program's version", Args: usage(cobra.NoArgs),
		RunE: with(func(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, schema outbox.Schema) error {
			if err := schema.ValidateMigrations(ctx, conn); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "schema %s is at this program's version\n", schema)
			return nil
		})}

	var from int
	sql := &cobra.Command{Use: "sql", Short: "Print the SQL of the migrations, for a tool of your own", Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := outbox.Schema(s.schema).MigrationSQL(from)
			if err != nil {
				return err
			}
			fmt.Fprint(cmd.OutOrStdout(), text)
			return nil
		}}
	sql.Flags().IntVar(&from, "above", 0, "only migrations above this version")
	cmd.AddCommand(up, down, status, validate, sql)
	return cmd
}

func printStatus(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, schema outbox.Schema) error {
	all, err := schema.MigrationStatus(ctx, conn)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "VERSION\tNAME\tAPPLIED")
	for _, m := range all {
		applied := "no"
		if !m.AppliedAt.IsZero() {
			applied = m.AppliedAt.UTC().Format(time.RFC3339)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\n", m.Version, m.Name, applied)
	}
	return w.Flush()
}
