package mesh_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"jetmesh/internal/natsd"
	"jetmesh/mesh"
)

func TestFailureIsRecordedAndRetriedUntilItSucceeds(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script(errBoom, errors.New("bang"), nil)
	p := e.handle(orders(fn))
	ev := e.event("orders")
	ev.IdempotencyKey = "orders:order:create:O-1"
	began := time.Now()
	seq := e.publish(ev)
	e.awaitSettled("orders", seq)

	calls := h.of(ev.ID)
	if len(calls) != 3 {
		t.Fatalf("%d calls, want 3", len(calls))
	}
	for i, d := range calls {
		if d.Attempt != i+1 || d.Redelivered != (i > 0) || d.Subscription != "orders" {
			t.Errorf("call %d: attempt %d, redelivered %v, subscription %s", i, d.Attempt, d.Redelivered, d.Subscription)
		}
	}
	want := []mesh.Outcome{
		{Attempt: 1, Code: mesh.CodeError, Message: "boom", RetryCount: 1},
		{Attempt: 2, Code: mesh.CodeError, Message: "bang", RetryCount: 2},
		{Attempt: 3, RetryCount: 2},
	}
	for i, o := range e.outcomesOf(ev.ID) {
		if o.StartedAt.Before(began) || o.StartedAt.After(time.Now()) || o.Duration <= 0 || o.PublishedAt.Before(began.Add(-time.Second)) ||
			o.StreamSeq != seq || o.Instance != p.Instance() || o.Subject != e.OutcomeSubject(e.source) {
			t.Errorf("outcome %d: %+v", i, o)
		}
		if failed := i < 2; o.RetryIn < 0 || o.RetryIn > 10*time.Millisecond || !failed && o.RetryIn != 0 {
			t.Errorf("outcome %d: retry in %s", i, o.RetryIn)
		}
		got := mesh.Outcome{Attempt: o.Attempt, Code: o.Code, Message: o.Message, RetryCount: o.RetryCount, Exhausted: o.Exhausted}
		if i >= len(want) || got != want[i] {
			t.Errorf("outcome %d: %+v", i, got)
		}
	}
	if n := len(e.outcomesOf(ev.ID)); n != len(want) {
		t.Errorf("%d outcomes, want %d", n, len(want))
	}

	r := e.record("orders", ev.ID)
	wantRecord := mesh.Record{
		EventID: ev.ID, Subscription: "orders", Source: e.source, Consumer: "orders", EventType: ordered, AggregateType: "order", AggregateID: "O-1",
		IdempotencyKey: ev.IdempotencyKey, TraceID: "trace-1", Status: mesh.RecordDispatched, RetryCount: 2, MaxRetries: 10,
		Attempts: []mesh.Attempt{
			{Number: 1, Instance: p.Instance(), ErrorCode: mesh.CodeError, ErrorMessage: "boom"},
			{Number: 2, Instance: p.Instance(), ErrorCode: mesh.CodeError, ErrorMessage: "bang"},
			{Number: 3, Instance: p.Instance()},
		},
	}
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.StartedAt.Before(began) || a.Duration <= 0 {
			t.Errorf("attempt %+v", a)
		} else {
			a.StartedAt, a.Duration = time.Time{}, 0
		}
	}
	if r.CreatedAt.Before(began) || r.UpdatedAt.Before(r.CreatedAt) {
		t.Errorf("created %s, updated %s", r.CreatedAt, r.UpdatedAt)
	}
	r.CreatedAt, r.UpdatedAt = time.Time{}, time.Time{}
	if diff := cmp.Diff(wantRecord, *r); diff != "" {
		t.Error(diff)
	}
	if dead := e.deadLetters(); len(dead) > 0 {
		t.Errorf("%d dead letters", len(dead))
	}
}

type codedError struct{ code string }

func (e codedError) Error() string     { return "coded " + e.code }
func (e codedError) ErrorCode() string { return e.code }

// brokenError panics when its nil pointer is asked for anything, as a typed nil does.
type brokenError struct{ text string }

func (e *brokenError) Error() string { return e.text }

func TestWhateverAHandlerDoesIsAnOutcome(t *testing.T) {
	t.Parallel()
	e := start(t)
	type call = func(context.Context, mesh.Delivery[[]byte]) error
	gives := func(err error) call { return func(context.Context, mesh.Delivery[[]byte]) error { return err } }
	type decoded struct{ Total string }
	for i, c := range []struct {
		name  string
		fn    call
		spoil func(*mesh.Event)
		code  string
		text  []string // parts of the message
		dead  bool
	}{
		{name: "error", fn: gives(errBoom), code: mesh.CodeError, text: []string{"boom"}},
		{name: "error with a code", fn: gives(fmt.Errorf("wrapped: %w", codedError{"out_of_stock"})), code: "out_of_stock", text: []string{"wrapped: coded out_of_stock"}},
		{name: "error with a code that is no name", fn: gives(codedError{"out of stock"}), code: mesh.CodeError},
		{name: "error with an empty code", fn: gives(codedError{""}), code: mesh.CodeError},
		{name: "error that panics when it is read", fn: gives((*brokenError)(nil)), code: mesh.CodePanic, text: []string{"nil pointer"}},
		{name: "error of broken UTF-8", fn: gives(errors.New("a\xffb")), code: mesh.CodeError, text: []string{"a\ufffdb"}},
		{name: "error without a text", fn: gives(errors.New("")), code: mesh.CodeError},
		{name: "permanent", fn: gives(mesh.Permanent(errBoom)), code: mesh.CodeError, text: []string{"boom"}, dead: true},
		{name: "permanent, wrapped, with a code", fn: gives(fmt.Errorf("give up: %w", mesh.Permanent(codedError{"gone"}))), code: "gone", text: []string{"give up: coded gone"}, dead: true},
		{name: "permanent in a later retry", fn: gives(mesh.RetryAfter(time.Hour, mesh.Permanent(errBoom))), code: mesh.CodeError, dead: true},
		{name: "panic", fn: func(context.Context, mesh.Delivery[[]byte]) error { panic("at the disco") }, code: mesh.CodePanic,
			text: []string{"panic: at the disco", "goroutine", "failure_test.go"}},
		{name: "panic with nil", fn: func(context.Context, mesh.Delivery[[]byte]) error { panic(nil) }, code: mesh.CodePanic},
		{name: "index out of range", fn: func(_ context.Context, d mesh.Delivery[[]byte]) error { return []error{}[d.Attempt] }, code: mesh.CodePanic, text: []string{"out of range"}},
		{name: "runtime.Goexit", fn: func(context.Context, mesh.Delivery[[]byte]) error { runtime.Goexit(); return nil }, code: mesh.CodePanic, text: []string{"Goexit"}},
		{name: "timeout", fn: func(ctx context.Context, _ mesh.Delivery[[]byte]) error { <-ctx.Done(); return ctx.Err() }, code: mesh.CodeTimeout,
			text: []string{"ran into its timeout of 100ms", "deadline exceeded"}},
		{name: "permanent timeout", fn: func(ctx context.Context, _ mesh.Delivery[[]byte]) error {
			<-ctx.Done()
			return mesh.Permanent(ctx.Err())
		}, code: mesh.CodeTimeout, dead: true},
		{name: "undecodable payload", spoil: func(e *mesh.Event) { e.Payload = []byte(`{"Total":12}`) }, code: mesh.CodeUndecodable,
			text: []string{"payload does not decode into mesh_test.decoded", "Total"}, dead: true},
		{name: "payload of another content type", spoil: func(e *mesh.Event) { e.Payload, e.ContentType = []byte("<xml/>"), "text/xml" }, code: mesh.CodeUndecodable, dead: true},
		{name: "unknown type", spoil: func(e *mesh.Event) { e.Type = "order.unheard-of" }, fn: gives(nil), code: mesh.CodeNoHandler,
			text: []string{"no handler for event type order.unheard-of"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			consumer := fmt.Sprint("c", i)
			sub := mesh.OnRaw(consumer, ordered, c.fn)
			if c.fn == nil {
				sub = mesh.On(consumer, ordered, func(context.Context, mesh.Delivery[decoded]) error { return nil })
			}
			sub.Timeout = 100 * time.Millisecond
			sub.Backoff = mesh.Backoff{Base: time.Hour, Cap: time.Hour}
			e := &env{t: t, Names: e.Names, js: e.js, source: e.source, connect: e.connect}
			p := e.handle(sub)
			ev := e.event(consumer)
			if c.spoil != nil {
				c.spoil(&ev)
			}
			seq := e.publish(ev)
			o := e.awaitOutcome(ev.ID, 1)
			if o.Code != c.code || o.Exhausted != c.dead || o.RetryCount != 1 || o.Attempt != 1 || len(o.Message) > 2100 {
				t.Errorf("outcome %+v", o)
			}
			for _, part := range c.text {
				if !strings.Contains(o.Message, part) {
					t.Errorf("message %q does not hold %q", o.Message, part)
				}
			}
			r := e.awaitRecord(consumer, ev.ID, 1)
			if r.ErrorCode != c.code || r.ErrorMessage != o.Message || r.Exhausted != c.dead || r.Status != mesh.RecordFailed || r.NextRetryAt.IsZero() != c.dead {
				t.Errorf("record %+v", r)
			}
			if c.dead {
				e.awaitSettled(consumer, seq)
			}
			p.stop() // a handler that ended its goroutine is waited for like any other
		})
	}
}

func TestPermanentFailureIsDeadLetteredWithEverythingAboutIt(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script(errBoom, mesh.Permanent(errors.New("no such\tshop: 订单 100%")))
	p := e.handle(orders(fn))
	ev := e.event("orders")
	ev.IdempotencyKey, ev.ContentType, ev.Payload = "key-1", "application/octet-stream", []byte{0, 1, 255, '\r', '\n'}
	ev.Headers = map[string]string{"X-Shop": "Zoë 100%", "webhook.endpoint-key": "k"}
	ev.TraceParent, ev.TraceState, ev.MaxRetries = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a=1", 7
	seq := e.publish(ev)
	e.awaitSettled("orders", seq)

	letters := e.deadLetters()
	if len(letters) != 1 {
		t.Fatalf("%d dead letters, want 1", len(letters))
	}
	msg := letters[0]
	if want := e.DeadSubject("orders", "orders", ordered); msg.Subject != want {
		t.Errorf("subject %s, want %s", msg.Subject, want)
	}
	if id, want := msg.Header.Get(nats.MsgIdHdr), ev.ID+"#orders#0"; id != want {
		t.Errorf("message id %q, want %q", id, want)
	}
	for key := range msg.Header {
		if key != nats.MsgIdHdr && strings.HasPrefix(strings.ToLower(key), "nats-") {
			t.Errorf("header %s of the server", key)
		}
	}
	got, err := mesh.ParseMessage(msg.Header, msg.Data)
	want := ev
	want.Failures = 2
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("event: %v\n%s", err, diff)
	}
	r := e.record("orders", ev.ID)
	for key, want := range map[string]string{
		"mesh-subscription": "orders", "mesh-error-code": mesh.CodeError, "mesh-error-message": "no such\tshop: 订单 100%",
		"mesh-retry-count": "2", "mesh-stream-seq": fmt.Sprint(seq), "mesh-died-at": r.UpdatedAt.UTC().Format(time.RFC3339Nano),
	} {
		if got, err := url.PathUnescape(msg.Header.Get(key)); err != nil || got != want {
			t.Errorf("%s: %q, want %q", key, got, want)
		}
	}
	text, err := url.PathUnescape(msg.Header.Get("mesh-attempts"))
	var attempts []mesh.Attempt
	if err := errors.Join(err, json.Unmarshal([]byte(text), &attempts)); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(r.Attempts, attempts); diff != "" {
		t.Error(diff)
	}
	if !r.Exhausted || !r.NextRetryAt.IsZero() || r.RetryCount != 2 || r.MaxRetries != 7 || len(r.Attempts) != 2 || r.Attempts[0].Instance != p.Instance() {
		t.Errorf("record %+v", r)
	}
	if o := e.awaitFinal(ev.ID); o.RetryCount != 2 || !o.Exhausted || o.RetryIn != 0 || o.Attempt != 2 {
		t.Errorf("outcome %+v", o)
	}
	if n := h.count(); n != 2 {
		t.Errorf("%d calls, want 2", n)
	}
}

func TestRetriesAreTheEventsElseTheSubscriptionsElseTen(t *testing.T) {
	t.Parallel()
	e := start(t)
	for i, c := range []struct{ event, subscription, attempts int }{
		{0, 0, 10}, {0, 2, 2}, {3, 2, 3}, {3, mesh.NoRetries, 3}, {1, 5, 1}, {mesh.NoRetries, 5, 1}, {0, mesh.NoRetries, 1},
	} {
		t.Run(fmt.Sprintf("event %d, subscription %d", c.event, c.subscription), func(t *testing.T) {
			t.Parallel()
			consumer := fmt.Sprint("c", i)
			h, fn := script(errBoom)
			sub := mesh.OnRaw(consumer, ordered, fn)
			sub.MaxRetries, sub.Backoff = c.subscription, orders(nil).Backoff
			e := &env{t: t, Names: e.Names, js: e.js, source: e.source, connect: e.connect}
			e.handle(sub)
			ev := e.event(consumer)
			ev.MaxRetries = c.event
			e.awaitSettled(consumer, e.publish(ev))
			all := e.outcomesOf(ev.ID)
			if n := h.count(); n != c.attempts || len(all) != n {
				t.Errorf("%d attempts and %d outcomes, want %d", n, len(all), c.attempts)
			}
			for i, o := range all {
				if last := i == len(all)-1; o.Exhausted != last || o.RetryCount != i+1 || o.Attempt != i+1 {
					t.Errorf("outcome %d: %+v", i, o)
				}
			}
			r := e.record(consumer, ev.ID)
			if !r.Exhausted || r.RetryCount != c.attempts || !r.NextRetryAt.IsZero() || len(r.Attempts) != c.attempts || r.Status != mesh.RecordFailed {
				t.Errorf("record %+v", r)
			}
		})
	}
}

func TestRecordKeepsTheLatestAttempts(t *testing.T) {
	t.Parallel()
	e := start(t)
	_, fn := script(errBoom)
	e.handle(with(orders(fn), func(s *mesh.Subscription) {
		s.MaxRetries, s.Backoff = 25, mesh.Backoff{Base: 1, Cap: 1}
	}))
	ev := e.event("orders")
	e.publish(ev)
	e.awaitFinal(ev.ID)
	r := e.record("orders", ev.ID)
	if r.RetryCount != 25 || len(r.Attempts) != 20 || r.Attempts[0].Number != 6 || r.Attempts[19].Number != 25 {
		t.Errorf("record %+v", r)
	}
	if text := e.awaitDeadLetter().Header.Get("mesh-attempts"); strings.Count(text, "startedAt") != 5 {
		t.Errorf("attempts of the dead letter: %s", text)
	}
}

// Whatever anybody publishes to the mesh's subjects: it is put aside, and the others go on.
func TestForeignMessageIsDeadLetteredAsMalformed(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script()
	sub := orders(fn)
	sub.Concurrency = 1
	e.handle(sub)
	most := int(e.js.Conn().MaxPayload())
	for _, c := range []struct {
		name, subject string
		header        nats.Header
		data          []byte
		dead          string
	}{
		{"no header", "mesh.events.orders.x.y", nil, []byte("garbage"), "orders.x.y"},
		{"no data", "mesh.events.orders.x", nil, nil, "orders.x"},
		{"another's headers", "mesh.events.orders.x", nats.Header{"Foo": {"bar"}, "ce-id": {"1"}}, []byte("x"), "orders.x"},
		{"source that is a URL", "mesh.events.orders.x", wireEvent("ce-source", "https://example.com/a"), []byte("x"), "orders.x"},
		{"id of 5000 bytes", "mesh.events.orders.x", wireEvent("ce-id", strings.Repeat("i", 5000)), []byte("x"), "orders.x"},
		{"id of wildcards", "mesh.events.orders.x", wireEvent("ce-id", "a.>"), []byte("x"), "orders.x"},
		{"type that is none", "mesh.events.orders.é", nil, []byte("x"), "unknown.unknown"},
		{"replay of nothing", "mesh.replay.orders.x", nil, []byte("x"), "unknown.unknown"},
		{"replay", "mesh.replay.orders.orders.x.y", nil, []byte("x"), "orders.x.y"},
		{"as large as the server takes", "mesh.events.orders.x", nil, bytes.Repeat([]byte("x"), most), "orders.x"},
	} {
		before := len(e.deadLetters())
		seq := e.publishRaw(c.subject, c.header, c.data)
		e.awaitSettled("orders", seq)
		letters := e.deadLetters()
		if len(letters) != before+1 {
			t.Fatalf("%s: %d dead letters more, want 1", c.name, len(letters)-before)
		}
		msg := letters[before]
		if msg.Subject != "mesh.dead.orders."+c.dead || msg.Header.Get("mesh-error-code") != mesh.CodeMalformed || msg.Header.Get("mesh-error-message") == "" ||
			msg.Header.Get("mesh-stream-seq") != fmt.Sprint(seq) || msg.Header.Get("ce-id") != fmt.Sprint("seq-", seq) {
			t.Errorf("%s: %s %v", c.name, msg.Subject, msg.Header)
		}
		if !bytes.HasPrefix(c.data, msg.Data) || len(msg.Data) < min(len(c.data), most-8<<10) {
			t.Errorf("%s: dead letter of %d bytes, the message has %d", c.name, len(msg.Data), len(c.data))
		}
		ev := e.event("orders")
		e.awaitSettled("orders", e.publish(ev))
		if len(h.of(ev.ID)) != 1 {
			t.Errorf("%s: the next event was not handled", c.name)
		}
	}
	if all := e.messages(e.OutcomesStream(), 1); len(all) != h.count() {
		t.Errorf("%d outcome messages, want %d", len(all), h.count())
	}
}

// A full stream of dead letters keeps what dies from being ended, and nothing else.
func TestFullDeadLetterStreamHoldsUpNoOtherEvents(t *testing.T) {
	t.Parallel()
	e := startWith(t, natsd.Config{}, mesh.Topology{MaxBytes: 64 << 20, MaxDeadBytes: 4 << 10, MaxLedger: 64 << 20})
	e.fill("mesh.dead.junk.x.y")
	bad, fail := script(mesh.Permanent(errBoom))
	good, succeed := script()
	sub := orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "bad" {
			return fail(ctx, d)
		}
		return succeed(ctx, d)
	})
	sub.Concurrency = 1
	e.handle(sub)
	dying := e.event("orders")
	dying.AggregateID = "bad"
	e.publish(dying)
	foreign := e.publishRaw("mesh.events.orders.x", nil, []byte("garbage"))
	e.awaitRecord("orders", dying.ID, 1)
	for _, ev := range e.publishMany(20, "orders") {
		e.awaitOutcome(ev.ID, 1)
	}
	if all := e.outcomesOf(dying.ID); len(all) > 0 || e.durable("orders").AckFloor.Stream >= foreign {
		t.Errorf("ended without a dead letter: %+v", all)
	}
	e.empty(e.DeadStream())
	e.awaitSettled("orders", foreign+20)
	if o := e.awaitFinal(dying.ID); !o.Exhausted || o.RetryCount != 1 {
		t.Errorf("outcome %+v", o)
	}
	if bad.count() != 1 || good.count() != 20 || len(e.deadLetters()) != 2 {
		t.Errorf("%d and %d calls, %d dead letters, want 1, 20 and 2", bad.count(), good.count(), len(e.deadLetters()))
	}
}

// What CheckSize lets through can also die, whatever it dies of.
func TestLargestEventsCanBeDeadLettered(t *testing.T) {
	t.Parallel()
	e := start(t)
	wide := strings.Repeat("é", 127)
	for _, c := range []struct{ name, text, instance string }{
		{"payload up to the limit", strings.Repeat("订单", 2000), ""},
		{"60 KB of headers", strings.Repeat("订单", 2000), wide},
		{"60 KB of headers and payload up to the limit", "short", strings.Repeat("<", 255)},
		{"60 KB of headers and payload up to the limit", strings.Repeat("订单", 2000), wide},
		{"60 KB of headers and payload up to the limit", strings.Repeat("<", 5000), wide},
		{"60 KB of headers and payload up to the limit", strings.Repeat("\xff\x01\"", 2000), wide},
	} {
		_, fn := script(errors.New(c.text))
		sub := with(mesh.OnRaw("orders", mesh.AnyType, fn), func(s *mesh.Subscription) {
			s.MaxRetries, s.Backoff = 6, mesh.Backoff{Base: 1, Cap: 1}
		})
		p := e.handleOn(e.mesh(mesh.Config{Instance: c.instance}), sub)
		ev := extremes(int(e.js.Conn().MaxPayload()))[c.name]
		e.awaitSettled("orders", e.publish(ev))
		letters := e.deadLetters()
		if len(letters) != 1 || !bytes.Equal(letters[0].Data, ev.Payload) || letters[0].Header.Get("mesh-retry-count") != "6" {
			t.Errorf("%s, dying of %.10q: %d dead letters", c.name, c.text, len(letters))
		}
		e.empty(e.DeadStream())
		p.stop()
	}
}

// The smallest server that is accepted also takes the largest records and batches of outcomes.
func TestSmallestServerTakesWhatTheMeshWrites(t *testing.T) {
	t.Parallel()
	e := startWith(t, natsd.Config{ConfigText: []byte("max_payload: 64KB\njetstream { max_file_store: 1GB }")}, small)
	_, fail := script(errors.New(strings.Repeat("<\x01", 2000)))
	release := make(chan struct{})
	sub := orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		if d.AggregateID == "bad" {
			return fail(ctx, d)
		}
		<-release
		return nil
	})
	sub.MaxRetries, sub.Concurrency, sub.Backoff = 25, 600, mesh.Backoff{Base: 1, Cap: 1}
	e.handle(sub)
	bad := e.event("orders")
	bad.AggregateID = "bad"
	e.publish(bad)
	if o := e.awaitFinal(bad.ID); o.RetryCount != 25 {
		t.Errorf("outcome %+v", o)
	}
	if r := e.record("orders", bad.ID); r.RetryCount != 25 || len(r.Attempts) == 0 || r.Attempts[len(r.Attempts)-1].Number != 25 {
		t.Errorf("record with %d attempts", len(r.Attempts))
	}
	events := e.publishMany(600, "orders")
	await(t, "600 handlers to run", func() bool { return e.durable("orders").NumAckPending == 600 })
	close(release)
	e.awaitSettled("orders", uint64(len(events)+1))
}

func TestRecordThatWasDeletedBeginsAnew(t *testing.T) {
	t.Parallel()
	e := start(t)
	_, fn := script(errBoom, nil)
	ev := e.event("orders")
	e.publishRaw(e.recordSubject("orders", ev.ID), nil, []byte(`{"retryCount":9}`))
	e.publishRaw(e.recordSubject("orders", ev.ID), nats.Header{"KV-Operation": {"DEL"}}, nil)
	e.handle(orders(fn))
	e.awaitSettled("orders", e.publish(ev))
	if r := e.record("orders", ev.ID); r.RetryCount != 1 || r.Status != mesh.RecordDispatched {
		t.Errorf("record %+v", r)
	}
}
