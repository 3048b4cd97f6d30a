package mesh_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"jetmesh/internal/natsd"
	"jetmesh/internal/natstest"
	"jetmesh/mesh"
)

func TestMain(m *testing.M) {
	natsd.MaybeChildMain()
	maybeServiceMain()
	// A server that was given a stream with sources waits for them some time after its shutdown.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*stream).trySetupSourceConsumer.func3"))
}

// patience bounds every wait. It only ever runs out in a test that fails.
const patience = 30 * time.Second

// soon is a delay that a test waits out: a retry, a sign of life.
const soon = 50 * time.Millisecond

func await(t testing.TB, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; !holds(); pause = min(2*pause, 20*time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s in vain for %s", patience, what)
		}
		time.Sleep(pause)
	}
}

// receive takes the next value from a channel.
func receive[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("waited %s in vain for %s", patience, what)
		panic("unreachable")
	}
}

var testLog = func() zerolog.Logger {
	if os.Getenv("JETMESH_TEST_LOG") == "" {
		return zerolog.Nop()
	}
	return zerolog.New(os.Stderr)
}()

// An env is a server with the streams of a mesh, seen with the eyes of an operator.
type env struct {
	mesh.Names
	t       testing.TB
	connect func(...nats.Option) (*nats.Conn, error) // as a service does
	js      jetstream.JetStream
	source  string // the outbox that the events claim to come from

	mu       sync.Mutex
	outcomes []instanceOutcome
	read     uint64 // messages of the outcomes stream
}

type instanceOutcome struct {
	mesh.Outcome
	Instance string
	Subject  string
	Batch    uint64 // sequence of the message it came in
}

var small = mesh.Topology{MaxBytes: 256 << 20, MaxDeadBytes: 64 << 20, MaxLedger: 64 << 20}

// start is a server in this process with a mesh's streams.
func start(t testing.TB) *env {
	t.Helper()
	return startWith(t, natsd.Config{}, small)
}

func startWith(t testing.TB, cfg natsd.Config, topology mesh.Topology) *env {
	t.Helper()
	s := natstest.Run(t, cfg)
	return on(t, topology, func(opts ...nats.Option) (*nats.Conn, error) { return mesh.Connect(s.URL(), opts...) })
}

func on(t testing.TB, topology mesh.Topology, connect func(...nats.Option) (*nats.Conn, error)) *env {
	t.Helper()
	e := &env{t: t, connect: connect, source: uuid.NewString()}
	m := e.mesh(mesh.Config{})
	e.Names, e.js = m.Names, m.JetStream()
	if err := m.ApplyTopology(t.Context(), topology); err != nil {
		t.Fatal(err)
	}
	return e
}

// mesh is a mesh on a connection of its own.
func (e *env) mesh(cfg mesh.Config, opts ...nats.Option) *mesh.Mesh {
	e.t.Helper()
	nc, err := e.connect(opts...)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(nc.Close)
	cfg.Logger = testLog
	m, err := mesh.New(nc, cfg)
	if err != nil {
		e.t.Fatal(err)
	}
	return m
}

func userInfo(user string) nats.Option { return nats.UserInfo(user, "p") }

// A process stands for one process of a service.
type process struct {
	*mesh.Mesh
	cancel context.CancelFunc
	done   chan struct{}
}

// handle runs subscriptions until the test ends or stop is called.
func (e *env) handle(subs ...mesh.Subscription) *process {
	e.t.Helper()
	return e.handleOn(e.mesh(mesh.Config{}), subs...)
}

func (e *env) handleOn(m *mesh.Mesh, subs ...mesh.Subscription) *process {
	e.t.Helper()
	m.Handle(subs...)
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{Mesh: m, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		if err := m.Run(ctx); err != nil {
			e.t.Errorf("Run: %v", err)
		}
	}()
	e.t.Cleanup(p.stop)
	return p
}

func (p *process) stop() { p.cancel(); <-p.done }

// runError is what Run refuses to start with.
func (e *env) runError(subs ...mesh.Subscription) error {
	e.t.Helper()
	m := e.mesh(mesh.Config{})
	m.Handle(subs...)
	ctx, cancel := context.WithTimeout(e.t.Context(), patience)
	defer cancel()
	if err := m.Run(ctx); err != nil {
		return err
	}
	e.t.Fatal("Run ended without an error")
	return nil
}

const ordered = "order.created"

// event is one as an outbox publishes it.
func (e *env) event(consumer string) mesh.Event {
	return mesh.Event{
		ID: uuid.NewString(), Source: e.source, Consumer: consumer, Type: ordered,
		AggregateType: "order", AggregateID: "O-1", Payload: []byte(`{"total":12}`),
		TraceID: "trace-1", Time: time.Now().UTC().Truncate(time.Microsecond),
	}
}

// publish stores an event as a relay does and returns its place in the stream.
func (e *env) publish(ev mesh.Event) uint64 {
	e.t.Helper()
	ack, err := e.js.PublishMsg(e.t.Context(), ev.Message(e.EventSubject(ev.Consumer, ev.Type), ev.MsgID()))
	if err != nil {
		e.t.Fatal(err)
	}
	return ack.Sequence
}

// publishReplay stores an event as an operator's replay does.
func (e *env) publishReplay(subscription string, ev mesh.Event) uint64 {
	e.t.Helper()
	subject := strings.TrimSuffix(e.ReplayFilter(subscription), ">") + ev.Consumer + "." + ev.Type
	ack, err := e.js.PublishMsg(e.t.Context(), ev.Message(subject, fmt.Sprintf("%s#%s#%d", ev.ID, subscription, ev.Generation)))
	if err != nil {
		e.t.Fatal(err)
	}
	return ack.Sequence
}

// publishMany publishes n events of a consumer.
func (e *env) publishMany(n int, consumer string) []mesh.Event {
	e.t.Helper()
	events := make([]mesh.Event, n)
	for i := range events {
		events[i] = e.event(consumer)
		e.publish(events[i])
	}
	return events
}

// publishRaw stores any message.
func (e *env) publishRaw(subject string, header nats.Header, data []byte) uint64 {
	e.t.Helper()
	ack, err := e.js.PublishMsg(e.t.Context(), &nats.Msg{Subject: subject, Header: header, Data: data})
	if err != nil {
		e.t.Fatal(err)
	}
	return ack.Sequence
}

// fill publishes to a subject until its stream is full.
func (e *env) fill(subject string) {
	e.t.Helper()
	for size := 1000; size > 0; {
		_, err := e.js.Publish(e.t.Context(), subject, make([]byte, size))
		if api := (*jetstream.APIError)(nil); errors.As(err, &api) && api.ErrorCode == 10077 {
			size /= 2
		} else if err != nil {
			e.t.Fatal(err)
		}
	}
}

// empty purges a stream.
func (e *env) empty(stream string) {
	e.t.Helper()
	s, err := e.js.Stream(e.t.Context(), stream)
	if err == nil {
		err = s.Purge(e.t.Context())
	}
	if err != nil {
		e.t.Fatal(err)
	}
}

// durable is the state of a subscription's durable; nil if there is none.
func (e *env) durable(subscription string) *jetstream.ConsumerInfo {
	c, err := e.js.Consumer(e.t.Context(), e.EventsStream(), e.OwnerDurable(subscription))
	if err != nil {
		return nil
	}
	return c.CachedInfo()
}

// awaitSettled waits until a subscription has answered everything up to a message for good.
func (e *env) awaitSettled(subscription string, seq uint64) {
	e.t.Helper()
	await(e.t, fmt.Sprintf("subscription %s to settle message %d", subscription, seq), func() bool {
		c := e.durable(subscription)
		return c != nil && c.AckFloor.Stream >= seq && c.NumAckPending == 0
	})
}

// record is the failure record of an event, nil if there is none.
func (e *env) record(subscription, id string) *mesh.Record {
	e.t.Helper()
	s, err := e.js.Stream(e.t.Context(), "KV_"+e.FailuresBucket())
	if err != nil {
		return nil
	}
	msg, err := s.GetLastMsgForSubject(e.t.Context(), e.recordSubject(subscription, id))
	if err != nil {
		return nil
	}
	r := new(mesh.Record)
	if err := json.Unmarshal(msg.Data, r); err != nil {
		e.t.Fatal(err)
	}
	return r
}

func (e *env) recordSubject(subscription, id string) string {
	return "$KV." + e.FailuresBucket() + "." + subscription + "." + id
}

// awaitRecord waits for a record with a number of failures.
func (e *env) awaitRecord(subscription, id string, retryCount int) *mesh.Record {
	e.t.Helper()
	var r *mesh.Record
	await(e.t, fmt.Sprintf("record of event %s with %d failures", id, retryCount), func() bool {
		r = e.record(subscription, id)
		return r != nil && r.RetryCount >= retryCount
	})
	return r
}

// putRecord writes a record as an operator's tool does.
func (e *env) putRecord(r mesh.Record) {
	e.t.Helper()
	data, err := json.Marshal(r)
	if err != nil {
		e.t.Fatal(err)
	}
	e.publishRaw(e.recordSubject(r.Subscription, r.EventID), nil, data)
}

// outcomesOf are the outcomes of an event so far, in the order of their storage.
func (e *env) outcomesOf(id string) []instanceOutcome {
	e.t.Helper()
	var of []instanceOutcome
	for _, o := range e.allOutcomes() {
		if o.EventID == id {
			of = append(of, o)
		}
	}
	return of
}

func (e *env) allOutcomes() []instanceOutcome {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, msg := range e.messages(e.OutcomesStream(), e.read+1) {
		e.read = msg.Sequence
		b, err := mesh.ParseOutcomes(msg.Data)
		if err != nil {
			e.t.Fatal(err)
		}
		for _, o := range b.Outcomes {
			e.outcomes = append(e.outcomes, instanceOutcome{o, b.Instance, msg.Subject, msg.Sequence})
		}
	}
	return slices.Clone(e.outcomes)
}

// awaitOutcome waits for the nth outcome of an event, from 1.
func (e *env) awaitOutcome(id string, n int) instanceOutcome {
	e.t.Helper()
	var got []instanceOutcome
	await(e.t, fmt.Sprintf("outcome %d of event %s", n, id), func() bool {
		got = e.outcomesOf(id)
		return len(got) >= n
	})
	return got[n-1]
}

// awaitFinal waits for the outcome after which an event does not run again. As a row does, it
// goes by generation and attempt: after a fault an older outcome may be told later.
func (e *env) awaitFinal(id string) instanceOutcome {
	e.t.Helper()
	var last instanceOutcome
	await(e.t, "the final outcome of event "+id, func() bool {
		for _, o := range e.outcomesOf(id) {
			if cmp.Or(cmp.Compare(o.Generation, last.Generation), cmp.Compare(o.Attempt, last.Attempt)) >= 0 {
				last = o
			}
		}
		return last.EventID == id && (last.Succeeded() || last.Exhausted)
	})
	return last
}

// messages are what a stream holds from a sequence on.
func (e *env) messages(stream string, from uint64) []*jetstream.RawStreamMsg {
	e.t.Helper()
	s, err := e.js.Stream(e.t.Context(), stream)
	if err != nil {
		return nil // the server is away: the caller asks again
	}
	state := s.CachedInfo().State
	var list []*jetstream.RawStreamMsg
	for seq := max(from, state.FirstSeq); seq <= state.LastSeq; seq++ {
		msg, err := s.GetMsg(e.t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		if err != nil {
			return list
		}
		list = append(list, msg)
	}
	return list
}

func (e *env) deadLetters() []*jetstream.RawStreamMsg {
	e.t.Helper()
	return e.messages(e.DeadStream(), 1)
}

func (e *env) awaitDeadLetter() *jetstream.RawStreamMsg {
	e.t.Helper()
	var list []*jetstream.RawStreamMsg
	await(e.t, "a dead letter", func() bool { list = e.deadLetters(); return len(list) > 0 })
	return list[0]
}

// takeAndHandBack leaves messages that were delivered once and never handled.
func (e *env) takeAndHandBack(subscription string, n int) {
	e.t.Helper()
	c, err := e.js.Consumer(e.t.Context(), e.EventsStream(), e.OwnerDurable(subscription))
	if err != nil {
		e.t.Fatal(err)
	}
	batch, err := c.Fetch(n, jetstream.FetchMaxWait(patience))
	if err != nil {
		e.t.Fatal(err)
	}
	taken := 0
	for msg := range batch.Messages() {
		if err := msg.Nak(); err != nil {
			e.t.Fatal(err)
		}
		taken++
	}
	if taken != n || batch.Error() != nil {
		e.t.Fatalf("took %d messages of %d: %v", taken, n, batch.Error())
	}
	if err := e.js.Conn().Flush(); err != nil {
		e.t.Fatal(err)
	}
}

// bind makes a subscription's durable, without anybody who takes from it.
func (e *env) bind(s mesh.Subscription) {
	e.t.Helper()
	p := e.handle(s)
	await(e.t, "the durable", func() bool { return e.durable(s.Name) != nil })
	p.stop()
}

// A handler is a scripted handler that remembers its calls.
type handler struct {
	calls chan mesh.Delivery[[]byte]
	mu    sync.Mutex
	seen  []mesh.Delivery[[]byte]
}

// script makes a handler that comes to the given results, the last of them for ever.
func script(results ...error) (*handler, mesh.Handler) {
	h := &handler{calls: make(chan mesh.Delivery[[]byte], 10_000)}
	return h, func(_ context.Context, d mesh.Delivery[[]byte]) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		n := 0
		for _, s := range h.seen {
			if s.ID == d.ID {
				n++
			}
		}
		h.seen = append(h.seen, d)
		h.calls <- d
		if len(results) == 0 {
			return nil
		}
		return results[min(n, len(results)-1)]
	}
}

// of are the calls for one event.
func (h *handler) of(id string) []mesh.Delivery[[]byte] {
	h.mu.Lock()
	defer h.mu.Unlock()
	var of []mesh.Delivery[[]byte]
	for _, d := range h.seen {
		if d.ID == id {
			of = append(of, d)
		}
	}
	return of
}

func (h *handler) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.seen)
}

// orders is the subscription of most tests: it retries at once.
func orders(fn mesh.Handler) mesh.Subscription {
	s := mesh.OnRaw("orders", ordered, fn)
	s.Backoff = mesh.Backoff{Base: time.Millisecond, Cap: 10 * time.Millisecond}
	return s
}

var errBoom = errors.New("boom")

// problems are the fields that an error names, sorted; the parts of keys are key.<part>.
func problems(t testing.TB, err error) []string {
	t.Helper()
	var names []string
	var walk func(error)
	walk = func(err error) {
		switch e := err.(type) {
		case nil:
		case *mesh.FieldError:
			names = append(names, e.Field)
		case *mesh.KeyError:
			names = append(names, "key."+e.Part)
		case interface{ Unwrap() []error }:
			for _, part := range e.Unwrap() {
				walk(part)
			}
		case interface{ Unwrap() error }:
			walk(e.Unwrap())
		default:
			t.Errorf("error without a field: %v", err)
		}
		if err != nil && len(err.Error()) > 20_000 {
			t.Errorf("error text of %d bytes", len(err.Error()))
		}
	}
	walk(err)
	slices.SortFunc(names, cmp.Compare[string])
	return names
}
