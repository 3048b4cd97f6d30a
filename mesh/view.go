package mesh

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// A View keeps the failure records in memory, for lists and summaries. [View.Run] watches the
// bucket; every method may be called at any time and says how fresh its answer is.
type View struct {
	m *Mesh

	mu      sync.Mutex
	records map[string]viewed // by subscription and event id
	asOf    time.Time         // when the view last agreed with the bucket
}

type viewed struct {
	Record
	revision uint64
}

// NewView makes a view; it is empty and stale until [View.Run] has read the bucket.
func NewView(m *Mesh) *View { return &View{m: m, records: map[string]viewed{}} }

// viewFresh is how long a view may go without a sign of life from the server and still count as
// fresh; viewReconcile is the time between full comparisons with the bucket, since a watch may
// miss what happened while it was deaf.
const (
	viewFresh     = 5 * time.Second
	viewReconcile = time.Minute
)

// Run keeps the view up to date until ctx ends. Faults it waits out with growing pauses, while
// the view says that it is stale.
func (v *View) Run(ctx context.Context) error {
	pause := 100 * time.Millisecond
	for ctx.Err() == nil {
		began := time.Now()
		if err := v.round(ctx); err != nil && ctx.Err() == nil {
			v.m.log.Warn().Err(err).Msg("view of failure records is stale, watching again")
		}
		if time.Since(began) > viewFresh {
			pause = 100 * time.Millisecond
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, 10*time.Second)
	}
	return nil
}

// round reads the whole bucket, then follows changes until the next reconciliation or a fault.
func (v *View) round(ctx context.Context) error {
	l := v.m.ledger
	filter := l.subject("*", "*")
	all := map[string]viewed{}
	if err := l.each(ctx, filter, func(msg jetstream.Msg) { viewRecord(all, msg) }); err != nil {
		return err
	}
	v.mu.Lock()
	v.records, v.asOf = all, time.Now()
	v.mu.Unlock()

	s, err := l.js.Stream(ctx, "KV_"+l.names.FailuresBucket())
	if err != nil {
		return err
	}
	c, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy})
	if err != nil {
		return err
	}
	cc, err := c.Consume(func(msg jetstream.Msg) {
		v.mu.Lock()
		defer v.mu.Unlock()
		viewRecord(v.records, msg)
	})
	if err != nil {
		return err
	}
	defer func() { cc.Stop(); <-cc.Closed() }()
	reconcile := time.NewTimer(viewReconcile)
	defer reconcile.Stop()
	alive := time.NewTicker(viewFresh / 5)
	defer alive.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-reconcile.C:
			return nil
		case <-cc.Closed():
			return fmt.Errorf("mesh: the watch of failure records was closed")
		case <-alive.C:
		}
		// Fresh only while the watch is known to have received everything there is.
		info, err := c.Info(ctx)
		if err != nil {
			return fmt.Errorf("mesh: ask for the watch of failure records: %w", err)
		}
		if info.NumPending == 0 {
			v.mu.Lock()
			v.asOf = time.Now()
			v.mu.Unlock()
		}
	}
}

// viewRecord takes one message of the bucket over, unless a newer one was there before.
func viewRecord(into map[string]viewed, msg jetstream.Msg) {
	meta, err := msg.Metadata()
	if err != nil {
		return
	}
	tokens := strings.Split(msg.Subject(), ".")
	key := strings.Join(tokens[len(tokens)-2:], ".")
	if old, ok := into[key]; ok && old.revision >= meta.Sequence.Stream {
		return
	}
	if msg.Headers().Get("KV-Operation") != "" {
		delete(into, key)
		return
	}
	rec := viewed{revision: meta.Sequence.Stream}
	if json.Unmarshal(msg.Data(), &rec.Record) == nil {
		into[key] = rec
	}
}

// Freshness says what a view's answer is worth.
type Freshness struct {
	AsOf  time.Time // the view showed everything that was stored by then; zero: never yet
	Stale bool      // it may lack what happened since
}

func (v *View) freshness() Freshness {
	return Freshness{AsOf: v.asOf, Stale: time.Since(v.asOf) > viewFresh}
}

// A RecordFilter selects failure records; fields that are set must all match.
type RecordFilter struct {
	Subscription, Consumer, EventType, AggregateType, AggregateID, IdempotencyKey, TraceID, Status string
	UpdatedFrom, UpdatedTo                                                                         time.Time // inclusive, exclusive
}

func (f RecordFilter) matches(r *Record) bool {
	for _, p := range [][2]string{{f.Subscription, r.Subscription}, {f.Consumer, r.Consumer}, {f.EventType, r.EventType}, {f.AggregateType, r.AggregateType},
		{f.AggregateID, r.AggregateID}, {f.IdempotencyKey, r.IdempotencyKey}, {f.TraceID, r.TraceID}, {f.Status, r.Status}} {
		if p[0] != "" && p[0] != p[1] {
			return false
		}
	}
	return (f.UpdatedFrom.IsZero() || !r.UpdatedAt.Before(f.UpdatedFrom)) && (f.UpdatedTo.IsZero() || r.UpdatedAt.Before(f.UpdatedTo))
}

// List returns one page of records, the latest change first. limit is 1 to 200; cursor is what the
// page before returned, "" for the first; the cursor returned is "" on the last page. A record
// that changes between two pages moves to the front and is not shown again.
func (v *View) List(f RecordFilter, limit int, cursor string) (page []Record, next string, fresh Freshness, err error) {
	if limit < 1 || limit > 200 {
		return nil, "", Freshness{}, fieldErrorf("limit", "must be 1 to 200, not %d", limit)
	}
	below := ^uint64(0)
	if cursor != "" {
		data, decodeErr := base64.RawURLEncoding.DecodeString(cursor)
		if _, scanErr := fmt.Sscanf(string(data), "r1.%d", &below); decodeErr != nil || scanErr != nil {
			return nil, "", Freshness{}, fieldErrorf("cursor", "is none that a list has returned")
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	var found []viewed
	for _, r := range v.records {
		if r.revision < below && f.matches(&r.Record) {
			found = append(found, r)
		}
	}
	slices.SortFunc(found, func(a, b viewed) int { return cmp.Compare(b.revision, a.revision) })
	if len(found) > limit {
		found = found[:limit]
		next = base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "r1.%d", found[limit-1].revision))
	}
	for _, r := range found {
		page = append(page, r.Record)
	}
	return page, next, v.freshness(), nil
}

// A Summary is one group of the failure summary.
type Summary struct {
	Consumer, EventType, AggregateType, Status string
	Total, Retryable, Exhausted                int
	LastUpdatedAt                              time.Time
}

// Summarize counts the failed and skipped records that match, by consumer, event type, aggregate
// type and status. A failed record is retryable while another attempt is planned.
func (v *View) Summarize(f RecordFilter) ([]Summary, Freshness) {
	v.mu.Lock()
	defer v.mu.Unlock()
	groups := map[[4]string]*Summary{}
	for _, r := range v.records {
		if r.Status != RecordFailed && r.Status != RecordSkipped || !f.matches(&r.Record) {
			continue
		}
		key := [4]string{r.Consumer, r.EventType, r.AggregateType, r.Status}
		g := groups[key]
		if g == nil {
			g = &Summary{Consumer: r.Consumer, EventType: r.EventType, AggregateType: r.AggregateType, Status: r.Status}
			groups[key] = g
		}
		g.Total++
		switch {
		case r.Exhausted:
			g.Exhausted++
		case r.Status == RecordFailed:
			g.Retryable++
		}
		if r.UpdatedAt.After(g.LastUpdatedAt) {
			g.LastUpdatedAt = r.UpdatedAt
		}
	}
	list := make([]Summary, 0, len(groups))
	for _, g := range groups {
		list = append(list, *g)
	}
	slices.SortFunc(list, func(a, b Summary) int {
		return cmp.Or(strings.Compare(a.Consumer, b.Consumer), strings.Compare(a.EventType, b.EventType),
			strings.Compare(a.AggregateType, b.AggregateType), strings.Compare(a.Status, b.Status))
	})
	return list, v.freshness()
}
