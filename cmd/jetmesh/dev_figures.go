package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// figures are what the line shows: what this process did since it started, and how the
// outbox stands.
type figures struct {
	placed, published, booked int64
	pending, failed           int64 // rows; at most mostRows of each are counted
	latency                   time.Duration
	latencyKnown              bool // something was booked in the last second
}

const mostRows = 5000

func (f figures) String() string {
	rows := func(n int64) string {
		if n >= mostRows {
			return fmt.Sprintf("%d+", mostRows)
		}
		return fmt.Sprint(n)
	}
	latency := "-"
	if f.latencyKnown {
		latency = f.latency.Round(100 * time.Microsecond).String()
	}
	return fmt.Sprintf("placed %d  published %d  booked %d  pending %s  failed %s  p50 %s",
		f.placed, f.published, f.booked, rows(f.pending), rows(f.failed), latency)
}

// showFigures keeps the line up to date.
func (d *dev) showFigures(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		f, err := d.figures(ctx)
		if err == nil {
			d.screen.show(f.String())
		} else if ctx.Err() == nil {
			d.log.Debug().Err(err).Msg("figures could not be read")
		}
	}
}

// printFigures writes how it ended, unless the database has gone.
func (d *dev) printFigures(ctx context.Context) {
	if f, err := d.figures(ctx); err == nil {
		fmt.Fprintln(d.screen, f)
	}
}

func (d *dev) figures(ctx context.Context) (f figures, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	placed, relay := d.orders.Stats(), d.relay.Stats()
	f.placed, f.booked, f.published = placed.Placed, placed.Booked, relay.Published
	if f.latency, f.latencyKnown, err = d.orders.Latency(ctx, time.Second); err != nil {
		return f, err
	}
	// Rows are settled, tracked, or above relay_low, which follows the relay at some seconds'
	// distance. Both indexes are read up to a bound: no outbox is too large for this.
	query := strings.ReplaceAll(`
		select
			(select count(*) from (select from {{schema}}.outbox where tracked_status = 'failed' limit $1) failed),
			(select count(*) from (select from {{schema}}.outbox where tracked_status in ('pending', 'dispatching') limit $1) waiting) +
			(select count(*) from (
				select status, tracked_status from {{schema}}.outbox where seq >= (select relay_low from {{schema}}.meta) order by seq desc limit $1
			) latest where status in ('pending', 'dispatching') and tracked_status is null)`, "{{schema}}", pgx.Identifier{d.schema}.Sanitize())
	err = d.pool.QueryRow(ctx, query, mostRows).Scan(&f.failed, &f.pending)
	return f, err
}
