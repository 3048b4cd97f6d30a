package outbox_test

import (
	"bytes"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

// losses are what a client's connections lose while on is set: its answers to messages, that is acks, naks and signs
// of life.
type losses struct {
	on   atomic.Bool
	lost atomic.Int64 // answers but for signs of life
}

// Dial makes losses a [nats.CustomDialer].
func (l *losses) Dial(network, address string) (net.Conn, error) {
	conn, err := net.DialTimeout(network, address, 5*time.Second)
	return lossyConn{conn, l}, err
}

type lossyConn struct {
	net.Conn
	*losses
}

func (c lossyConn) Write(p []byte) (int, error) {
	if !c.on.Load() {
		return c.Conn.Write(p)
	}
	if _, err := c.Conn.Write(c.withoutAnswers(p)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// withoutAnswers drops publishes to the subjects of acks. The client writes whole operations.
func (l *losses) withoutAnswers(p []byte) (kept []byte) {
	for len(p) > 0 {
		n := bytes.Index(p, []byte("\r\n"))
		if n < 0 {
			return append(kept, p...)
		}
		line := p[:n]
		n += 2
		if bytes.HasPrefix(line, []byte("PUB ")) || bytes.HasPrefix(line, []byte("HPUB ")) {
			size, _ := strconv.Atoi(string(line[bytes.LastIndexByte(line, ' ')+1:]))
			n = min(n+size+2, len(p))
		}
		switch {
		case !bytes.HasPrefix(line, []byte("PUB $JS.ACK.")):
			kept = append(kept, p[:n]...)
		case !bytes.Contains(p[:n], []byte("+WPI")):
			l.lost.Add(1)
		}
		p = p[n:]
	}
	return kept
}
