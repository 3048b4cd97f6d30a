package mesh_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/internal/natsd"
	"jetmesh/internal/natstest"
	"jetmesh/mesh"
)

// streamConfigs are the streams of a mesh as the server has them.
func streamConfigs(t *testing.T, m *mesh.Mesh) map[string]jetstream.StreamConfig {
	t.Helper()
	configs := map[string]jetstream.StreamConfig{}
	for _, name := range []string{m.Names.EventsStream(), m.Names.DeadStream(), m.Names.OutcomesStream(), "KV_" + m.Names.FailuresBucket()} {
		s, err := m.JetStream().Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		configs[name] = s.CachedInfo().Config
	}
	return configs
}

// natsMesh is a mesh on a server of its own that has no streams yet.
func natsMesh(t *testing.T, cfg natsd.Config, opts ...nats.Option) *mesh.Mesh {
	t.Helper()
	return meshOn(t, natstest.Run(t, cfg).URL(), mesh.Config{}, opts...)
}

func meshOn(t *testing.T, url string, cfg mesh.Config, opts ...nats.Option) *mesh.Mesh {
	t.Helper()
	nc, err := mesh.Connect(url, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	m, err := mesh.New(nc, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestTopologyIsCreatedOnceAndLeftAloneAfterwards(t *testing.T) {
	t.Parallel()
	m := natsMesh(t, natsd.Config{})
	missing := m.VerifyTopology(t.Context(), mesh.Topology{})
	if got := differing(missing); len(got) != 4 || got["MESH_EVENTS"] != "it does not exist" {
		t.Errorf("before: %v", missing)
	}
	topology := mesh.Topology{MaxBytes: 1 << 20, MaxDeadBytes: 2 << 20, MaxLedger: 3 << 20, DedupeWindow: 5 * time.Minute}
	if err := m.ApplyTopology(t.Context(), topology); err != nil {
		t.Fatal(err)
	}
	made := streamConfigs(t, m)
	events, dead, outcomes, failures := made["MESH_EVENTS"], made["MESH_DEAD"], made["MESH_OUTCOMES"], made["KV_mesh-failures"]
	if events.MaxBytes != 1<<20 || dead.MaxBytes != 2<<20 || outcomes.MaxBytes != 3<<20 || failures.MaxBytes != 3<<20 || events.Duplicates != 5*time.Minute {
		t.Errorf("sizes: %+v", made)
	}
	for name, c := range made {
		// What is full refuses, nothing ages, nobody rolls anything up, and all of it is on disk.
		if c.Discard != jetstream.DiscardNew || c.MaxAge != 0 || c.Storage != jetstream.FileStorage || c.Replicas != 1 ||
			c.AllowRollup && name != "KV_mesh-failures" || c.AllowMsgSchedules || c.AllowMsgTTL || c.AllowDirect {
			t.Errorf("%s: %+v", name, c)
		}
	}
	if outcomes.Retention != jetstream.WorkQueuePolicy || events.Retention != jetstream.LimitsPolicy || failures.MaxMsgsPerSubject != 1 {
		t.Errorf("retention: %+v", made)
	}
	// The same sizes, and sizes left open, find nothing to do and nothing to complain of.
	for _, again := range []mesh.Topology{topology, {}, {MaxBytes: 1 << 20}} {
		if err := errors.Join(m.ApplyTopology(t.Context(), again), m.VerifyTopology(t.Context(), again)); err != nil {
			t.Errorf("%+v: %v", again, err)
		}
	}
	if diff := cmp.Diff(made, streamConfigs(t, m)); diff != "" {
		t.Error(diff)
	}
}

func TestTopologyIsAppliedByManyProcessesAtOnce(t *testing.T) {
	t.Parallel()
	s := natstest.Run(t, natsd.Config{})
	errs := make([]error, 20)
	var all sync.WaitGroup
	for i := range errs {
		m := meshOn(t, s.URL(), mesh.Config{})
		all.Go(func() { errs[i] = m.ApplyTopology(t.Context(), small) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	if err := meshOn(t, s.URL(), mesh.Config{}).VerifyTopology(t.Context(), small); err != nil {
		t.Error(err)
	}
}

// differing maps the streams that an error names to the fields.
func differing(err error) map[string]string {
	got := map[string]string{}
	var walk func(error)
	walk = func(err error) {
		switch e := err.(type) {
		case *mesh.TopologyError:
			got[e.Stream] = strings.Join(e.Fields, "; ")
		case interface{ Unwrap() []error }:
			for _, part := range e.Unwrap() {
				walk(part)
			}
		default:
			got["?"] = fmt.Sprint(err)
		}
	}
	walk(err)
	return got
}

func TestEachDifferenceIsNamedAndNothingIsOverwritten(t *testing.T) {
	t.Parallel()
	s := natstest.Run(t, natsd.Config{})
	const events, dead, outcomes, failures = "_EVENTS", "_DEAD", "_OUTCOMES", "-failures"
	type config = jetstream.StreamConfig
	for i, c := range []struct {
		stream string
		change func(*config)
		want   string
	}{
		{events, func(c *config) { c.Subjects = c.Subjects[:1] }, "subjects is [X.events.>], want [X.events.> X.replay.>]"},
		{events, func(c *config) { c.Retention = jetstream.WorkQueuePolicy }, "retention is WorkQueue, want Limits"},
		{events, func(c *config) { c.Retention = jetstream.InterestPolicy }, "retention is Interest, want Limits"},
		{events, func(c *config) { c.Storage, c.MaxBytes = jetstream.MemoryStorage, 1<<20 },
			"storage is Memory, want File; max_bytes is 1048576, want 4194304"},
		{events, func(c *config) { c.Discard = jetstream.DiscardOld }, "discard is DiscardOld, want DiscardNew"},
		{events, func(c *config) { c.MaxBytes = 1 << 16 }, "max_bytes is 65536, want 4194304"},
		{events, func(c *config) { c.MaxMsgs = 10 }, "max_msgs is 10, want -1"},
		{events, func(c *config) { c.MaxMsgSize = 1000 }, "max_msg_size is 1000, want -1"},
		{events, func(c *config) { c.MaxMsgsPerSubject = 1 }, "max_msgs_per_subject is 1, want -1"},
		{events, func(c *config) { c.MaxAge = time.Hour }, "max_age is 1h0m0s, want 0s"},
		{events, func(c *config) { c.Duplicates = time.Minute }, "duplicate_window is 1m0s, want 3m0s"},
		{events, func(c *config) { c.AllowDirect = true }, "allow_direct is true, want false"},
		{events, func(c *config) { c.AllowRollup = true }, "allow_rollup_hdrs is true, want false"},
		{events, func(c *config) { c.AllowMsgSchedules, c.Discard = true, jetstream.DiscardOld },
			"discard is DiscardOld, want DiscardNew; allow_rollup_hdrs is true, want false; allow_msg_schedules is true, want false"},
		{events, func(c *config) { c.AllowMsgTTL = true }, "allow_msg_ttl is true, want false"},
		{events, func(c *config) { c.DenyDelete = true }, "deny_delete is true, want false"},
		{events, func(c *config) { c.DenyPurge = true }, "deny_purge is true, want false"},
		{events, func(c *config) { c.NoAck = true }, "no_ack is true, want false"},
		{events, func(c *config) {
			c.SubjectTransform = &jetstream.SubjectTransformConfig{Source: c.Subjects[0], Destination: "elsewhere.>"}
		}, "subject_transform is true, want false"},
		{events, func(c *config) { c.Sources = []*jetstream.StreamSource{{Name: "OTHER"}} }, "sources is 1, want 0"},
		{events, func(c *config) { c.Subjects, c.Mirror = nil, &jetstream.StreamSource{Name: "OTHER"} },
			"subjects is [], want [X.events.> X.replay.>]; mirror is true, want false"},
		{dead, func(c *config) { c.Discard = jetstream.DiscardOld }, "discard is DiscardOld, want DiscardNew"},
		{dead, func(c *config) { c.MaxBytes = 1 << 16 }, "max_bytes is 65536, want 2097152"},
		{outcomes, func(c *config) { c.Retention = jetstream.LimitsPolicy }, "retention is Limits, want WorkQueue"},
		{outcomes, func(c *config) { c.MaxBytes = -1 }, "max_bytes is -1, want 2097152"},
		{failures, func(c *config) { c.MaxMsgsPerSubject = 5 }, "max_msgs_per_subject is 5, want 1"},
		{failures, func(c *config) { c.AllowDirect = true }, "allow_direct is true, want false"},
		{failures, func(c *config) { c.AllowRollup = false }, "allow_rollup_hdrs is false, want true"},
		{failures, func(c *config) { c.DenyDelete = false }, "deny_delete is false, want true"},
	} {
		prefix := fmt.Sprint("x", i)
		m := meshOn(t, s.URL(), mesh.Config{Prefix: prefix})
		topology := mesh.Topology{MaxBytes: 4 << 20, MaxDeadBytes: 2 << 20, MaxLedger: 2 << 20, DedupeWindow: 3 * time.Minute}
		if err := m.ApplyTopology(t.Context(), topology); err != nil {
			t.Fatal(err)
		}
		name := strings.ToUpper(prefix) + c.stream
		if c.stream == failures {
			name = "KV_" + prefix + c.stream
		}
		config := streamConfigs(t, m)[name]
		c.change(&config)
		if err := m.JetStream().DeleteStream(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if _, err := m.JetStream().CreateStream(t.Context(), config); err != nil {
			t.Fatalf("%s: %v", c.want, err)
		}
		before := streamConfigs(t, m)
		want := map[string]string{name: strings.ReplaceAll(c.want, "X.", prefix+".")}
		for what, err := range map[string]error{
			"apply":  m.ApplyTopology(t.Context(), topology),
			"verify": m.VerifyTopology(t.Context(), topology),
		} {
			if diff := cmp.Diff(want, differing(err)); diff != "" {
				t.Errorf("%s: %s", what, diff)
			}
		}
		if diff := cmp.Diff(before, streamConfigs(t, m)); diff != "" {
			t.Errorf("%s: overwritten: %s", c.want, diff)
		}
	}
}

func TestSealedStreamIsNamed(t *testing.T) {
	t.Parallel()
	e := start(t)
	m := e.mesh(mesh.Config{})
	c := streamConfigs(t, m)["MESH_DEAD"]
	c.Sealed = true
	if _, err := e.js.UpdateStream(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if got := differing(m.ApplyTopology(t.Context(), small)); !strings.Contains(got["MESH_DEAD"], "sealed is true, want false") {
		t.Errorf("%v", got)
	}
}

func TestAllStreamsThatDifferAreNamedAtOnce(t *testing.T) {
	t.Parallel()
	m := natsMesh(t, natsd.Config{})
	if err := m.ApplyTopology(t.Context(), small); err != nil {
		t.Fatal(err)
	}
	other := mesh.Topology{Replicas: 3, MaxBytes: 1 << 20, MaxDeadBytes: 1 << 20, MaxLedger: 1 << 20}
	want := map[string]string{
		"MESH_EVENTS":      "num_replicas is 1, want 3; max_bytes is 268435456, want 1048576",
		"MESH_DEAD":        "num_replicas is 1, want 3; max_bytes is 67108864, want 1048576",
		"MESH_OUTCOMES":    "num_replicas is 1, want 3; max_bytes is 67108864, want 1048576",
		"KV_mesh-failures": "num_replicas is 1, want 3; max_bytes is 67108864, want 1048576",
	}
	if diff := cmp.Diff(want, differing(m.VerifyTopology(t.Context(), other))); diff != "" {
		t.Error(diff)
	}
	if got := problems(t, m.ApplyTopology(t.Context(), mesh.Topology{Replicas: 2})); len(got) != 1 || got[0] != "replicas" {
		t.Errorf("2 replicas: %q", got)
	}
}

func TestServerThatCannotCarryAMeshIsRefused(t *testing.T) {
	t.Parallel()
	bare, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	bare.Start()
	t.Cleanup(func() { bare.Shutdown(); bare.WaitForShutdown() })
	if !bare.ReadyForConnections(patience) {
		t.Fatal("server not ready")
	}
	const twoAccounts = `accounts { A { users = [ {user: a, password: p} ] }, B { jetstream: enabled, users = [ {user: b, password: p} ] } }`
	for name, c := range map[string]struct {
		m    *mesh.Mesh
		want string
	}{
		"no JetStream":            {meshOn(t, bare.ClientURL(), mesh.Config{}), "the server has no JetStream for this account"},
		"no JetStream in account": {natsMesh(t, natsd.Config{ConfigText: []byte(twoAccounts)}, nats.UserInfo("a", "p")), "the server has no JetStream for this account"},
		"max_payload of 32 KB":    {natsMesh(t, natsd.Config{ConfigText: []byte("max_payload: 32KB")}), "max_payload is 32768 bytes, at least 65536"},
	} {
		c.m.Handle(mesh.OnRaw("orders", ordered, func(context.Context, mesh.Delivery[[]byte]) error { return nil }))
		for what, err := range map[string]error{
			"apply": c.m.ApplyTopology(t.Context(), small), "verify": c.m.VerifyTopology(t.Context(), small), "Run": c.m.Run(t.Context()),
		} {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s, %s: %v, want %q", name, what, err, c.want)
			}
		}
	}
}

func TestPrefixKeepsTwoMeshesOnOneServerApart(t *testing.T) {
	t.Parallel()
	s := natstest.Run(t, natsd.Config{})
	type side struct {
		m     *mesh.Mesh
		calls chan mesh.Delivery[[]byte]
	}
	var sides []side
	for _, prefix := range []string{"", "shop2"} {
		m := meshOn(t, s.URL(), mesh.Config{Prefix: prefix})
		e := &env{t: t, Names: m.Names, js: m.JetStream()}
		if err := m.ApplyTopology(t.Context(), small); err != nil {
			t.Fatal(err)
		}
		h, fn := script()
		e.handleOn(m, orders(fn))
		sides = append(sides, side{m, h.calls})
	}
	for i, here := range sides {
		e := &env{t: t, Names: here.m.Names, js: here.m.JetStream(), source: "s"}
		ev := e.event("orders")
		e.awaitSettled("orders", e.publish(ev))
		if got := receive(t, "the event", here.calls); got.ID != ev.ID {
			t.Errorf("mesh %d got event %s, want %s", i, got.ID, ev.ID)
		}
		if there := sides[1-i].calls; len(there) > 0 {
			t.Errorf("the other mesh got event %s", (<-there).ID)
		}
	}
	for _, bad := range []string{"Mesh", "a.b", "a-b", "*", "é", strings.Repeat("a", 33)} {
		if _, err := mesh.NewNames(bad); len(problems(t, err)) != 1 {
			t.Errorf("prefix %q: %v", bad, err)
		}
	}
}
