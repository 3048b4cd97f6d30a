package mesh

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// Metadata of an owner's durable, by which relays know whose events have a taker.
const (
	metaKind      = "mesh.kind" // "owner"
	metaConsumers = "mesh.consumers"
)

// maxAckPending bounds the messages of one durable that are running or wait for a retry.
// The server's default of 1,000 would let a thousand failing events stop the rest.
const maxAckPending = 100_000

// bind looks up the subscription's durable or creates it, and refuses one that was made
// for something else.
func (r *runner) bind(ctx context.Context) error {
	want := r.durable()
	stream, err := r.m.js.Stream(ctx, r.m.Names.EventsStream())
	if err != nil {
		return fmt.Errorf("mesh: open stream %s: %w", r.m.Names.EventsStream(), err)
	}
	if err := r.checkOwners(ctx, stream); err != nil {
		return err
	}
	c, err := stream.Consumer(ctx, want.Durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		c, err = stream.CreateConsumer(ctx, want)
		if errors.Is(err, jetstream.ErrConsumerExists) {
			c, err = stream.Consumer(ctx, want.Durable)
		}
	}
	if err != nil {
		return fmt.Errorf("mesh: bind durable %s: %w", want.Durable, err)
	}
	if err := compareDurable(want, c.CachedInfo().Config); err != nil {
		return err
	}
	if err := r.decided.load(ctx, r.m.ledger, r.sub.Name); err != nil {
		return err
	}
	if err := r.past.load(ctx, r.m.ledger, r.sub.Name, r.signs()); err != nil {
		return err
	}
	r.consumer = c
	return nil
}

func (r *runner) durable() jetstream.ConsumerConfig {
	filters := []string{r.m.Names.ReplayFilter(r.sub.Name)}
	for _, c := range r.sub.consumers() {
		filters = append(filters, r.m.Names.ConsumerFilter(c))
	}
	return jetstream.ConsumerConfig{
		Durable:        r.m.Names.OwnerDurable(r.sub.Name),
		Description:    "owner of " + strings.Join(r.sub.consumers(), ", "),
		FilterSubjects: filters,
		DeliverPolicy:  jetstream.DeliverAllPolicy,
		AckPolicy:      jetstream.AckExplicitPolicy,
		AckWait:        r.sub.AckWait,
		// No BackOff: it distorts the delay of a nak. Attempts are counted in records,
		// since a message that reaches MaxDeliver is stuck for ever.
		MaxDeliver:    -1,
		MaxAckPending: maxAckPending,
		Metadata:      map[string]string{metaKind: "owner", metaConsumers: strings.Join(r.sub.consumers(), ",")},
	}
}

func compareDurable(want, got jetstream.ConsumerConfig) error {
	var diff differences
	if len(got.FilterSubjects) == 0 && got.FilterSubject != "" {
		got.FilterSubjects = []string{got.FilterSubject}
	}
	slices.Sort(want.FilterSubjects)
	slices.Sort(got.FilterSubjects)
	diff.check("filter_subjects", got.FilterSubjects, want.FilterSubjects)
	diff.check("ack_policy", got.AckPolicy, want.AckPolicy)
	diff.check("ack_wait", got.AckWait, want.AckWait)
	diff.check("backoff", got.BackOff, want.BackOff)
	diff.check("max_deliver", got.MaxDeliver, want.MaxDeliver)
	diff.check("max_ack_pending", got.MaxAckPending, want.MaxAckPending)
	diff.check("headers_only", got.HeadersOnly, want.HeadersOnly)
	if len(diff) > 0 {
		return fmt.Errorf("mesh: durable %s differs from the subscription: %s", want.Durable, strings.Join(diff, "; "))
	}
	return nil
}

// checkOwners refuses a second owner for a consumer.
func (r *runner) checkOwners(ctx context.Context, stream jetstream.Stream) error {
	owners, err := Owners(ctx, stream)
	if err != nil {
		return err
	}
	for _, c := range r.sub.consumers() {
		if owner, taken := owners[c]; taken && owner != r.m.Names.OwnerDurable(r.sub.Name) {
			return fmt.Errorf("mesh: consumer %s is owned by durable %s already: use that subscription's name, or delete the durable", c, owner)
		}
	}
	return nil
}

// Owners lists the consumers that have an owner, and the owner's durable.
func Owners(ctx context.Context, stream jetstream.Stream) (map[string]string, error) {
	owners := map[string]string{}
	list := stream.ListConsumers(ctx)
	for info := range list.Info() {
		if info.Config.Metadata[metaKind] != "owner" {
			continue
		}
		for consumer := range strings.SplitSeq(info.Config.Metadata[metaConsumers], ",") {
			owners[consumer] = info.Config.Durable
		}
	}
	if err := list.Err(); err != nil {
		return nil, fmt.Errorf("mesh: list durables: %w", err)
	}
	return owners, nil
}
