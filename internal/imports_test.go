package internal

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// allowed lists, for each package of the product, the packages of this module it may import. The
// order is the architecture: imports point downwards only.
var allowed = map[string][]string{
	"mesh":    {},
	"outbox":  {"mesh"},
	"saga":    {"mesh", "outbox"},
	"webhook": {"mesh", "outbox"},
	"admin":   {"mesh", "outbox", "saga", "webhook"},
}

// foreign lists modules that a package must not know.
var foreign = map[string][]string{
	"mesh":   {"github.com/jackc/", "github.com/gofiber/", "github.com/nats-io/nats-server/"},
	"outbox": {"github.com/gofiber/", "github.com/nats-io/nats-server/"},
}

func TestImportsPointDownwardsOnly(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}{{range .Imports}} {{.}}{{end}}`, "jetmesh/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		pkg, imports := strings.TrimPrefix(fields[0], "jetmesh/"), fields[1:]
		top, _, _ := strings.Cut(pkg, "/")
		below, product := allowed[top]
		if product {
			seen++
		}
		for _, imported := range imports {
			own, isOwn := strings.CutPrefix(imported, "jetmesh/")
			ownTop, _, _ := strings.Cut(own, "/")
			switch {
			case product && isOwn && ownTop != top && !slices.Contains(below, ownTop):
				t.Errorf("%s imports %s", pkg, own)
			case top == "examples" && isOwn && ownTop == "internal":
				t.Errorf("%s imports %s: examples use public packages only", pkg, own)
			case isOwn && ownTop == "cmd":
				t.Errorf("%s imports %s", pkg, own)
			}
			for _, prefix := range foreign[top] {
				if strings.HasPrefix(imported, prefix) {
					t.Errorf("%s imports %s", pkg, imported)
				}
			}
		}
	}
	if seen < 2 {
		t.Fatalf("only %d packages of the product were found", seen)
	}
}
