package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestLogsStandAboveTheLineOfFigures(t *testing.T) {
	var terminal bytes.Buffer // both streams lead there
	s := &screen{out: &terminal, terminal: true}
	logs := aboveLine{s, &terminal}
	fmt.Fprint(logs, "before\n")
	s.show("placed 1")
	fmt.Fprint(logs, "meanwhile\n")
	s.show("placed 22")
	s.endLine()
	fmt.Fprint(logs, "after\n")
	const want = "before\n" +
		"\r\x1b[Kplaced 1" +
		"\r\x1b[Kmeanwhile\nplaced 1" +
		"\r\x1b[Kplaced 22\n" +
		"after\n"
	if got := terminal.String(); got != want {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestFiguresInAFileComeEveryFiveSecondsIfTheyChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var file bytes.Buffer
		s := newScreen(&file)
		for second := range 20 {
			s.show(fmt.Sprint("placed ", min(second, 7)))
			time.Sleep(time.Second)
		}
		if got, want := file.String(), "placed 0\nplaced 5\nplaced 7\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

func TestFiguresSayWhenThereAreMore(t *testing.T) {
	f := figures{placed: 3, published: 2, booked: 1, pending: mostRows + 7, failed: mostRows - 1}
	if got, want := f.String(), "placed 3  published 2  booked 1  pending 5000+  failed 4999  p50 -"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	f.latency, f.latencyKnown = 1234567*time.Nanosecond, true
	if got := f.String(); !strings.HasSuffix(got, "p50 1.2ms") {
		t.Errorf("got %q", got)
	}
}
