//go:build !unix

package postgres

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

func supported() error {
	return errors.New("no private server on this system: set JETMESH_DATABASE_URL to a server you have")
}

func attributes(*owner, syscall.Signal) *syscall.SysProcAttr { return nil }

func ownerOf(fs.FileInfo) (uid, gid int) { return 0, 0 }

func killFamily(*os.Process) {}

var errRunning = errors.ErrUnsupported

func lockRunning(string) (*os.File, error) { return nil, errors.ErrUnsupported }
