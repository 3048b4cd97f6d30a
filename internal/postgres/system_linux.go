package postgres

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

func setDeathSignal(attr *syscall.SysProcAttr, sig syscall.Signal) { attr.Pdeathsig = sig }

// children lists the processes whose parent is pid.
func children(pid int) []int {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is valid
	var found []int
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // ended meanwhile
		}
		// "pid (name) state parent ...", and the name may hold anything.
		var state string
		var parent int
		_, err = fmt.Sscan(string(text[bytes.LastIndexByte(text, ')')+1:]), &state, &parent)
		if err != nil || parent != pid {
			continue
		}
		if child, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil {
			found = append(found, child)
		}
	}
	return found
}
