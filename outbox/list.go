package outbox

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"jetmesh/mesh"
)

// A Filter selects events; fields that are set must all match.
type Filter struct {
	Status         string
	Consumer       string
	Type           string
	AggregateType  string
	AggregateID    string
	IdempotencyKey string
	TraceID        string
	CreatedFrom    time.Time // inclusive
	CreatedTo      time.Time // exclusive
}

// Bounds of a page.
const (
	DefaultLimit = 50
	MaxLimit     = 200
)

// A Page is one page of a list, newest first.
type Page struct {
	Items      []Row
	NextCursor string // empty: this is the last page
}

// List reads one page of the events that match, newest first in the order they were written.
// limit is 1 to [MaxLimit]; 0 means [DefaultLimit]. cursor is the NextCursor of the page
// before, "" for the first; it belongs to one filter. Rows written meanwhile do not shift the
// pages.
func List(ctx context.Context, db querier, f Filter, limit int, cursor string) (Page, error) {
	return DefaultSchema.List(ctx, db, f, limit, cursor)
}

// List is [List] for this schema.
func (s Schema) List(ctx context.Context, db querier, f Filter, limit int, cursor string) (Page, error) {
	if err := s.check(); err != nil {
		return Page{}, err
	}
	if limit == 0 {
		limit = DefaultLimit
	}
	if limit < 1 || limit > MaxLimit {
		return Page{}, &mesh.FieldError{Field: "limit", Reason: fmt.Sprintf("must be 1 to %d, not %d", MaxLimit, limit)}
	}
	where, args, err := f.where()
	if err != nil {
		return Page{}, err
	}
	if cursor != "" {
		before, err := f.parseCursor(cursor)
		if err != nil {
			return Page{}, err
		}
		args = append(args, before)
		where = append(where, fmt.Sprintf("o.seq < $%d", len(args)))
	}
	query := `select ` + rowColumns + ` from {{schema}}.outbox o`
	if len(where) > 0 {
		query += ` where ` + strings.Join(where, " and ")
	}
	query += fmt.Sprintf(" order by o.seq desc limit %d", limit+1)
	rows, err := db.Query(ctx, s.sql(query), args...)
	if err != nil {
		return Page{}, fmt.Errorf("outbox: list events: %w", err)
	}
	items, err := pgx.CollectRows(rows, scanRow)
	if err != nil {
		return Page{}, fmt.Errorf("outbox: list events: %w", err)
	}
	page := Page{Items: items}
	if len(items) > limit {
		page.Items = items[:limit]
		page.NextCursor = f.cursor(items[limit-1].Seq)
	}
	return page, nil
}

func (f Filter) where() (conditions []string, args []any, err error) {
	equal := func(column, value string) {
		if value != "" {
			args = append(args, value)
			conditions = append(conditions, fmt.Sprintf("o.%s = $%d", column, len(args)))
		}
	}
	switch f.Status {
	case "", StatusPending, StatusDispatching, StatusDispatched:
	case StatusFailed, StatusSkipped:
		// These rows are always tracked, and the index knows them by that.
		args = append(args, trackedAs(f.Status))
		conditions = append(conditions, fmt.Sprintf("o.tracked_status = any($%d)", len(args)))
	default:
		return nil, nil, &mesh.FieldError{Field: "status", Reason: fmt.Sprintf("must be pending, dispatching, dispatched, failed or skipped, not %.40q", f.Status)}
	}
	for _, v := range []struct{ field, value string }{{"consumer", f.Consumer}, {"eventType", f.Type}, {"aggregateType", f.AggregateType},
		{"aggregateId", f.AggregateID}, {"idempotencyKey", f.IdempotencyKey}, {"traceId", f.TraceID}} {
		if strings.ToValidUTF8(v.value, "") != v.value || strings.ContainsRune(v.value, 0) {
			return nil, nil, &mesh.FieldError{Field: v.field, Reason: "is not valid UTF-8 or holds NUL"}
		}
	}
	equal("status", f.Status)
	equal("consumer", f.Consumer)
	equal("event_type", f.Type)
	equal("aggregate_type", f.AggregateType)
	equal("aggregate_id", f.AggregateID)
	equal("idempotency_key", f.IdempotencyKey)
	equal("trace_id", f.TraceID)
	if !f.CreatedFrom.IsZero() && !f.CreatedTo.IsZero() && !f.CreatedFrom.Before(f.CreatedTo) {
		return nil, nil, &mesh.FieldError{Field: "createdFrom", Reason: "must be before createdTo"}
	}
	if !f.CreatedFrom.IsZero() {
		args = append(args, f.CreatedFrom)
		conditions = append(conditions, fmt.Sprintf("o.created_at >= $%d", len(args)))
	}
	if !f.CreatedTo.IsZero() {
		args = append(args, f.CreatedTo)
		conditions = append(conditions, fmt.Sprintf("o.created_at < $%d", len(args)))
	}
	return conditions, args, nil
}

// A cursor names the last row of a page and the filter it belongs to.
type cursorDoc struct {
	Version int    `json:"v"`
	Before  int64  `json:"s"`
	Filter  []byte `json:"f"`
}

func (f Filter) hash() []byte {
	f.CreatedFrom, f.CreatedTo = f.CreatedFrom.UTC(), f.CreatedTo.UTC()
	data, _ := json.Marshal(f) // strings and times only: cannot fail
	sum := sha256.Sum256(data)
	return sum[:8]
}

func (f Filter) cursor(before int64) string {
	data, _ := json.Marshal(cursorDoc{Version: 1, Before: before, Filter: f.hash()})
	return base64.RawURLEncoding.EncodeToString(data)
}

func (f Filter) parseCursor(cursor string) (before int64, err error) {
	var doc cursorDoc
	data, err := base64.RawURLEncoding.DecodeString(cursor)
	if err == nil {
		err = json.Unmarshal(data, &doc)
	}
	switch {
	case err != nil || doc.Version != 1 || doc.Before < 1:
		return 0, &mesh.FieldError{Field: "cursor", Reason: "is none that a list has returned"}
	case !slices.Equal(doc.Filter, f.hash()):
		return 0, &mesh.FieldError{Field: "cursor", Reason: "belongs to a list with another filter"}
	}
	return doc.Before, nil
}

func checkUUID(field, s string) error {
	if id, err := uuid.Parse(s); err != nil || id.String() != s {
		return &mesh.FieldError{Field: field, Reason: fmt.Sprintf("must be a UUID in canonical form, not %.60q", s)}
	}
	return nil
}
