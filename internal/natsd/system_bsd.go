//go:build unix && !linux

package natsd

import "syscall"

// childAttributes: a process group of its own, out of reach of the terminal's Ctrl-C.
// There is no death signal here.
func childAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func frozen(int) bool { return true }
