//go:build unix

package natsd

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// Pause freezes the child (SIGSTOP): it keeps its connections and answers nobody.
// Kill, Stop and Restart work on a paused child.
func (c *Child) Pause() error {
	c.life.Lock()
	defer c.life.Unlock()
	p := c.proc.Load()
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return fmt.Errorf("natsd: pause child: %w", err)
	}
	for !frozen(p.cmd.Process.Pid) {
		select {
		case <-p.done:
			return errors.New("natsd: pause child: it ended")
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// Resume ends Pause.
func (c *Child) Resume() error {
	c.life.Lock()
	defer c.life.Unlock()
	if err := wake(c.proc.Load().cmd.Process); err != nil {
		return fmt.Errorf("natsd: resume child: %w", err)
	}
	return nil
}

func wake(p *os.Process) error { return p.Signal(syscall.SIGCONT) }
