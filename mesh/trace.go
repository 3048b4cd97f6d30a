package mesh

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"

	"go.opentelemetry.io/otel/trace"
)

type traceKey struct{}

// WithTraceID returns a context that carries a trace id; events written and commands
// enqueued under it take it over.
func WithTraceID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, traceKey{}, id)
}

// TraceID is the trace id of a context: the one from [WithTraceID], which is also what
// a handler's context carries, else the one of its OpenTelemetry span, else "".
func TraceID(ctx context.Context) string {
	if id, ok := ctx.Value(traceKey{}).(string); ok && id != "" {
		return id
	}
	if sc := trace.SpanContextFromContext(ctx); sc.HasTraceID() {
		return sc.TraceID().String()
	}
	return ""
}

// Trace completes the event's trace: its own id wins, then the context's, else a new
// random one of 32 hexadecimal digits. A context's id that would not be safe in a header
// is replaced by a new one too, so that tracing never keeps a business event from being
// written. The W3C trace context of the context's span goes along.
func (e *Event) Trace(ctx context.Context) {
	if e.TraceID == "" {
		e.TraceID = TraceID(ctx)
		if !validTraceID(e.TraceID) {
			e.TraceID = newTraceID()
		}
	}
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() && e.TraceParent == "" {
		e.TraceParent = fmt.Sprintf("00-%s-%s-%s", sc.TraceID(), sc.SpanID(), sc.TraceFlags())
		e.TraceState = sc.TraceState().String()
	}
}

func newTraceID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// traceContext is what a handler's context carries: the event's trace id and, where the
// writer had a span, that span as remote parent.
func (e *Event) traceContext(ctx context.Context) context.Context {
	ctx = WithTraceID(ctx, e.TraceID)
	if sc, ok := parseTraceParent(e.TraceParent, e.TraceState); ok {
		ctx = trace.ContextWithRemoteSpanContext(ctx, sc)
	}
	return ctx
}

func parseTraceParent(parent, state string) (trace.SpanContext, bool) {
	// 00-<32 hex>-<16 hex>-<2 hex>; later versions may be longer, never shorter; ff is none.
	if len(parent) < 55 || parent[2] != '-' || parent[35] != '-' || parent[52] != '-' ||
		parent[:2] == "ff" || parent[:2] == "00" && len(parent) > 55 {
		return trace.SpanContext{}, false
	}
	traceID, err1 := trace.TraceIDFromHex(parent[3:35])
	spanID, err2 := trace.SpanIDFromHex(parent[36:52])
	flags, err3 := hex.DecodeString(parent[53:55])
	if err1 != nil || err2 != nil || err3 != nil {
		return trace.SpanContext{}, false
	}
	ts, _ := trace.ParseTraceState(state)
	sc := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: traceID, SpanID: spanID, TraceFlags: trace.TraceFlags(flags[0]), TraceState: ts, Remote: true,
	})
	return sc, sc.IsValid()
}
