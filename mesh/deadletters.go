package mesh

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A DeadLetter is an event that its subscription has given up, as MESH_DEAD keeps it.
type DeadLetter struct {
	Event                  // without its payload in a list
	Seq          uint64    // in the stream of dead letters: its id
	Subscription string    // that gave it up
	ErrorCode    string    // why
	ErrorMessage string    // at most 256 bytes; the record has it all
	RetryCount   int       // of the event when it died
	Attempts     []Attempt // the latest five
	DiedAt       time.Time
	StreamSeq    uint64 // of its message in the events stream
}

// A DeadFilter selects dead letters; fields that are set must all match.
type DeadFilter struct{ Subscription, Consumer, Type string }

// ErrNoDeadLetter: there is no dead letter of that number.
var ErrNoDeadLetter = errors.New("mesh: no such dead letter")

// DeadLetters lists dead letters, newest first, without their payloads. limit is 1 to 200; cursor
// is the one that the page before returned, "" for the first. The cursor returned is "" on the
// last page.
func (m *Mesh) DeadLetters(ctx context.Context, f DeadFilter, limit int, cursor string) (page []DeadLetter, next string, err error) {
	if limit < 1 || limit > 200 {
		return nil, "", fieldErrorf("limit", "must be 1 to 200, not %d", limit)
	}
	filter, err := m.deadFilter(f)
	if err != nil {
		return nil, "", err
	}
	stream, err := m.js.Stream(ctx, m.Names.DeadStream())
	if err != nil {
		return nil, "", fmt.Errorf("mesh: open stream %s: %w", m.Names.DeadStream(), err)
	}
	state := stream.CachedInfo().State
	below := state.LastSeq + 1
	if cursor != "" {
		if below, err = parseDeadCursor(cursor); err != nil {
			return nil, "", err
		}
	}
	// Backwards in windows that grow while they hold too little.
	for window := uint64(256); below > state.FirstSeq && len(page) <= limit; window *= 2 {
		from := state.FirstSeq
		if below > window+from {
			from = below - window
		}
		found, err := m.deadBetween(ctx, stream, filter, max(from, 1), below)
		if err != nil {
			return nil, "", err
		}
		slices.Reverse(found)
		page = append(page, found...)
		below = from
	}
	if len(page) > limit {
		page = page[:limit]
		next = base64.RawURLEncoding.EncodeToString([]byte("d1." + strconv.FormatUint(page[limit-1].Seq, 10)))
	}
	return page, next, nil
}

func parseDeadCursor(cursor string) (uint64, error) {
	data, err := base64.RawURLEncoding.DecodeString(cursor)
	number, ok := strings.CutPrefix(string(data), "d1.")
	seq, numErr := strconv.ParseUint(number, 10, 64)
	if err != nil || !ok || numErr != nil {
		return 0, fieldErrorf("cursor", "is none that a list has returned")
	}
	return seq, nil
}

func (m *Mesh) deadFilter(f DeadFilter) (string, error) {
	part := func(field, value string, check error) (string, error) {
		if value == "" {
			return "*", nil
		}
		return value, check
	}
	subscription, err1 := part("subscription", f.Subscription, checkConsumer(f.Subscription))
	consumer, err2 := part("consumer", f.Consumer, checkConsumer(f.Consumer))
	eventType, err3 := ">", error(nil)
	if f.Type != "" {
		eventType, err3 = f.Type, checkType("eventType", f.Type)
	}
	return m.Names.DeadSubject(subscription, consumer, eventType), errors.Join(err1, err2, err3)
}

// deadBetween reads the headers of the dead letters from one number up to, and without, another.
func (m *Mesh) deadBetween(ctx context.Context, stream jetstream.Stream, filter string, from, to uint64) ([]DeadLetter, error) {
	c, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		HeadersOnly: true, InactiveThreshold: time.Minute,
	})
	if err != nil {
		return nil, fmt.Errorf("mesh: read dead letters: %w", err)
	}
	var found []DeadLetter
	for left := c.CachedInfo().NumPending; left > 0; {
		batch, err := c.Fetch(int(min(left, 500)), jetstream.FetchMaxWait(5*time.Second))
		if err != nil {
			return nil, fmt.Errorf("mesh: read dead letters: %w", err)
		}
		n := uint64(0)
		for msg := range batch.Messages() {
			n++
			meta, err := msg.Metadata()
			if err != nil {
				return nil, fmt.Errorf("mesh: read dead letters: %w", err)
			}
			if meta.Sequence.Stream >= to {
				return found, nil
			}
			found = append(found, parseDeadLetter(msg.Headers(), nil, meta.Sequence.Stream))
		}
		if err := batch.Error(); err != nil {
			return nil, fmt.Errorf("mesh: read dead letters: %w", err)
		}
		if n == 0 {
			break
		}
		left -= min(n, left)
	}
	return found, nil
}

// DeadLetter reads one dead letter with its payload, or [ErrNoDeadLetter].
func (m *Mesh) DeadLetter(ctx context.Context, seq uint64) (DeadLetter, error) {
	stream, err := m.js.Stream(ctx, m.Names.DeadStream())
	if err != nil {
		return DeadLetter{}, fmt.Errorf("mesh: open stream %s: %w", m.Names.DeadStream(), err)
	}
	msg, err := stream.GetMsg(ctx, seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return DeadLetter{}, fmt.Errorf("%w: %d", ErrNoDeadLetter, seq)
	}
	if err != nil {
		return DeadLetter{}, fmt.Errorf("mesh: read dead letter %d: %w", seq, err)
	}
	return parseDeadLetter(msg.Header, msg.Data, seq), nil
}

// DiscardDeadLetter deletes a dead letter for good. The event's row and record stay.
func (m *Mesh) DiscardDeadLetter(ctx context.Context, seq uint64) error {
	stream, err := m.js.Stream(ctx, m.Names.DeadStream())
	if err != nil {
		return fmt.Errorf("mesh: open stream %s: %w", m.Names.DeadStream(), err)
	}
	if _, err := m.DeadLetter(ctx, seq); err != nil {
		return err
	}
	if err := stream.DeleteMsg(ctx, seq); err != nil {
		return fmt.Errorf("mesh: discard dead letter %d: %w", seq, err)
	}
	return nil
}

// parseDeadLetter reads what bury wrote. What is missing or unreadable stays empty: an operator
// must see a dead letter however it came about.
func parseDeadLetter(header nats.Header, data []byte, seq uint64) DeadLetter {
	event, _ := ParseMessage(header, data)
	d := DeadLetter{Event: event, Seq: seq}
	take := func(key string) string {
		value := header.Get(key)
		delete(d.Headers, key)
		return value
	}
	d.Subscription = take(hdrDeadSubscription)
	d.ErrorCode = take(hdrDeadCode)
	d.ErrorMessage = percentDecode(take(hdrDeadMessage))
	d.RetryCount, _ = strconv.Atoi(take(hdrRetryCount))
	d.DiedAt, _ = time.Parse(time.RFC3339Nano, take(hdrDeadAt))
	d.StreamSeq, _ = strconv.ParseUint(take(hdrDeadSeq), 10, 64)
	_ = json.Unmarshal([]byte(percentDecode(take(hdrDeadAttempts))), &d.Attempts) // left empty, see above
	if len(d.Headers) == 0 {
		d.Headers = nil
	}
	return d
}
