package natsd_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"jetmesh/internal/natsd"
)

// parentOf makes the test binary the parent of a child with these two arguments.
const parentOf = "JETMESH_NATSD_PARENT"

func TestMain(m *testing.M) {
	if store := os.Getenv(parentOf); store != "" && os.Getenv(natsd.ChildVariable) == "" {
		c, err := natsd.StartChild(context.Background(), os.Args[0],
			[]string{"-store", store, "-port", "-1"}, []string{natsd.ChildVariable + "=1"})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(c.Pid())
		<-c.Done()
		os.Exit(2)
	}
	natsd.MaybeChildMain()
	goleak.VerifyTestMain(m)
}

func start(t *testing.T, cfg natsd.Config) *natsd.Server {
	t.Helper()
	if cfg.StoreDir == "" {
		cfg.StoreDir = t.TempDir()
	}
	s, err := natsd.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func connect(t *testing.T, url string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// stream returns a stream on disk, which it creates if it is missing.
func stream(t *testing.T, nc *nats.Conn) (jetstream.JetStream, jetstream.Stream) {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	if err != nil {
		t.Fatal(err)
	}
	return js, s
}

func publish(t *testing.T, js jetstream.JetStream, n int) {
	t.Helper()
	for range n {
		if _, err := js.Publish(t.Context(), "s", nil); err != nil {
			t.Fatal(err)
		}
	}
}

func messages(t *testing.T, s jetstream.Stream) uint64 {
	t.Helper()
	info, err := s.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Msgs
}
