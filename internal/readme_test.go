package internal

import (
	"os"
	"strings"
	"testing"
)

func TestREADMEShowsTheProgramThatIsCompiled(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("../examples/hello/main.go")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "```go\n"+string(program)+"```\n") {
		t.Error("README.md shows another program than examples/hello/main.go")
	}
	if n := strings.Count(string(program), "\n"); n > 46 {
		t.Errorf("the program has %d lines", n)
	}
}
