package natsd

import (
	"fmt"
	"sync"

	"github.com/rs/zerolog"
)

// logger takes what the server says. The server's text is the message: nobody but
// the server knows its parts.
type logger struct {
	to zerolog.Logger

	mu      sync.Mutex
	fatal   error // the first one while starting
	started bool
}

func (l *logger) Noticef(format string, v ...any) { l.to.Debug().Msgf(format, v...) }
func (l *logger) Warnf(format string, v ...any)   { l.to.Warn().Msgf(format, v...) }
func (l *logger) Errorf(format string, v ...any)  { l.to.Error().Msgf(format, v...) }
func (l *logger) Debugf(format string, v ...any)  { l.to.Trace().Msgf(format, v...) }
func (l *logger) Tracef(format string, v ...any)  { l.to.Trace().Msgf(format, v...) }

// Fatalf does not end the process, as the server's own logger does.
func (l *logger) Fatalf(format string, v ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.started:
		l.to.Error().Msgf(format, v...)
	case l.fatal == nil:
		l.fatal = fmt.Errorf("%s", fmt.Sprintf(format, v...))
	}
}

func (l *logger) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}

// ready ends the time in which Start can still return a fatal error.
func (l *logger) ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.started = true
	return l.fatal
}
