package mesh_test

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/mesh"
)

func nothing(context.Context, mesh.Delivery[[]byte]) error { return nil }

func with(s mesh.Subscription, change func(*mesh.Subscription)) mesh.Subscription {
	change(&s)
	return s
}

func TestWrongSubscriptionsAreRefusedByTheFieldsName(t *testing.T) {
	t.Parallel()
	e := start(t)
	type sub = mesh.Subscription
	a, b := mesh.OnRaw("a", "t1", nothing), mesh.OnRaw("a", "t2", nothing)
	set := func(change func(*sub)) []sub { return []sub{with(a, change)} }
	disagree := func(one, two func(*sub)) []sub { return []sub{with(a, one), with(b, two)} }
	type decoded struct{ Total int }
	for name, c := range map[string]struct {
		subs   []sub
		fields []string
	}{
		"no handler":                       {[]sub{{Name: "a"}}, []string{"subscription"}},
		"zero value":                       {[]sub{{}}, []string{"name", "subscription"}},
		"nil handler":                      {[]sub{mesh.OnRaw("a", "t", nil)}, []string{"handler"}},
		"nil handler of a type":            {[]sub{mesh.On[decoded]("a", "t", nil)}, []string{"handler"}},
		"bad consumer":                     {[]sub{with(mesh.OnRaw("a.b", "t", nothing), func(s *sub) { s.Name = "a" })}, []string{"consumer"}},
		"bad consumer, which is the name":  {[]sub{mesh.OnRaw("a*", "t", nothing)}, []string{"consumer", "name"}},
		"wildcard type":                    {[]sub{mesh.OnRaw("a", "t.*", nothing)}, []string{"eventType"}},
		"type >":                           {[]sub{mesh.OnRaw("a", ">", nothing)}, []string{"eventType"}},
		"name with a dot":                  {set(func(s *sub) { s.Name = "a.b" }), []string{"name"}},
		"name of 65 bytes":                 {set(func(s *sub) { s.Name = strings.Repeat("n", 65) }), []string{"name"}},
		"same handler twice":               {[]sub{a, a}, []string{"handler"}},
		"AnyType twice":                    {[]sub{mesh.OnRaw("a", mesh.AnyType, nothing), mesh.OnRaw("a", mesh.AnyType, nothing)}, []string{"handler"}},
		"two owners of a consumer":         {[]sub{a, with(b, func(s *sub) { s.Name = "other" })}, []string{"consumer"}},
		"retries below never":              {set(func(s *sub) { s.MaxRetries = -2 }), []string{"maxRetries"}},
		"retries above 1000":               {set(func(s *sub) { s.MaxRetries = 1001 }), []string{"maxRetries"}},
		"negative concurrency":             {set(func(s *sub) { s.Concurrency = -1 }), []string{"concurrency"}},
		"concurrency above 10,000":         {set(func(s *sub) { s.Concurrency = 10_001 }), []string{"concurrency"}},
		"negative timeout":                 {set(func(s *sub) { s.Timeout = -1 }), []string{"timeout"}},
		"timeout for ever":                 {set(func(s *sub) { s.Timeout = math.MaxInt64 }), []string{"timeout"}},
		"ackWait below a second":           {set(func(s *sub) { s.AckWait = time.Second - 1 }), []string{"ackWait"}},
		"ackWait for ever":                 {set(func(s *sub) { s.AckWait = math.MaxInt64 }), []string{"ackWait"}},
		"negative backoff":                 {set(func(s *sub) { s.Backoff.Base = -1 }), []string{"backoff"}},
		"cap below base":                   {set(func(s *sub) { s.Backoff = mesh.Backoff{Base: 2, Cap: 1} }), []string{"backoff"}},
		"base above the default cap":       {set(func(s *sub) { s.Backoff.Base = time.Hour }), []string{"backoff"}},
		"cap for ever":                     {set(func(s *sub) { s.Backoff.Cap = math.MaxInt64 }), []string{"backoff"}},
		"retries that disagree":            {disagree(func(s *sub) { s.MaxRetries = 1 }, func(s *sub) { s.MaxRetries = mesh.NoRetries }), []string{"maxRetries"}},
		"concurrency that disagrees":       {disagree(func(s *sub) { s.Concurrency = 1 }, func(s *sub) { s.Concurrency = 2 }), []string{"concurrency"}},
		"timeouts that disagree":           {disagree(func(s *sub) { s.Timeout = 1 }, func(s *sub) { s.Timeout = 2 }), []string{"timeout"}},
		"ackWaits that disagree":           {disagree(func(s *sub) { s.AckWait = 1e9 }, func(s *sub) { s.AckWait = 2e9 }), []string{"ackWait"}},
		"backoffs that disagree in base":   {disagree(func(s *sub) { s.Backoff.Base = 1 }, func(s *sub) { s.Backoff.Base = 2 }), []string{"backoff.base"}},
		"backoffs that disagree in cap":    {disagree(func(s *sub) { s.Backoff.Cap = 1e10 }, func(s *sub) { s.Backoff.Cap = 2e10 }), []string{"backoff.cap"}},
		"everything of several, all named": {[]sub{{}, mesh.OnRaw("a", "t.*", nil), with(a, func(s *sub) { s.AckWait = 1 }), with(b, func(s *sub) { s.Name = "other" })}, []string{"ackWait", "consumer", "eventType", "handler", "name", "subscription"}},
	} {
		err := e.runError(c.subs...)
		if diff := cmp.Diff(c.fields, problems(t, err)); diff != "" {
			t.Errorf("%s: %v\n%s", name, err, diff)
		}
	}
	if list := e.durable("a"); list != nil {
		t.Errorf("a refused subscription has a durable: %+v", list)
	}
}

func TestSettingsThatOneOfSeveralSubscriptionsMakesHoldForAll(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script()
	e.handle(
		mesh.OnRaw("orders", "a", fn),
		with(mesh.OnRaw("orders", "b", fn), func(s *mesh.Subscription) { s.AckWait = 7 * time.Second }),
		with(mesh.OnRaw("orders", "c", fn), func(s *mesh.Subscription) { s.AckWait = 7 * time.Second }),
	)
	for _, typ := range []string{"a", "b", "c"} {
		ev := e.event("orders")
		ev.Type = typ
		e.publish(ev)
		if got := receive(t, typ, h.calls); got.Type != typ || got.Subscription != "orders" {
			t.Errorf("type %s at %s, want %s", got.Type, got.Subscription, typ)
		}
	}
	if c := e.durable("orders").Config; c.AckWait != 7*time.Second || c.MaxDeliver != -1 || c.MaxAckPending != 100_000 || len(c.BackOff) > 0 {
		t.Errorf("durable %+v", c)
	}
}

func TestAnyTypeServesWhatHasNoHandlerOfItsOwn(t *testing.T) {
	t.Parallel()
	e := start(t)
	type served struct{ by, typ string }
	got := make(chan served, 10)
	by := func(name string) mesh.Handler {
		return func(_ context.Context, d mesh.Delivery[[]byte]) error {
			got <- served{name, d.Type}
			return nil
		}
	}
	e.handle(mesh.OnRaw("orders", mesh.AnyType, by("any")), mesh.OnRaw("orders", "order.paid", by("paid")))
	for _, c := range []served{{"any", "order.created"}, {"paid", "order.paid"}, {"any", "order.paid.late"}, {"any", "order"}} {
		ev := e.event("orders")
		ev.Type = c.typ
		e.publish(ev)
		if s := receive(t, c.typ, got); s != c {
			t.Errorf("served %+v, want %+v", s, c)
		}
	}
}

func TestOneSubscriptionOwnsSeveralConsumers(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script()
	audit := func(consumer string) mesh.Subscription {
		return with(mesh.OnRaw(consumer, mesh.AnyType, fn), func(s *mesh.Subscription) { s.Name = "audit" })
	}
	e.handle(audit("orders"), audit("stock"), audit("mail"))
	for _, consumer := range []string{"orders", "stock", "mail"} {
		ev := e.event(consumer)
		e.publish(ev)
		if got := receive(t, consumer, h.calls); got.Consumer != consumer || got.Subscription != "audit" {
			t.Errorf("consumer %s at %s, want %s at audit", got.Consumer, got.Subscription, consumer)
		}
	}
	stream, err := e.js.Stream(t.Context(), e.EventsStream())
	if err != nil {
		t.Fatal(err)
	}
	owners, err := mesh.Owners(t.Context(), stream)
	if diff := cmp.Diff(map[string]string{"orders": "own_audit", "stock": "own_audit", "mail": "own_audit"}, owners); diff != "" || err != nil {
		t.Error(err, diff)
	}
}

func TestReplayReachesTheOneSubscription(t *testing.T) {
	t.Parallel()
	e := start(t)
	h, fn := script()
	_, other := script()
	e.handle(orders(fn), mesh.OnRaw("stock", ordered, other))
	ev := e.event("orders")
	ev.Generation = 1
	e.publishReplay("orders", ev)
	if got := receive(t, "the replay", h.calls); got.ID != ev.ID || got.Generation != 1 {
		t.Errorf("got %+v", got.Event)
	}
	if o := e.awaitOutcome(ev.ID, 1); o.Generation != 1 || !o.Succeeded() {
		t.Errorf("outcome %+v", o)
	}
}

func TestSecondOwnerOfAConsumerIsRefused(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.bind(mesh.OnRaw("orders", ordered, nothing))
	err := e.runError(with(mesh.OnRaw("orders", ordered, nothing), func(s *mesh.Subscription) { s.Name = "other" }))
	if !strings.Contains(err.Error(), "consumer orders is owned by durable own_orders already") {
		t.Error(err)
	}
	if e.durable("other") != nil {
		t.Error("the refused subscription has a durable")
	}
}

func TestDurableThatWasMadeForSomethingElseIsRefused(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.bind(mesh.OnRaw("orders", ordered, nothing))
	made := e.durable("orders").Config
	type config = jetstream.ConsumerConfig
	for name, c := range map[string]struct {
		change func(*config)
		want   string
	}{
		"other filters": {func(c *config) { c.FilterSubjects = []string{"mesh.events.stock.>"} },
			"filter_subjects is [mesh.events.stock.>], want [mesh.events.orders.> mesh.replay.orders.>]"},
		"one filter, in the old form": {func(c *config) { c.FilterSubjects, c.FilterSubject = nil, "mesh.events.orders.>" },
			"filter_subjects is [mesh.events.orders.>], want [mesh.events.orders.> mesh.replay.orders.>]"},
		"no filter":          {func(c *config) { c.FilterSubjects = nil }, "filter_subjects is [], want [mesh.events.orders.> mesh.replay.orders.>]"},
		"other ack policy":   {func(c *config) { c.AckPolicy = jetstream.AckAllPolicy }, "ack_policy is AckAll, want AckExplicit"},
		"other ack wait":     {func(c *config) { c.AckWait = time.Minute }, "ack_wait is 1m0s, want 30s"},
		"backoff":            {func(c *config) { c.BackOff, c.AckWait = []time.Duration{30 * time.Second}, 30*time.Second }, "backoff is [30s], want []"},
		"bounded deliveries": {func(c *config) { c.MaxDeliver = 5 }, "max_deliver is 5, want -1"},
		"bounded pending":    {func(c *config) { c.MaxAckPending = 1000 }, "max_ack_pending is 1000, want 100000"},
		"headers only":       {func(c *config) { c.HeadersOnly = true }, "headers_only is true, want false"},
		"everything": {func(c *config) { c.AckWait, c.MaxDeliver, c.HeadersOnly = time.Minute, 5, true },
			"ack_wait is 1m0s, want 30s; max_deliver is 5, want -1; headers_only is true, want false"},
	} {
		config := made
		c.change(&config)
		if err := e.js.DeleteConsumer(t.Context(), e.EventsStream(), config.Durable); err != nil {
			t.Fatal(err)
		}
		if _, err := e.js.CreateConsumer(t.Context(), e.EventsStream(), config); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		before := e.durable("orders").Config
		err := e.runError(mesh.OnRaw("orders", ordered, nothing))
		if want := "mesh: durable own_orders differs from the subscription: " + c.want; err.Error() != want {
			t.Errorf("%s: %q, want %q", name, err, want)
		}
		if diff := cmp.Diff(before, e.durable("orders").Config); diff != "" {
			t.Errorf("%s: the durable was changed: %s", name, diff)
		}
	}
}

func TestMeshRunsOnce(t *testing.T) {
	t.Parallel()
	e := start(t)
	m := e.mesh(mesh.Config{})
	e.handleOn(m, mesh.OnRaw("orders", ordered, nothing)).stop()
	if err := m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "Run called twice") {
		t.Errorf("second Run: %v", err)
	}
	defer func() {
		if p := recover(); p != "mesh: Handle called after Run" {
			t.Errorf("Handle after Run: %v", p)
		}
	}()
	m.Handle(mesh.OnRaw("stock", ordered, nothing))
}
