package mesh

import (
	"encoding/json"
	"errors"
	"mime"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Bounds of an event. Names end up in subjects and durables, so they are short and
// plain; the rest is what an index entry and a header line carry without harm.
const (
	maxConsumer    = 64
	maxType        = 128
	maxAggregate   = 255
	maxTraceID     = 128
	maxContentType = 128
	maxHeaders     = 64
	maxHeaderKey   = 128
	maxHeaderBytes = 60 << 10 // of the server's 64 KiB; the rest is for replays and dead letters

	// wireReserve is kept free of a server's max_payload for what replays and dead
	// letters add to the headers of an event.
	wireReserve = 4 << 10

	// DefaultMaxPayload is the server's max_payload that is assumed until the relay
	// has met the server: the default of nats-server, in bytes.
	DefaultMaxPayload = 1 << 20
)

// NoRetries as Event.MaxRetries or Subscription.MaxRetries means that the first
// failure is the last.
const NoRetries = -1

// DefaultContentType is the content type of an event that names none.
const DefaultContentType = "application/json"

// An Event is a fact that a service tells others. The zero value of an optional
// field means the default that the field names.
type Event struct {
	// ID is a UUID in its canonical form; made (version 7) when empty.
	ID string
	// Consumer is whom the event is for: 1 to 64 of A-Z a-z 0-9 _ -.
	Consumer string
	// Type names what happened: tokens of A-Z a-z 0-9 _ - joined by dots, at most 128 bytes.
	Type string
	// AggregateType and AggregateID name the thing it happened to: 1 to 255 bytes of
	// UTF-8 without control characters.
	AggregateType, AggregateID string
	// IdempotencyKey names the business action, see [ValidateKey]. Optional: without
	// one every Write is an event of its own.
	IdempotencyKey string
	// Payload is delivered byte for byte as it was written. For a JSON content type
	// it must be valid JSON.
	Payload []byte
	// ContentType of the payload; default application/json.
	ContentType string
	// Headers go along with the message: at most 64, keys of letters, digits, '-', '_'
	// and '.', values of UTF-8 without control characters or outer spaces. Keys that
	// begin with ce-, nats- or mesh-, traceparent, tracestate and content-type are
	// the mesh's own.
	Headers map[string]string
	// TraceID ties the event to the request that caused it: 1 to 128 of
	// A-Z a-z 0-9 . _ @ : / -. When empty, Write takes it from the context, else makes one.
	TraceID string
	// TraceParent and TraceState are the W3C trace context of the writer's span;
	// filled from the context.
	TraceParent, TraceState string
	// MaxRetries is how many failures exhaust the event: 3 means three attempts.
	// 0 means the subscription's setting (default 10), [NoRetries] and 1 mean one attempt.
	MaxRetries int
	// Time is when it happened; default: when it was written.
	Time time.Time

	// Source is the outbox the event came from, Generation how often an operator
	// replayed, skipped or marked it, Failures its retryCount when it was published. They
	// are set by the mesh, not by a writer.
	Source     string
	Generation int
	Failures   int
}

// Validate reports everything that keeps the event from being written, as
// [FieldError]s and [KeyError]s joined. It does not check the size, see [Event.CheckSize].
func (e *Event) Validate() error {
	var errs []error
	add := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	if e.ID != "" {
		if id, err := uuid.Parse(e.ID); err != nil || id.String() != e.ID {
			add(fieldErrorf("id", "must be a UUID in canonical form, not %.60q", e.ID))
		}
	}
	add(checkConsumer(e.Consumer))
	add(checkType("eventType", e.Type))
	add(checkText("aggregateType", e.AggregateType, maxAggregate))
	add(checkText("aggregateId", e.AggregateID, maxAggregate))
	if e.IdempotencyKey != "" {
		add(ValidateKey(e.IdempotencyKey))
	}
	if e.TraceID != "" && !validTraceID(e.TraceID) {
		add(fieldErrorf("traceId", "must be 1 to %d of A-Z a-z 0-9 . _ @ : / -, not %.60q", maxTraceID, e.TraceID))
	}
	if e.MaxRetries < NoRetries || e.MaxRetries > 1000 {
		add(fieldErrorf("maxRetries", "must be between 0 and 1000 or NoRetries, not %d", e.MaxRetries))
	}
	add(e.checkTime())
	add(e.checkTraceContext())
	add(checkHeaders(e.Headers))
	add(e.checkPayload())
	return errors.Join(errs...)
}

// checkTime refuses what RFC 3339 has no form for.
func (e *Event) checkTime() error {
	if year := e.Time.UTC().Year(); year < 0 || year > 9999 {
		return fieldErrorf("time", "is in the year %d, outside 0 to 9999", year)
	}
	return nil
}

// checkTraceContext: these two go onto the wire as they are.
func (e *Event) checkTraceContext() error {
	var errs []error
	for _, f := range []struct{ name, value string }{{"traceParent", e.TraceParent}, {"traceState", e.TraceState}} {
		if !only(f.value, func(c byte) bool { return c >= ' ' && c < 0x7f }) || strings.TrimSpace(f.value) != f.value {
			errs = append(errs, fieldErrorf(f.name, "must be printable ASCII without outer white space, not %.80q", f.value))
		}
	}
	return errors.Join(errs...)
}

func (e *Event) checkPayload() error {
	if e.ContentType == "" {
		if !json.Valid(e.Payload) {
			return fieldErrorf("payload", "is not valid JSON, which content type %s demands", DefaultContentType)
		}
		return nil
	}
	if err := checkText("contentType", e.ContentType, maxContentType); err != nil {
		return err
	}
	media, _, err := mime.ParseMediaType(e.ContentType)
	if err != nil || !strings.Contains(media, "/") {
		return fieldErrorf("contentType", "is no media type: %.60q", e.ContentType)
	}
	if isJSON(media) && !json.Valid(e.Payload) {
		return fieldErrorf("payload", "is not valid JSON, which content type %s demands", media)
	}
	return nil
}

func isJSON(media string) bool {
	return media == DefaultContentType || strings.HasSuffix(media, "+json")
}

// CheckSize reports whether payload and headers together fit a server with the
// given max_payload in bytes (0 means [DefaultMaxPayload]), with room left for the
// headers that a replay or a dead letter adds.
func (e *Event) CheckSize(maxPayload int) error {
	if maxPayload <= 0 {
		maxPayload = DefaultMaxPayload
	}
	headers := e.headerSize()
	if headers > maxHeaderBytes {
		return fieldErrorf("headers", "take %d bytes on the wire, more than the limit of %d", headers, maxHeaderBytes)
	}
	if size, limit := headers+len(e.Payload), maxPayload-wireReserve; size > limit {
		return fieldErrorf("payload", "takes %d bytes with its headers, more than the limit of %d (the server's max_payload %d less %d)",
			size, limit, maxPayload, wireReserve)
	}
	return nil
}

func checkConsumer(s string) error {
	if !validName(s, maxConsumer) {
		return fieldErrorf("consumer", "must be 1 to %d of A-Z a-z 0-9 _ -, not %.80q", maxConsumer, s)
	}
	return nil
}

func checkType(field, s string) error {
	if len(s) <= maxType {
		ok := true
		for token := range strings.SplitSeq(s, ".") {
			ok = ok && validName(token, maxType)
		}
		if ok {
			return nil
		}
	}
	return fieldErrorf(field, "must be tokens of A-Z a-z 0-9 _ - joined by dots, at most %d bytes, not %.80q", maxType, s)
}

func checkText(field, s string, limit int) error {
	switch {
	case s == "":
		return fieldErrorf(field, "is empty")
	case len(s) > limit:
		return fieldErrorf(field, "has %d bytes, more than the limit of %d", len(s), limit)
	case !utf8.ValidString(s):
		return fieldErrorf(field, "is not valid UTF-8")
	case hasControl(s):
		return fieldErrorf(field, "holds a control character: %.80q", s)
	}
	return nil
}

func checkHeaders(headers map[string]string) error {
	if len(headers) > maxHeaders {
		return fieldErrorf("headers", "are %d, more than the limit of %d", len(headers), maxHeaders)
	}
	var errs []error
	seen := make(map[string]bool, len(headers))
	for key, value := range headers {
		field := "headers." + key
		if len(key) > 60 {
			field = "headers." + strings.ToValidUTF8(key[:60], "") + "…"
		}
		lower := strings.ToLower(key)
		switch {
		case !validHeaderKey(key):
			errs = append(errs, fieldErrorf("headers", "have an illegal key %.80q: 1 to %d letters, digits, '-', '_' and '.'", key, maxHeaderKey))
		case reservedHeader(lower):
			errs = append(errs, fieldErrorf(field, "is a header of the mesh itself"))
		case seen[lower]:
			errs = append(errs, fieldErrorf(field, "stands twice, in different case"))
		case !utf8.ValidString(value):
			errs = append(errs, fieldErrorf(field, "is not valid UTF-8"))
		case hasControl(value):
			errs = append(errs, fieldErrorf(field, "holds a control character"))
		case strings.TrimSpace(value) != value:
			errs = append(errs, fieldErrorf(field, "begins or ends with white space, which headers do not keep"))
		}
		seen[lower] = true
	}
	return errors.Join(errs...)
}

func reservedHeader(lower string) bool {
	switch lower {
	case "traceparent", "tracestate", "content-type":
		return true
	}
	return strings.HasPrefix(lower, "ce-") || strings.HasPrefix(lower, "nats-") || strings.HasPrefix(lower, "mesh-")
}

func validName(s string, limit int) bool {
	return len(s) >= 1 && len(s) <= limit && only(s, func(c byte) bool { return alphanumeric(c) || c == '_' || c == '-' })
}

func validHeaderKey(s string) bool {
	return len(s) >= 1 && len(s) <= maxHeaderKey &&
		only(s, func(c byte) bool { return alphanumeric(c) || c == '_' || c == '-' || c == '.' })
}

func validTraceID(s string) bool {
	return len(s) >= 1 && len(s) <= maxTraceID &&
		only(s, func(c byte) bool { return alphanumeric(c) || strings.IndexByte("._@:/-", c) >= 0 })
}

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

func only(s string, ok func(byte) bool) bool {
	for i := range len(s) {
		if !ok(s[i]) {
			return false
		}
	}
	return true
}

// hasControl reports C0, DEL and C1 controls and the two line separators of Unicode.
func hasControl(s string) bool {
	for _, r := range s {
		if r < 0x20 || r >= 0x7f && r < 0xa0 || r == '\u2028' || r == '\u2029' {
			return true
		}
	}
	return false
}

// NeededMaxPayload is the smallest max_payload in bytes of a server that [Event.CheckSize]
// accepts the event for.
func (e *Event) NeededMaxPayload() int { return e.headerSize() + len(e.Payload) + wireReserve }

// CheckWire reports what keeps an event that was not written by this package's rules, but
// put into the outbox by other hands, from ever being delivered, or dead-lettered, by a
// server with the given max_payload.
func (e *Event) CheckWire(maxPayload int) error {
	errs := []error{
		checkConsumer(e.Consumer), checkType("eventType", e.Type), e.checkTime(), e.checkTraceContext(),
		checkHeaders(e.Headers), e.CheckSize(maxPayload),
	}
	if e.IdempotencyKey != "" {
		errs = append(errs, ValidateKey(e.IdempotencyKey))
	}
	return errors.Join(errs...)
}
