// Package jetmesh holds what the binary carries with it.
package jetmesh

import _ "embed"

// NATSConf is nats.conf: the configuration that the embedded server loads and
// that a server of your own can start from.
//
//go:embed nats.conf
var NATSConf []byte
