package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"
)

// Result is what a run measured, and under which conditions. Scripts read the JSON keys.
type Result struct {
	RawPublish      float64 `json:"raw_publish_per_s" about:"messages published and acked, by a plain asynchronous publisher"`
	RawConsume      float64 `json:"raw_consume_per_s" about:"messages consumed and acked, by a plain consumer"`
	Insert          float64 `json:"insert_per_s" about:"transactions that write one event each"`
	Relay           float64 `json:"relay_per_s" about:"events of a backlog published by the relay"`
	EndToEnd        float64 `json:"end_to_end_per_s" about:"events of a backlog published, handled and settled"`
	RelayRatio      float64 `json:"relay_ratio" about:"relay_per_s over raw_publish_per_s"`
	EndToEndRatio   float64 `json:"end_to_end_ratio" about:"end_to_end_per_s over raw_publish_per_s"`
	LatencyP50      float64 `json:"latency_p50_ms" about:"from commit to handler, median"`
	LatencyP99      float64 `json:"latency_p99_ms" about:"from commit to handler, 99th percentile"`
	MaxRSS          float64 `json:"max_rss_mb" about:"MiB, largest resident size of the relay's process"`
	DedupeWindow    string  `json:"dedupe_window" about:"of the events stream"`
	Events          int     `json:"events" about:"in each throughput phase"`
	Payload         int     `json:"payload" about:"bytes of each event, without headers"`
	Rate            int     `json:"rate" about:"events per second while latency is measured"`
	Seconds         float64 `json:"seconds" about:"for which latency is measured"`
	Concurrency     int     `json:"handler_concurrency" about:"handlers at once, and messages fetched ahead"`
	Connections     int     `json:"insert_connections" about:"that insert_per_s uses"`
	CPUs            int     `json:"cpus" about:"of this machine"`
	GoVersion       string  `json:"go_version" about:"that built this program"`
	PostgresVersion string  `json:"postgres_version" about:""`
	Durability
	NATSVersion      string `json:"nats_version" about:"server in a process of its own, over TCP loopback"`
	NATSSyncInterval string `json:"nats_sync_interval" about:"as found"`
}

// finish computes the ratios and cuts digits that mean nothing.
func (r *Result) finish() {
	r.RelayRatio = round(r.Relay/r.RawPublish, 3)
	r.EndToEndRatio = round(r.EndToEnd/r.RawPublish, 3)
	for _, rate := range []*float64{&r.RawPublish, &r.RawConsume, &r.Insert, &r.Relay, &r.EndToEnd} {
		*rate = round(*rate, 0)
	}
	r.LatencyP50, r.LatencyP99 = round(r.LatencyP50, 3), round(r.LatencyP99, 3)
	r.MaxRSS = round(r.MaxRSS, 1)
}

// WriteJSON writes one object.
func (r Result) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteTable writes the same for people.
func (r Result) WriteTable(w io.Writer) error {
	out := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Result]()) {
		if f.Anonymous {
			continue
		}
		var text string
		switch v := reflect.ValueOf(r).FieldByIndex(f.Index).Interface().(type) {
		case float64:
			text = strconv.FormatFloat(v, 'f', -1, 64)
		default:
			text = fmt.Sprint(v)
		}
		fmt.Fprintf(out, "%s\t%s\t%s\n", f.Tag.Get("json"), text, f.Tag.Get("about"))
	}
	return out.Flush()
}

func round(v float64, digits int) float64 {
	scale := math.Pow10(digits)
	return math.Round(v*scale) / scale
}

func perSecond(n int, took time.Duration) float64 { return float64(n) / took.Seconds() }

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// percentile is the smallest sample that at least p percent of all do not exceed.
func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[max((len(sorted)*p+99)/100, 1)-1]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
