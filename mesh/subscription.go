package mesh

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// AnyType, as the event type given to [OnRaw], makes a handler for every type of the
// consumer that has no handler of its own.
const AnyType = "*"

// A Delivery is one attempt to handle one event.
type Delivery[T any] struct {
	Event
	Data         T      // the payload, decoded
	Subscription string // the subscription it was delivered to
	Attempt      int    // 1 for the first; runs that were cut off do not count
	Redelivered  bool   // an earlier run may have happened in part: look before you repeat an effect
}

// A Handler is told of an event. It returns nil for success, an error to be called
// again later, or what [Permanent] or [RetryAfter] make of an error. It may run more than
// once for the same event, also at the same time in rare cases, and must be idempotent
// by the event's idempotency key. Its context ends at the subscription's Timeout. Payload and
// headers are not the handler's to change: a dead letter is made of them.
type Handler func(ctx context.Context, d Delivery[[]byte]) error

// A Subscription runs handlers for the events of one or more consumers, which it owns:
// the outcome of its handler is the event's status. Make one with [On] or [OnRaw] and
// give it to [Mesh.Handle]; subscriptions of the same name are merged. The zero value of a
// setting means its default; settings of one subscription that disagree fail at start.
type Subscription struct {
	// Name of the subscription and its durable: 1 to 64 of A-Z a-z 0-9 _ -. Default: the
	// consumer. A subscription that owns several consumers needs a name.
	Name string
	// MaxRetries for events that bring none of their own, see [Event]; default 10.
	MaxRetries int
	// Concurrency is how many handlers run at once in this process, and how many messages
	// are fetched ahead; default 16, at most 10,000. Fetched messages are kept alive too.
	Concurrency int
	// Timeout of one handler run; default 10 min, at most 1000 h.
	Timeout time.Duration
	// AckWait is how long the server waits for a sign of life before it delivers again;
	// default 30 s, at least 1 s. Running handlers send one every third of it.
	AckWait time.Duration
	// Backoff between attempts.
	Backoff Backoff

	routes map[route]Handler
	errs   []error
}

const (
	defaultMaxRetries  = 10
	defaultBackoffBase = time.Second
	defaultBackoffCap  = 10 * time.Minute
)

// MaxRetries is the number of retries that an Event.MaxRetries means where no subscription
// sets another default.
func MaxRetries(n int) int {
	if n == 0 {
		n = defaultMaxRetries
	}
	return max(n, 0)
}

type route struct{ consumer, eventType string }

// On makes a subscription with one handler for one event type of a consumer. The payload
// is decoded from JSON into T; fields that T does not have are ignored, so that producers
// may add some. A payload that does not decode is dead-lettered at once.
func On[T any](consumer, eventType string, fn func(context.Context, Delivery[T]) error) Subscription {
	if fn == nil {
		return OnRaw(consumer, eventType, nil)
	}
	return OnRaw(consumer, eventType, func(ctx context.Context, raw Delivery[[]byte]) error {
		d := Delivery[T]{Event: raw.Event, Subscription: raw.Subscription, Attempt: raw.Attempt, Redelivered: raw.Redelivered}
		if err := json.Unmarshal(raw.Data, &d.Data); err != nil {
			return &undecodableError{fmt.Errorf("payload does not decode into %T: %w", d.Data, err)}
		}
		return fn(ctx, d)
	})
}

// OnRaw is the untyped form of [On]: the handler gets the payload's bytes, whatever their
// content type. The event type may be [AnyType].
func OnRaw(consumer, eventType string, fn Handler) Subscription {
	s := Subscription{Name: consumer, routes: map[route]Handler{{consumer, eventType}: fn}}
	s.errs = append(s.errs, checkConsumer(consumer))
	if eventType != AnyType {
		s.errs = append(s.errs, checkType("eventType", eventType))
	}
	if fn == nil {
		s.errs = append(s.errs, fieldErrorf("handler", "for %s %s is nil", consumer, eventType))
	}
	return s
}

type undecodableError struct{ error }

func (e *undecodableError) Unwrap() error { return e.error }

// handler finds the handler of an event, the type's own before the consumer's AnyType.
func (s *Subscription) handler(e *Event) (Handler, bool) {
	if h, ok := s.routes[route{e.Consumer, e.Type}]; ok {
		return h, true
	}
	h, ok := s.routes[route{e.Consumer, AnyType}]
	return h, ok
}

func (s *Subscription) consumers() []string {
	set := map[string]bool{}
	for r := range s.routes {
		set[r.consumer] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// merge joins the subscriptions by name and fills in defaults; it reports everything
// that is wrong at once.
func merge(subs []Subscription) ([]*Subscription, error) {
	var errs []error
	byName := map[string]*Subscription{}
	owner := map[string]string{}
	for _, s := range subs {
		errs = append(errs, s.errs...)
		if len(s.routes) == 0 {
			errs = append(errs, fieldErrorf("subscription", "%.80q has no handler: make it with On or OnRaw", s.Name))
		}
		into := byName[s.Name]
		if into == nil {
			into = &Subscription{Name: s.Name, routes: map[route]Handler{}}
			byName[s.Name] = into
		}
		errs = append(errs, into.take(s))
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		s := byName[name]
		errs = append(errs, s.complete())
		for _, c := range s.consumers() {
			if other, taken := owner[c]; taken {
				errs = append(errs, fieldErrorf("consumer", "%s is owned by two subscriptions, %s and %s", c, other, name))
			}
			owner[c] = name
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return slices.SortedFunc(maps.Values(byName), func(a, b *Subscription) int { return strings.Compare(a.Name, b.Name) }), nil
}

// take adds other's handlers and settings to s.
func (s *Subscription) take(other Subscription) error {
	var errs []error
	for r, h := range other.routes {
		if _, taken := s.routes[r]; taken {
			errs = append(errs, fieldErrorf("handler", "for %s %s is registered twice", r.consumer, r.eventType))
		}
		s.routes[r] = h
	}
	agree(&errs, s.Name, "maxRetries", &s.MaxRetries, other.MaxRetries)
	agree(&errs, s.Name, "concurrency", &s.Concurrency, other.Concurrency)
	agree(&errs, s.Name, "timeout", &s.Timeout, other.Timeout)
	agree(&errs, s.Name, "ackWait", &s.AckWait, other.AckWait)
	agree(&errs, s.Name, "backoff.base", &s.Backoff.Base, other.Backoff.Base)
	agree(&errs, s.Name, "backoff.cap", &s.Backoff.Cap, other.Backoff.Cap)
	return errors.Join(errs...)
}

func agree[T comparable](errs *[]error, name, field string, have *T, want T) {
	var zero T
	switch {
	case want == zero || *have == want:
	case *have == zero:
		*have = want
	default:
		*errs = append(*errs, fieldErrorf(field, "of subscription %s is set twice, to %v and to %v", name, *have, want))
	}
}

// maxWait keeps times that are reckoned from a setting far from overflow.
const maxWait = 1000 * time.Hour

// complete fills in defaults and checks bounds.
func (s *Subscription) complete() error {
	var errs []error
	check := func(ok bool, field, want string, got any) {
		if !ok {
			errs = append(errs, fieldErrorf(field, "of subscription %s must be %s, not %v", s.Name, want, got))
		}
	}
	orElse(&s.MaxRetries, defaultMaxRetries)
	orElse(&s.Concurrency, 16)
	orElse(&s.Timeout, 10*time.Minute)
	orElse(&s.AckWait, 30*time.Second)
	orElse(&s.Backoff.Base, defaultBackoffBase)
	orElse(&s.Backoff.Cap, defaultBackoffCap)
	check(validName(s.Name, maxConsumer), "name", "1 to 64 of A-Z a-z 0-9 _ -", fmt.Sprintf("%.80q", s.Name))
	check(s.MaxRetries >= NoRetries && s.MaxRetries <= 1000, "maxRetries", "between 0 and 1000 or NoRetries", s.MaxRetries)
	check(s.Concurrency >= 1 && s.Concurrency <= 10_000, "concurrency", "between 1 and 10,000", s.Concurrency)
	check(s.Timeout > 0 && s.Timeout <= maxWait, "timeout", "positive, at most 1000h", s.Timeout)
	check(s.AckWait >= time.Second && s.AckWait <= maxWait, "ackWait", "between 1s and 1000h", s.AckWait)
	check(s.Backoff.Base > 0 && s.Backoff.Cap >= s.Backoff.Base && s.Backoff.Cap <= maxWait,
		"backoff", "positive, with a cap between the base and 1000h", s.Backoff)
	return errors.Join(errs...)
}

func orElse[T comparable](field *T, def T) {
	var zero T
	if *field == zero {
		*field = def
	}
}
