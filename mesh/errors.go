package mesh

import (
	"fmt"
	"time"
)

// FieldError says which field of an event or a setting cannot be accepted, and why.
// Several come joined with [errors.Join]; find one with [errors.As].
type FieldError struct {
	Field  string // as in JSON: consumer, eventType, headers.x-shop, payload, …
	Reason string
}

func (e *FieldError) Error() string { return fmt.Sprintf("mesh: %s %s", e.Field, e.Reason) }

func fieldErrorf(field, format string, args ...any) error {
	return &FieldError{Field: field, Reason: fmt.Sprintf(format, args...)}
}

// Error codes of a failed event. They are stored in rows, records and dead letters
// and shown to operators: renaming one breaks their filters and alerts.
const (
	CodeError       = "handler_error"     // the handler returned an error
	CodePanic       = "handler_panic"     // the handler panicked
	CodeTimeout     = "handler_timeout"   // the handler outlived its timeout
	CodeCrashLoop   = "crash_loop"        // five recorded starts of the handler, after its first run, came to no end
	CodeNoHandler   = "no_handler"        // the consumer is registered, the event type is not
	CodeUndecodable = "undecodable"       // the payload does not decode into the handler's type
	CodeMalformed   = "malformed_message" // the message is no event of the mesh
	CodeUnpublished = "unpublishable"     // the relay can never publish the row
)

// maxErrorText bounds what is kept of a handler's error: enough for a person, too
// little to fill a table.
const maxErrorText = 2048

// PermanentError is what [Permanent] returns.
type PermanentError struct{ Err error }

func (e *PermanentError) Error() string { return e.Err.Error() }
func (e *PermanentError) Unwrap() error { return e.Err }

// Permanent wraps a handler's error that no retry can mend: the event is dead-lettered
// now. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &PermanentError{Err: err}
}

// RetryAfterError is what [RetryAfter] returns.
type RetryAfterError struct {
	Delay time.Duration
	Err   error
}

func (e *RetryAfterError) Error() string { return e.Err.Error() }
func (e *RetryAfterError) Unwrap() error { return e.Err }

// RetryAfter wraps a handler's error and names the delay before the next attempt, in
// place of the backoff; from 0 to 24 hours, values outside are clamped. It counts as
// a failed attempt like any other error. RetryAfter(d, nil) is nil.
func RetryAfter(d time.Duration, err error) error {
	if err == nil {
		return nil
	}
	return &RetryAfterError{Delay: min(max(d, 0), 24*time.Hour), Err: err}
}
