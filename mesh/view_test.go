package mesh_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"jetmesh/mesh"
)

func TestViewListsAndSummarizesFailures(t *testing.T) {
	t.Parallel()
	e := start(t)
	m := e.mesh(mesh.Config{})
	view := mesh.NewView(m)
	if _, fresh := view.Summarize(mesh.RecordFilter{}); !fresh.Stale || !fresh.AsOf.IsZero() {
		t.Errorf("a view that read nothing says %+v", fresh)
	}
	// Some records before the view runs, some while it does.
	fail := func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "dead" {
			return mesh.Permanent(errors.New("never"))
		}
		return mesh.RetryAfter(time.Hour, errors.New("later"))
	}
	e.handle(orders(fail))
	var events []mesh.Event
	publish := func(n int, aggregate string) {
		for range n {
			ev := e.event("orders")
			ev.AggregateID = aggregate
			e.publish(ev)
			events = append(events, ev)
		}
	}
	publish(3, "alive")
	for _, ev := range events {
		e.awaitOutcome(ev.ID, 1)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); view.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	await(t, "the view to be fresh", func() bool { _, fresh := view.Summarize(mesh.RecordFilter{}); return !fresh.Stale })
	publish(4, "dead")
	await(t, "the summary", func() bool {
		groups, _ := view.Summarize(mesh.RecordFilter{})
		return len(groups) == 1 && groups[0].Total == 7
	})
	groups, fresh := view.Summarize(mesh.RecordFilter{})
	if g := groups[0]; g.Retryable != 3 || g.Exhausted != 4 || g.Consumer != "orders" || g.Status != mesh.RecordFailed || g.LastUpdatedAt.IsZero() || fresh.Stale {
		t.Errorf("%+v %+v", g, fresh)
	}
	if groups, _ := view.Summarize(mesh.RecordFilter{AggregateID: "alive"}); len(groups) != 1 || groups[0].Total != 3 {
		t.Errorf("%+v", groups)
	}
	// Pages, the latest first, each record once.
	seen := map[string]bool{}
	cursor, last := "", ""
	for pages := 0; ; pages++ {
		page, next, _, err := view.List(mesh.RecordFilter{Consumer: "orders"}, 2, cursor)
		if err != nil || len(page) > 2 || pages > 4 {
			t.Fatal(page, err)
		}
		for _, r := range page {
			if seen[r.EventID] {
				t.Errorf("%s twice", r.EventID)
			}
			seen[r.EventID] = true
			last = r.AggregateID
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	if len(seen) != 7 || last != "alive" {
		t.Errorf("%d records, the oldest is of %s", len(seen), last)
	}
	for _, c := range []struct {
		limit  int
		cursor string
	}{{0, ""}, {201, ""}, {10, "%%"}, {10, "YWJj"}} {
		if _, _, _, err := view.List(mesh.RecordFilter{}, c.limit, c.cursor); err == nil {
			t.Errorf("limit %d, cursor %q were accepted", c.limit, c.cursor)
		}
	}
	// A server that is away makes it stale, and it says so.
	m.Conn().Close()
	await(t, "the view to be stale", func() bool { _, fresh := view.Summarize(mesh.RecordFilter{}); return fresh.Stale })
}

func TestDeadLettersAreListedShownAndDiscarded(t *testing.T) {
	t.Parallel()
	e := start(t)
	m := e.mesh(mesh.Config{})
	e.handle(orders(func(context.Context, mesh.Delivery[[]byte]) error { return mesh.Permanent(errors.New("ouch — ü")) }))
	const n = 7
	for i := range n {
		ev := e.event("orders")
		ev.AggregateID = fmt.Sprint(i)
		e.publish(ev)
		e.awaitOutcome(ev.ID, 1)
	}
	var got []mesh.DeadLetter
	for cursor := ""; ; {
		page, next, err := m.DeadLetters(t.Context(), mesh.DeadFilter{}, 3, cursor)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, page...)
		if cursor = next; cursor == "" {
			break
		}
	}
	if len(got) != n {
		t.Fatalf("%d dead letters", len(got))
	}
	for i, d := range got {
		if d.AggregateID != fmt.Sprint(n-1-i) || d.Subscription != "orders" || d.ErrorCode != mesh.CodeError || d.ErrorMessage != "ouch — ü" || d.RetryCount != 1 || len(d.Attempts) != 1 || d.DiedAt.IsZero() {
			t.Errorf("%+v", d)
		}
	}
	if page, _, err := m.DeadLetters(t.Context(), mesh.DeadFilter{Consumer: "bills"}, 3, ""); err != nil || len(page) != 0 {
		t.Errorf("of another consumer: %v, %v", page, err)
	}
	shown, err := m.DeadLetter(t.Context(), got[0].Seq)
	if err != nil || len(shown.Payload) == 0 || shown.ID != got[0].ID {
		t.Errorf("%+v, %v", shown, err)
	}
	if err := m.DiscardDeadLetter(t.Context(), got[0].Seq); err != nil {
		t.Fatal(err)
	}
	if _, err := m.DeadLetter(t.Context(), got[0].Seq); !errors.Is(err, mesh.ErrNoDeadLetter) {
		t.Errorf("after discarding: %v", err)
	}
	if err := m.DiscardDeadLetter(t.Context(), got[0].Seq); !errors.Is(err, mesh.ErrNoDeadLetter) {
		t.Errorf("discarded twice: %v", err)
	}
	if page, _, err := m.DeadLetters(t.Context(), mesh.DeadFilter{Consumer: "orders", Type: got[1].Type}, 200, ""); err != nil || len(page) != n-1 {
		t.Errorf("%d left, %v", len(page), err)
	}
}
