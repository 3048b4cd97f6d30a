//go:build unix && !linux

package bench

import (
	"os"
	"runtime"
	"syscall"
)

// childAttributes: a process group of its own, out of reach of the terminal's Ctrl-C.
func childAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// livePeak is known only when the process has ended.
func livePeak(int) int64 { return 0 }

// endedPeak is the largest resident size that a process had, in bytes.
func endedPeak(state *os.ProcessState) int64 {
	usage, ok := state.SysUsage().(*syscall.Rusage)
	if !ok {
		return 0
	}
	if runtime.GOOS == "darwin" || runtime.GOOS == "ios" {
		return int64(usage.Maxrss)
	}
	return int64(usage.Maxrss) << 10
}

func inMemory(string) bool { return false }
