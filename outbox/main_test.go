package outbox_test

import (
	"testing"

	"jetmesh/internal/natsd"
	"jetmesh/internal/pgtest"
)

func TestMain(m *testing.M) {
	natsd.MaybeChildMain()
	pgtest.Main(m)
}
