package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

const superuser = "postgres"

// cluster is the part of a server that lies on disk.
type cluster struct {
	dir      string
	owner    *owner
	bin      string // folder of the binaries
	version  string // major version of the binaries
	password string
}

func (c *cluster) path(name string) string { return filepath.Join(c.dir, name) }

// open finds the binaries that fit and makes sure that there is a cluster.
func (c *cluster) open(ctx context.Context, durable bool) error {
	version, err := os.ReadFile(c.path("data/PG_VERSION"))
	exists := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := c.chooseBinaries(strings.TrimSpace(string(version))); err != nil {
		return err
	}
	if !exists {
		return c.create(ctx, durable)
	}
	info, err := os.Stat(c.path("data"))
	if err != nil {
		return err
	}
	if uid, _ := ownerOf(info); uid != c.owner.uid {
		return fmt.Errorf("%s belongs to user id %d, but the server would run as user id %d: "+
			"run as that user or choose another folder", c.path("data"), uid, c.owner.uid)
	}
	password, err := os.ReadFile(c.path("password"))
	if err != nil {
		return fmt.Errorf("password of the cluster: %w (restore the file, or remove %s to start empty)", err, c.dir)
	}
	c.password = strings.TrimSpace(string(password))
	return nil
}

// chooseBinaries takes the preferred installation, or for a cluster that exists
// the preferred one of its major version: a newer package beside the old one does
// not end a cluster's life.
func (c *cluster) chooseBinaries(version string) error {
	found := installed(places)
	if len(found) == 0 {
		return ErrNoBinaries
	}
	var have []string
	for _, bin := range found {
		major, err := c.owner.majorVersion(c.dir, bin)
		if err != nil {
			return err
		}
		if version == "" || version == major {
			c.bin, c.version = bin, major
			return nil
		}
		have = append(have, fmt.Sprintf("%s (%s)", major, bin))
	}
	return fmt.Errorf("the cluster in %s was made by PostgreSQL %s, but installed is PostgreSQL %s: "+
		"install version %s, or move the folder away to start empty",
		c.path("data"), version, strings.Join(have, ", "), version)
}

// create runs initdb beside the final place and renames: a crash in the middle
// leaves only a folder that the next start removes.
func (c *cluster) create(ctx context.Context, durable bool) error {
	fresh := c.path("data.new")
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("remove the rest of an interrupted initdb: %w", err)
	}
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return err
	}
	if err := c.owner.give(fresh); err != nil {
		return err
	}
	if err := c.newPassword(); err != nil {
		return err
	}
	args := []string{
		"-D", fresh, "-U", superuser, "-A", "scram-sha-256", "--pwfile", c.path("password"),
		// The C locale exists everywhere, and its order does not change under an
		// index when the C library is updated.
		"-E", "UTF8", "--locale=C",
	}
	if !durable {
		args = append(args, "--no-sync")
	}
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "initdb"), args...)
	cmd.Dir, cmd.Env, cmd.SysProcAttr = c.dir, environment(), attributes(c.owner, syscall.SIGKILL)
	cmd.WaitDelay = 10 * time.Second // its children may hold the output a little longer
	running, err := lockRunning(c.path("running.lock"))
	if err != nil {
		return err
	}
	cmd.ExtraFiles = []*os.File{running}
	runtime.LockOSThread() // the death signal follows the thread
	out, err := cmd.CombinedOutput()
	runtime.UnlockOSThread()
	running.Close()
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("initdb: %w: %s", err, tail(string(out)))
	}
	if err := os.Rename(fresh, c.path("data")); err != nil {
		return err
	}
	if durable {
		return syncDir(c.dir)
	}
	return nil
}

// newPassword writes a new random password for initdb and for later starts.
func (c *cluster) newPassword() error {
	c.password = rand.Text()
	name := c.path("password")
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(c.password + "\n")
	return errors.Join(err, f.Sync(), f.Close(), c.owner.give(name))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// environment is all that the server sees of ours: PG* and locale variables of the
// user would change how it starts and in which language it reports.
func environment() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "TZ=UTC"}
}

// tail cuts a text to its last lines, for an error message.
func tail(text string) string {
	const most = 2000
	text = strings.TrimSpace(text)
	if len(text) > most {
		text = text[len(text)-most:]
		_, text, _ = strings.Cut(text, "\n")
	}
	return text
}
