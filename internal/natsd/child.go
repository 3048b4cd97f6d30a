package natsd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Child is a NATS server in a process of its own, for faults that a server in this
// process cannot have. Its methods may be called concurrently.
type Child struct {
	exe       string
	args, env []string
	life      sync.Mutex // one of start, Stop, Kill, Pause, Resume, Restart at a time
	proc      atomic.Pointer[childProcess]
}

type childProcess struct {
	cmd    *exec.Cmd
	done   chan struct{} // closed when it has ended
	err    error         // how; valid after done
	out    readyLine
	stderr lastBytes
}

const stopWithin = 30 * time.Second

// StartChild starts exe with the arguments and with env added to this process's
// environment, and waits until it prints the line of RunChild. On Linux the child is
// killed when this process dies. Canceling ctx gives up the start; it has no effect
// afterwards. For a URL that stays the same over Restart, the arguments name a port.
func StartChild(ctx context.Context, exe string, args, env []string) (*Child, error) {
	c := &Child{exe: exe, args: args, env: env}
	if err := c.start(ctx); err != nil {
		return nil, fmt.Errorf("natsd: start child: %w", err)
	}
	return c, nil
}

func (c *Child) start(ctx context.Context) error {
	p := &childProcess{done: make(chan struct{}), out: readyLine{ready: make(chan string, 1)}}
	p.cmd = exec.Command(c.exe, c.args...)
	p.cmd.Env = append(os.Environ(), c.env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.stderr
	p.cmd.SysProcAttr = childAttributes()
	if err := p.spawn(); err != nil {
		return err
	}
	select {
	case p.out.url = <-p.out.ready:
		c.proc.Store(p)
		return nil
	case <-p.done:
		return fmt.Errorf("it ended (%v): %s", p.err, p.stderr.text())
	case <-ctx.Done():
		p.kill()
		return fmt.Errorf("%w before it was ready: %s", ctx.Err(), p.stderr.text())
	}
}

// URL returns the address that the child reported.
func (c *Child) URL() string { return c.proc.Load().out.url }

// Pid returns the child's process id.
func (c *Child) Pid() int { return c.proc.Load().cmd.Process.Pid }

// Done is closed when the child has ended, by itself or by Stop or Kill. Restart
// begins a new life with a new channel.
func (c *Child) Done() <-chan struct{} { return c.proc.Load().done }

// Kill ends the child with SIGKILL and waits until it is gone. Killing again does
// nothing.
func (c *Child) Kill() {
	c.life.Lock()
	defer c.life.Unlock()
	c.proc.Load().kill()
}

// Stop ends the child with SIGTERM, also a paused one, and waits until it is gone. The
// error says that it failed on the way, or was killed because it took more than 30
// seconds. Stopping a child that has ended does nothing.
func (c *Child) Stop() error {
	c.life.Lock()
	defer c.life.Unlock()
	return c.proc.Load().stop()
}

// Restart stops the child if it runs, and starts it again with the same arguments and
// environment. After an error it is not running.
func (c *Child) Restart(ctx context.Context) error {
	c.life.Lock()
	defer c.life.Unlock()
	err := c.proc.Load().stop()
	if err == nil {
		err = c.start(ctx)
	}
	if err != nil {
		return fmt.Errorf("natsd: restart child: %w", err)
	}
	return nil
}

func (p *childProcess) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *childProcess) kill() {
	_ = p.cmd.Process.Kill() // fails only if it has ended
	<-p.done
}

func (p *childProcess) stop() error {
	if p.ended() {
		return nil
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = wake(p.cmd.Process)
	select {
	case <-p.done:
		if p.err != nil {
			return fmt.Errorf("natsd: stop child: %w: %s", p.err, p.stderr.text())
		}
		return nil
	case <-time.After(stopWithin):
		p.kill()
		return errors.New("natsd: stop child: killed, because it did not end within " + stopWithin.String())
	}
}

// readyLine finds the ready line in the child's output and drops the rest.
type readyLine struct {
	url   string
	ready chan string // gets one
	begin string      // of a line
	found bool
}

func (r *readyLine) Write(b []byte) (int, error) {
	r.begin += string(b)
	for {
		line, rest, whole := strings.Cut(r.begin, "\n")
		if !whole {
			return len(b), nil
		}
		r.begin = rest
		if url, ok := strings.CutPrefix(line, readyPrefix); ok && !r.found {
			r.found = true
			r.ready <- url
		}
	}
}

// lastBytes keeps the end of the child's stderr.
type lastBytes struct {
	mu  sync.Mutex
	buf []byte
}

func (l *lastBytes) Write(b []byte) (int, error) {
	const most = 4096
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = append(l.buf, b...)
	l.buf = l.buf[max(0, len(l.buf)-most):]
	return len(b), nil
}

func (l *lastBytes) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.TrimSpace(string(l.buf))
}
