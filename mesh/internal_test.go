package mesh

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

func TestVersionsAreComparedAsNumbers(t *testing.T) {
	for _, c := range []struct {
		version, least string
		want           bool
	}{
		{"2.12.6", "2.12.6", true},
		{"2.12.5", "2.12.6", false},
		{"2.12.10", "2.12.6", true},
		{"2.9.99", "2.12.6", false},
		{"2.15.3", "2.12.6", true},
		{"3.0.0", "2.12.6", true},
		{"1.99.99", "2.12.6", false},
		{"2.12.6-RC.1", "2.12.6", true},
		{"2.12.5-preview.9", "2.12.6", false},
		{"2.13", "2.12.6", true},
		{"2.12", "2.12.6", false},
		{"", "2.12.6", false},
		{"unknown", "2.12.6", false},
	} {
		if got := versionAtLeast(c.version, c.least); got != c.want {
			t.Errorf("%q at least %q: %v", c.version, c.least, got)
		}
	}
}

func TestDelayIsWithinItsCeilingForEveryRetry(t *testing.T) {
	for _, b := range []Backoff{
		{time.Second, 10 * time.Minute}, {1, 1}, {1, maxWait}, {10 * time.Minute, maxWait}, {5 * time.Second, 24 * time.Hour}, {maxWait, maxWait},
	} {
		for retry := 1; retry <= 1000; retry++ {
			ceiling := math.Min(float64(b.Base)*math.Pow(2, float64(retry-1)), float64(b.Cap))
			if d := b.delay(retry); d < 0 || float64(d) > ceiling {
				t.Fatalf("%+v, retry %d: %s, want up to %s", b, retry, d, time.Duration(ceiling))
			}
		}
	}
	b := Backoff{time.Second, 8 * time.Second}
	for retry, ceiling := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 4: 8 * time.Second, 5: 8 * time.Second} {
		least, most := ceiling, time.Duration(0)
		for range 1000 {
			d := b.delay(retry)
			least, most = min(least, d), max(most, d)
		}
		if least > ceiling/10 || most < ceiling*9/10 {
			t.Errorf("retry %d: from %s to %s, want from 0 to %s", retry, least, most, ceiling)
		}
	}
}

func TestWrappedErrorsKeepTheirCause(t *testing.T) {
	cause := errors.New("cause")
	if Permanent(nil) != nil || RetryAfter(time.Second, nil) != nil {
		t.Error("nil became an error")
	}
	for _, err := range []error{Permanent(cause), RetryAfter(time.Second, cause)} {
		if !errors.Is(err, cause) || err.Error() != "cause" {
			t.Errorf("%v", err)
		}
	}
	for given, want := range map[time.Duration]time.Duration{
		-time.Hour: 0, 0: 0, time.Minute: time.Minute, 25 * time.Hour: 24 * time.Hour, math.MaxInt64: 24 * time.Hour,
	} {
		var after *RetryAfterError
		if !errors.As(fmt.Errorf("wrapped: %w", RetryAfter(given, cause)), &after) || after.Delay != want {
			t.Errorf("RetryAfter(%s) is %s, want %s", given, after.Delay, want)
		}
	}
}

func TestClippedTextIsShortAndValid(t *testing.T) {
	for text, want := range map[string]string{
		"short": "short", "a\xffb": "a\ufffdb", "1234567890": "1234567890", "12345678901": "1234567890…", "123456789é": "123456789…", "123456789\xff1": "123456789…",
	} {
		if got := clip(text, 10); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// The bound by which batches are cut to the server's max_payload.
func TestOutcomeIsNeverLargerThanItsBound(t *testing.T) {
	year9999 := time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.FixedZone("", 14*60*60))
	for _, text := range []string{"", "<", "\x01", `"`, "\u2028", "é"} {
		o := Outcome{
			EventID: strings.Repeat("i", maxConsumer), Generation: math.MaxInt, Attempt: math.MaxInt, Code: strings.Repeat("c", maxConsumer),
			Message: clip(strings.Repeat(text, maxErrorText), maxErrorText), RetryCount: math.MaxInt, Exhausted: true, RetryIn: math.MaxInt64,
			StartedAt: year9999, Duration: math.MaxInt64, StreamSeq: math.MaxUint64, PublishedAt: year9999,
		}
		data, err := encodeOutcomes(strings.Repeat("<", maxAggregate), []settled{{outcome: o}})
		alone, _ := encodeOutcomes("", nil)
		if size := len(data) - len(alone) - 6*maxAggregate; err != nil || size > o.maxSize() || len(data)+headerRoom > largestOutcome {
			t.Errorf("outcome of %d bytes with a text of %.5q, bound %d (%v)", size, text, o.maxSize(), err)
		}
	}
}

func TestUnreachableServerIsToldFromOneThatRefuses(t *testing.T) {
	for err, want := range map[error]bool{
		context.DeadlineExceeded: true, context.Canceled: false, errors.New("x"): false, &TopologyError{}: false, &FieldError{}: false,
	} {
		if got := unreachable(fmt.Errorf("wrapped: %w", err)); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
	if unreachable(nil) {
		t.Error("nil is unreachable")
	}
}
