package outbox

import "time"

// SetTrackInterval shortens what takes too long for a test; call it before relays run.
func SetTrackInterval(d time.Duration) { trackInterval = d }
