package bench

import (
	"errors"
	"fmt"
	"os"
)

// makeFolder makes the folder for the servers, on a disk: what is synced to a file system
// in memory is not on disk. The server of Postgres may run as another user, who passes
// through.
func makeFolder() (string, error) {
	base := os.TempDir()
	if inMemory(base) {
		const persistent = "/var/tmp"
		if inMemory(persistent) {
			return "", fmt.Errorf("%s lies in memory, where fsync does nothing: set TMPDIR to a folder on a disk", base)
		}
		base = persistent
	}
	dir, err := os.MkdirTemp(base, "jetmesh-bench-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		return "", errors.Join(err, os.Remove(dir))
	}
	return dir, nil
}
