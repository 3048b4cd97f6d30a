//go:build soak

package outbox_test

import "testing"

func TestSoakModelOfFailures(t *testing.T) { checkModel(t, "400", "40") }
