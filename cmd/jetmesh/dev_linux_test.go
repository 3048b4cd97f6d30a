package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"jetmesh/internal/meshtest"
)

// processesIn lists the processes that work in or below a folder, as Postgres's do in its own.
// A process that is dead and only not yet buried has no folder.
func processesIn(t *testing.T, dir string) (pids []int) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		cwd, err := os.Readlink(link)
		if err != nil || cwd != dir && !strings.HasPrefix(cwd, dir+"/") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// postmaster is the process id of the private Postgres.
func postmaster(t *testing.T, data string) int {
	t.Helper()
	f, err := os.Open(filepath.Join(data, "postgres", "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	line, err := bufio.NewReader(f).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestInterruptedDevLeavesNoProcess(t *testing.T) {
	data := dataDir(t)
	dev := startDev(t, nil, "--data", data, "--nats-port", freePort(t))
	if len(processesIn(t, data)) == 0 {
		t.Fatal("no Postgres at work: the test would see nothing")
	}
	dev.interrupt()
	if left := processesIn(t, data); len(left) != 0 {
		t.Errorf("left processes %v", left)
	}
}

func TestKilledDevLeavesNoPostgresAndStartsAgain(t *testing.T) {
	data, port := dataDir(t), freePort(t)
	dev := startDev(t, nil, "--data", data, "--nats-port", port, "--rate", "50")
	meshtest.Await(t, "orders to be booked", func() bool { return dev.ask(`select count(*) from orders.bookings`) >= 10 })
	if len(processesIn(t, data)) == 0 {
		t.Fatal("no Postgres at work: the test would see nothing")
	}
	booked := dev.ask(`select count(*) from orders.bookings`)
	dev.kill()
	meshtest.Await(t, "Postgres to leave", func() bool { return len(processesIn(t, data)) == 0 })

	dev = startDev(t, nil, "--data", data, "--nats-port", port, "--rate", "0")
	if n := dev.ask(`select count(*) from orders.orders`); n < booked {
		t.Errorf("%d orders after the kill, %d were booked before", n, booked)
	}
	meshtest.Await(t, "every order to be booked", func() bool {
		return dev.ask(`select count(*) from orders.orders o where not exists (select from orders.bookings b where b.order_id = o.id)`) == 0
	})
	dev.interrupt()
}

func TestSecondInterruptKillsDev(t *testing.T) {
	data := dataDir(t)
	dev := startDev(t, nil, "--data", data, "--nats-port", freePort(t), "--rate", "0")
	// A Postgres that does not listen holds the shutdown up.
	server := postmaster(t, data)
	if err := syscall.Kill(server, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	meshtest.Await(t, "the second interrupt to kill", func() bool {
		return dev.cmd.Process.Signal(os.Interrupt) != nil || dev.hasEnded()
	})
	dev.wait(-1) // by the signal
	// The kernel may have let it go on already: its process group is an orphan now.
	if err := syscall.Kill(server, syscall.SIGCONT); err != nil && err != syscall.ESRCH {
		t.Fatal(err)
	}
	meshtest.Await(t, "Postgres to leave", func() bool { return len(processesIn(t, data)) == 0 })
}

func TestDevEndsWhenItsPostgresDies(t *testing.T) {
	data := dataDir(t)
	dev := startDev(t, nil, "--data", data, "--nats-port", freePort(t), "--rate", "50")
	if err := syscall.Kill(postmaster(t, data), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	dev.wait(exitFailure)
	if got := dev.stderr.String(); !strings.Contains(got, "\njetmesh: postgres: the server ended (signal: killed)") {
		t.Errorf("it says %s", got)
	}
	if left := processesIn(t, data); len(left) != 0 {
		t.Errorf("left processes %v", left)
	}
}

// The distribution's folders are hidden in a mount namespace of the child's own.
func TestDevWithoutPostgresSaysTheFix(t *testing.T) {
	data := dataDir(t)
	const hide = `for dir in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/local/pgsql/bin; do
		if [ -d "$dir" ]; then mount -t tmpfs none "$dir" || exit 99; fi
	done
	PATH= exec "$@"`
	cmd := exec.Command("unshare", "--mount", "--map-root-user", "sh", "-c", hide, "sh",
		program(t), "dev", "--data", data, "--nats-port", freePort(t))
	cmd.Env = cleanEnv()
	var stdout, stderr output
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	text := stderr.String()
	if strings.HasPrefix(text, "unshare:") || cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 99 {
		t.Skipf("this system allows no mount namespace: %v: %s", err, text)
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if code := cmd.ProcessState.ExitCode(); code != exitFailure || len(lines) != 1 ||
		!strings.Contains(text, "install the package postgresql") || !strings.Contains(text, "JETMESH_DATABASE_URL") {
		t.Errorf("exit code %d, it says %s", code, text)
	}
	if stdout.String() != "" {
		t.Errorf("it prints %s", stdout.String())
	}
}
