-- Small state: broker-wide switches, and the state of stream queries.

-- Switches that all servers obey, by name.
create table queen.system_state (
    key        text primary key,
    value      jsonb not null,
    updated_at timestamptz not null default now()
);

create schema if not exists queen_streams;

-- A stream query by its name; the hash says whether its configuration is still the one it ran with.
create table queen_streams.queries (
    id           uuid primary key default gen_random_uuid(),
    name         text not null unique,
    source_queue text,
    sink_queue   text,
    config_hash  text not null,
    created_at   timestamptz not null default now(),
    updated_at   timestamptz not null default now()
);

-- No foreign key to partitions: state that still matters must not vanish with an empty
-- partition; it vetoes the cleanup instead. value is text, so that it comes back as sent.
create table queen_streams.state (
    query_id     uuid not null references queen_streams.queries (id) on delete cascade,
    partition_id uuid not null,
    key          text not null,
    value        text not null,
    updated_at   timestamptz not null default now(),
    primary key (query_id, partition_id, key)
);
create index state_partition_idx on queen_streams.state (partition_id);
