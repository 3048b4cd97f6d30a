package postgres

import (
	"context"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestServerEndsWithItsOwner(t *testing.T) {
	dir := tempDir(t)
	owner, output := helper(t, dir)
	postmaster := number(t, output())
	family := children(postmaster)
	signal := func(sig syscall.Signal) {
		for _, pid := range family {
			if err := syscall.Kill(pid, sig); err != nil && err != syscall.ESRCH { // a helper may have ended
				t.Fatal(err)
			}
		}
	}
	signal(syscall.SIGSTOP) // it will take its time to shut down
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = owner.Wait()

	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Start(short, Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), "still there") {
		t.Errorf("Start() = %v, want that another server is there", err)
	}
	signal(syscall.SIGCONT)
	s := start(t, Config{Dir: dir})
	query(t, s, "select 1")
	until(t, "server gone with its owner", func() bool { return gone(postmaster) })
}

func TestServerOutlivesTheThreadThatCalledStart(t *testing.T) {
	dir := tempDir(t)
	var s *Server
	thread := make(chan int)
	var starter func()
	starter = func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if tid := syscall.Gettid(); tid != os.Getpid() {
			s = start(t, Config{Dir: dir})
			thread <- tid
			return
		}
		// The main thread never ends: hold it and take another.
		defer runtime.UnlockOSThread()
		var other sync.WaitGroup
		other.Go(starter)
		other.Wait()
	}
	go starter()
	tid := <-thread
	until(t, "thread gone", func() bool { return syscall.Tgkill(os.Getpid(), tid, 0) == syscall.ESRCH })
	query(t, s, "select 1")
}
