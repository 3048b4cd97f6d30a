package natsd_test

import (
	"net"
	"strings"
	"testing"

	"jetmesh/internal/natsd"
)

// All of 127.0.0.0/8 is this machine on Linux, so a second address of it tells a
// listener on one address from a listener on all.
func TestListensOnOneAddressUnlessToldOtherwise(t *testing.T) {
	for _, test := range []struct {
		config, host string
		everywhere   bool
	}{
		{"", "", false},
		{"jetstream {}", "", false},
		{`host: "0.0.0.0"`, "127.0.0.1", false},
		{`host: "0.0.0.0"`, "", true},
		{"", "0.0.0.0", true},
	} {
		s := start(t, natsd.Config{ConfigText: []byte(test.config), Host: test.host, Port: -1})
		if err := connect(t, s.URL()).Flush(); err != nil {
			t.Error(err)
		}
		address, ok := strings.CutPrefix(s.URL(), "nats://127.0.0.1:")
		if !ok {
			t.Errorf("URL %s is not for clients on this machine", s.URL())
		}
		conn, err := net.Dial("tcp", "127.0.0.2:"+address)
		if err == nil {
			conn.Close()
		}
		if (err == nil) != test.everywhere {
			t.Errorf("config %q, host %q: reachable at another address: %t, want %t", test.config, test.host, err == nil, test.everywhere)
		}
	}
}
