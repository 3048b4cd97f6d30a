package bench

import (
	"io"
	"time"

	"github.com/rs/zerolog"

	"jetmesh/outbox"
)

// Config of a run. All fields are required except DatabaseURL.
type Config struct {
	Executable  string        // jetmesh itself: it runs again as the NATS server and as the relay
	NATSConf    []byte        // configuration of the NATS server
	DatabaseURL string        // server in which a database for the run is made; default: a private one
	Schema      outbox.Schema // of the outbox
	Prefix      string        // of the mesh
	Events      int           // in each throughput phase
	Payload     int           // bytes, at least 2
	Rate        int           // events per second of the latency phase
	Duration    time.Duration // of the latency phase, after a warm-up of a second
	Progress    io.Writer     // a line for what happens and for each figure
	Logger      zerolog.Logger
}

const (
	consumer = "bench"

	// handlerConcurrency is how many handlers run at once, and how many messages are fetched
	// ahead: handlers that do nothing end at once, so it is the prefetch that counts.
	handlerConcurrency = 512

	insertConnections = 16
	rawRounds         = 3
	rawMost           = 200_000 // messages, which are made in memory

	// What a relay has in flight by default.
	maxInFlight   = 4096
	bytesInFlight = 64 << 20
)
