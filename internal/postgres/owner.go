package postgres

import (
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
)

// owner is the operating system's user that runs the server.
type owner struct {
	name     string
	uid, gid int
	drop     bool // this process is root and must become that user
}

const serverUser = "postgres"

func findOwner() (*owner, error) {
	if os.Geteuid() != 0 {
		return &owner{uid: os.Geteuid(), gid: os.Getegid()}, nil
	}
	u, err := user.Lookup(serverUser)
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL does not run as root, and this system has no user %q to run it as: "+
			"create it (`useradd --system %s`) or run as an ordinary user: %w", serverUser, serverUser, err)
	}
	o := &owner{name: u.Username, drop: true}
	if o.uid, err = strconv.Atoi(u.Uid); err != nil {
		return nil, fmt.Errorf("uid of user %s: %w", u.Username, err)
	}
	if o.gid, err = strconv.Atoi(u.Gid); err != nil {
		return nil, fmt.Errorf("gid of user %s: %w", u.Username, err)
	}
	return o, nil
}

// give hands a file or folder to the user of the server.
func (o *owner) give(path string) error {
	if !o.drop {
		return nil
	}
	return os.Chown(path, o.uid, o.gid)
}

// makeDir creates the cluster's folder. For root it stays root's, so that the
// server's user cannot plant links among the files that root writes there.
func (o *owner) makeDir(dir string) error {
	mode := os.FileMode(0o700)
	if o.drop {
		mode = 0o711 // the server passes through, nobody lists
	}
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) == 0 { // an empty one that was made for us, as by os.MkdirTemp
		return os.Chmod(dir, mode)
	}
	return nil
}

// mayEnter reports the first folder on the way to path that the user may not pass.
func (o *owner) mayEnter(path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	parts := strings.Split(path, string(filepath.Separator))
	for i := range parts {
		folder := string(filepath.Separator) + filepath.Join(parts[:i+1]...)
		info, err := os.Stat(folder)
		if err != nil {
			return err
		}
		bit := os.FileMode(0o001)
		switch uid, gid := ownerOf(info); {
		case uid == o.uid:
			bit = 0o100
		case gid == o.gid:
			bit = 0o010
		}
		if info.Mode()&bit == 0 {
			return fmt.Errorf("user %s, who runs the server for root, may not enter %s (mode %04o): "+
				"allow it (`chmod o+x %s`) or choose another folder", o.name, folder, info.Mode().Perm(), folder)
		}
	}
	return nil
}
