package natsd

import "runtime"

// spawn starts the child on a thread of its own, which lives as long as it does: the
// kernel sends the death signal when the parent's thread ends, and Go ends threads as
// it likes.
func (p *childProcess) spawn() error {
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	return <-started
}
