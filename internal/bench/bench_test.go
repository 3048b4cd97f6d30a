package bench

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestPercentileIsOneOfTheSamples(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, c := range []struct {
		samples []time.Duration
		p       int
		want    time.Duration
	}{
		{hundred, 50, 50}, {hundred, 99, 99}, {hundred, 100, 100},
		{[]time.Duration{7}, 50, 7}, {[]time.Duration{7}, 99, 7},
		{[]time.Duration{1, 2, 3}, 50, 2}, {[]time.Duration{1, 2, 3}, 99, 3},
		{hundred[:10], 99, 10}, {hundred[:10], 50, 5},
	} {
		if got := percentile(c.samples, c.p); got != c.want {
			t.Errorf("percentile %d of %d samples is %d, want %d", c.p, len(c.samples), got, c.want)
		}
	}
}

func TestPayloadIsJSONOfTheGivenSize(t *testing.T) {
	for _, size := range []int{2, 3, 300, 1_000_000} {
		if doc := payload(size); len(doc) != size || !json.Valid(doc) {
			t.Errorf("payload(%d) has %d bytes: %.60s", size, len(doc), doc)
		}
	}
}

func TestRatiosAreOverRawPublish(t *testing.T) {
	r := Result{RawPublish: 1000, Relay: 750.4, EndToEnd: 333.3}
	r.finish()
	if r.RelayRatio != 0.75 || r.EndToEndRatio != 0.333 || r.Relay != 750 {
		t.Errorf("%+v", r)
	}
}

func TestTableShowsWhatJSONDoes(t *testing.T) {
	r := Result{RawPublish: 123456, LatencyP50: 0.51}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Result]()) {
		if f.Type.Kind() == reflect.String {
			reflect.ValueOf(&r).Elem().FieldByIndex(f.Index).SetString("a-" + f.Name)
		}
	}
	var object, table bytes.Buffer
	if err := r.WriteJSON(&object); err != nil {
		t.Fatal(err)
	}
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	var want, got []string
	dec := json.NewDecoder(&object)
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			t.Fatal(err)
		}
		if key, ok := token.(string); ok {
			value, err := dec.Token()
			if err != nil {
				t.Fatal(err)
			}
			text, _ := json.Marshal(value)
			want = append(want, key+" "+strings.Trim(string(text), `"`))
		}
	}
	for line := range strings.Lines(table.String()) {
		fields := strings.Fields(line)
		got = append(got, fields[0]+" "+fields[1])
	}
	if len(want) < 20 || !slices.Equal(got, want) {
		t.Errorf("table %q\nJSON  %q", got, want)
	}
}

func TestRunGetsADatabaseOfItsOwn(t *testing.T) {
	for server, want := range map[string]string{
		"postgres://u:p@h:5433/app?sslmode=disable": "postgres://u:p@h:5433/mine?sslmode=disable",
		"postgresql://h": "postgresql://h/mine",
		"postgres://h/app?dbname=other&database=more": "postgres://h/mine",
		"host=h dbname=app":                           "host=h dbname=app dbname=mine",
	} {
		if got, err := withDatabase(server, "mine"); got != want || err != nil {
			t.Errorf("%s became %s, %v; want %s", server, got, err, want)
		}
	}
	if got, err := withDatabase("postgres://u:secret@h:port/app", "mine"); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("a URL that is none became %s, %v", got, err)
	}
}

func TestWarningsOfTheRelayAreFound(t *testing.T) {
	o := output{ready: "serve: ready", isReady: make(chan struct{})}
	for _, part := range []string{"jetmesh serve: re", "ady\n", `{"level":"info","message":"relay works"}` + "\n", `{"level":"warn","message":"relay starts again"}` + "\n"} {
		if _, err := o.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-o.isReady:
	default:
		t.Error("not seen to be ready")
	}
	if got := o.warnings(); len(got) != 1 || !strings.Contains(got[0], "relay starts again") {
		t.Errorf("warnings %q", got)
	}
}

func TestForgetfulPostgresIsRefused(t *testing.T) {
	ok := Durability{Fsync: "on", SynchronousCommit: "local", FullPageWrites: "on"}
	if err := ok.check(); err != nil {
		t.Error(err)
	}
	for _, d := range []Durability{{"off", "on", "on"}, {"on", "off", "on"}, {"on", "on", "off"}} {
		if d.check() == nil {
			t.Errorf("%+v is taken", d)
		}
	}
}
