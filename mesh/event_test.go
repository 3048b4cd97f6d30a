package mesh_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"jetmesh/internal/natsd"
	"jetmesh/mesh"
)

func valid() mesh.Event {
	return mesh.Event{Consumer: "orders", Type: ordered, AggregateType: "order", AggregateID: "O-1", Payload: []byte(`{}`)}
}

func TestBadEventIsRefusedByTheFieldsName(t *testing.T) {
	type event = mesh.Event
	header := func(key, value string) func(*event) {
		return func(e *event) { e.Headers = map[string]string{key: value} }
	}
	long := strings.Repeat("n", 5000)
	for _, c := range []struct {
		name  string
		spoil func(*event)
		field string
	}{
		{"no consumer", func(e *event) { e.Consumer = "" }, "consumer"},
		{"wildcard * in consumer", func(e *event) { e.Consumer = "a.*" }, "consumer"},
		{"wildcard > as consumer", func(e *event) { e.Consumer = ">" }, "consumer"},
		{"dot in consumer", func(e *event) { e.Consumer = "a.b" }, "consumer"},
		{"space in consumer", func(e *event) { e.Consumer = "a b" }, "consumer"},
		{"control character in consumer", func(e *event) { e.Consumer = "a\x01" }, "consumer"},
		{"NUL in consumer", func(e *event) { e.Consumer = "a\x00" }, "consumer"},
		{"broken UTF-8 in consumer", func(e *event) { e.Consumer = "a\xff" }, "consumer"},
		{"letter beyond ASCII in consumer", func(e *event) { e.Consumer = "café" }, "consumer"},
		{"line break in consumer", func(e *event) { e.Consumer = "a\r\nPUB x 1" }, "consumer"},
		{"consumer of 65 bytes", func(e *event) { e.Consumer = long[:65] }, "consumer"},
		{"consumer of 5000 bytes", func(e *event) { e.Consumer = long }, "consumer"},

		{"no type", func(e *event) { e.Type = "" }, "eventType"},
		{"wildcard * as type", func(e *event) { e.Type = mesh.AnyType }, "eventType"},
		{"wildcard * in type", func(e *event) { e.Type = "a.*" }, "eventType"},
		{"wildcard > in type", func(e *event) { e.Type = "a.>" }, "eventType"},
		{"empty token in type", func(e *event) { e.Type = "a..b" }, "eventType"},
		{"empty first token", func(e *event) { e.Type = ".a" }, "eventType"},
		{"empty last token", func(e *event) { e.Type = "a." }, "eventType"},
		{"space in type", func(e *event) { e.Type = "a b" }, "eventType"},
		{"NUL in type", func(e *event) { e.Type = "a\x00" }, "eventType"},
		{"broken UTF-8 in type", func(e *event) { e.Type = "a\xc3" }, "eventType"},
		{"type of 129 bytes", func(e *event) { e.Type = long[:129] }, "eventType"},
		{"type of 5000 bytes", func(e *event) { e.Type = strings.Repeat("a.", 2500) + "a" }, "eventType"},

		{"no aggregate type", func(e *event) { e.AggregateType = "" }, "aggregateType"},
		{"NUL in aggregate type", func(e *event) { e.AggregateType = "a\x00" }, "aggregateType"},
		{"no aggregate id", func(e *event) { e.AggregateID = "" }, "aggregateId"},
		{"line break in aggregate id", func(e *event) { e.AggregateID = "a\r\nb" }, "aggregateId"},
		{"broken UTF-8 in aggregate id", func(e *event) { e.AggregateID = "a\xe2\x82" }, "aggregateId"},
		{"C1 control in aggregate id", func(e *event) { e.AggregateID = "a\u0085" }, "aggregateId"},
		{"line separator in aggregate id", func(e *event) { e.AggregateID = "a\u2028" }, "aggregateId"},
		{"aggregate id of 256 bytes", func(e *event) { e.AggregateID = long[:256] }, "aggregateId"},
		{"aggregate id of 5000 bytes", func(e *event) { e.AggregateID = long }, "aggregateId"},

		{"space in key", func(e *event) { e.IdempotencyKey = "a b" }, "key.key"},
		{"wildcard in key", func(e *event) { e.IdempotencyKey = "a*" }, "key.key"},
		{"broken UTF-8 in key", func(e *event) { e.IdempotencyKey = "a\xff" }, "key.key"},
		{"key of 5000 bytes", func(e *event) { e.IdempotencyKey = long }, "key.key"},

		{"bad UUID", func(e *event) { e.ID = "1" }, "id"},
		{"UUID in upper case", func(e *event) { e.ID = strings.ToUpper(uuid.NewString()) }, "id"},
		{"UUID in braces", func(e *event) { e.ID = "{" + uuid.NewString() + "}" }, "id"},
		{"UUID as URN", func(e *event) { e.ID = "urn:uuid:" + uuid.NewString() }, "id"},

		{"space in trace id", func(e *event) { e.TraceID = "a b" }, "traceId"},
		{"line break in trace id", func(e *event) { e.TraceID = "a\r\nNats-Rollup: all" }, "traceId"},
		{"trace id of 129 bytes", func(e *event) { e.TraceID = long[:129] }, "traceId"},
		{"line break in traceparent", func(e *event) { e.TraceParent = "00-1\r\nNats-Rollup: all" }, "traceParent"},
		{"broken UTF-8 in tracestate", func(e *event) { e.TraceState = "a=\xff" }, "traceState"},
		{"white space around tracestate", func(e *event) { e.TraceState = " a=b" }, "traceState"},

		{"retries below never", func(e *event) { e.MaxRetries = -2 }, "maxRetries"},
		{"retries above 1000", func(e *event) { e.MaxRetries = 1001 }, "maxRetries"},
		{"time without RFC 3339 form", func(e *event) { e.Time = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }, "time"},
		{"time before the year 0", func(e *event) { e.Time = time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC) }, "time"},

		{"no payload", func(e *event) { e.Payload = nil }, "payload"},
		{"invalid JSON", func(e *event) { e.Payload = []byte(`{"a":`) }, "payload"},
		{"two JSON values", func(e *event) { e.Payload = []byte(`{} {}`) }, "payload"},
		{"JSON behind a byte order mark", func(e *event) { e.Payload = []byte("\ufeff{}") }, "payload"},
		{"invalid JSON of a derived type", func(e *event) { e.ContentType, e.Payload = "application/vnd.order+json", []byte("x") }, "payload"},
		{"invalid JSON, type in capitals", func(e *event) { e.ContentType, e.Payload = "Application/JSON; charset=utf-8", []byte("x") }, "payload"},
		{"payload of 2 MB", func(e *event) { e.Payload = []byte(`"` + strings.Repeat("x", 2<<20) + `"`) }, "payload"},

		{"content type without a slash", func(e *event) { e.ContentType = "json" }, "contentType"},
		{"content type without a subtype", func(e *event) { e.ContentType = "text/" }, "contentType"},
		{"content type with half a parameter", func(e *event) { e.ContentType = "text/plain; charset" }, "contentType"},
		{"line break in content type", func(e *event) { e.ContentType = "text/plain\r\nNats-Rollup: all" }, "contentType"},
		{"content type of 129 bytes", func(e *event) { e.ContentType = "text/" + long[:124] }, "contentType"},

		{"empty header key", header("", "v"), "headers"},
		{"space in header key", header("a b", "v"), "headers"},
		{"colon in header key", header("a:b", "v"), "headers"},
		{"line break in header key", header("a\r\nNats-Rollup", "v"), "headers"},
		{"NUL in header key", header("a\x00", "v"), "headers"},
		{"letter beyond ASCII in header key", header("ä", "v"), "headers"},
		{"header key of 129 bytes", header(long[:129], "v"), "headers"},
		{"header key of 5000 bytes", header(long, "v"), "headers"},
		{"line break in header value", header("x-shop", "a\r\nNats-Rollup: all"), "headers.x-shop"},
		{"line feed in header value", header("x-shop", "a\nb"), "headers.x-shop"},
		{"NUL in header value", header("x-shop", "a\x00"), "headers.x-shop"},
		{"tab in header value", header("x-shop", "a\tb"), "headers.x-shop"},
		{"broken UTF-8 in header value", header("x-shop", "a\xff"), "headers.x-shop"},
		{"space before header value", header("x-shop", " a"), "headers.x-shop"},
		{"space after header value", header("x-shop", "a "), "headers.x-shop"},
		{"wide space after header value", header("x-shop", "a\u3000"), "headers.x-shop"},
		{"Nats-Msg-Id", header("Nats-Msg-Id", "v"), "headers.Nats-Msg-Id"},
		{"NATS-ROLLUP", header("NATS-ROLLUP", "all"), "headers.NATS-ROLLUP"},
		{"ce-id", header("ce-id", "v"), "headers.ce-id"},
		{"CE-Anything", header("CE-Anything", "v"), "headers.CE-Anything"},
		{"Mesh-Generation", header("Mesh-Generation", "1"), "headers.Mesh-Generation"},
		{"mesh-error-code", header("mesh-error-code", "1"), "headers.mesh-error-code"},
		{"Traceparent", header("Traceparent", "v"), "headers.Traceparent"},
		{"TRACESTATE", header("TRACESTATE", "v"), "headers.TRACESTATE"},
		{"Content-Type", header("Content-Type", "v"), "headers.Content-Type"},
		{"65 headers", func(e *event) {
			e.Headers = map[string]string{}
			for i := range 65 {
				e.Headers[fmt.Sprint("h", i)] = ""
			}
		}, "headers"},
		{"70 KB of headers", func(e *event) {
			e.Headers = map[string]string{}
			for i := range 64 {
				e.Headers[fmt.Sprint("h", i)] = long[:1100]
			}
		}, "headers"},
	} {
		e := valid()
		c.spoil(&e)
		err := errors.Join(e.Validate(), e.CheckSize(0))
		if got := problems(t, err); !slices.Equal(got, []string{c.field}) {
			t.Errorf("%s: fields %q, want %q (%v)", c.name, got, c.field, err)
		}
		if err != nil && (len(err.Error()) > 600 || strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' || r == '\ufffd' })) {
			t.Errorf("%s: text of %d bytes: %.700q", c.name, len(err.Error()), err)
		}
	}
}

func TestHeaderThatStandsTwiceInDifferentCaseIsRefused(t *testing.T) {
	e := valid()
	e.Headers = map[string]string{"X-Shop": "1", "x-shop": "2"}
	got := problems(t, e.Validate())
	if len(got) != 1 || !strings.EqualFold(got[0], "headers.x-shop") {
		t.Errorf("fields %q, want one of the two", got)
	}
}

func TestEverythingWrongWithAnEventIsReportedAtOnce(t *testing.T) {
	e := mesh.Event{
		ID: "x", Consumer: "a.*", Type: "", AggregateType: "\x00", AggregateID: "", IdempotencyKey: "a b", TraceID: "a b",
		TraceParent: "\n", TraceState: "\n", MaxRetries: 5000, ContentType: "json", Time: time.Date(99999, 1, 1, 0, 0, 0, 0, time.UTC),
		Headers: map[string]string{"nats-msg-id": "1", "a b": "2", "ok": "\n", "fine": "3"},
	}
	want := []string{
		"aggregateId", "aggregateType", "consumer", "contentType", "eventType", "headers", "headers.nats-msg-id",
		"headers.ok", "id", "key.key", "maxRetries", "time", "traceId", "traceParent", "traceState",
	}
	if diff := cmp.Diff(want, problems(t, e.Validate())); diff != "" {
		t.Error(diff)
	}
}

// What other hands put into the outbox meets the same bounds before it is published.
func TestForeignRowThatNoServerTakesIsRefused(t *testing.T) {
	e := mesh.Event{
		ID: uuid.NewString(), Consumer: ">", Type: "a b", IdempotencyKey: "a b", TraceParent: "\n", Time: time.Date(99999, 1, 1, 0, 0, 0, 0, time.UTC),
		Headers: map[string]string{"Nats-Rollup": "all"}, Payload: make([]byte, 1<<20),
	}
	want := []string{"consumer", "eventType", "headers.Nats-Rollup", "key.key", "payload", "time", "traceParent"}
	if diff := cmp.Diff(want, problems(t, e.CheckWire(1<<20))); diff != "" {
		t.Error(diff)
	}
	// Texts that travel encoded may hold what a writer may not.
	e = valid()
	e.ID, e.AggregateID, e.TraceID, e.ContentType, e.Payload = uuid.NewString(), "a\nb", "a b", "no type", []byte("no JSON")
	if err := e.CheckWire(1 << 20); err != nil {
		t.Error(err)
	}
}

// extremes are the largest and strangest of the good events.
func extremes(maxPayload int) map[string]mesh.Event {
	made := map[string]mesh.Event{}
	add := func(name string, change func(*mesh.Event)) {
		e := valid()
		e.ID, e.Source, e.TraceID = uuid.NewString(), uuid.NewString(), "t"
		e.Time = time.Date(2026, 2, 3, 4, 5, 6, 789_123_456, time.UTC)
		change(&e)
		made[name] = e
	}
	fill := func(e *mesh.Event) { // up to the last byte
		e.Payload = nil
		e.Payload = []byte(`"` + strings.Repeat("x", maxPayload-e.NeededMaxPayload()-2) + `"`)
	}
	wide := func(e *mesh.Event, size int) { // size bytes of headers
		e.Headers = map[string]string{}
		for i := range 60 {
			e.Headers[fmt.Sprintf("h%02d", i)] = strings.Repeat("v", size/60-len("h00: \r\n"))
		}
	}
	add("names as long as they may be", func(e *mesh.Event) {
		e.Consumer = strings.Repeat("c", 64)
		e.Type = strings.Repeat("t.", 63) + "tt"
		e.IdempotencyKey = strings.Repeat("k", 128)
		e.TraceID = strings.Repeat("t", 128)
		e.AggregateType = strings.Repeat("ä", 127) + "a"
	})
	add("aggregate id of 255 bytes of everything", func(e *mesh.Event) {
		e.AggregateID = `50% "quoted" 'x' %41 %zz % %2 \ 😀 Zoë 订单 ` + "\u00a0\u3000\u200b"
		e.AggregateID += strings.Repeat("é", (255-len(e.AggregateID))/2)
		e.AggregateID += strings.Repeat("x", 255-len(e.AggregateID))
	})
	add("headers of every legal character", func(e *mesh.Event) {
		e.Headers = map[string]string{
			"X-Shop": `50% "a:b" ; , = {} 😀 订单 é`, "x_y.z-9": "", "webhook.endpoint-key": "a  b", "A": "%41",
			strings.Repeat("K", 128): "colon: inside", "host": "example.com",
		}
	})
	add("JSON null", func(e *mesh.Event) { e.Payload = []byte("null") })
	add("JSON with outer white space", func(e *mesh.Event) { e.Payload = []byte(" \r\n\t{\"a\" : 1.0e+2}\n") })
	add("every byte", func(e *mesh.Event) {
		e.ContentType = "application/octet-stream"
		for i := range 256 {
			e.Payload = append(e.Payload, byte(i))
		}
	})
	add("empty payload", func(e *mesh.Event) { e.ContentType, e.Payload = "text/plain; charset=utf-8", nil })
	add("retries never", func(e *mesh.Event) { e.MaxRetries = mesh.NoRetries })
	add("retries 1000", func(e *mesh.Event) { e.MaxRetries = 1000 })
	add("the last second of the year 9999", func(e *mesh.Event) { e.Time = time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC) })
	add("payload up to the limit", fill)
	add("60 KB of headers", func(e *mesh.Event) { wide(e, 60_000) })
	add("60 KB of headers and payload up to the limit", func(e *mesh.Event) { wide(e, 60_000); fill(e) })
	return made
}

func TestExtremeEventsMakeTheWholeTripByteForByte(t *testing.T) {
	t.Parallel()
	e := startWith(t, natsd.Config{}, small)
	h, fn := script()
	var subs []mesh.Subscription
	for _, consumer := range []string{"orders", strings.Repeat("c", 64)} {
		subs = append(subs, mesh.OnRaw(consumer, mesh.AnyType, fn))
	}
	e.handle(subs...)
	for name, want := range extremes(int(e.js.Conn().MaxPayload())) {
		if err := errors.Join(want.Validate(), want.CheckSize(int(e.js.Conn().MaxPayload())), want.CheckWire(int(e.js.Conn().MaxPayload()))); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		e.publish(want)
		got := receive(t, name, h.calls)
		if want.ContentType == "" {
			want.ContentType = mesh.DefaultContentType
		}
		if !bytes.Equal(got.Data, want.Payload) || !bytes.Equal(got.Payload, want.Payload) {
			t.Errorf("%s: another payload", name)
		}
		got.Payload, want.Payload = nil, nil // compared: a megabyte takes cmp seconds
		if diff := cmp.Diff(want, got.Event); diff != "" {
			t.Errorf("%s: %.2000s", name, diff)
		}
		if o := e.awaitOutcome(want.ID, 1); !o.Succeeded() {
			t.Errorf("%s: outcome %+v", name, o)
		}
	}
}

func TestOneByteMoreThanTheLimitIsRefused(t *testing.T) {
	const maxPayload = 1 << 20
	for _, name := range []string{"payload up to the limit", "60 KB of headers and payload up to the limit"} {
		e := extremes(maxPayload)[name]
		if need := e.NeededMaxPayload(); need != maxPayload {
			t.Errorf("%s needs %d bytes, want %d", name, need, maxPayload)
		}
		e.Payload = append(e.Payload, ' ')
		if got := problems(t, e.CheckSize(maxPayload)); !slices.Equal(got, []string{"payload"}) {
			t.Errorf("%s and a byte: fields %q", name, got)
		}
		if err := e.CheckSize(maxPayload + 1); err != nil {
			t.Errorf("%s and a byte on a larger server: %v", name, err)
		}
	}
}
