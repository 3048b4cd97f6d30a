package mesh

import (
	"errors"
	"fmt"
	"time"
)

// A failure is what a handler's error comes to.
type failure struct {
	code, text string
	permanent  bool
	delay      time.Duration // negative: the backoff decides
}

func failuref(code, format string, args ...any) *failure {
	return &failure{code: code, text: fmt.Sprintf(format, args...), delay: -1}
}

// classify is nil for nil.
func classify(err error) *failure {
	if err == nil {
		return nil
	}
	f := &failure{code: errorCode(err), text: err.Error(), delay: -1}
	if undecodable := (*undecodableError)(nil); errors.As(err, &undecodable) {
		f.code, f.permanent = CodeUndecodable, true
	}
	if permanent := (*PermanentError)(nil); errors.As(err, &permanent) {
		f.permanent = true
	}
	if after := (*RetryAfterError)(nil); errors.As(err, &after) {
		f.delay = after.Delay
	}
	return f
}

// coded lets a handler's error choose its own error code.
type coded interface{ ErrorCode() string }

// errorCode is the stable code of a handler's error: its own, if it has one that is
// a plain name, else [CodeError].
func errorCode(err error) string {
	if c := coded(nil); errors.As(err, &c) {
		if code := c.ErrorCode(); validName(code, maxConsumer) {
			return code
		}
	}
	return CodeError
}
