package mesh_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"jetmesh/internal/natsd"
	"jetmesh/mesh"
)

// A parking is a subscription whose events of aggregate "park" wait for an hour after their first
// run, and those of "brief" for a few seconds.
type parking struct {
	*env
	parked, brief, fresh atomic.Int64 // calls
}

const briefly = 5 * time.Second

func newParking(t *testing.T) *parking {
	p := &parking{env: startWith(t, natsd.Config{}, mesh.Topology{MaxBytes: 512 << 20, MaxLedger: 512 << 20, MaxDeadBytes: 64 << 20})}
	sub := mesh.OnRaw("orders", ordered, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		switch {
		case d.AggregateID == "park":
			p.parked.Add(1)
			return mesh.RetryAfter(time.Hour, errBoom)
		case d.AggregateID == "brief" && d.Attempt == 1:
			p.brief.Add(1)
			return mesh.RetryAfter(briefly, errBoom)
		case d.AggregateID != "brief":
			p.fresh.Add(1)
		}
		return nil
	})
	sub.Concurrency = 200
	p.handle(sub)
	return p
}

// park publishes n events that fail, and waits until they have.
func (p *parking) park(n int64) {
	p.t.Helper()
	p.publishAtOnce(int(n), func(int) mesh.Event {
		ev := p.event("orders")
		ev.AggregateID = "park"
		return ev
	})
	for seen := int64(0); seen < n; { // as long as there is progress
		before := seen
		await(p.t, "more events to fail", func() bool { seen = p.parked.Load(); return seen > before })
	}
}

// handleFresh publishes n events and waits for their outcomes.
func (p *parking) handleFresh(n int) {
	p.t.Helper()
	began := time.Now()
	before := p.fresh.Load()
	p.publishMany(n, "orders")
	await(p.t, "fresh events", func() bool { return p.fresh.Load() == before+int64(n) })
	p.t.Logf("%d fresh events took %s", n, time.Since(began))
}

func TestParkedRetriesDoNotStopFreshEvents(t *testing.T) {
	t.Parallel()
	p := newParking(t)
	const n = 20_000
	p.park(n)
	p.handleFresh(100)
	await(t, "the fresh events to be answered", func() bool { return p.durable("orders").NumAckPending == n })
	if got := p.parked.Load(); got != n {
		t.Errorf("%d runs of parked events, want %d", got, n)
	}
}
