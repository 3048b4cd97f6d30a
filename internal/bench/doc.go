// Package bench measures a mesh on one machine: Postgres with its commits on disk, NATS as
// a child process over TCP loopback, the relay as `jetmesh serve` in a process of its own,
// and handlers in this process through mesh.Mesh.
//
// What the clock of each figure covers, for N events:
//
//	raw_publish_per_s  N messages that were built before, with the headers of an event and
//	                   its message id: from the first asynchronous publish to the last ack.
//	                   As many in flight as a relay has. Median of three rounds; N is at
//	                   most 200,000 here.
//	raw_consume_per_s  those messages: from the start of consuming to the last ack at the
//	                   server. Settings and prefetch of the handlers' durable. Median too.
//	insert_per_s       N transactions with one outbox.Write each, on 16 connections that
//	                   stand already: from the first begin to the last commit. No relay runs.
//	relay_per_s        a committed backlog of N rows, whose consumer has a durable and no
//	                   handler: from the moment the server stores the first message to the
//	                   moment it stores the last, by the server's clock. The acks are
//	                   confirmed afterwards: the relay marks each row it got one for.
//	end_to_end_per_s   the same with handlers that do nothing: from the first message
//	                   stored to the commit that settles the last row.
//	latency_*_ms       events at a steady rate: from the return of the commit to the entry
//	                   of the handler, both on this process's monotonic clock. The first
//	                   second does not count. Percentiles are those of all samples.
//
// So the start of processes and the connecting are in no figure. The two ratios are over
// raw_publish_per_s. max_rss_mb is the largest resident size, in MiB, that any of the
// relay's processes reached.
//
// Before each phase the schema and the streams are made anew; before each measurement on
// rows, the tables are vacuumed and analyzed and a checkpoint is taken.
package bench
