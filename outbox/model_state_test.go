package outbox_test

import (
	"fmt"
	"slices"
	"strings"

	"jetmesh/outbox"
)

// statusOpen stands for pending and dispatching: which of the two a row is depends on when it
// is marked.
const statusOpen = "open"

// A modelState is what the contract says about one event.
type modelState struct {
	status string // statusOpen, dispatched, failed or skipped
	gen    int
	retry  int  // retryCount
	before int  // of retry, what a reset took out of the budget
	due    bool // a run of this generation is to come
	byHand bool // but only when the delay of an operator's failure is over
	hangs  byte // a run of this generation hangs, and what it comes to; 0: none
	runs   int  // of the handler in this generation
	ok     bool // the handler has succeeded
}

// exhausted: no attempt is to come.
func (s modelState) exhausted() bool { return !s.due && s.hangs == 0 }

// A modelEvent is an event, what its handler does, and every state that it may be in: more than one
// only where the clock, or who of two is first, decides.
type modelEvent struct {
	id, key  string
	max      int
	scripts  []string // by generation: what the handler's runs come to, the last one for ever
	possible []modelState
}

// waitsByHand: the delay of an operator's failure is not over, as far as is known.
func (e *modelEvent) waitsByHand() bool {
	return slices.ContainsFunc(e.possible, func(s modelState) bool { return s.byHand })
}

// What a run of the handler comes to. The upper case of each hangs before until it is released.
const (
	runSucceeds = 's'
	runFails    = 'f'
	runGivesUp  = 'p' // a permanent failure
	runPanics   = 'x'
)

func scripted(scripts []string, gen, run int) byte {
	s := scripts[gen%len(scripts)]
	return s[min(run, len(s)-1)]
}

// A modelTask is something that is done to an event: an operator's operation, or release.
type modelTask struct {
	op    string
	reset bool
}

const taskRelease = "release"

var modelAllowed = map[string][]string{
	"replay":   {outbox.StatusFailed, outbox.StatusSkipped},
	"skip":     {statusOpen, outbox.StatusFailed},
	"fail":     {statusOpen, outbox.StatusFailed},
	"dispatch": {statusOpen, outbox.StatusFailed},
}

// do is a task by the contract's table; refused is the status that forbids it.
func (e *modelEvent) do(s modelState, task modelTask) (next modelState, refused string) {
	if task.op == taskRelease {
		if s.hangs != 0 {
			end := s.hangs
			s.hangs = 0
			s = e.end(s, end)
		}
		return s, ""
	}
	if !slices.Contains(modelAllowed[task.op], s.status) {
		return s, s.status
	}
	s.gen++
	s.runs, s.hangs, s.due, s.byHand = 0, 0, false, false
	switch task.op {
	case "replay":
		s.status, s.due = statusOpen, true
		if task.reset {
			s.before = s.retry
		}
	case "skip":
		s.status = outbox.StatusSkipped
	case "dispatch":
		s.status = outbox.StatusDispatched
	case "fail":
		s.status = outbox.StatusFailed
		s.retry++
		s.due = s.retry-s.before < e.max
		s.byHand = s.due
	}
	return s, ""
}

// run starts the handler.
func (e *modelEvent) run(s modelState, calm bool) modelState {
	end := scripted(e.scripts, s.gen, s.runs)
	s.runs++
	s.due, s.byHand = false, false
	if calm {
		end = runSucceeds
	}
	if end < 'a' {
		s.hangs = end | 0x20
		return s
	}
	return e.end(s, end)
}

// end is what a run comes to.
func (e *modelEvent) end(s modelState, end byte) modelState {
	if end == runSucceeds {
		s.status, s.ok = outbox.StatusDispatched, true
		return s
	}
	s.status = outbox.StatusFailed
	s.retry++
	s.due = end != runGivesUp && s.retry-s.before < e.max
	return s
}

// A modelEnd is a way that concurrent tasks may have gone: the state after, and what each was told.
type modelEnd struct {
	state   modelState
	refused string // per task, joined: ok, or the status that forbade it
}

// explore finds every way that tasks, done at the same time, may go together with the runs of the
// handler. It ends where nothing moves by itself.
func (e *modelEvent) explore(tasks []modelTask, up, calm bool) []modelEnd {
	var ends []modelEnd
	seen := map[string]bool{}
	var visit func(s modelState, told []string)
	visit = func(s modelState, told []string) {
		key := fmt.Sprint(s, told)
		if seen[key] {
			return
		}
		seen[key] = true
		moves := false
		for i, task := range tasks {
			if told[i] != "" {
				continue
			}
			moves = true
			next, refused := e.do(s, task)
			after := slices.Clone(told)
			after[i] = "ok"
			if refused != "" {
				after[i] = refused
			}
			visit(next, after)
		}
		if s.due && up {
			moves = moves || !s.byHand
			visit(e.run(s, calm), told)
		}
		if !moves {
			ends = append(ends, modelEnd{s, strings.Join(told, " ")})
		}
	}
	for _, s := range e.possible {
		visit(s, make([]string, len(tasks)))
	}
	return ends
}

// apply does tasks, of which it is known what each was told.
func (e *modelEvent) apply(tasks []modelTask, told []string, up, calm bool) error {
	ends := e.explore(tasks, up, calm)
	e.possible = nil
	for _, end := range ends {
		if end.refused == strings.Join(told, " ") && !slices.Contains(e.possible, end.state) {
			e.possible = append(e.possible, end.state)
		}
	}
	if len(e.possible) == 0 {
		return fmt.Errorf("event %s: %+v were told %q; the contract allows %+v", e.id, tasks, told, ends)
	}
	return nil
}

// A change is one update of a row, as the trigger saw it.
type modelChange struct {
	id                   string
	from, to             string
	fromGen, toGen       int
	fromRetry, toRetry   int
	fromPlanned, planned bool // next_retry_at is set
}

// A modelStep is a line of the contract's table.
type modelStep struct {
	from, to  string
	operators bool // raises the generation
	counts    bool // raises retryCount
}

var modelTable = func() (table []modelStep) {
	step := func(to string, operators, counts bool, from ...string) {
		for _, f := range from {
			table = append(table, modelStep{f, to, operators, counts})
		}
	}
	step("dispatching", false, false, "pending", "failed")
	step("dispatched", false, false, "dispatching")
	step("failed", false, true, "dispatching")
	step("failed", true, true, "pending", "dispatching", "failed")
	step("dispatched", true, false, "pending", "dispatching", "failed")
	step("pending", true, false, "failed", "skipped")
	step("skipped", true, false, "pending", "dispatching", "failed")
	return table
}()

// check holds a change against the contract's table. The record decides and the row follows: it may pass by what
// it was too late for, so one change may be several steps.
func (c modelChange) check() error {
	if c.from == "" && c.to == "pending" && c.toGen == 0 && c.toRetry == 0 {
		return nil
	}
	if !reachable(c.from, c.to, c.toGen-c.fromGen, c.toRetry-c.fromRetry) || c.planned && c.to != "failed" {
		return fmt.Errorf("the contract has no such change: %+v", c)
	}
	return nil
}

func reachable(from, to string, raised, counted int) bool {
	for _, step := range modelTable {
		r, c := raised, counted
		if step.operators {
			r--
		}
		if step.counts {
			c--
		}
		switch {
		case step.from != from || r < 0 || c < 0:
		case step.to == to && r == 0 && c == 0, reachable(step.to, to, r, c):
			return true
		}
	}
	return false
}
