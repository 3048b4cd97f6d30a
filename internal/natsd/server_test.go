package natsd_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"jetmesh/internal/natsd"
)

func TestStoreIsUsedAgain(t *testing.T) {
	store := t.TempDir()
	s := start(t, natsd.Config{StoreDir: store, Port: -1})
	js, _ := stream(t, connect(t, s.URL()))
	publish(t, js, 3)
	js.Conn().Close()
	for range 2 { // a second Stop does nothing
		if err := s.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	_, again := stream(t, connect(t, start(t, natsd.Config{StoreDir: store, Port: -1}).URL()))
	if n := messages(t, again); n != 3 {
		t.Errorf("%d messages, want 3", n)
	}
}

func TestStartSaysWhatIsWrong(t *testing.T) {
	running := start(t, natsd.Config{StoreDir: t.TempDir(), Port: -1})
	inUse := t.TempDir()
	start(t, natsd.Config{StoreDir: inUse, DontListen: true})
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var port int
	if _, err := fmt.Sscanf(running.URL(), "nats://127.0.0.1:%d", &port); err != nil {
		t.Fatal(err)
	}
	free := t.TempDir()
	for _, test := range []struct {
		cfg  natsd.Config
		want []string
	}{
		{natsd.Config{}, []string{"StoreDir"}},
		{natsd.Config{StoreDir: inUse, Port: -1}, []string{inUse, "another process"}},
		{natsd.Config{StoreDir: file, Port: -1}, []string{"store folder", file}},
		{natsd.Config{StoreDir: free, Port: port}, []string{"cannot listen", fmt.Sprint(port), "address already in use"}},
		// The server calls these two fatal, and would end the process.
		{natsd.Config{StoreDir: free, Port: -1, ConfigText: fmt.Appendf(nil, `http: "127.0.0.1:%d"`, port)}, []string{"monitoring", "address already in use"}},
		{natsd.Config{StoreDir: free, Port: -1, ConfigText: fmt.Appendf(nil, `mqtt { listen: "127.0.0.1:%d" }, server_name: x`, port)}, []string{"MQTT", "address already in use"}},
		{natsd.Config{StoreDir: free, ConfigText: []byte("prot: 4222")}, []string{"configuration", `"prot"`}},
		{natsd.Config{StoreDir: free, ConfigText: []byte("port: $JETMESH_NOT_SET")}, []string{"configuration", "JETMESH_NOT_SET"}},
	} {
		s, err := natsd.Start(test.cfg)
		if err == nil {
			t.Errorf("started with %+v", test.cfg)
			_ = s.Stop()
			continue
		}
		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %q does not say %q", err, want)
			}
		}
	}
	start(t, natsd.Config{StoreDir: free, Port: -1}) // no failed start kept the folder
}

func TestPortOfTheConfiguration(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	s := start(t, natsd.Config{ConfigText: fmt.Appendf(nil, "listen: %q", addr)})
	if s.URL() != "nats://"+addr {
		t.Errorf("listens on %s, want %s", s.URL(), addr)
	}
}

func TestInProcessOnly(t *testing.T) {
	t.Setenv("JETMESH_TEST_PASSWORD", "pw")
	s := start(t, natsd.Config{
		DontListen: true,
		ConfigText: []byte("authorization { user: u, password: $JETMESH_TEST_PASSWORD }"),
	})
	if s.URL() != "" {
		t.Errorf("listens on %s", s.URL())
	}
	for _, opts := range [][]nats.Option{nil, {nats.UserInfo("u", strings.Repeat("wrong", 200))}} {
		if nc, err := s.Conn(opts...); !errors.Is(err, nats.ErrAuthorization) {
			nc.Close()
			t.Errorf("Conn() = %v without the password", err)
		}
	}
	nc, err := s.Conn(nats.UserInfo("u", "pw"))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, str := stream(t, nc)
	publish(t, js, 1)
	if n := messages(t, str); n != 1 {
		t.Errorf("%d messages, want 1", n)
	}
}

func TestMaxStore(t *testing.T) {
	s := start(t, natsd.Config{DontListen: true, MaxStore: 1 << 20, ConfigText: []byte("jetstream { max_file_store: 1GB }")})
	nc, err := s.Conn()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	cfg := jetstream.StreamConfig{Name: "S", MaxBytes: 1 << 21}
	if _, err := js.CreateStream(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "insufficient storage") {
		t.Errorf("a stream of 2 MiB in a store of 1 MiB: %v", err)
	}
	cfg.MaxBytes = 1 << 19
	if _, err := js.CreateStream(t.Context(), cfg); err != nil {
		t.Error(err)
	}
}

func TestSignalsAreTheProgramsOwn(t *testing.T) {
	got := make(chan os.Signal, 1)
	signal.Notify(got, os.Interrupt)
	defer signal.Stop(got)
	s := start(t, natsd.Config{Port: -1})
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	<-got
	if err := connect(t, s.URL()).Flush(); err != nil {
		t.Errorf("after SIGINT: %v", err)
	}
}

func TestLog(t *testing.T) {
	var out buffer
	s := start(t, natsd.Config{
		Port:       -1,
		Logger:     zerolog.New(&out).Level(zerolog.InfoLevel),
		ConfigText: []byte("authorization { user: u, password: not_to_be_logged }"),
	})
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	for _, want := range []string{`"nats ready"`, s.URL(), `"nats stopped"`, "Plaintext passwords detected"} {
		if !strings.Contains(text, want) {
			t.Errorf("log does not say %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "Starting nats-server") || strings.Contains(text, "not_to_be_logged") {
		t.Errorf("log says too much:\n%s", text)
	}
}

func TestFakeTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t, natsd.Config{DontListen: true})
		nc, err := s.Conn()
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		str, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, MaxAge: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		publish(t, js, 1)
		time.Sleep(59 * time.Minute)
		if n := messages(t, str); n != 1 {
			t.Errorf("%d messages after 59 minutes, want 1", n)
		}
		time.Sleep(2 * time.Minute)
		if n := messages(t, str); n != 0 {
			t.Errorf("%d messages after an hour, want 0", n)
		}
	})
}

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
