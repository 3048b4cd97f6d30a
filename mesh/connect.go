package mesh

import (
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// Connect opens a connection as a mesh needs it and applies opts after its own: it
// reconnects for ever, waits for a server that is not there yet, and keeps no buffer
// while it is disconnected. (With the client's default buffer a publish that its caller
// was told had failed is sent later all the same.) Whoever connects closes.
func Connect(url string, opts ...nats.Option) (*nats.Conn, error) {
	own := []nats.Option{
		nats.Name("jetmesh"),
		nats.MaxReconnects(-1),
		nats.RetryOnFailedConnect(true),
		nats.ReconnectBufSize(-1),
		nats.FlusherTimeout(10 * time.Second), // a server that hangs does not hold the connection for a minute
		nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(250*time.Millisecond, time.Second),
		nats.PingInterval(10 * time.Second),
		nats.MaxPingsOutstanding(2),
	}
	nc, err := nats.Connect(url, append(own, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("mesh: connect to NATS: %w", err)
	}
	return nc, nil
}
