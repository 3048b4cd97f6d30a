package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"jetmesh/mesh"
)

// unmarkedMost bounds the events that are published and neither settled nor marked.
const unmarkedMost = 50_000

// A publisher keeps a pipeline of messages to the events stream full. Of a publish that was
// not acked nothing is known: it is repeated under the same message id.
type publisher struct {
	s      *session
	js     jetstream.JetStream
	verify chan *item
	done   sync.WaitGroup

	mu       sync.Mutex
	room     *sync.Cond
	byMsg    map[*nats.Msg]*item // published, no answer yet
	byID     map[string]*item    // those, those to be repeated, and those not yet marked
	bytes    int
	unmarked []*item // in the order of their acks
	repeats  []*item
	parked   []refused
	closed   bool
	checking int // duplicates being verified
}

type refused struct {
	it  *item
	why error
}

func newPublisher(s *session) (*publisher, error) {
	p := &publisher{s: s, verify: make(chan *item, s.cfg.MaxInFlight), byMsg: map[*nats.Msg]*item{}, byID: map[string]*item{}}
	p.room = sync.NewCond(&p.mu)
	var err error
	p.js, err = jetstream.New(s.m.Conn(),
		jetstream.WithPublishAsyncMaxPending(s.cfg.MaxInFlight+1),
		jetstream.WithPublishAsyncTimeout(ackTimeout),
		jetstream.WithPublishAsyncAckHandler(func(_ jetstream.JetStream, msg *nats.Msg, ack *jetstream.PubAck) { p.acked(msg, ack) }),
		jetstream.WithPublishAsyncErrHandler(func(_ jetstream.JetStream, msg *nats.Msg, err error) { p.failed(msg, err) }),
	)
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	for range 4 {
		p.done.Go(p.verifyLoop)
	}
	return p, nil
}

// knows reports whether an event is on its way, or published and not yet marked.
func (p *publisher) knows(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, known := p.byID[id]
	return known
}

// publish sends an item, waiting for room in the pipeline.
func (p *publisher) publish(ctx context.Context, it *item) error {
	it.msgID = it.event.MsgID()
	return p.send(ctx, it)
}

func (p *publisher) send(ctx context.Context, it *item) error {
	msg := it.event.Message(p.s.m.Names.EventSubject(it.event.Consumer, it.event.Type), it.msgID)
	it.size = len(msg.Data) + 1024
	p.mu.Lock()
	if p.full(it) {
		stop := context.AfterFunc(ctx, p.room.Broadcast)
		for ctx.Err() == nil && p.full(it) {
			p.room.Wait()
		}
		stop()
	}
	if ctx.Err() != nil {
		p.mu.Unlock()
		return ctx.Err()
	}
	p.byMsg[msg] = it
	p.byID[it.event.ID] = it
	p.bytes += it.size
	p.mu.Unlock()
	if _, err := p.js.PublishMsgAsync(msg); err != nil {
		if errors.Is(err, nats.ErrConnectionClosed) {
			return err
		}
		p.failed(msg, err)
	}
	return nil
}

func (p *publisher) full(it *item) bool {
	n := len(p.byMsg) + p.checking
	return n > 0 && (n >= p.s.cfg.MaxInFlight || p.bytes+it.size > bytesInFlight)
}

// take removes a message from the pipeline.
func (p *publisher) take(msg *nats.Msg) (*item, bool) {
	it, ok := p.byMsg[msg]
	if ok {
		delete(p.byMsg, msg)
		p.bytes -= it.size
		p.room.Signal()
	}
	return it, ok
}

func (p *publisher) acked(msg *nats.Msg, ack *jetstream.PubAck) {
	p.mu.Lock()
	defer p.mu.Unlock()
	it, ok := p.take(msg)
	if !ok {
		return // given up as unknown before, and repeated
	}
	it.streamSeq = ack.Sequence
	if ack.Duplicate {
		p.s.stats.duplicates.Add(1)
		p.checking++
		p.verify <- it // as large as the pipeline: never blocks
		return
	}
	p.s.stats.published.Add(1)
	p.stored(it)
}

// stored notes that the stream holds the event.
func (p *publisher) stored(it *item) {
	if it.settled {
		delete(p.byID, it.event.ID)
		return
	}
	it.publishedAt = time.Now()
	it.event.Payload, it.event.Headers = nil, nil
	p.unmarked = append(p.unmarked, it)
}

func (p *publisher) failed(msg *nats.Msg, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	it, ok := p.take(msg)
	if !ok {
		return
	}
	it.tries++
	if refusedForEver(err, it.tries) {
		p.parked = append(p.parked, refused{it, err})
		delete(p.byID, it.event.ID)
		p.s.wake.signal()
		return
	}
	p.s.stats.retried.Add(1)
	it.notBefore = time.Now().Add(min(50*time.Millisecond<<min(it.tries-1, 6), 2*time.Second))
	p.repeats = append(p.repeats, it)
}

// refusedForEver tells a message that no server will take from one that could not be
// delivered now: a broken connection, a stream that is full or has no leader. An answer of the
// server that is neither is given the benefit of the doubt ten times.
func refusedForEver(err error, tries int) bool {
	switch {
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject), errors.Is(err, nats.ErrBadHeaderMsg):
		return true
	}
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return false
	}
	switch api.ErrorCode {
	case 10054, 10097: // message, header exceeds the maximum
		return true
	case 10077, 10047, 10023, 10158: // stream full, no storage left, duplicate in process
		return false
	}
	return api.Code < 500 && tries >= 10
}

// repeat publishes again what is due, and returns only when nothing is left to repeat: while the
// stream does not take what was read, nothing more is read.
func (p *publisher) repeat(ctx context.Context) error {
	for {
		p.mu.Lock()
		parked, again := p.parked, p.repeats
		p.parked, p.repeats = nil, nil
		p.mu.Unlock()
		for _, r := range parked {
			if err := p.s.park(ctx, r.it, r.why); err != nil {
				return err
			}
		}
		if len(again) == 0 {
			return nil
		}
		for i, it := range again {
			select {
			case <-ctx.Done():
			case <-time.After(time.Until(it.notBefore)):
			}
			if err := p.send(ctx, it); err != nil {
				p.mu.Lock()
				p.repeats = append(p.repeats, again[i:]...)
				p.mu.Unlock()
				return err
			}
		}
	}
}

func (p *publisher) nextRepeat() (at time.Time, waiting bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.parked) > 0 {
		return time.Time{}, true
	}
	if len(p.repeats) == 0 {
		return time.Time{}, false
	}
	return p.repeats[0].notBefore, true
}

// verifyLoop looks at the message that a publish was a duplicate of. JetStream deduplicates by
// message id alone, over the whole stream and all outboxes.
func (p *publisher) verifyLoop() {
	for it := range p.verify {
		ctx, cancel := context.WithTimeout(context.Background(), ackTimeout)
		err := p.verifyOne(ctx, it)
		cancel()
		p.mu.Lock()
		p.checking--
		if err != nil {
			p.s.log.Warn().Err(err).Str("event_id", it.event.ID).Msg("duplicate could not be verified, published again")
			it.tries++
			it.notBefore = time.Now().Add(time.Second)
			p.repeats = append(p.repeats, it)
		}
		p.room.Broadcast()
		p.mu.Unlock()
	}
}

func (p *publisher) verifyOne(ctx context.Context, it *item) error {
	again := func(msgID string) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		it.msgID = msgID
		it.notBefore = time.Now()
		p.repeats = append(p.repeats, it)
		p.s.wake.signal()
		return nil
	}
	stream, err := p.js.Stream(ctx, p.s.m.Names.EventsStream())
	if err != nil {
		return err
	}
	raw, err := stream.GetMsg(ctx, it.streamSeq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		// The id is remembered, the message is gone.
		return again(fmt.Sprintf("%s#%d", it.event.ID, time.Now().UnixNano()))
	}
	if err != nil {
		return err
	}
	other, parseErr := mesh.ParseMessage(raw.Header, raw.Data)
	switch {
	case parseErr == nil && other.ID == it.event.ID:
		p.mu.Lock()
		p.stored(it) // our own publish, whose ack was lost
		p.mu.Unlock()
		return nil
	case parseErr == nil && other.Consumer == it.event.Consumer && other.Type == it.event.Type && other.IdempotencyKey == it.event.IdempotencyKey && other.IdempotencyKey != "":
		// The same action, written to another outbox as well.
		if err := p.s.skipDuplicate(ctx, it, other.ID); err != nil {
			return err
		}
		p.mu.Lock()
		delete(p.byID, it.event.ID)
		p.mu.Unlock()
		return nil
	default:
		// Another action under the same key: the key is ours only together with the names.
		msgID := fmt.Sprintf("%s|%s|%s", it.event.MsgID(), it.event.Consumer, it.event.Type)
		if it.msgID == msgID {
			msgID = fmt.Sprintf("%s#%d", it.event.ID, time.Now().UnixNano())
		}
		return again(msgID)
	}
}

// skipDuplicate settles a row whose action another outbox has published.
func (s *session) skipDuplicate(ctx context.Context, it *item, of string) error {
	_, err := s.db.Exec(ctx, s.cfg.Schema.sql(`
		update {{schema}}.outbox set status = 'skipped', tracked_status = 'skipped', duplicate_of = $2, updated_at = now(), settled_at = now()
		where seq = $1 and status = 'pending'`), it.seq, of)
	if err != nil {
		return fmt.Errorf("skip duplicate %s: %w", it.event.ID, err)
	}
	return nil
}

// settledEvent notes that an event needs no mark any more.
func (p *publisher) settledEvent(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if it, ok := p.byID[id]; ok {
		it.settled = true
		if !it.publishedAt.IsZero() {
			delete(p.byID, id)
		}
	}
}

// due takes out what was published before the given time and is not settled.
func (p *publisher) due(before time.Time) []*item {
	p.mu.Lock()
	defer p.mu.Unlock()
	var due []*item
	n := 0
	for _, it := range p.unmarked {
		if !it.publishedAt.Before(before) {
			break
		}
		n++
		if !it.settled {
			due = append(due, it)
		}
	}
	p.unmarked = append(p.unmarked[:0:0], p.unmarked[n:]...)
	return due
}

// overdue is what cannot stay unmarked even while outcomes keep arriving: the memory is bounded.
func (p *publisher) overdue() []*item {
	p.mu.Lock()
	n := len(p.unmarked)
	p.mu.Unlock()
	if n < unmarkedMost {
		return nil
	}
	return p.due(time.Now().Add(-markAfter))
}

// marked forgets items after their mark was committed.
func (p *publisher) marked(items []*item) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, it := range items {
		delete(p.byID, it.event.ID)
	}
}

// lowest is the lowest number among the events it knows.
func (p *publisher) lowest() (seq int64, any bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, it := range p.byID {
		if !any || it.seq < seq {
			seq, any = it.seq, true
		}
	}
	return seq, any
}

// drain waits for the answers to what was published, up to the ack timeout.
func (p *publisher) drain() {
	ctx, cancel := context.WithTimeout(context.Background(), ackTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, p.room.Broadcast)
	defer stop()
	p.mu.Lock()
	for ctx.Err() == nil && (len(p.byMsg) > 0 || p.checking > 0) {
		p.room.Wait()
	}
	p.byMsg = map[*nats.Msg]*item{} // late answers find nothing
	closed := p.closed
	p.closed = true
	p.mu.Unlock()
	if !closed {
		close(p.verify)
	}
	p.done.Wait()
	p.js.CleanupPublisher()
}
