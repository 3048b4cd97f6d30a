package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// process is a child process. On Linux it is told to end when this process dies.
type process struct {
	cmd    *exec.Cmd
	done   chan struct{} // closed when it has ended
	err    error         // how; valid after done
	peak   atomic.Int64  // largest resident size so far, in bytes
	output output
}

const (
	stopWithin  = 30 * time.Second
	samplePause = 50 * time.Millisecond
)

// startProcess starts exe with env added to this process's environment and waits until a
// line of its output contains ready.
func startProcess(ctx context.Context, exe string, args, env []string, ready string) (*process, error) {
	p := &process{done: make(chan struct{}), output: output{ready: ready, isReady: make(chan struct{})}}
	p.cmd = exec.Command(exe, args...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	p.cmd.SysProcAttr = childAttributes()
	if err := p.spawn(); err != nil {
		return nil, err
	}
	select {
	case <-p.output.isReady:
		return p, nil
	case <-p.done:
		return nil, p.failure()
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), p.stop())
	}
}

// spawn starts the process on a thread of its own, which lives as long as it does: the
// kernel sends the death signal when the parent's thread ends, and Go ends threads as it
// likes.
func (p *process) spawn() error {
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		var sampling sync.WaitGroup
		ended := make(chan struct{})
		sampling.Go(func() { p.sample(ended) })
		p.err = p.cmd.Wait()
		close(ended)
		sampling.Wait()
		p.notePeak(endedPeak(p.cmd.ProcessState))
		close(p.done)
	}()
	return <-started
}

// sample notes the resident size until the process has ended: afterwards, Linux no longer
// tells it.
func (p *process) sample(ended <-chan struct{}) {
	tick := time.NewTicker(samplePause)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
			p.notePeak(livePeak(p.cmd.Process.Pid))
		}
	}
}

func (p *process) notePeak(bytes int64) {
	for old := p.peak.Load(); bytes > old && !p.peak.CompareAndSwap(old, bytes); old = p.peak.Load() {
	}
}

// stop interrupts the process and waits until it is gone. The error says that it failed, or
// had to be killed.
func (p *process) stop() error {
	p.notePeak(livePeak(p.cmd.Process.Pid))
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		_ = p.cmd.Process.Kill() // no such signal on this system
	}
	select {
	case <-p.done:
	case <-time.After(stopWithin):
		_ = p.cmd.Process.Kill() // fails only if it has ended
		<-p.done
		return fmt.Errorf("killed, because it did not end within %s", stopWithin)
	}
	if p.err != nil {
		return p.failure()
	}
	return nil
}

// failure says how the process ended and what it said last.
func (p *process) failure() error {
	how := "exit status 0"
	if p.err != nil {
		how = p.err.Error()
	}
	return fmt.Errorf("%s: %s", how, p.output.tail())
}

// output waits for the word ready and keeps the end of what a process says.
type output struct {
	ready   string
	isReady chan struct{} // closed when it was said

	mu   sync.Mutex
	said bool
	end  []byte
}

func (o *output) Write(b []byte) (int, error) {
	const most = 4096
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end = append(o.end, b...)
	if !o.said && strings.Contains(string(o.end), o.ready) {
		o.said = true
		close(o.isReady)
	}
	o.end = o.end[max(0, len(o.end)-most):]
	return len(b), nil
}

func (o *output) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.TrimSpace(string(o.end))
}

// warnings are the last lines among it that a relay logged above the level of information: a
// figure that was taken meanwhile is worth a second look.
func (o *output) warnings() []string {
	var found []string
	for line := range strings.Lines(o.tail()) {
		var entry struct{ Level string }
		if json.Unmarshal([]byte(line), &entry) == nil && (entry.Level == "warn" || entry.Level == "error") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	const most = 3
	return found[max(0, len(found)-most):]
}
