//go:build unix && !linux

package postgres

import "syscall"

// There is no death signal here: a server whose owner is killed stays, and the next
// Start names it.
func setDeathSignal(*syscall.SysProcAttr, syscall.Signal) {}

// Children are not looked for here: they leave when they notice that their
// postmaster is gone.
func children(int) []int { return nil }
