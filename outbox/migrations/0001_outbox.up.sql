-- The outbox of one service: its events, their failed attempts, and one row about itself.

create table {{schema}}.meta (
    only_row     boolean primary key default true check (only_row),
    -- Made here, not configured, so that no outbox can take another's outcomes.
    source_id    uuid not null default gen_random_uuid(),
    -- The database it was made for. In a copy of the database (a template, a restored dump) the
    -- relay finds another one, and takes a source id of its own.
    home         text not null,
    -- max_payload of the NATS server, as the relay met it: what Write measures events by.
    max_payload  integer not null default 1048576,
    -- The relay waits for a notification; only then do writers send one.
    relay_asleep boolean not null default false,
    -- Every row below is settled, or tracked: where a starting relay begins to read.
    relay_low    bigint not null default 0
) with (fillfactor = 20); -- updated all the time: room for new versions in the one page

create function {{schema}}.home() returns text language sql stable as $$
    select c.system_identifier || '/' || d.oid from pg_control_system() c, pg_database d where d.datname = current_database()
$$;

insert into {{schema}}.meta (home) values ({{schema}}.home());

create table {{schema}}.outbox (
    seq             bigint generated always as identity,
    id              uuid primary key,
    consumer        text not null,
    event_type      text not null,
    aggregate_type  text not null,
    aggregate_id    text not null,
    idempotency_key text,
    payload         bytea not null,
    content_type    text not null,
    headers         jsonb not null default '{}' check (jsonb_typeof(headers) = 'object'),
    trace_id        text not null,
    max_retries     integer check (max_retries >= 0),
    status          text not null default 'pending'
                    check (status in ('pending', 'dispatching', 'dispatched', 'failed', 'skipped')),
    -- The status once more, but only of a row that left the fast path: it waits for a durable,
    -- is long under way, failed, or was skipped. Those are found by it.
    tracked_status  text,
    generation      integer not null default 0,
    attempt         integer not null default 0, -- the last one applied, within its generation
    retry_count     integer not null default 0,
    next_retry_at   timestamptz,
    error_code      text,
    error_message   text,
    locked_by       text,
    locked_at       timestamptz,
    started_at      timestamptz,
    duration_ms     double precision,
    stream_seq      bigint,
    duplicate_of    text,
    occurred_at     timestamptz check (isfinite(occurred_at)), -- null: when it was written
    created_at      timestamptz not null default now() check (isfinite(created_at)),
    updated_at      timestamptz not null default now(),
    published_at    timestamptz,
    settled_at      timestamptz
) with (
    -- A fast event is updated once in its life. With room left in the page, and no index over a
    -- column that a successful event changes, that update touches no index (HOT). Measured by
    -- plain SQL at a fillfactor of 45, 500 rows a statement, Postgres 15, 2 cores: 130,000 to 180,000 updates/s with 747 bytes of WAL
    -- each, against 22,000 to 28,000 and 1,750 to 1,890 bytes without. The table is no larger in
    -- the end: what is left free here, dead versions would take elsewhere.
    fillfactor = 40,
    -- Vacuum by what changes, not by what the table has gathered: at the default of 20 % a
    -- table of ten million rows is left alone until two million are dead.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    -- Statistics of a queue are wrong within minutes.
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_analyze_threshold = 5000,
    -- And do not pause within a run; the table is hot in memory anyway.
    autovacuum_vacuum_cost_delay = 0
);

-- No index may cover status, settled_at or another column that success changes; see above.
create unique index outbox_seq on {{schema}}.outbox (seq);
create unique index outbox_key on {{schema}}.outbox (idempotency_key) where idempotency_key is not null;
create index outbox_consumer on {{schema}}.outbox (consumer, seq);
create index outbox_aggregate on {{schema}}.outbox (aggregate_id, seq);
create index outbox_trace on {{schema}}.outbox (trace_id);
create index outbox_tracked on {{schema}}.outbox (tracked_status, seq) where tracked_status is not null;
create index outbox_tracked_consumer on {{schema}}.outbox (tracked_status, consumer, seq) where tracked_status is not null;

-- Failed attempts; a success stands in the event's row.
create table {{schema}}.outbox_attempt (
    event_id      uuid not null,
    generation    integer not null,
    attempt       integer not null,
    instance      text not null,
    started_at    timestamptz not null,
    duration_ms   double precision not null,
    error_code    text not null,
    error_message text not null,
    primary key (event_id, generation, attempt)
);
