package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// unmarkedMost bounds the events that are published and neither settled nor marked.
const unmarkedMost = 50_000

// A publisher keeps a pipeline of messages to the events stream full. Of a publish that was
// not acked nothing is known: it is repeated under the same message id.
type publisher struct {
	s      *session
	js     jetstream.JetStream
	stream jetstream.Stream
	verify chan *item
	done   sync.WaitGroup
	ctx    context.Context // of the verifications
	stop   context.CancelFunc

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
	warnedAt time.Time
}

type refused struct {
	it  *item
	why error
}

func newPublisher(ctx context.Context, s *session) (*publisher, error) {
	stream, err := s.m.JetStream().Stream(ctx, s.m.Names.EventsStream())
	if err != nil {
		return nil, fmt.Errorf("open stream %s: %w", s.m.Names.EventsStream(), err)
	}
	p := &publisher{s: s, stream: stream, verify: make(chan *item, s.cfg.MaxInFlight), byMsg: map[*nats.Msg]*item{}, byID: map[string]*item{}}
	p.room = sync.NewCond(&p.mu)
	p.ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx))
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
	if it.replays() {
		it.msgID = p.replayID(it)
	}
	return p.send(ctx, it)
}

// replays: an event that was published before goes to its owner alone, and as something new.
func (it *item) replays() bool { return it.event.Generation > 0 && it.published }

func (p *publisher) replayID(it *item) string {
	return fmt.Sprintf("%s#%s#%d", it.event.ID, p.s.owners.subscription(it.event.Consumer), it.event.Generation)
}

func (p *publisher) subject(it *item) string {
	names := p.s.m.Names
	if it.replays() {
		return names.ReplaySubject(p.s.owners.subscription(it.event.Consumer), it.event.Consumer, it.event.Type)
	}
	return names.EventSubject(it.event.Consumer, it.event.Type)
}

func (p *publisher) send(ctx context.Context, it *item) error {
	msg := it.event.Message(p.subject(it), it.msgID)
	p.mu.Lock()
	if p.full(it) {
		stop := p.wakeAtEnd(ctx)
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
	if it.size == 0 {
		it.size = len(msg.Data) + 1024
		p.bytes += it.size
	}
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
	return n > 0 && (n >= p.s.cfg.MaxInFlight || it.size == 0 && p.bytes+len(it.event.Payload) > bytesInFlight)
}

// wakeAtEnd wakes whoever waits for room when ctx ends.
func (p *publisher) wakeAtEnd(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		p.mu.Lock() // or it could fall between a check and its wait
		defer p.mu.Unlock()
		p.room.Broadcast()
	})
}

// take removes a message from the pipeline.
func (p *publisher) take(msg *nats.Msg) (*item, bool) {
	it, ok := p.byMsg[msg]
	if ok {
		delete(p.byMsg, msg)
		p.room.Signal()
	}
	return it, ok
}

// release gives back what the item takes of the memory.
func (p *publisher) release(it *item) {
	p.bytes -= it.size
	it.size = 0
	it.event.Payload, it.event.Headers = nil, nil
	p.room.Signal()
}

// drop forgets an item that needs no mark.
func (p *publisher) drop(it *item) {
	p.release(it)
	delete(p.byID, it.event.ID)
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
		p.drop(it)
		return
	}
	it.publishedAt = time.Now()
	p.release(it)
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
	if refusedForEver(err) {
		p.parked = append(p.parked, refused{it, err})
		p.drop(it)
		p.s.wake.signal()
		return
	}
	p.s.stats.retried.Add(1)
	if now := time.Now(); now.Sub(p.warnedAt) > 10*time.Second {
		p.warnedAt = now
		p.s.log.Warn().Err(err).Str("event_id", it.event.ID).Int("repeats", len(p.repeats)+1).Msg("events cannot be published, trying again")
	}
	p.again(it, min(50*time.Millisecond<<min(it.tries-1, 6), 2*time.Second))
}

// again plans another publish.
func (p *publisher) again(it *item, after time.Duration) {
	it.notBefore = time.Now().Add(after)
	p.repeats = append(p.repeats, it)
	p.s.wake.signal()
}

// refusedForEver tells a message that no server will take from one that could not be
// delivered now: a broken connection, a stream that is full or has no leader, an account at its
// limit. In doubt it is the server's state and will pass, not the message's fault.
func refusedForEver(err error) bool {
	switch {
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject), errors.Is(err, nats.ErrBadHeaderMsg):
		return true
	}
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == 10054 || api.ErrorCode == 10097) // message, header exceeds the maximum
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
			if p.dropSettled(it) {
				continue
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

// dropSettled forgets an item whose outcome came although its publish was not acked.
func (p *publisher) dropSettled(it *item) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if it.settled {
		p.drop(it)
	}
	return it.settled
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
	stop := p.wakeAtEnd(ctx)
	defer stop()
	p.mu.Lock()
	for ctx.Err() == nil && (len(p.byMsg) > 0 || p.checking > 0) {
		p.room.Wait()
	}
	p.stop()                        // what is not verified by now the next session publishes again
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
