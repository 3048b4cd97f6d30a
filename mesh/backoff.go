package mesh

import (
	"math/rand/v2"
	"time"
)

// Backoff is the delay between attempts: exponential with full jitter. Before retry n
// (from 1) the delay is random between 0 and min(Cap, Base·2ⁿ⁻¹), so that events that
// failed together do not come back together.
type Backoff struct {
	Base time.Duration // default 1s
	Cap  time.Duration // default 10min
}

func (b Backoff) delay(retry int) time.Duration {
	ceiling := b.Cap
	// Cap is shifted down, since Base shifted up may overflow.
	if shift := retry - 1; shift < 63 && b.Base <= b.Cap>>shift {
		ceiling = b.Base << shift
	}
	return rand.N(ceiling + 1)
}
