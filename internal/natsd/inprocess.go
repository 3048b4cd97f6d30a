package natsd

import (
	"fmt"
	"net"
	"sync"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Conn connects without the network. It needs the credentials that the configuration
// asks for, but no TLS. The connection ends with the server, and never finds another.
func (s *Server) Conn(opts ...nats.Option) (*nats.Conn, error) {
	all := append([]nats.Option{nats.InProcessServer(inProcess{s.srv})}, opts...)
	nc, err := nats.Connect("nats://in-process", all...)
	if err != nil {
		return nil, fmt.Errorf("natsd: connect in process: %w", err)
	}
	return nc, nil
}

type inProcess struct{ srv *server.Server }

func (p inProcess) InProcessConn() (net.Conn, error) {
	conn, err := p.srv.InProcessConn()
	if err != nil {
		return nil, err
	}
	return &pipe{Conn: conn}, nil
}

// pipe is the client's end of an unbuffered pipe. The client writes CONNECT, then
// PING, then reads. The server reads CONNECT, and writes its refusal before it reads
// on: both would write and nobody read, until the server's write deadline 10 seconds
// later, and the refusal would be lost. So that PING is written beside.
type pipe struct {
	net.Conn
	once sync.Once // the first PING
	ping sync.WaitGroup
}

func (p *pipe) Write(b []byte) (n int, err error) {
	beside := false
	if string(b) == "PING\r\n" {
		p.once.Do(func() { beside = true })
	}
	if !beside {
		return p.Conn.Write(b)
	}
	ping := []byte(string(b)) // the caller's is only lent
	p.ping.Go(func() { _, _ = p.Conn.Write(ping) })
	return len(b), nil
}

func (p *pipe) Close() error {
	err := p.Conn.Close()
	p.ping.Wait() // the pipe is closed: not for long
	return err
}
