package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/rs/zerolog"
)

// A screen shows one line of figures that changes, beneath everything else that is
// written: on a terminal it is rewritten in place, elsewhere it is written anew.
type screen struct {
	out      io.Writer
	terminal bool

	mu   sync.Mutex
	line string    // on a terminal: what stands in the last row
	last string    // elsewhere: what was written last,
	at   time.Time // and when
}

// plainEvery is the least time between two lines of figures where they cannot be rewritten.
const plainEvery = 5 * time.Second

func newScreen(out io.Writer) *screen {
	f, ok := out.(*os.File)
	return &screen{out: out, terminal: ok && isTerminal(f)}
}

// clearLine returns to the beginning of the row and empties it.
const clearLine = "\r\x1b[K"

// show replaces the line of figures.
func (s *screen) show(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.terminal:
		s.line = line
		fmt.Fprint(s.out, clearLine, line)
	case line != s.last && time.Since(s.at) >= plainEvery:
		s.last, s.at = line, time.Now()
		fmt.Fprintln(s.out, line)
	}
}

// endLine lets the line of figures stand where it is.
func (s *screen) endLine() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.line != "" {
		fmt.Fprintln(s.out)
		s.line = ""
	}
}

// Write writes whole lines above the line of figures.
func (s *screen) Write(p []byte) (int, error) { return s.above(s.out, p) }

func (s *screen) above(w io.Writer, p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.line == "" {
		return w.Write(p)
	}
	fmt.Fprint(s.out, clearLine)
	n, err := w.Write(p)
	fmt.Fprint(s.out, s.line)
	return n, err
}

// logger is the settings' logger, but keeps clear of the line of figures.
func (s *screen) logger(set *settings, stderr io.Writer) zerolog.Logger {
	f, ok := stderr.(*os.File)
	if !ok || !isTerminal(f) {
		return set.logger(stderr)
	}
	return set.logger(stderr).Output(zerolog.ConsoleWriter{
		Out: aboveLine{s, stderr}, TimeFormat: time.TimeOnly, NoColor: os.Getenv("NO_COLOR") != "",
	})
}

type aboveLine struct {
	s *screen
	w io.Writer
}

func (a aboveLine) Write(p []byte) (int, error) { return a.s.above(a.w, p) }
