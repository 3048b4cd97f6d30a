// Package natsd runs a NATS server with JetStream: inside this process (Start), or as
// a child process that can be killed, paused and restarted (StartChild).
//
// Inside the process, the server's habits that suit only a program of its own are
// off: it takes no signals, ends nobody's process on a fatal error (Start returns it),
// and keeps others off its store folder, which NATS itself does not (two servers on
// one folder damage it).
package natsd
