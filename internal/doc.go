// Package internal holds what only tests and the command share.
package internal
