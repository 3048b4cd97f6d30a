package outbox_test

import (
	"context"
	"errors"
	"sync"

	"jetmesh/mesh"
)

// A modelHandler does what each event's script says.
type modelHandler struct {
	mu   sync.Mutex
	calm bool
	runs map[string]*modelRuns
}

type modelRuns struct {
	scripts   []string
	started   map[int]int // by generation
	hanging   map[int]int
	successes int
	release   chan struct{}
}

func (h *modelHandler) handle(ctx context.Context, d mesh.Delivery[[]byte]) error {
	h.mu.Lock()
	r := h.runs[d.ID]
	end := scripted(r.scripts, d.Generation, r.started[d.Generation])
	r.started[d.Generation]++
	if h.calm {
		end = runSucceeds
	}
	if end < 'a' {
		end |= 0x20
		r.hanging[d.Generation]++
		release := r.release
		h.mu.Unlock()
		select {
		case <-release:
		case <-ctx.Done():
		}
		h.mu.Lock()
		r.hanging[d.Generation]--
	}
	defer h.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case end == runSucceeds:
		r.successes++
		return nil
	case end == runGivesUp:
		return mesh.Permanent(errors.New("scripted to give up"))
	case end == runPanics:
		panic("scripted to panic")
	default:
		return errors.New("scripted to fail")
	}
}

func (h *modelHandler) counts(id string, gen int) (started, hanging int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.runs[id].started[gen], h.runs[id].hanging[gen]
}

// busy: a run of the handler hangs, of whatever generation.
func (h *modelHandler) busy() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.runs {
		for _, n := range r.hanging {
			if n > 0 {
				return true
			}
		}
	}
	return false
}

func (h *modelHandler) release(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.runs[id].release)
	h.runs[id].release = make(chan struct{})
}
