package outbox

import "time"

// SetTrackInterval shortens what takes too long for a test; call it before relays run.
func SetTrackInterval(d time.Duration) { trackInterval = d }

// SetDecisionSweep shortens the time between looks at operators' decisions.
func SetDecisionSweep(d time.Duration) { decisionSweep = d }
