// Package postgres runs a private PostgreSQL server from the binaries that are
// installed on this machine, for development and for tests.
//
// The folder of a server:
//
//	Dir/lock          held by the process that called Start
//	Dir/running.lock  held by the server's processes themselves, so that a server
//	                  which outlives its owner is noticed
//	Dir/password      the superuser's random password, mode 0600
//	Dir/postgres.log  what the server wrote, mode 0600
//	Dir/data          the cluster; appears by rename, so it is whole or absent
//
// The server listens on 127.0.0.1 only, has no Unix socket, and asks every
// client for the password. It gets no Ctrl-C from the terminal (its owner drains
// first and then calls Stop), and on Linux it shuts down when its owner dies.
//
// PostgreSQL refuses to run as root: for root, the server runs as the operating
// system's user "postgres", and every folder above Dir must let that user through.
package postgres
