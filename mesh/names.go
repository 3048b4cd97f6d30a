package mesh

import (
	"fmt"
	"strings"
)

// Names are the names of a mesh on the wire. Subscriptions, relays and operators of
// one mesh must agree on them, and stored messages keep them for ever.
type Names struct{ prefix string }

// NewNames checks the prefix: 1 to 32 of a-z and 0-9; "" means "mesh".
func NewNames(prefix string) (Names, error) {
	if prefix == "" {
		prefix = "mesh"
	}
	if len(prefix) > 32 || !only(prefix, func(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }) {
		return Names{}, fieldErrorf("prefix", "must be 1 to 32 of a-z 0-9, not %.60q", prefix)
	}
	return Names{prefix}, nil
}

func (n Names) stream(name string) string { return strings.ToUpper(n.prefix) + "_" + name }

// EventsStream holds every event and replay.
func (n Names) EventsStream() string { return n.stream("EVENTS") }

// DeadStream holds dead letters.
func (n Names) DeadStream() string { return n.stream("DEAD") }

// OutcomesStream carries the outcomes of handlers back to the outboxes.
func (n Names) OutcomesStream() string { return n.stream("OUTCOMES") }

// FailuresBucket is the KV bucket of failure records, keyed <subscription>.<eventId>.
func (n Names) FailuresBucket() string { return n.prefix + "-failures" }

// EventSubject is where an event is published.
func (n Names) EventSubject(consumer, eventType string) string {
	return n.prefix + ".events." + consumer + "." + eventType
}

// ConsumerFilter matches every event of a consumer.
func (n Names) ConsumerFilter(consumer string) string { return n.prefix + ".events." + consumer + ".>" }

// ReplayFilter matches every replay to a subscription.
func (n Names) ReplayFilter(subscription string) string {
	return n.prefix + ".replay." + subscription + ".>"
}

// ReplaySubject is where an event is published once more, for one subscription alone.
func (n Names) ReplaySubject(subscription, consumer, eventType string) string {
	return n.prefix + ".replay." + subscription + "." + consumer + "." + eventType
}

// DeadSubject is where a subscription's dead letter goes.
func (n Names) DeadSubject(subscription, consumer, eventType string) string {
	return fmt.Sprintf("%s.dead.%s.%s.%s", n.prefix, subscription, consumer, eventType)
}

// OutcomeSubject is where outcomes of the events of one outbox go.
func (n Names) OutcomeSubject(source string) string { return n.prefix + ".outcomes." + source }

// OwnerDurable is the durable of the subscription that owns a consumer. Names of
// subscriptions hold no dot, so the encoding is injective.
func (n Names) OwnerDurable(subscription string) string { return "own_" + subscription }

// OutcomesDurable is the durable through which an outbox reads its outcomes.
func (n Names) OutcomesDurable(source string) string { return "outbox_" + source }

// parseEventSubject takes consumer and type from the subject of an event or a replay; a
// subject that holds neither gives "unknown".
func (n Names) parseEventSubject(subject string) (consumer, eventType string) {
	rest, ok := strings.CutPrefix(subject, n.prefix+".events.")
	if !ok {
		if rest, ok = strings.CutPrefix(subject, n.prefix+".replay."); ok {
			_, rest, ok = strings.Cut(rest, ".")
		}
	}
	consumer, eventType, found := strings.Cut(rest, ".")
	if !ok || !found || checkConsumer(consumer) != nil || checkType("eventType", eventType) != nil {
		return "unknown", "unknown"
	}
	return consumer, eventType
}
