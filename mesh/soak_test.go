//go:build soak

package mesh_test

import "testing"

// maxAckPending is the durable's limit.
const maxAckPending = 100_000

// Up to the durable's limit parked retries hold up nothing. At the limit fresh events wait in the
// stream, retries that are due go on, and each that ends makes room for one fresh event.
func TestSoakParkedRetriesUpToTheLimitOfTheDurable(t *testing.T) {
	p := newParking(t)
	const brief, fresh = 10, 30
	p.park(maxAckPending - brief)
	p.handleFresh(1000)

	for range brief {
		ev := p.event("orders")
		ev.AggregateID = "brief"
		p.publish(ev)
	}
	before := p.fresh.Load()
	p.publishMany(fresh, "orders")
	await(t, "the durable to be full", func() bool { return p.brief.Load() == brief && p.durable("orders").NumAckPending == maxAckPending })
	if c := p.durable("orders"); c.NumPending != fresh || p.fresh.Load() != before {
		t.Errorf("%d fresh events wait and %d ran, want %d and none", c.NumPending, p.fresh.Load()-before, fresh)
	}
	await(t, "the fresh events to run", func() bool { return p.fresh.Load() == before+fresh })
	await(t, "only parked events to be left", func() bool { return p.durable("orders").NumAckPending == maxAckPending-brief })
	if got := p.parked.Load(); got != maxAckPending-brief {
		t.Errorf("%d runs of parked events, want %d", got, maxAckPending-brief)
	}
}
