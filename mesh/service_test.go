package mesh_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"jetmesh/mesh"
)

// serviceVariable makes the test binary one process of a service, with these settings.
const serviceVariable = "JETMESH_TEST_SERVICE"

// settings of a service process. Its handler does what the event's aggregate id says, see
// [env.doing].
type settings struct {
	URL         string
	Concurrency int           // default 1
	MaxRetries  int           // default 10
	Drain       time.Duration // default 30s
	Together    int           // so many handlers run, if they can, when one of them kills the process; default 1
	Tame        bool          // "kill" succeeds
	Point       string        // where the process kills itself,
	Hit         int           // the nth time it gets there, from 1
}

func maybeServiceMain() {
	text := os.Getenv(serviceVariable)
	if text == "" {
		return
	}
	go func() { // the test's end of the pipe goes with the test, however it ends
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	if err := serviceMain(text); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serviceMain(text string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var s settings
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	if s.Point != "" {
		var hits atomic.Int64
		mesh.SetFaultPoint(func(name string) {
			if name == s.Point && hits.Add(1) == int64(s.Hit) {
				killMyself()
			}
		})
	}
	nc, err := mesh.Connect(s.URL)
	if err != nil {
		return err
	}
	defer nc.Close()
	m, err := mesh.New(nc, mesh.Config{DrainTimeout: s.Drain, Logger: testLog})
	if err != nil {
		return err
	}
	var running atomic.Int64
	sub := orders(func(ctx context.Context, d mesh.Delivery[[]byte]) error {
		fmt.Println("called", d.ID)
		running.Add(1)
		defer running.Add(-1)
		switch d.AggregateID {
		case "ok":
		case "fail once":
			if d.Attempt == 1 {
				return errBoom
			}
		case "fail":
			return errBoom
		case "fail for good":
			return mesh.Permanent(errBoom)
		case "kill":
			if s.Tame {
				return nil
			}
			for range 20 { // others may not come
				if running.Load() >= int64(s.Together) {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
			killMyself()
		case "slow":
			time.Sleep(time.Second)
		case "wait":
			<-ctx.Done()
			return ctx.Err()
		case "succeed late":
			<-ctx.Done()
		case "hang":
			select {}
		default:
			return fmt.Errorf("what is %q", d.AggregateID)
		}
		return nil
	})
	sub.AckWait, sub.Concurrency, sub.MaxRetries = time.Second, max(s.Concurrency, 1), s.MaxRetries
	m.Handle(sub)
	return m.Run(ctx)
}

func killMyself() {
	if p, err := os.FindProcess(os.Getpid()); err == nil {
		_ = p.Kill()
	}
	select {} // until it has come
}

// doing is an event for the handler of a service process.
func (e *env) doing(what string) mesh.Event {
	ev := e.event("orders")
	ev.AggregateID = what
	return ev
}

// A service is a service whose processes are killed; one runs at a time.
type service struct {
	e    *env
	cmd  *exec.Cmd
	done chan struct{}
	err  error // of the process, after done

	mu    sync.Mutex
	calls map[string]int // of the handler in all processes, by event
}

// service starts a process, which ends with the test.
func (e *env) service(s settings) *service {
	e.t.Helper()
	p := &service{e: e, calls: map[string]int{}}
	p.start(s)
	e.t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // fails only if it has ended
		<-p.done
	})
	return p
}

// start starts the next process.
func (p *service) start(s settings) {
	p.e.t.Helper()
	s.URL = p.e.url()
	text, err := json.Marshal(s)
	if err != nil {
		p.e.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), serviceVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		_, err = cmd.StdinPipe()
	}
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		p.e.t.Fatal(err)
	}
	done := make(chan struct{})
	p.cmd, p.done = cmd, done
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if id, ok := strings.CutPrefix(lines.Text(), "called "); ok {
				p.mu.Lock()
				p.calls[id]++
				p.mu.Unlock()
			}
		}
		p.err = cmd.Wait()
	}()
}

func (p *service) callsOf(ev mesh.Event) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls[ev.ID]
}

func (p *service) awaitCalls(ev mesh.Event, n int) {
	p.e.t.Helper()
	await(p.e.t, fmt.Sprintf("call %d of the handler of event %s", n, ev.ID), func() bool { return p.callsOf(ev) >= n })
}

// awaitKilled waits until the process has killed itself.
func (p *service) awaitKilled() {
	p.e.t.Helper()
	receive(p.e.t, "the process to be killed", p.done)
	if got := fmt.Sprint(p.err); !strings.Contains(got, "killed") {
		p.e.t.Fatalf("the process ended by %s", got)
	}
}

func (p *service) kill() {
	p.e.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		p.e.t.Fatal(err)
	}
	p.awaitKilled()
}

// stop ends the process in good order.
func (p *service) stop() {
	p.e.t.Helper()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		p.e.t.Fatal(err)
	}
	receive(p.e.t, "the process to end", p.done)
	if p.err != nil {
		p.e.t.Fatalf("the process ended by %v", p.err)
	}
}
