package main

import (
	"context"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"jetmesh/internal/meshtest"
	"jetmesh/internal/pgtest"
)

func TestDevBooksOrdersAndKeepsThemOverARestart(t *testing.T) {
	data, port := dataDir(t), freePort(t)
	first := startDev(t, nil, "--data", data, "--nats-port", port, "--rate", "50")
	if want := "nats://127.0.0.1:" + port; first.natsURL != want {
		t.Errorf("NATS is at %s, want %s", first.natsURL, want)
	}
	meshtest.Await(t, "orders to be booked", func() bool { return first.ask(`select count(*) from orders.bookings`) >= 20 })
	meshtest.Await(t, "a line of figures", func() bool { return strings.Contains(first.stdout.String(), "\nplaced ") })
	first.interrupt()

	// What was placed stands in the last line, and in the database after the restart.
	last := regexp.MustCompile(`(?m)^placed (\d+)  published (\d+)  booked (\d+)  pending (\d+)  failed (\d+)  p50 .*\n\z`).
		FindStringSubmatch(first.stdout.String())
	if last == nil {
		t.Fatalf("no figures at the end of %s", first.stdout.String())
	}
	placed, err := strconv.ParseInt(last[1], 10, 64)
	if err != nil || placed < 20 || last[5] != "0" {
		t.Errorf("it ended with %q", last[0])
	}

	second := startDev(t, nil, "--data", data, "--nats-port", port, "--rate", "0")
	if second.databaseURL != first.databaseURL {
		t.Errorf("the database is at another URL after a restart")
	}
	if n := second.ask(`select count(*) from orders.orders`); n != placed {
		t.Errorf("%d orders after the restart, %d were placed before", n, placed)
	}
	meshtest.Await(t, "every order to be booked", func() bool { return second.ask(`select count(*) from orders.bookings`) == placed })
	meshtest.Await(t, "every event to be settled", func() bool {
		return second.ask(`select count(*) from mesh.outbox where status = 'dispatched'`) == placed
	})
	if n := messages(t, second.natsURL); n != uint64(placed) {
		t.Errorf("%d messages in the events stream, want %d: each order's, once", n, placed)
	}
	second.interrupt()
	checkSecrets(t, first)
	checkSecrets(t, second)
}

// checkSecrets: the password is printed for the user, and logged nowhere.
func checkSecrets(t *testing.T, c *devChild) {
	t.Helper()
	u, err := url.Parse(c.databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	password, _ := u.User.Password()
	if len(password) < 16 || strings.Contains(c.stderr.String(), password) {
		t.Errorf("password of %d characters; in the log: %t", len(password), strings.Contains(c.stderr.String(), password))
	}
}

func messages(t *testing.T, url string) uint64 {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "MESH_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	return stream.CachedInfo().State.Msgs
}

func TestDevKeepsOthersOutAndServesOtherPrograms(t *testing.T) {
	data, port := dataDir(t), freePort(t)
	dev := startDev(t, nil, "--data", data, "--nats-port", port, "--rate", "0")

	second := launchDev(t, nil, "--data", data, "--nats-port", freePort(t))
	second.wait(exitFailure)
	if got := second.stderr.String(); !strings.Contains(got, "another `jetmesh dev` works in "+data) || !strings.Contains(got, "--data") {
		t.Errorf("on a folder in use it says %s", got)
	}

	other := launchDev(t, nil, "--data", dataDir(t), "--nats-port", port)
	other.wait(exitFailure)
	if got := other.stderr.String(); !strings.Contains(got, port) || !strings.Contains(got, "--nats-port") {
		t.Errorf("on a port that is taken it says %s", got)
	}

	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		hello := exec.CommandContext(ctx, build(t, buildHello))
		hello.Env = append(cleanEnv(), "JETMESH_DATABASE_URL="+dev.databaseURL, "JETMESH_NATS_URL="+dev.natsURL)
		if out, err := hello.CombinedOutput(); err != nil || string(out) != "hello, world\n" {
			t.Errorf("the README's program: %v, it says %q", err, out)
		}
	}
	dev.interrupt()
}

func TestDevOnAGivenDatabaseLeavesItRunning(t *testing.T) {
	given := pgtest.URL(t, nil)
	data := dataDir(t)
	dev := startDev(t, []string{"JETMESH_DATABASE_URL=" + given}, "--data", data, "--nats-port", freePort(t), "--rate", "50")
	if dev.databaseURL != "" || strings.Contains(dev.stdout.String(), given) {
		t.Errorf("it prints the URL it was given: %s", dev.stdout.String())
	}
	dev.databaseURL = given
	meshtest.Await(t, "orders to be booked", func() bool { return dev.ask(`select count(*) from orders.bookings`) >= 5 })
	dev.interrupt()
	if n := dev.ask(`select count(*) from orders.orders`); n < 5 {
		t.Errorf("%d orders", n)
	}
	if _, err := os.Stat(filepath.Join(data, "postgres")); !os.IsNotExist(err) {
		t.Errorf("a private Postgres was made (%v)", err)
	}
}

func TestDevTakesAnotherPortWhenItsOwnIsTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := l.Addr().(*net.TCPAddr).Port
	d := &dev{data: dataDir(t), log: zerolog.Nop()}
	if err := d.openData(t.Context()); err != nil {
		t.Fatal(err)
	}
	note := filepath.Join(d.data, "postgres.port")
	if err := os.WriteFile(note, []byte(strconv.Itoa(taken)), 0o600); err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, stop := range d.stops {
			if err := stop(); err != nil {
				t.Error(err)
			}
		}
	}()
	if err := d.startPostgres(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := d.postgres.Port(); got == taken || got != readPort(note) {
		t.Errorf("port %d, noted %d, taken is %d", got, readPort(note), taken)
	}
}

func TestDevRefusesWrongFlags(t *testing.T) {
	for _, test := range []struct{ flag, value, want string }{
		{"--rate", "-1", "--rate must be 0, or between 0.01 and 1000"},
		{"--rate", "1e-12", "--rate must be"},
		{"--rate", "NaN", "--rate must be"},
		{"--rate", "1001", "--rate must be"},
		{"--nats-port", "-1", "--nats-port must be between"},
		{"--nats-port", "65536", "--nats-port must be between"},
		{"--nats-url", "nats://somewhere", "jetmesh serve"},
	} {
		var stderr output
		data := filepath.Join(t.TempDir(), "new")
		code := run(t.Context(), []string{"dev", "--data", data, test.flag, test.value}, &output{}, &stderr)
		if code != exitUsage || !strings.Contains(stderr.String(), test.want) {
			t.Errorf("%s %s: exit code %d, %s", test.flag, test.value, code, stderr.String())
		}
		if _, err := os.Stat(data); !os.IsNotExist(err) {
			t.Errorf("%s %s: it made its folder", test.flag, test.value)
		}
	}
}

func TestStateDirIsTheUsersOwn(t *testing.T) {
	t.Setenv("HOME", "/home/ada")
	for _, test := range []struct {
		root      bool
		xdg, want string
	}{
		{true, "/home/ada/state", "/var/lib/jetmesh"},
		{false, "/home/ada/state", "/home/ada/state/jetmesh"},
		{false, "relative", "/home/ada/.local/state/jetmesh"},
		{false, "", "/home/ada/.local/state/jetmesh"},
	} {
		t.Setenv("XDG_STATE_HOME", test.xdg)
		if got, err := stateDir(test.root); got != test.want || err != nil {
			t.Errorf("stateDir(%t) with XDG_STATE_HOME=%s is %s, %v", test.root, test.xdg, got, err)
		}
	}
}
