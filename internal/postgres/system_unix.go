//go:build unix

package postgres

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

func supported() error { return nil }

// attributes of a child: a process group of its own, out of reach of the terminal's
// Ctrl-C; the server's user; and the signal it gets when we die (0: none).
func attributes(o *owner, death syscall.Signal) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if o.drop {
		attr.Credential = &syscall.Credential{Uid: uint32(o.uid), Gid: uint32(o.gid)}
	}
	setDeathSignal(attr, death)
	return attr
}

// killFamily ends the postmaster and its children at once.
// Signals fail only for processes that are gone.
func killFamily(postmaster *os.Process) {
	// Stopped, it buries no children: no id in the list can be another process's
	// by now. One that it was just starting leaves when it finds itself alone.
	_ = postmaster.Signal(syscall.SIGSTOP)
	family := children(postmaster.Pid)
	_ = postmaster.Kill()
	for _, pid := range family {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

func ownerOf(info fs.FileInfo) (uid, gid int) {
	stat := info.Sys().(*syscall.Stat_t)
	return int(stat.Uid), int(stat.Gid)
}

var errRunning = errors.New("processes of a server are still there")

// lockRunning takes the lock that the server's processes inherit. flock belongs to
// the open file, not to a process, so the lock lasts until the last of them is gone.
func lockRunning(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errRunning
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}
