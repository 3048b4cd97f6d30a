// Package mesh is the JetStream side of jetmesh: events and their form on the
// wire, idempotency keys, streams, and subscriptions that run handlers.
//
// It knows no Postgres. Package outbox writes events in a database transaction and
// publishes them; this package delivers them, at least once.
//
// # The life of a delivery
//
//	           ┌────────────┐ nil              ┌───────────┐
//	message ──▶│  handler   │─────────────────▶│ succeeded │─▶ outcome ─▶ ack
//	           └────────────┘                  └───────────┘
//	                 │ error, panic, timeout, no handler
//	                 ▼
//	           ┌────────────┐ retries left     ┌───────────┐
//	           │   record   │─────────────────▶│  failed   │─▶ outcome ─▶ nak with delay
//	           │ retryCount │                  └───────────┘
//	           │     + 1    │ exhausted or     ┌───────────┐
//	           └────────────┘ [Permanent]      │ exhausted │─▶ dead letter ─▶ outcome ─▶ terminate
//	                                           └───────────┘
//
// A message is acked, nak'd or terminated only after its outcome is stored in the
// outcomes stream, so a crash at any arrow repeats the step and loses nothing. The
// outbox the event came from settles the event's row by that outcome.
//
// # Failures
//
// An event that failed has a record: how often, why, when it is tried again. The record decides.
// A redelivery looks at it before it runs the handler; an operator's word raises its generation by
// compare-and-set ([Mesh.Decide]), and a message of a lower generation is acked and not handled. From
// the second delivery on a start is recorded before the handler runs: five starts without an
// outcome mean that the handler kills its process, and the event is dead-lettered as crash_loop.
// Of events with two such starts a process runs one at a time, so that none is blamed for another.
//
// Nothing in this package closes the connection it was given, and nothing runs in
// the background except inside [Mesh.Run].
package mesh
