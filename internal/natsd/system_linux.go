package natsd

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
)

// childAttributes: a process group of its own, out of reach of the terminal's Ctrl-C,
// and a death that even a paused child cannot miss.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// frozen reports that the process is stopped: the signal takes a moment.
func frozen(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// "pid (name) state ...", and the name may hold anything.
	_, after, _ := bytes.Cut(text[max(0, bytes.LastIndexByte(text, ')')):], []byte(" "))
	return bytes.HasPrefix(after, []byte("T"))
}
