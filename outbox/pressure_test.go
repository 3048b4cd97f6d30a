package outbox_test

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/natsd"
	"jetmesh/internal/natstest"
	"jetmesh/internal/pgtest"
	"jetmesh/mesh"
	"jetmesh/outbox"
)

// fill leaves no room in the events stream, which must hold something; the returned function gives
// it back.
func fill(t *testing.T, env *meshtest.Env) (empty func()) {
	t.Helper()
	js := relayJetStream(t, env.NC)
	info, err := js.StreamInfo("MESH_EVENTS")
	if err != nil || info.State.Bytes == 0 {
		t.Fatalf("%+v, %v", info, err)
	}
	update := func(maxBytes int64) {
		cfg := info.Config
		cfg.MaxBytes = maxBytes
		if _, err := js.UpdateStream(&cfg); err != nil {
			t.Fatal(err)
		}
	}
	update(int64(info.State.Bytes))
	return func() { update(info.Config.MaxBytes) }
}

// on is a mesh on a server of the given configuration.
func on(t *testing.T, config string, topology mesh.Topology) *meshtest.Env {
	t.Helper()
	nc, err := natstest.Run(t, natsd.Config{ConfigText: []byte(config)}).Conn()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	env := meshtest.WithPool(t, pgtest.Pool(t, meshtest.Migrate))
	env.NC = nc
	m, err := mesh.New(nc, mesh.Config{Logger: env.Log})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.ApplyTopology(t.Context(), topology); err != nil {
		t.Fatal(err)
	}
	return env
}

const server = "jetstream { max_memory_store: 64MB, max_file_store: 4GB }\n"

func TestAccountAtItsLimitParksNoEvent(t *testing.T) {
	t.Parallel()
	env := on(t, server+`accounts { A { jetstream: { max_file: 60MB, max_mem: 0 }, users: [ {user: a, password: a} ] } }
		no_auth_user: a`, mesh.Topology{MaxBytes: 20 << 20, MaxDeadBytes: 1 << 20, MaxLedger: 5 << 20})
	var s sink
	env.Handle(s.on("orders"))
	relay, _ := env.Relay(outbox.RelayConfig{})
	env.AwaitStatus(env.Write(meshtest.Event("orders"))[0].Row.ID, outbox.StatusDispatched)
	js := relayJetStream(t, env.NC)
	if _, err := js.AddStream(&nats.StreamConfig{Name: "OTHER", Subjects: []string{"other"}}); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{500_000, 5000, 100} {
		for {
			if _, err := js.Publish("other", make([]byte, size)); err != nil {
				break
			}
		}
	}
	env.Write(events("orders", 20)...)
	meshtest.Await(t, "the publishes to be refused", func() bool { return relay.Stats().Retried >= 60 })
	if parked, failed := relay.Stats().Parked, env.Count(outbox.StatusFailed); parked+int64(failed) > 0 {
		t.Errorf("%d parked, %d failed", parked, failed)
	}
	if err := js.DeleteStream("OTHER"); err != nil {
		t.Fatal(err)
	}
	env.AwaitCount(outbox.StatusDispatched, 21)
	if s.count() != 21 || len(s.twice()) > 0 {
		t.Errorf("handled %d, twice %v", s.count(), s.twice())
	}
}

// A publish is repeated as soon as its pause is over, however long the relay may poll.
func TestFullStreamParksNoEventAndIsNoticedToHaveRoom(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Handle(s.on("orders"))
	relay, _ := env.Relay(outbox.RelayConfig{PollInterval: time.Minute})
	env.AwaitStatus(env.Write(meshtest.Event("orders"))[0].Row.ID, outbox.StatusDispatched)
	empty := fill(t, env)
	env.Write(events("orders", 20)...)
	meshtest.Await(t, "the publishes to be refused", func() bool { return relay.Stats().Retried >= 60 })
	if parked, failed := relay.Stats().Parked, env.Count(outbox.StatusFailed); parked+int64(failed) > 0 {
		t.Errorf("%d parked, %d failed", parked, failed)
	}
	empty()
	env.AwaitCount(outbox.StatusDispatched, 21)
	if s.count() != 21 || len(s.twice()) > 0 {
		t.Errorf("handled %d, twice %v", s.count(), s.twice())
	}
}

func TestOverloadedServerParksNoEvent(t *testing.T) {
	t.Parallel()
	env := on(t, strings.Replace(server, "}", ", max_buffered_msgs: 50 }", 1), mesh.Topology{MaxBytes: 64 << 20, MaxDeadBytes: 1 << 20, MaxLedger: 5 << 20})
	own(t, env, "orders")
	relay, _ := env.Relay(outbox.RelayConfig{})
	bulk(t, env, "orders", 100, 3000)
	meshtest.Await(t, "everything to be published", func() bool { return env.Count(outbox.StatusPending) == 0 })
	stats := relay.Stats()
	if n := env.Count(outbox.StatusDispatching); n != 3000 || stats.Parked > 0 || stats.Retried == 0 {
		t.Errorf("%d published, %+v", n, stats)
	}
}

func TestEventThatIsSettledUnackedIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	var s sink
	env.Handle(s.on("orders"))
	relay, _ := env.Relay(outbox.RelayConfig{})
	env.AwaitStatus(env.Write(meshtest.Event("orders"))[0].Row.ID, outbox.StatusDispatched)
	empty := fill(t, env)
	// As if the ack had been lost, and the outcome not.
	id := env.Write(meshtest.Event("orders"))[0].Row.ID
	meshtest.Await(t, "the publish to be refused", func() bool { return relay.Stats().Retried > 0 })
	settle(t, env, "x", mesh.Outcome{EventID: id, Attempt: 1})
	env.AwaitStatus(id, outbox.StatusDispatched)
	settle(t, env, "x", mesh.Outcome{EventID: id, Attempt: 1}) // after which the first has been dealt with
	meshtest.Await(t, "the outcome to be ignored", func() bool { return relay.Stats().Ignored == 1 })
	empty()
	env.AwaitStatus(env.Write(meshtest.Event("orders"))[0].Row.ID, outbox.StatusDispatched)
	if s.has(id) || relay.Stats().Published != 2 {
		t.Errorf("published again: %+v", relay.Stats())
	}
}

func TestStopDoesNotWaitForNATSThatHangs(t *testing.T) {
	t.Parallel()
	server := natstest.Child(t)
	nc, err := mesh.Connect(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	env := meshtest.On(t, pgtest.Pool(t, meshtest.Migrate), nc)
	own(t, env, "orders")
	_, stop := env.Relay(outbox.RelayConfig{})
	bulk(t, env, "orders", 1000, 1000)
	env.AwaitCount(outbox.StatusDispatching, 1000)
	stop()
	exec(t, env, `update mesh.outbox set status = 'pending', tracked_status = null`)
	exec(t, env, `update mesh.meta set relay_low = 0`)
	relay, stop := env.Relay(outbox.RelayConfig{})
	meshtest.Await(t, "duplicates", func() bool { return relay.Stats().Duplicates > 0 })
	if err := server.Pause(); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	meshtest.Await(t, "the relay to end while NATS hangs", func() bool {
		select {
		case <-stopped:
			return true
		default:
			return false
		}
	})
	if env.Count(outbox.StatusPending) == 0 {
		t.Error("everything had been verified before NATS hung")
	}
	if err := server.Resume(); err != nil {
		t.Fatal(err)
	}
	env.Relay(outbox.RelayConfig{})
	env.AwaitCount(outbox.StatusDispatching, 1000)
}

func TestCleanStopLeavesNothingUnmarked(t *testing.T) {
	t.Parallel()
	t.Run("under outcomes", func(t *testing.T) {
		t.Parallel()
		env := meshtest.New(t)
		sub := (&sink{}).on("orders")
		sub.Concurrency = 64
		env.Handle(sub)
		relay, stop := env.Relay(outbox.RelayConfig{})
		bulk(t, env, "orders", 10, 30_000)
		meshtest.Await(t, "outcomes", func() bool { return relay.Stats().Settled > 1000 })
		stop()
		if pending := env.Count(outbox.StatusPending); int64(pending)+relay.Stats().Published != 30_000 {
			t.Errorf("%d pending, %+v", pending, relay.Stats())
		}
	})
	t.Run("with a row that somebody locks", func(t *testing.T) {
		t.Parallel()
		env := meshtest.New(t)
		own(t, env, "orders")
		stranger := lock(t, env, env.Write(events("orders", 300)...)[0].Row.ID)
		relay, stop := env.Relay(outbox.RelayConfig{})
		meshtest.Await(t, "the publishes", func() bool { return relay.Stats().Published == 300 })
		stop()
		rollback(t, stranger)
		if n := env.Count(outbox.StatusDispatching); n != 299 {
			t.Errorf("%d of the 299 others are marked", n)
		}
	})
}

// A backlog that never ends starves neither a row that commits late nor a consumer that comes back.
func TestBacklogStarvesNobody(t *testing.T) {
	t.Parallel()
	env := meshtest.New(t)
	own(t, env, "backlog")
	var late, back sink
	env.Handle(late.on("late"))
	relay, _ := env.Relay(outbox.RelayConfig{BatchSize: 100})
	env.AwaitStatus(env.Write(meshtest.Event("late"))[0].Row.ID, outbox.StatusDispatched)
	waiting := env.Write(events("back", 10)...)
	slow := begin(t, env.Pool)
	lateRow, err := outbox.Write(t.Context(), slow, meshtest.Event("late"))
	if err != nil {
		t.Fatal(err)
	}
	written := 0
	ahead := func() { // of the relay, always
		for int64(written)-relay.Stats().Published < 10_000 {
			bulk(t, env, "backlog", 2, 5000)
			written += 5000
		}
	}
	ahead()
	meshtest.Await(t, "the backlog to be read", func() bool { return relay.Stats().Published > 1000 })
	if err := slow.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	env.Handle(back.on("back"))
	meshtest.Await(t, "the others to be served", func() bool {
		ahead()
		return late.has(lateRow.Row.ID) && back.count() == len(waiting)
	})
}

// Nothing of a session that could not be opened stays: see TestMain.
func TestSessionThatCannotBeOpenedLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	// Nobody answers who is asked for the durables.
	env := on(t, server+`accounts { A { jetstream: enabled, mappings: { "$JS.API.CONSUMER.LIST.>": "nowhere.>" }, users: [ {user: a, password: a} ] } }
		no_auth_user: a`, mesh.Topology{MaxBytes: 64 << 20, MaxDeadBytes: 1 << 20, MaxLedger: 5 << 20})
	var again atomic.Int32
	env.Log = zerolog.New(nil).Hook(zerolog.HookFunc(func(_ *zerolog.Event, _ zerolog.Level, msg string) {
		if msg == "relay starts again" {
			again.Add(1)
		}
	}))
	relay, _ := env.Relay(outbox.RelayConfig{})
	meshtest.Await(t, "a session to fail", func() bool { return again.Load() > 1 })
	if relay.Stats().Active {
		t.Error("the relay works")
	}
}

// watchHeap returns by how much the live heap grew at most, until it is called.
func watchHeap() (growth func() int) {
	live := func() int {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	began := live()
	var peak int
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			peak = max(peak, live())
			time.Sleep(50 * time.Millisecond)
		}
	})
	return func() int {
		cancel()
		wg.Wait()
		return peak - began
	}
}

// mostGrowth is more than a portion and what is in flight, and less than all rows of a test.
const mostGrowth = 60 << 20

// child is a mesh whose server's memory is not this process's.
func child(t *testing.T) *meshtest.Env {
	t.Helper()
	nc, err := mesh.Connect(natstest.Child(t).URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return meshtest.On(t, pgtest.Pool(t, meshtest.Migrate), nc)
}

// Not parallel to others: the heap is everyone's.
func TestLateBulkTransactionIsReadInPortions(t *testing.T) {
	env := child(t)
	own(t, env, "orders")
	relay, _ := env.Relay(outbox.RelayConfig{MaxInFlight: 8})
	late := begin(t, env.Pool)
	if _, err := late.Exec(t.Context(), bulkRows, "orders", 1_000_000, 80); err != nil {
		t.Fatal(err)
	}
	env.AwaitStatus(env.Write(meshtest.Event("orders"))[0].Row.ID, outbox.StatusDispatching)
	growth := watchHeap()
	if err := late.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	meshtest.Await(t, "the late rows to be published", func() bool { return relay.Stats().Published == 81 })
	if n := growth(); n > mostGrowth {
		t.Errorf("the heap grew by %d MB", n>>20)
	}
}

func TestWaitingRowsAreReadInPortionsWhileTheStreamIsFull(t *testing.T) {
	env := child(t)
	own(t, env, "orders")
	relay, _ := env.Relay(outbox.RelayConfig{MaxInFlight: 8})
	env.AwaitStatus(env.Write(meshtest.Event("orders"))[0].Row.ID, outbox.StatusDispatching)
	bulk(t, env, "back", 1_000_000, 80)
	meshtest.Await(t, "the rows to be set aside", func() bool {
		return scan[int](t, env, `select count(*) from mesh.outbox where tracked_status = 'pending'`) == 80
	})
	empty := fill(t, env)
	growth := watchHeap()
	own(t, env, "back")
	meshtest.Await(t, "the publishes to be refused", func() bool { return relay.Stats().Retried > 40 })
	if n := growth(); n > mostGrowth {
		t.Errorf("the heap grew by %d MB", n>>20)
	}
	empty()
	meshtest.Await(t, "all of them to be published", func() bool { return relay.Stats().Published == 81 })
}
