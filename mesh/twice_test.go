package mesh_test

import (
	"context"
	"testing"
	"time"

	"jetmesh/mesh"
)

// Two runs of one event at once: the first process lost its connection, the server gave the
// message to a second one, which ends sooner. Whatever the two come to, the event is settled
// once, and a success wins.
func TestEventThatRunsTwiceAtOnceIsSettledOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		first, second error
		retryCount    int
	}{
		"the second run fails":    {nil, errBoom, 1},
		"the first run fails":     {errBoom, nil, 0},
		"both runs succeed":       {nil, nil, 0},
		"the second run gives up": {nil, mesh.Permanent(errBoom), 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := start(t)
			run := func(result error) (started, end chan struct{}, p *process) {
				started, end = make(chan struct{}, 10), make(chan struct{})
				sub := mesh.OnRaw("orders", ordered, func(context.Context, mesh.Delivery[[]byte]) error {
					started <- struct{}{}
					<-end
					return result
				})
				sub.Concurrency, sub.AckWait, sub.Backoff = 1, time.Second, mesh.Backoff{Base: time.Hour, Cap: time.Hour}
				return started, end, e.handle(sub)
			}
			signs, err := e.js.Conn().SubscribeSync("$JS.ACK.>")
			if err != nil {
				t.Fatal(err)
			}
			started, end, first := run(c.first)
			ev := e.event("orders")
			seq := e.publish(ev)
			receive(t, "the first run", started)
			sign, err := signs.NextMsg(patience)
			if err != nil {
				t.Fatal(err)
			}
			if err := first.Conn().ForceReconnect(); err != nil {
				t.Fatal(err)
			}
			await(t, "the first process to be back", func() bool { return first.Conn().IsConnected() && first.Conn().Stats().Reconnects == 1 })
			startedAgain, endAgain, _ := run(c.second)
			if err := e.js.Conn().Publish(sign.Subject, []byte("-NAK")); err != nil {
				t.Fatal(err)
			}
			receive(t, "the second run", startedAgain)

			close(endAgain)
			e.awaitOutcome(ev.ID, 1)
			close(end)
			var success instanceOutcome
			await(t, "a success", func() bool {
				all := e.outcomesOf(ev.ID)
				success = all[len(all)-1]
				return success.Succeeded()
			})
			if success.RetryCount != c.retryCount || success.Attempt != c.retryCount+1 {
				t.Errorf("outcome %+v", success)
			}
			e.awaitSettled("orders", seq)
			if r := e.record("orders", ev.ID); r.Status != mesh.RecordDispatched || r.RetryCount != c.retryCount {
				t.Errorf("record %+v", r)
			}
			if len(started)+len(startedAgain) > 0 {
				t.Error("a third run")
			}
		})
	}
}

// The event comes to another process as if for the first time, as after a crash of the server
// that forgot the delivery, or from a relay that publishes again. Its success leaves no record,
// so the failure of a run that was cut off from the server meanwhile must not leave one either.
func TestFailureOfARunThatLostTheServerIsNotRecorded(t *testing.T) {
	t.Parallel()
	e := start(t)
	end, started := make(chan struct{}), make(chan struct{}, 10)
	sub := mesh.OnRaw("orders", ordered, func(context.Context, mesh.Delivery[[]byte]) error {
		started <- struct{}{}
		<-end
		return errBoom
	})
	sub.Concurrency, sub.Backoff = 1, mesh.Backoff{Base: time.Hour, Cap: time.Hour}
	first := e.handle(sub)
	await(t, "the durable", func() bool { return e.durable("orders") != nil })
	ev := e.publishMany(2, "orders")[0] // one to run and one to wait: this process asks for no more
	receive(t, "the first run", started)
	await(t, "the second event to be fetched ahead", func() bool { return e.durable("orders").NumAckPending == 2 })
	if err := first.Conn().ForceReconnect(); err != nil {
		t.Fatal(err)
	}
	await(t, "the first process to be back", func() bool { return first.Conn().IsConnected() && first.Conn().Stats().Reconnects == 1 })
	h, fn := script()
	e.handle(orders(fn))
	if _, err := e.js.PublishMsg(t.Context(), ev.Message(e.EventSubject("orders", ordered), "again")); err != nil {
		t.Fatal(err)
	}
	if d := receive(t, "the second run", h.calls); d.ID != ev.ID || d.Redelivered {
		t.Errorf("event %s, redelivered %v", d.ID, d.Redelivered)
	}
	e.awaitOutcome(ev.ID, 1)
	first.cancel() // so that what waits there is not started
	close(end)
	first.stop()
	if r := e.record("orders", ev.ID); r != nil {
		t.Errorf("record %+v", r)
	}
	if all := e.outcomesOf(ev.ID); len(all) != 1 || !all[0].Succeeded() {
		t.Errorf("outcomes %+v", all)
	}
}
