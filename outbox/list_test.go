package outbox_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

func TestListFiltersByEveryField(t *testing.T) {
	t.Parallel()
	env := meshtest.WithPool(t, pgtest.Pool(t, meshtest.Migrate))
	var all []mesh.Event
	for i := range 24 {
		e := meshtest.Event([]string{"orders", "bills"}[i%2])
		e.Type = []string{"a.b", "a.c"}[i/2%2]
		e.AggregateType = []string{"order", "bill", "user"}[i%3]
		e.AggregateID = fmt.Sprintf("A-%d", i/4)
		e.IdempotencyKey = fmt.Sprintf("k:%d", i)
		e.TraceID = fmt.Sprintf("t-%d", i/6)
		all = append(all, e)
	}
	written := env.Write(all...)
	for i, status := range []string{outbox.StatusDispatching, outbox.StatusDispatched, outbox.StatusFailed, outbox.StatusSkipped} {
		for j := i; j < len(written); j += 5 {
			if _, err := env.Pool.Exec(t.Context(), `update mesh.outbox set status = $2, tracked_status = case when $2 in ('failed', 'skipped') then $2 end where id = $1`, written[j].Row.ID, status); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := env.Pool.Exec(t.Context(), `update mesh.outbox set created_at = timestamptz '2030-01-01' + seq * interval '1 hour'`); err != nil {
		t.Fatal(err)
	}
	var rows []outbox.Row
	for _, w := range written {
		row, _ := env.Row(w.Row.ID)
		rows = append(rows, row)
	}
	from, to := rows[5].CreatedAt, rows[15].CreatedAt
	for name, c := range map[string]struct {
		filter  outbox.Filter
		matches func(outbox.Row) bool
	}{
		"all":             {outbox.Filter{}, func(outbox.Row) bool { return true }},
		"pending":         {outbox.Filter{Status: "pending"}, func(r outbox.Row) bool { return r.Status == "pending" }},
		"dispatching":     {outbox.Filter{Status: "dispatching"}, func(r outbox.Row) bool { return r.Status == "dispatching" }},
		"dispatched":      {outbox.Filter{Status: "dispatched"}, func(r outbox.Row) bool { return r.Status == "dispatched" }},
		"failed":          {outbox.Filter{Status: "failed"}, func(r outbox.Row) bool { return r.Status == "failed" }},
		"skipped":         {outbox.Filter{Status: "skipped"}, func(r outbox.Row) bool { return r.Status == "skipped" }},
		"consumer":        {outbox.Filter{Consumer: "bills"}, func(r outbox.Row) bool { return r.Consumer == "bills" }},
		"type":            {outbox.Filter{Type: "a.c"}, func(r outbox.Row) bool { return r.Type == "a.c" }},
		"aggregate type":  {outbox.Filter{AggregateType: "user"}, func(r outbox.Row) bool { return r.AggregateType == "user" }},
		"aggregate":       {outbox.Filter{AggregateID: "A-3"}, func(r outbox.Row) bool { return r.AggregateID == "A-3" }},
		"key":             {outbox.Filter{IdempotencyKey: "k:7"}, func(r outbox.Row) bool { return r.IdempotencyKey == "k:7" }},
		"trace":           {outbox.Filter{TraceID: "t-2"}, func(r outbox.Row) bool { return r.TraceID == "t-2" }},
		"created":         {outbox.Filter{CreatedFrom: from, CreatedTo: to}, func(r outbox.Row) bool { return !r.CreatedAt.Before(from) && r.CreatedAt.Before(to) }},
		"several":         {outbox.Filter{Status: "failed", Consumer: "orders"}, func(r outbox.Row) bool { return r.Status == "failed" && r.Consumer == "orders" }},
		"nothing matches": {outbox.Filter{Consumer: "nobody"}, func(outbox.Row) bool { return false }},
	} {
		t.Run(name, func(t *testing.T) {
			var want []string
			for i := len(rows) - 1; i >= 0; i-- {
				if c.matches(rows[i]) {
					want = append(want, rows[i].ID)
				}
			}
			for _, limit := range []int{1, 3, 200} {
				var got []string
				cursor := ""
				for {
					page, err := outbox.List(t.Context(), env.Pool, c.filter, limit, cursor)
					if err != nil {
						t.Fatal(err)
					}
					if len(page.Items) > limit {
						t.Fatalf("%d items on a page of %d", len(page.Items), limit)
					}
					for _, r := range page.Items {
						got = append(got, r.ID)
					}
					if cursor = page.NextCursor; cursor == "" {
						break
					}
				}
				if strings.Join(got, " ") != strings.Join(want, " ") {
					t.Errorf("limit %d: got %v, want %v", limit, got, want)
				}
			}
		})
	}
}

func TestPagesDoNotShiftWhenRowsAreWritten(t *testing.T) {
	t.Parallel()
	env := meshtest.WithPool(t, pgtest.Pool(t, meshtest.Migrate))
	old := env.Write(events("orders", 4)...)
	page, err := outbox.List(t.Context(), env.Pool, outbox.Filter{}, 2, "")
	if err != nil {
		t.Fatal(err)
	}
	env.Write(events("bills", 5)...)
	next, err := outbox.List(t.Context(), env.Pool, outbox.Filter{}, 2, page.NextCursor)
	if err != nil || len(next.Items) != 2 || next.Items[0].ID != old[1].Row.ID || next.NextCursor != "" {
		t.Errorf("%+v, %v", next, err)
	}
}

func TestListRefusesBadInputByName(t *testing.T) {
	t.Parallel()
	env := meshtest.WithPool(t, pgtest.Pool(t, meshtest.Migrate))
	env.Write(events("orders", 3)...)
	page, err := outbox.List(t.Context(), env.Pool, outbox.Filter{Consumer: "orders"}, 1, "")
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for name, c := range map[string]struct {
		filter outbox.Filter
		limit  int
		cursor string
		field  string
	}{
		"status":                   {outbox.Filter{Status: "done"}, 0, "", "status"},
		"limit too large":          {outbox.Filter{}, 201, "", "limit"},
		"limit negative":           {outbox.Filter{}, -1, "", "limit"},
		"cursor is garbage":        {outbox.Filter{}, 0, "%%%", "cursor"},
		"cursor is no JSON":        {outbox.Filter{}, 0, "YWJj", "cursor"},
		"cursor of another filter": {outbox.Filter{Consumer: "bills"}, 0, page.NextCursor, "cursor"},
		"NUL":                      {outbox.Filter{AggregateID: "a\x00"}, 0, "", "aggregateId"},
		"broken UTF-8":             {outbox.Filter{TraceID: "\xff"}, 0, "", "traceId"},
		"empty period":             {outbox.Filter{CreatedFrom: now, CreatedTo: now}, 0, "", "createdFrom"},
	} {
		_, err := outbox.List(t.Context(), env.Pool, c.filter, c.limit, c.cursor)
		var field *mesh.FieldError
		if !errors.As(err, &field) || field.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := outbox.Get(t.Context(), env.Pool, "42"); err == nil {
		t.Error("Get took an id that is no UUID")
	}
}
