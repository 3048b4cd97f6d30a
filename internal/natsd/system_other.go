//go:build !unix

package natsd

import (
	"errors"
	"os"
	"syscall"
)

// Pause is not possible on this system.
func (c *Child) Pause() error { return errors.ErrUnsupported }

// Resume is not possible on this system.
func (c *Child) Resume() error { return errors.ErrUnsupported }

func wake(*os.Process) error { return nil }

func childAttributes() *syscall.SysProcAttr { return nil }
