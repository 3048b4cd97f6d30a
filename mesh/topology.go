package mesh

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Topology is the size of a mesh's streams. Zero values mean the defaults.
type Topology struct {
	Replicas     int           // 1 (default), or 3 on a cluster
	MaxBytes     int64         // of the events stream; default 4 GiB. A full stream pauses the relays
	MaxDeadBytes int64         // of the dead letters; default 1 GiB
	MaxLedger    int64         // bytes of failure records and of outcomes on their way, each; default 512 MiB
	DedupeWindow time.Duration // of Nats-Msg-Id; default 2 min, at least 100 ms
}

// minServerVersion is the oldest server that holds no known hole in the JetStream API's
// authorisation and loses no message at a consumer's edge.
const minServerVersion = "2.12.6"

// minMaxPayload is the least max_payload in bytes that leaves events room worth having.
const minMaxPayload = 64 << 10

// withDefaults fills in what is left open, for streams that are to be created.
func (t Topology) withDefaults() Topology {
	orElse(&t.Replicas, 1)
	orElse(&t.MaxBytes, 4<<30)
	orElse(&t.MaxDeadBytes, 1<<30)
	orElse(&t.MaxLedger, 512<<20)
	orElse(&t.DedupeWindow, 2*time.Minute)
	return t
}

func (t Topology) streams(n Names) []jetstream.StreamConfig {
	base := func(name string, subjects ...string) jetstream.StreamConfig {
		return jetstream.StreamConfig{
			Name: name, Subjects: subjects, Replicas: t.Replicas,
			Storage: jetstream.FileStorage, Retention: jetstream.LimitsPolicy,
			// A full stream refuses; the default would drop what nobody has handled yet.
			Discard: jetstream.DiscardNew,
		}
	}
	events := base(n.EventsStream(), n.prefix+".events.>", n.prefix+".replay.>")
	events.Description = "events and replays of the mesh"
	events.MaxBytes = t.MaxBytes
	events.Duplicates = t.DedupeWindow

	dead := base(n.DeadStream(), n.prefix+".dead.>")
	dead.Description = "dead letters of the mesh"
	// A process that dies between dead letter and terminate writes the letter again when it is back.
	dead.Duplicates = time.Hour
	dead.MaxBytes = t.MaxDeadBytes

	outcomes := base(n.OutcomesStream(), n.prefix+".outcomes.*")
	outcomes.Description = "outcomes of handlers on their way to the outboxes"
	outcomes.Retention = jetstream.WorkQueuePolicy
	outcomes.MaxBytes = t.MaxLedger

	// A bucket, made by hand: the client's own way turns on direct reads, which any
	// replica may answer with an older value, and records decide what a runner does.
	failures := base("KV_"+n.FailuresBucket(), "$KV."+n.FailuresBucket()+".>")
	failures.Description = "failure records of the mesh"
	failures.MaxMsgsPerSubject = 1
	failures.MaxBytes = t.MaxLedger
	failures.AllowRollup = true
	failures.DenyDelete = true

	return []jetstream.StreamConfig{events, dead, outcomes, failures}
}

// TopologyError names a stream that exists with another configuration than the mesh
// needs. The mesh never changes it: correct the setting, or the stream.
type TopologyError struct {
	Stream string
	Fields []string // "max_bytes is 1048576, want 4294967296"
}

func (e *TopologyError) Error() string {
	return fmt.Sprintf("mesh: stream %s differs from the configuration: %s; set the mesh's topology to match, or change the stream",
		e.Stream, strings.Join(e.Fields, "; "))
}

// ApplyTopology creates the streams and buckets that do not exist and verifies those that
// do; it never changes one. All that differ are reported at once, as [TopologyError]s.
// It is safe to run in many processes at once.
func (m *Mesh) ApplyTopology(ctx context.Context, t Topology) error {
	full := map[string]jetstream.StreamConfig{}
	for _, cfg := range t.withDefaults().streams(m.Names) {
		full[cfg.Name] = cfg
	}
	return m.eachStream(ctx, t, func(ctx context.Context, want jetstream.StreamConfig) (*jetstream.StreamInfo, error) {
		s, err := m.js.Stream(ctx, want.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			s, err = m.js.CreateStream(ctx, full[want.Name])
			if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
				s, err = m.js.Stream(ctx, want.Name)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("mesh: create stream %s: %w", want.Name, err)
		}
		return s.CachedInfo(), nil
	})
}

// VerifyTopology reports what is missing or differs, and changes nothing.
func (m *Mesh) VerifyTopology(ctx context.Context, t Topology) error {
	return m.eachStream(ctx, t, func(ctx context.Context, want jetstream.StreamConfig) (*jetstream.StreamInfo, error) {
		s, err := m.js.Stream(ctx, want.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, &TopologyError{Stream: want.Name, Fields: []string{"it does not exist"}}
		}
		if err != nil {
			return nil, fmt.Errorf("mesh: look up stream %s: %w", want.Name, err)
		}
		return s.CachedInfo(), nil
	})
}

func (m *Mesh) eachStream(ctx context.Context, t Topology, get func(context.Context, jetstream.StreamConfig) (*jetstream.StreamInfo, error)) error {
	if err := m.checkServer(ctx); err != nil {
		return err
	}
	if r := t.Replicas; r != 0 && r != 1 && r != 3 {
		return fieldErrorf("replicas", "must be 1 or 3, not %d", r)
	}
	var errs []error
	for _, want := range t.streams(m.Names) {
		info, err := get(ctx, want)
		if err == nil {
			err = compareStream(want, info.Config)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// compareStream reports where got differs. Sizes are compared only where want sets them:
// a process that leaves them open works with whatever an operator chose.
func compareStream(want, got jetstream.StreamConfig) error {
	var diff differences
	// The server stores "no limit" as -1.
	orMinus1 := func(v int64) int64 {
		if v == 0 {
			return -1
		}
		return v
	}
	orElse(&want.Duplicates, got.Duplicates)
	orElse(&want.Replicas, got.Replicas)
	orElse(&want.MaxBytes, got.MaxBytes)
	slices.Sort(want.Subjects)
	slices.Sort(got.Subjects)
	diff.check("subjects", got.Subjects, want.Subjects)
	diff.check("retention", got.Retention, want.Retention)
	diff.check("storage", got.Storage, want.Storage)
	diff.check("discard", got.Discard, want.Discard)
	diff.check("num_replicas", got.Replicas, want.Replicas)
	diff.check("max_bytes", got.MaxBytes, orMinus1(want.MaxBytes))
	diff.check("max_msgs", got.MaxMsgs, orMinus1(want.MaxMsgs))
	diff.check("max_msg_size", got.MaxMsgSize, orMinus1(int64(want.MaxMsgSize)))
	diff.check("max_msgs_per_subject", got.MaxMsgsPerSubject, orMinus1(want.MaxMsgsPerSubject))
	diff.check("max_age", got.MaxAge, want.MaxAge)
	diff.check("duplicate_window", got.Duplicates, want.Duplicates)
	diff.check("allow_direct", got.AllowDirect, want.AllowDirect)
	diff.check("allow_rollup_hdrs", got.AllowRollup, want.AllowRollup)
	diff.check("allow_msg_schedules", got.AllowMsgSchedules, want.AllowMsgSchedules)
	diff.check("allow_msg_ttl", got.AllowMsgTTL, want.AllowMsgTTL)
	diff.check("deny_delete", got.DenyDelete, want.DenyDelete)
	diff.check("deny_purge", got.DenyPurge, want.DenyPurge)
	diff.check("no_ack", got.NoAck, want.NoAck)
	diff.check("sealed", got.Sealed, want.Sealed)
	diff.check("subject_transform", got.SubjectTransform != nil, want.SubjectTransform != nil)
	diff.check("mirror", got.Mirror != nil, want.Mirror != nil)
	diff.check("sources", len(got.Sources), len(want.Sources))
	if len(diff) > 0 {
		return &TopologyError{Stream: want.Name, Fields: diff}
	}
	return nil
}

// differences lists fields in which something that exists is not as it should be.
type differences []string

func (d *differences) check(field string, got, want any) {
	if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
		*d = append(*d, fmt.Sprintf("%s is %s, want %s", field, g, w))
	}
}

// checkServer refuses a server that is too old, allows too little, or has no JetStream.
func (m *Mesh) checkServer(ctx context.Context) error {
	switch {
	case m.nc.IsClosed():
		return fmt.Errorf("mesh: ask the server: %w", nats.ErrConnectionClosed)
	case !m.nc.IsConnected():
		return fmt.Errorf("mesh: ask the server: %w", nats.ErrDisconnected)
	}
	if v := m.nc.ConnectedServerVersion(); !versionAtLeast(v, minServerVersion) {
		return fmt.Errorf("mesh: nats-server %s is too old, %s or newer is needed", v, minServerVersion)
	}
	if limit := m.nc.MaxPayload(); limit < minMaxPayload {
		return fmt.Errorf("mesh: the server's max_payload is %d bytes, at least %d are needed", limit, minMaxPayload)
	}
	if _, err := m.js.AccountInfo(ctx); err != nil {
		if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrJetStreamNotEnabled) || errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
			return fmt.Errorf("mesh: the server has no JetStream for this account, enable it in its configuration: %w", err)
		}
		return fmt.Errorf("mesh: ask for JetStream's limits: %w", err)
	}
	return nil
}

// versionAtLeast compares major.minor.patch; a pre-release counts as its release.
func versionAtLeast(version, least string) bool {
	parse := func(s string) (v [3]int) {
		s, _, _ = strings.Cut(s, "-")
		for i, part := range strings.SplitN(s, ".", 3) {
			v[i], _ = strconv.Atoi(part)
		}
		return v
	}
	a, b := parse(version), parse(least)
	return slices.Compare(a[:], b[:]) >= 0
}
