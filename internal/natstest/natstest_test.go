package natstest_test

import (
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"jetmesh/internal/natsd"
	"jetmesh/internal/natstest"
)

func TestMain(m *testing.M) {
	natsd.MaybeChildMain()
	goleak.VerifyTestMain(m)
}

func TestServersEndWithTheirTests(t *testing.T) {
	for name, start := range map[string]func(*testing.T) (url string, nc *nats.Conn){
		"in process": func(t *testing.T) (string, *nats.Conn) {
			s, nc := natstest.Start(t)
			return s.URL(), nc
		},
		"child": func(t *testing.T) (string, *nats.Conn) {
			c := natstest.Child(t)
			nc, err := nats.Connect(c.URL())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(nc.Close)
			return c.URL(), nc
		},
	} {
		var url string
		t.Run(name, func(t *testing.T) {
			var nc *nats.Conn
			url, nc = start(t)
			js, err := jetstream.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			info, err := js.AccountInfo(t.Context())
			if err != nil || info.Streams != 0 {
				t.Errorf("JetStream of %+v (%v), want an empty one", info, err)
			}
		})
		if nc, err := nats.Connect(url); err == nil {
			nc.Close()
			t.Errorf("%s: still there after its test", name)
		}
	}
}
