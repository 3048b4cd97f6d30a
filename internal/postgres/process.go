package postgres

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
)

// process is one life of the server.
type process struct {
	cmd    *exec.Cmd
	done   chan struct{} // closed when the postmaster has ended
	err    error         // how it ended; valid after done
	wanted atomic.Bool   // Stop, Kill or Restart was called
	log    logFile
}

// spawn starts the postmaster on a thread of its own, which lives as long as it
// does: the kernel sends the death signal when the parent's thread ends, and Go ends
// threads as it likes.
func spawn(cmd *exec.Cmd, log logFile) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{}), log: log}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(sig syscall.Signal) { _ = p.cmd.Process.Signal(sig) } // fails only once it is gone

// failure says how the postmaster ended and what it wrote last.
func (p *process) failure() error {
	how := "exit status 0"
	if p.err != nil {
		how = p.err.Error()
	}
	return fmt.Errorf("the server ended (%s); the end of %s:\n%s", how, p.log.path, p.log.tail())
}

// logFile is the server's log from one start on.
type logFile struct {
	path string
	from int64
}

const maxLog = 16 << 20 // bytes; a longer log is set aside at the next start

func openLog(path string) (*os.File, logFile, error) {
	if info, err := os.Stat(path); err == nil && info.Size() > maxLog {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, logFile{}, err
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, logFile{}, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, logFile{}, err
	}
	return f, logFile{path: path, from: info.Size()}, nil
}

// tail returns the last lines that the server wrote since this start.
func (l logFile) tail() string {
	text, err := os.ReadFile(l.path)
	if err != nil {
		return err.Error()
	}
	return tail(string(text[min(l.from, int64(len(text))):]))
}
