package outbox_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"jetmesh/internal/natsd"
	"jetmesh/internal/pgtest"
	"jetmesh/outbox"
)

func TestMain(m *testing.M) {
	natsd.MaybeChildMain()
	outbox.SetTrackInterval(300 * time.Millisecond)
	outbox.SetDecisionSweep(time.Second)
	code := pgtest.Run(m)
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
