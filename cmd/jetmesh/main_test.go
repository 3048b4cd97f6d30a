package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"jetmesh/internal/natsd"
	"jetmesh/internal/pgtest"
)

// programs is the folder of the programs that tests build; TestMain removes it.
var programs = sync.OnceValues(func() (string, error) { return os.MkdirTemp("", "jetmesh-programs-") })

func TestMain(m *testing.M) {
	natsd.MaybeChildMain()
	maybeDrillMain()
	code := pgtest.Run(m)
	if dir, err := programs(); err == nil {
		_ = os.RemoveAll(dir)
	}
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// program is this program's path.
func program(t *testing.T) string { return build(t, buildJetmesh) }

var (
	buildJetmesh = sync.OnceValues(func() (string, error) { return goBuild("jetmesh/cmd/jetmesh") })
	buildHello   = sync.OnceValues(func() (string, error) { return goBuild("jetmesh/examples/hello") })
)

func build(t *testing.T, once func() (string, error)) string {
	t.Helper()
	path, err := once()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func goBuild(pkg string) (string, error) {
	dir, err := programs()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, filepath.Base(pkg))
	if out, err := exec.Command("go", "build", "-o", path, pkg).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build %s: %w: %s", pkg, err, out)
	}
	return path, nil
}
