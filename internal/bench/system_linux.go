package bench

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
)

// childAttributes: a process group of its own, out of reach of the terminal's Ctrl-C, and a
// signal when this process dies.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}

// livePeak is the largest resident size that a running process has had, in bytes; 0 when it
// has ended.
func livePeak(pid int) int64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte("VmHWM:")); ok {
			kib, _ := strconv.ParseInt(string(bytes.TrimSuffix(bytes.TrimSpace(rest), []byte(" kB"))), 10, 64)
			return kib << 10
		}
	}
	return 0
}

// endedPeak is unknown: what getrusage reports begins with the size of the process that
// forked.
func endedPeak(*os.ProcessState) int64 { return 0 }

// inMemory reports that a folder's file system has no disk.
func inMemory(dir string) bool {
	const tmpfs, ramfs = 0x01021994, 0x858458f6
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err != nil {
		return false // who makes a folder there will say what is wrong
	}
	kind := uint32(stat.Type)
	return kind == tmpfs || kind == ramfs
}
