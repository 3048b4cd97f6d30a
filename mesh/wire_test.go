package mesh_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"jetmesh/internal/natsd"
	"jetmesh/internal/natstest"
	"jetmesh/mesh"
)

// anyEvent is a random valid event that an outbox might publish.
func anyEvent(r *rand.Rand) mesh.Event {
	pick := func(alphabet string, most int) string {
		runes := []rune(alphabet)
		var s []rune
		for range 1 + r.IntN(most) {
			s = append(s, runes[r.IntN(len(runes))])
		}
		return string(s)
	}
	const (
		name = "abcXYZ019_-"
		text = `aZ0 %"'\/<>&=;:,%41%%` + "é订😀\u00a0\u200b"
		key  = "aZ0._@:/-"
	)
	maybe := func(s string) string {
		if r.IntN(2) == 0 {
			return ""
		}
		return s
	}
	e := mesh.Event{
		ID: uuid.NewString(), Source: maybe(uuid.NewString()), Consumer: pick(name, 64), Type: pick(name, 40) + maybe("."+pick(name, 40)),
		AggregateType: pick(text, 60), AggregateID: pick(text, 60), IdempotencyKey: maybe(pick(key, 128)), TraceID: maybe(pick(key, 128)),
		TraceParent: maybe("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), TraceState: maybe("a=1,b=2"),
		MaxRetries: []int{mesh.NoRetries, 0, 1, 1000}[r.IntN(4)], Generation: r.IntN(3), Failures: r.IntN(3),
		ContentType: []string{"application/json", "text/plain; charset=utf-8", "application/octet-stream"}[r.IntN(3)],
	}
	if r.IntN(2) == 0 {
		e.Time = time.Unix(r.Int64N(4_000_000_000), r.Int64N(1_000_000_000)).UTC()
	}
	for range r.IntN(4) {
		if e.Headers == nil {
			e.Headers = map[string]string{}
		}
		e.Headers["h-"+strings.ToLower(pick(name, 20))] = strings.TrimSpace(maybe(pick(text, 40)))
	}
	if e.ContentType == "application/json" {
		e.Payload, _ = json.Marshal(pick(text, 100))
	} else {
		e.Payload = make([]byte, r.IntN(100))
		for i := range e.Payload {
			e.Payload[i] = byte(r.Uint32())
		}
	}
	return e
}

func TestEveryValidEventComesOffTheWireAsItWent(t *testing.T) {
	t.Parallel()
	_, nc := natstest.Start(t)
	sub, err := nc.SubscribeSync("x")
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(1000) {
		want := anyEvent(rand.New(rand.NewPCG(seed, 0)))
		if err := want.Validate(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if err := nc.PublishMsg(want.Message("x", want.MsgID())); err != nil {
			t.Fatal(err)
		}
		msg, err := sub.NextMsg(patience)
		if err != nil {
			t.Fatal(err)
		}
		got, err := mesh.ParseMessage(msg.Header, msg.Data)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, diff)
		}
		if id := msg.Header.Get(nats.MsgIdHdr); id != want.MsgID() {
			t.Fatalf("seed %d: message id %q, want %q", seed, id, want.MsgID())
		}
		again := got.Header()
		again[nats.MsgIdHdr] = []string{got.MsgID()}
		if diff := cmp.Diff(msg.Header, again); diff != "" {
			t.Fatalf("seed %d: written again: %s", seed, diff)
		}
	}
}

// wireEvent is a header as another CloudEvents client writes it, with some lines changed.
func wireEvent(change ...string) nats.Header {
	h := nats.Header{"ce-specversion": {"1.0"}, "ce-id": {"0af76519-16cd-43dd-8448-eb211c80319c"}, "ce-consumer": {"c"}, "ce-type": {"t"}}
	for i := 0; i < len(change); i += 2 {
		h[change[i]] = []string{change[i+1]}
	}
	return h
}

func TestHeaderKeysAreReadInAnyCase(t *testing.T) {
	want := mesh.Event{
		ID: "0af76519-16cd-43dd-8448-eb211c80319c", Source: "s", Consumer: "c", Type: "t", AggregateType: "at", AggregateID: "ai", IdempotencyKey: "k",
		TraceID: "tr", TraceParent: "tp", TraceState: "ts", ContentType: "text/plain", MaxRetries: 7, Generation: 2,
		Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Headers: map[string]string{"x-shop": "s"}, Payload: []byte("p"),
	}
	for _, spell := range []func(string) string{
		strings.ToLower, strings.ToUpper,
		func(s string) string { return strings.ToUpper(s[:1]) + s[1:] }, // Ce-id
		func(s string) string { return strings.ToUpper(s[:2]) + s[2:] }, // CE-id
	} {
		h := nats.Header{"x-shop": {"s"}}
		for key, values := range want.Header() {
			if key != "x-shop" {
				h[spell(key)] = values
			}
		}
		got, err := mesh.ParseMessage(h, want.Payload)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%v: %v\n%s", slices.Sorted(maps.Keys(h)), err, diff)
		}
	}
}

func TestOnlyUserHeadersReachTheHandler(t *testing.T) {
	got, err := mesh.ParseMessage(wireEvent(
		"Nats-Msg-Id", "1", "nats-rollup", "all", "NATS-Expected-Stream", "S", "mesh-error-code", "x", "Mesh-Attempts", "[]",
		"ce-extension", "e", "Content-Type", "c", "bad key", "v", "X-Shop", "yes", "empty", ""), nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"X-Shop": "yes", "empty": ""}, got.Headers); diff != "" {
		t.Error(diff)
	}
}

func TestMessageThatIsNoEventIsRefusedByTheHeadersName(t *testing.T) {
	long := strings.Repeat("n", 5000)
	for _, c := range []struct{ key, value, field string }{
		{"ce-specversion", "0.3", "ce-specversion"},
		{"ce-specversion", "", "ce-specversion"},
		{"ce-id", "", "ce-id"},
		// An id is the end of a record's key, a source that of an outcome's subject.
		{"ce-id", "a.b", "ce-id"},
		{"ce-id", "a%20b", "ce-id"},
		{"ce-id", "*", "ce-id"},
		{"ce-id", ">", "ce-id"},
		{"ce-id", long, "ce-id"},
		{"ce-source", "https://example.com/orders", "ce-source"},
		{"ce-source", "a.b", "ce-source"},
		{"ce-source", "*", "ce-source"},
		{"ce-source", long, "ce-source"},
		{"ce-consumer", "", "consumer"},
		{"ce-consumer", "a.b", "consumer"},
		{"ce-consumer", long, "consumer"},
		{"ce-type", "", "ce-type"},
		{"ce-type", "a..b", "ce-type"},
		{"ce-type", ">", "ce-type"},
		{"ce-type", long, "ce-type"},
		{"ce-time", "yesterday", "ce-time"},
		{"ce-time", "0000-01-01T00:00:00+01:00", "ce-time"}, // before the year 0
		{"ce-maxretries", "-1", "ce-maxretries"},
		{"ce-maxretries", "many", "ce-maxretries"},
		{"ce-maxretries", "99999999999999999999", "ce-maxretries"},
		{"Mesh-Generation", "-1", "mesh-generation"},
		{"ce-subject", "%ff", "ce-subject"},
		{"ce-subject", "a\xff", "ce-subject"},
		{"ce-aggregatetype", "%c3%28", "ce-aggregatetype"},
	} {
		_, err := mesh.ParseMessage(wireEvent(c.key, c.value), nil)
		if got := problems(t, err); !slices.Equal(got, []string{c.field}) {
			t.Errorf("%s %.20q: fields %q, want %q (%v)", c.key, c.value, got, c.field, err)
		}
	}
	for name, h := range map[string]nats.Header{"no header": nil, "empty values": {"ce-specversion": {}, "ce-id": {}}} {
		if got, err := mesh.ParseMessage(h, []byte("x")); err == nil || string(got.Payload) != "x" {
			t.Errorf("%s: %v, payload %q", name, err, got.Payload)
		}
	}
}

func TestHeaderValuesArePercentEncodedAsCloudEventsDemands(t *testing.T) {
	for _, c := range []struct{ text, wire string }{
		{"plain-_.~!*'();:@&=+$,/?#[]", "plain-_.~!*'();:@&=+$,/?#[]"},
		{"a b", "a%20b"},
		{`say "hi"`, "say%20%22hi%22"},
		{"100%", "100%25"},
		{"%41", "%2541"},
		{"Euro € 😀", "Euro%20%E2%82%AC%20%F0%9F%98%80"}, // the examples of the specification
		{"\x00\t\n\x7f", "%00%09%0A%7F"},
	} {
		e := mesh.Event{ID: "1", Consumer: "c", Type: "t", AggregateID: c.text}
		if got := e.Header().Get("ce-subject"); got != c.wire {
			t.Errorf("%q is written %q, want %q", c.text, got, c.wire)
		}
		if got, err := mesh.ParseMessage(e.Header(), nil); err != nil || got.AggregateID != c.text {
			t.Errorf("%q is read back as %q (%v)", c.wire, got.AggregateID, err)
		}
	}
	// What other encoders write, and what none should.
	for wire, text := range map[string]string{
		"%e2%82%ac": "€", "a b": "a b", "%4": "%4", "%": "%", "100%": "100%", "%zz": "%zz", "%4z": "%4z", "%+1": "%+1", "%%41": "%A", "%2541": "%41", "€": "€",
	} {
		if got, err := mesh.ParseMessage(wireEvent("ce-subject", wire), nil); err != nil || got.AggregateID != text {
			t.Errorf("%q is read as %q (%v), want %q", wire, got.AggregateID, err, text)
		}
	}
}

// The computed size decides at write time what the server decides much later. It is compared
// with the server's own count, on the bare protocol, since the client counts too.
func TestComputedSizeIsWhatTheServerCounts(t *testing.T) {
	t.Parallel()
	const reserve = 4 << 10
	e := anyEvent(rand.New(rand.NewPCG(1, 1)))
	e.Source, e.IdempotencyKey, e.Time, e.Headers = uuid.NewString(), "key", time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.UTC), map[string]string{"x-shop": "Zoë"}
	size := e.NeededMaxPayload() - reserve

	var block strings.Builder
	block.WriteString("NATS/1.0\r\n")
	msg := e.Message("x", e.MsgID())
	for key, values := range msg.Header {
		fmt.Fprintf(&block, "%s: %s\r\n", key, values[0])
	}
	block.WriteString("\r\n")
	for _, c := range []struct {
		maxPayload int
		answer     string
	}{{size, "PONG"}, {size - 1, "-ERR 'Maximum Payload Violation'"}} {
		s := natstest.Run(t, natsd.Config{ConfigText: fmt.Appendf(nil, "max_payload: %d", c.maxPayload)})
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.URL(), "nats://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "CONNECT {\"verbose\":false,\"headers\":true}\r\nHPUB x %d %d\r\n%s%s\r\nPING\r\n",
			block.Len(), block.Len()+len(e.Payload), block.String(), e.Payload)
		lines := bufio.NewScanner(conn)
		var answer string
		for answer = ""; !strings.HasPrefix(answer, "PONG") && !strings.HasPrefix(answer, "-ERR") && lines.Scan(); {
			answer = lines.Text()
		}
		if answer != c.answer {
			t.Errorf("max_payload %d for a message of %d bytes: %q, want %q", c.maxPayload, size, answer, c.answer)
		}
	}

	// With its reserve the limit holds for what a relay publishes, and not for a byte less.
	s := natstest.Run(t, natsd.Config{ConfigText: fmt.Appendf(nil, "max_payload: %d", e.NeededMaxPayload())})
	nc, err := s.Conn()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := errors.Join(e.CheckSize(int(nc.MaxPayload())), e.CheckWire(int(nc.MaxPayload())), nc.PublishMsg(msg), nc.Flush()); err != nil {
		t.Error(err)
	}
	if err := e.CheckSize(int(nc.MaxPayload()) - 1); err == nil {
		t.Error("the size fits a byte less than it needs")
	}
}

func FuzzParseMessage(f *testing.F) {
	r := rand.New(rand.NewPCG(2, 2))
	for range 20 {
		e := anyEvent(r)
		var block bytes.Buffer
		for key, values := range e.Header() {
			fmt.Fprintf(&block, "%s: %s\r\n", key, values[0])
		}
		f.Add(block.Bytes(), e.Payload)
	}
	f.Add([]byte("ce-specversion: 1.0\r\nCE-ID: 1\r\nce-type: a.b\r\nce-consumer: c\r\nce-subject: %\xff\r\nmesh-generation: 9\r\n"), []byte(nil))
	f.Fuzz(func(t *testing.T, block, payload []byte) {
		header, err := nats.DecodeHeadersMsg(slices.Concat([]byte("NATS/1.0\r\n"), block, []byte("\r\n")))
		if err != nil {
			return
		}
		e, err := mesh.ParseMessage(header, payload)
		if !bytes.Equal(e.Payload, payload) {
			t.Error("payload changed")
		}
		if err != nil {
			return
		}
		if err := errors.Join(nameOf(e.ID), nameOf(e.Consumer), nameOf(strings.ReplaceAll(e.Type, ".", "")), nameOf(e.Source+"x")); err != nil {
			t.Error(err)
		}
		// What was read is written again by a dead letter, and read again by an operator.
		if e.ContentType == "" {
			e.ContentType = mesh.DefaultContentType
		}
		again, err := mesh.ParseMessage(e.Header(), payload)
		if diff := cmp.Diff(e, again, cmp.Comparer(time.Time.Equal)); diff != "" || err != nil {
			t.Errorf("%v\n%s", err, diff)
		}
	})
}

// nameOf reports what is no part of a subject.
func nameOf(s string) error {
	if s == "" || strings.ContainsAny(s, ".*> \t\r\n") || len(s) > 128 {
		return fmt.Errorf("%.200q is no token of a subject", s)
	}
	return nil
}
