package bench

import (
	"fmt"
	"math/rand/v2"

	"jetmesh/mesh"
)

// event is the i-th event of a phase, as a service would write it: with an idempotency key,
// which costs a header and an entry in a unique index.
func (b *bench) event(phase string, i int) mesh.Event {
	return mesh.Event{
		Consumer: consumer, Type: "order.created", AggregateType: "order", AggregateID: fmt.Sprintf("ORDER-%d", i),
		IdempotencyKey: fmt.Sprintf("%s:order:create:%s-%d", consumer, phase, i),
		Payload:        b.payload,
	}
}

// payload is a JSON document of the given size, at least 2 bytes, that does not compress
// well: Postgres compresses what is larger than 2 kB.
func payload(size int) []byte {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	random := rand.New(rand.NewPCG(1, 2))
	doc := make([]byte, size)
	for i := range doc {
		doc[i] = letters[random.IntN(len(letters))]
	}
	doc[0], doc[size-1] = '"', '"'
	return doc
}
