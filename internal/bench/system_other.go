//go:build !unix

package bench

import (
	"os"
	"syscall"
)

func childAttributes() *syscall.SysProcAttr { return nil }

func livePeak(int) int64 { return 0 }

func endedPeak(*os.ProcessState) int64 { return 0 }

func inMemory(string) bool { return false }
