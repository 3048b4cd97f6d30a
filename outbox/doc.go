// Package outbox makes publishing an event part of a Postgres transaction.
//
// An event passed to [Write] is published if, and only if, the transaction commits, and at
// least once. [InTx] opens the transaction itself. A [Relay] publishes what was committed
// and settles rows by the outcomes that handlers send back.
//
// # The life of a row
//
//	Write ──▶ pending ──▶ dispatching ──▶ dispatched        (absorbing)
//	             │             │ ▲           ▲
//	             │             ▼ │ retry     │ a later attempt succeeds
//	             └──────────▶ failed ────────┘
//	      can never be         │
//	      published            └─ next_retry_at empty: exhausted
//
// An operator moves a row, too: replay takes it from failed or skipped back to pending, skip to
// skipped, and the marks to failed or dispatched; see [Operator].
//
// A row is pending until it is known to be published, and dispatching until its owner's
// outcome arrives. Marking is lazy: only a row that is unsettled after 200 ms is marked, so an
// event that is handled at once goes from pending to dispatched with one update. A retry that
// runs leaves its row failed until it ends. An outcome applies only if its generation and
// attempt are higher than the row's.
//
// # Finding rows
//
// The relay reads by seq, from a cursor on. Transactions commit in another order than they
// drew numbers, so a number that is missing behind the cursor may still come: the relay
// remembers such holes, looks at them again on every wake-up, and forgets a hole only when
// every transaction that was open when it was seen has ended. A transaction that stays open for
// hours delays that forgetting and nothing else; nothing waits for it.
//
// # Two outboxes
//
// An outbox is named by an id made at migration, and bound to its database: a copy of the database
// takes an id of its own, so that no relay settles the rows of another. An event that a publish
// finds to be in the stream already, by message id, is verified against the message: it is this
// very event, or the same action written to another outbox (then the row becomes skipped), or another
// action under the same key (then it is published under key, consumer and type).
//
// Rows the relay leaves behind are tracked: those whose consumer has no durable yet, those
// long under way, and failed ones. A partial index finds them; everything below meta.relay_low
// is settled or tracked, and that is where a new relay starts to read.
package outbox
