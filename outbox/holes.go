package outbox

import (
	"slices"
	"sort"
	"sync"
)

// holes are the numbers behind the cursor that no row was seen for: drawn by a transaction that
// is still open, or that rolled back. Which of the two cannot be known, until every
// transaction that was open at the time has ended.
type holes struct {
	mu   sync.Mutex
	list []hole
}

// A hole is a range of numbers.
type hole struct {
	from, to int64  // both inclusive
	horizon  uint64 // transactions from this id on began after the hole was seen; 0: not yet known
}

// maxHoles bounds the memory; beyond it neighbours are joined, which only means that rows
// between them, long dealt with, are looked at again.
const maxHoles = 2_000

func (h *holes) add(from, to int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.list = bound(append(h.list, hole{from: from, to: to}))
}

// bound joins neighbours, which are in order, until there are few enough.
func bound(list []hole) []hole {
	for len(list) > maxHoles {
		joined := list[:0]
		for i := 0; i < len(list); i += 2 {
			x := list[i]
			if i+1 < len(list) {
				y := list[i+1]
				x.to = y.to
				if x.horizon == 0 || y.horizon == 0 {
					x.horizon = 0
				} else {
					x.horizon = max(x.horizon, y.horizon)
				}
			}
			joined = append(joined, x)
		}
		list = joined
	}
	return list
}

// ranges returns all holes for a look into the table.
func (h *holes) ranges() (from, to []int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.list {
		from, to = append(from, x.from), append(to, x.to)
	}
	return from, to
}

// looked records the result of a look: found are the numbers up to upTo that have a pending row
// now, in order; oldest is the id of the oldest transaction that was open just before the look,
// next the first id not yet given out. A hole whose transactions had all ended by then, and
// that still has no row, never will have one.
func (h *holes) looked(found []int64, upTo int64, oldest, next uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var left []hole
	var rest []hole // not looked at
	for _, x := range h.list {
		if x.to > upTo {
			rest = append(rest, hole{max(x.from, upTo+1), x.to, x.horizon})
			x.to = upTo
		}
		if x.horizon != 0 && x.horizon <= oldest {
			continue
		}
		if x.horizon == 0 {
			x.horizon = next
		}
		// Take out what was found.
		i := sort.Search(len(found), func(i int) bool { return found[i] >= x.from })
		for ; i < len(found) && found[i] <= x.to; i++ {
			if found[i] > x.from {
				left = append(left, hole{x.from, found[i] - 1, x.horizon})
			}
			x.from = found[i] + 1
		}
		if x.from <= x.to {
			left = append(left, x)
		}
	}
	h.list = bound(append(left, rest...))
}

// lowest is the lowest number that may still come.
func (h *holes) lowest() (seq int64, any bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.list) == 0 {
		return 0, false
	}
	return slices.MinFunc(h.list, func(a, b hole) int { return int(min(max(a.from-b.from, -1), 1)) }).from, true
}

func (h *holes) empty() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.list) == 0
}
