package postgres

import (
	"cmp"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// ErrNoBinaries means that no PostgreSQL server is installed where FindBinaries looks.
var ErrNoBinaries = errors.New("postgres: no PostgreSQL server is installed on this machine: " +
	"install the package postgresql (`apt-get install postgresql` or `brew install postgresql`), " +
	"or set JETMESH_DATABASE_URL to a server you have")

// places are where packages put the binaries without adding them to PATH.
var places = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/opt/homebrew/opt/postgresql@*/bin",
	"/usr/local/opt/postgresql@*/bin",
	"/usr/local/pgsql/bin",
}

// FindBinaries returns the folder that holds initdb and postgres: the one PATH
// leads to, else the newest version in the places where Debian, Red Hat, Homebrew
// and the source build install. The error is ErrNoBinaries.
func FindBinaries() (dir string, err error) {
	found := installed(places)
	if len(found) == 0 {
		return "", ErrNoBinaries
	}
	return found[0], nil
}

// installed lists every folder with both binaries, the preferred one first.
func installed(places []string) []string {
	var dirs []string
	for _, place := range places {
		match, _ := filepath.Glob(place) // the patterns are constant and valid
		dirs = append(dirs, match...)
	}
	slices.SortStableFunc(dirs, func(a, b string) int {
		return cmp.Compare(pathVersion(b), pathVersion(a))
	})
	// PATH often holds links into one of the folders above. The server finds its
	// other files from where it really is.
	if path, err := exec.LookPath("postgres"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = slices.Insert(dirs, 0, filepath.Dir(path))
		}
	}
	var found []string
	for _, dir := range dirs {
		if !slices.Contains(found, dir) && executable(dir, "initdb") && executable(dir, "postgres") {
			found = append(found, dir)
		}
	}
	return found
}

func executable(dir, name string) bool {
	_, err := exec.LookPath(filepath.Join(dir, name))
	return err == nil
}

var digits = regexp.MustCompile(`\d+(\.\d+)?`)

// pathVersion is the version in a path such as /usr/lib/postgresql/15/bin, else 0.
func pathVersion(path string) float64 {
	v, _ := strconv.ParseFloat(digits.FindString(path), 64)
	return v
}

var versionLine = regexp.MustCompile(`PostgreSQL\) (\d+)`)

// majorVersion asks the binary itself, as the user that is going to run it and
// from the folder it is going to run in, so that missing permissions show here.
func (o *owner) majorVersion(dir, bin string) (string, error) {
	cmd := exec.Command(filepath.Join(bin, "postgres"), "--version")
	cmd.Dir, cmd.Env, cmd.SysProcAttr = dir, environment(), attributes(o, 0)
	out, err := cmd.Output()
	if o.drop && errors.Is(err, os.ErrPermission) {
		for _, path := range []string{dir, bin} {
			if err := o.mayEnter(path); err != nil {
				return "", err
			}
		}
	}
	if err != nil {
		return "", err
	}
	m := versionLine.FindSubmatch(out)
	if m == nil {
		return "", errors.New(cmd.Path + " --version answers " + strconv.Quote(string(out)))
	}
	return string(m[1]), nil
}
