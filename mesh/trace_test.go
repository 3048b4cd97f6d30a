package mesh_test

import (
	"context"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/trace"

	"jetmesh/mesh"
)

const (
	spanTrace   = "0af7651916cd43dd8448eb211c80319c"
	spanID      = "b7ad6b7169203331"
	traceParent = "00-" + spanTrace + "-" + spanID + "-01"
)

// span is a context with a span, as an instrumented server makes one.
func span(t *testing.T, ctx context.Context) context.Context {
	t.Helper()
	traceID, err := trace.TraceIDFromHex(spanTrace)
	if err != nil {
		t.Fatal(err)
	}
	id, err := trace.SpanIDFromHex(spanID)
	if err != nil {
		t.Fatal(err)
	}
	state, err := trace.ParseTraceState("vendor=1,other=2")
	if err != nil {
		t.Fatal(err)
	}
	return trace.ContextWithSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: traceID, SpanID: id, TraceFlags: trace.FlagsSampled, TraceState: state,
	}))
}

func TestTraceIDIsTheEventsElseTheContextsElseTheSpansElseNew(t *testing.T) {
	ctx := context.Background()
	const made = "?"
	for name, c := range map[string]struct {
		ctx  context.Context
		own  string
		want string
	}{
		"own":                        {mesh.WithTraceID(span(t, ctx), "context"), "own", "own"},
		"context":                    {mesh.WithTraceID(span(t, ctx), "context"), "", "context"},
		"empty in context":           {mesh.WithTraceID(span(t, ctx), ""), "", spanTrace},
		"span":                       {span(t, ctx), "", spanTrace},
		"none":                       {ctx, "", made},
		"unsafe in context":          {mesh.WithTraceID(ctx, "a\r\nNats-Rollup: all"), "", made},
		"too long in context":        {mesh.WithTraceID(ctx, strings.Repeat("t", 129)), "", made},
		"unsafe, in front of a span": {mesh.WithTraceID(span(t, ctx), "ü"), "", made},
	} {
		e := valid()
		e.TraceID = c.own
		e.Trace(c.ctx)
		if c.want == made {
			if len(e.TraceID) != 32 || strings.Trim(e.TraceID, "0123456789abcdef") != "" || e.TraceID == spanTrace {
				t.Errorf("%s: %q, want 32 hexadecimal digits", name, e.TraceID)
			}
			again := valid()
			if again.Trace(c.ctx); again.TraceID == e.TraceID {
				t.Errorf("%s: the same id twice", name)
			}
		} else if e.TraceID != c.want {
			t.Errorf("%s: %q, want %q", name, e.TraceID, c.want)
		}
		if err := e.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSpanGoesAlongUnlessTheEventHasOne(t *testing.T) {
	e := valid()
	e.Trace(span(t, context.Background()))
	if e.TraceParent != traceParent || e.TraceState != "vendor=1,other=2" {
		t.Errorf("traceparent %q, tracestate %q", e.TraceParent, e.TraceState)
	}
	e = valid()
	e.TraceParent = "own"
	e.Trace(span(t, context.Background()))
	if e.TraceParent != "own" || e.TraceState != "" {
		t.Errorf("traceparent %q, tracestate %q", e.TraceParent, e.TraceState)
	}
	e = valid()
	if e.Trace(context.Background()); e.TraceParent != "" || e.TraceState != "" {
		t.Errorf("traceparent %q, tracestate %q without a span", e.TraceParent, e.TraceState)
	}
}

func TestHandlersContextCarriesTheWritersTrace(t *testing.T) {
	t.Parallel()
	e := start(t)
	type seen struct {
		id   string
		span trace.SpanContext
	}
	got := make(chan seen, 1)
	e.handle(mesh.OnRaw("orders", ordered, func(ctx context.Context, _ mesh.Delivery[[]byte]) error {
		got <- seen{mesh.TraceID(ctx), trace.SpanContextFromContext(ctx)}
		return nil
	}))
	ev := e.event("orders")
	ev.TraceID = ""
	ev.Trace(mesh.WithTraceID(span(t, t.Context()), "request-7"))
	e.publish(ev)
	s := receive(t, "the handler", got)
	if s.id != "request-7" || s.span.TraceID().String() != spanTrace || s.span.SpanID().String() != spanID || !s.span.IsRemote() ||
		!s.span.IsSampled() || s.span.TraceState().String() != "vendor=1,other=2" {
		t.Errorf("trace id %q, span %+v", s.id, s.span)
	}

	for name, c := range map[string]struct {
		parent, state string
		valid         bool
	}{
		"not sampled":                 {strings.TrimSuffix(traceParent, "1") + "0", "", true},
		"of a later version":          {"01" + traceParent[2:] + "-more", "", true},
		"with a state that is none":   {traceParent, "=,=", true},
		"none":                        {"", "", false},
		"cut short":                   {traceParent[:54], "", false},
		"too long for its version":    {traceParent + "-more", "", false},
		"of the version that is none": {"ff" + traceParent[2:], "", false},
		"of zeros":                    {"00-" + strings.Repeat("0", 32) + "-" + spanID + "-01", "", false},
		"of other letters":            {strings.ToUpper(traceParent), "", false},
		"without dashes":              {strings.ReplaceAll(traceParent, "-", "0"), "", false},
	} {
		ev := e.event("orders")
		ev.TraceID, ev.TraceParent, ev.TraceState = "request-8", c.parent, c.state
		e.publish(ev)
		s := receive(t, name, got)
		if s.id != "request-8" || s.span.IsValid() != c.valid || c.valid && s.span.SpanID().String() != spanID {
			t.Errorf("traceparent %s: trace id %q, span %+v", name, s.id, s.span)
		}
	}
}
