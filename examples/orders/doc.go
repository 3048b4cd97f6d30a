// Package orders is a small service, written as a service on jetmesh is meant to be:
// an order and the event that tells of it are written in one transaction, and a
// handler books the order, once, however often the event is delivered.
//
//	Place ── one transaction ──▶ orders.orders + outbox ──▶ relay ──▶ handler ──▶ orders.bookings
//
// `jetmesh dev` runs it. Of jetmesh it uses only the public packages.
package orders
