package mesh

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
)

// The wire form is a CloudEvents 1.0 message in binary mode. These names are read by
// other CloudEvents clients too; renaming one breaks them and every stored message.
const (
	hdrSpecVersion    = "ce-specversion"
	hdrID             = "ce-id"
	hdrSource         = "ce-source"
	hdrType           = "ce-type"
	hdrSubject        = "ce-subject"
	hdrTime           = "ce-time"
	hdrContentType    = "ce-datacontenttype"
	hdrConsumer       = "ce-consumer"
	hdrAggregateType  = "ce-aggregatetype"
	hdrIdempotencyKey = "ce-idempotencykey"
	hdrTraceID        = "ce-traceid"
	hdrMaxRetries     = "ce-maxretries"
	hdrTraceParent    = "traceparent"
	hdrTraceState     = "tracestate"

	// The mesh's own: absent means 0.
	hdrGeneration = "mesh-generation"
	hdrRetryCount = "mesh-retry-count"
)

// each calls fn for every header of e on the wire, in a fixed order.
func (e *Event) each(fn func(key, value string)) {
	attr := func(key, value string) {
		if value != "" {
			fn(key, percentEncode(value))
		}
	}
	fn(hdrSpecVersion, "1.0")
	attr(hdrID, e.ID)
	attr(hdrSource, e.Source)
	attr(hdrType, e.Type)
	attr(hdrSubject, e.AggregateID)
	if !e.Time.IsZero() {
		fn(hdrTime, e.Time.UTC().Format(time.RFC3339Nano))
	}
	if e.ContentType == "" {
		fn(hdrContentType, DefaultContentType)
	} else {
		attr(hdrContentType, e.ContentType)
	}
	attr(hdrConsumer, e.Consumer)
	attr(hdrAggregateType, e.AggregateType)
	attr(hdrIdempotencyKey, e.IdempotencyKey)
	attr(hdrTraceID, e.TraceID)
	switch {
	case e.MaxRetries > 0:
		fn(hdrMaxRetries, strconv.Itoa(e.MaxRetries))
	case e.MaxRetries == NoRetries:
		fn(hdrMaxRetries, "0")
	}
	if e.TraceParent != "" {
		fn(hdrTraceParent, e.TraceParent)
	}
	if e.TraceState != "" {
		fn(hdrTraceState, e.TraceState)
	}
	if e.Generation > 0 {
		fn(hdrGeneration, strconv.Itoa(e.Generation))
	}
	if e.Failures > 0 {
		fn(hdrRetryCount, strconv.Itoa(e.Failures))
	}
	for key, value := range e.Headers {
		fn(key, value)
	}
}

// Header is e's header on the wire, without the message id.
func (e *Event) Header() nats.Header {
	h := make(nats.Header, 18+len(e.Headers))
	values := make([]string, 0, 18+len(e.Headers))
	e.each(func(key, value string) {
		values = append(values, value)
		h[key] = values[len(values)-1 : len(values) : len(values)]
	})
	return h
}

// headerSize counts the bytes of e's header on the wire, with the message id, a source
// and a time, whether they are set yet or not.
func (e *Event) headerSize() int {
	const uuidLen, timeLen = 36, len("2006-01-02T15:04:05.999999999Z")
	line := func(key, value int) int { return key + len(": \r\n") + value }
	size := len("NATS/1.0\r\n\r\n") + line(len(nats.MsgIdHdr), len(e.msgIDForSize()))
	e.each(func(key, value string) { size += line(len(key), len(value)) })
	if e.ID == "" {
		size += line(len(hdrID), uuidLen)
	}
	if e.Source == "" {
		size += line(len(hdrSource), uuidLen)
	}
	if e.Time.IsZero() {
		size += line(len(hdrTime), timeLen)
	}
	return size
}

func (e *Event) msgIDForSize() string {
	if e.IdempotencyKey == "" {
		return "00000000-0000-0000-0000-000000000000"
	}
	return e.IdempotencyKey
}

// MsgID is the Nats-Msg-Id under which e is first published: its idempotency key, or
// its id when it has none.
func (e *Event) MsgID() string {
	if e.IdempotencyKey != "" {
		return e.IdempotencyKey
	}
	return e.ID
}

// Message is e as it is published to subject under the given message id.
func (e *Event) Message(subject, msgID string) *nats.Msg {
	h := e.Header()
	h[nats.MsgIdHdr] = []string{msgID}
	return &nats.Msg{Subject: subject, Header: h, Data: e.Payload}
}

// ParseMessage reads an event from a message's header and data, which it keeps. Header keys
// are compared without regard to case, as CloudEvents demands. User headers are those that
// a writer can set, see [Event]; the server's (Nats-*) and what else there is are left out. Id,
// source, consumer and type are good for subjects and keys.
func ParseMessage(header nats.Header, data []byte) (Event, error) {
	e := Event{Payload: data}
	var version string
	var err error
	text := func(dst *string, key, value string) {
		if *dst = percentDecode(value); !utf8.ValidString(*dst) {
			err = fieldErrorf(key, "is not valid UTF-8: %.60q", value)
		}
	}
	number := func(dst *int, key, value string) {
		n, convErr := strconv.Atoi(value)
		if convErr != nil || n < 0 {
			err = fieldErrorf(key, "is no number from 0: %.60q", value)
			return
		}
		*dst = n
	}
	for key, values := range header {
		if len(values) == 0 {
			continue
		}
		value := values[0]
		switch lower := strings.ToLower(key); lower {
		case hdrSpecVersion:
			version = value
		case hdrID:
			text(&e.ID, lower, value)
		case hdrSource:
			text(&e.Source, lower, value)
		case hdrType:
			text(&e.Type, lower, value)
		case hdrSubject:
			text(&e.AggregateID, lower, value)
		case hdrTime:
			t, timeErr := time.Parse(time.RFC3339Nano, value)
			if e.Time = t; timeErr != nil || e.checkTime() != nil {
				err = fieldErrorf(hdrTime, "is no RFC 3339 time: %.60q", value)
			}
		case hdrContentType:
			text(&e.ContentType, lower, value)
		case hdrConsumer:
			text(&e.Consumer, lower, value)
		case hdrAggregateType:
			text(&e.AggregateType, lower, value)
		case hdrIdempotencyKey:
			text(&e.IdempotencyKey, lower, value)
		case hdrTraceID:
			text(&e.TraceID, lower, value)
		case hdrTraceParent:
			e.TraceParent = value
		case hdrTraceState:
			e.TraceState = value
		case hdrMaxRetries:
			number(&e.MaxRetries, lower, value)
			if e.MaxRetries == 0 {
				e.MaxRetries = NoRetries
			}
		case hdrGeneration:
			number(&e.Generation, lower, value)
		case hdrRetryCount:
			number(&e.Failures, lower, value)
		default:
			if reservedHeader(lower) || !validHeaderKey(key) {
				continue
			}
			if e.Headers == nil {
				e.Headers = make(map[string]string)
			}
			e.Headers[key] = value
		}
	}
	switch {
	case err != nil:
	case version != "1.0":
		err = fieldErrorf(hdrSpecVersion, "is %.20q, not 1.0", version)
	case !validName(e.ID, maxConsumer):
		err = fieldErrorf(hdrID, "must be 1 to %d of A-Z a-z 0-9 _ -, not %.80q", maxConsumer, e.ID)
	case e.Source != "" && !validName(e.Source, maxConsumer):
		err = fieldErrorf(hdrSource, "must be 1 to %d of A-Z a-z 0-9 _ -, not %.80q", maxConsumer, e.Source)
	default:
		err = errors.Join(checkConsumer(e.Consumer), checkType(hdrType, e.Type))
	}
	if err != nil {
		return e, fmt.Errorf("mesh: message is no event: %w", err)
	}
	return e, nil
}

// percentEncode writes a header value as the CloudEvents bindings demand: everything
// but printable ASCII, and also space, quote and percent, becomes %XX.
func percentEncode(s string) string {
	if only(s, plainByte) {
		return s
	}
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; plainByte(c) {
			b.WriteByte(c)
		} else {
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		}
	}
	return b.String()
}

func plainByte(c byte) bool { return c > ' ' && c < 0x7f && c != '"' && c != '%' }

// percentDecode reads it back. A percent sign that begins no %XX stands for itself, as
// the bindings advise.
func percentDecode(s string) string {
	if strings.IndexByte(s, '%') < 0 {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b = append(b, byte(n))
				i += 2
				continue
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}

// HeaderKeys lists the user headers in order, for whoever prints them.
func (e *Event) HeaderKeys() []string { return slices.Sorted(maps.Keys(e.Headers)) }
