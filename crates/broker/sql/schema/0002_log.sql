-- The log itself: segments, the sidecar of transaction-id hashes, cursors, dead letters.

-- The primary key is the push, pop and retention path; a second index would be paid on each.
create table queen.log_segments (
    partition_id uuid not null references queen.log_partitions (id) on delete cascade,
    base_offset  bigint not null,
    end_offset   bigint not null,
    created_at   timestamptz not null,
    blob         bytea not null,
    primary key (partition_id, base_offset)
) with (
    autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_vacuum_insert_scale_factor = 0.3,
    autovacuum_vacuum_cost_limit = 4000,
    autovacuum_vacuum_cost_delay = 0,
    -- Blobs live in toast, so that is where retention leaves its dead rows.
    toast.autovacuum_vacuum_scale_factor = 0.1,
    toast.autovacuum_vacuum_insert_scale_factor = 0.3,
    toast.autovacuum_vacuum_cost_limit = 4000,
    toast.autovacuum_vacuum_cost_delay = 0
);
-- Blobs arrive compressed; trying again would only cost time.
alter table queen.log_segments alter column blob set storage external;

-- No foreign key on purpose: a purge must not pay for referential triggers. Whoever deletes
-- a partition deletes its rows here.
create table queen.log_txns (
    partition_id uuid not null,
    base_offset  bigint not null,
    end_offset   bigint not null,
    created_at   timestamptz not null,
    hashes       bytea not null,  -- 16 bytes a message, in frame order
    primary key (partition_id, base_offset)
) with (
    autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_vacuum_insert_scale_factor = 0.3,
    autovacuum_vacuum_cost_delay = 0
);
-- Hashes do not compress.
alter table queen.log_txns alter column hashes set storage external;

-- No secondary index, so that every pop and ack updates in place.
create table queen.log_consumers (
    partition_id      uuid not null references queen.log_partitions (id) on delete cascade,
    consumer_group    text not null default '__QUEUE_MODE__',
    committed         bigint not null default -1,
    batch_end         bigint,
    worker_id         text,
    lease_expires_at  timestamptz,
    lease_acquired_at timestamptz,
    batch_retry_count int not null default 0,
    attempt_offset    bigint,
    attempt_count     int not null default 0,
    total_consumed    bigint not null default 0,
    created_at        timestamptz not null default now(),
    primary key (partition_id, consumer_group)
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- No foreign key: a dead letter vetoes the cleanup of its partition instead.
-- payload is text, since jsonb refuses a NUL escape and reorders keys.
create table queen.log_dlq (
    id             uuid primary key default gen_random_uuid(),
    partition_id   uuid not null,
    consumer_group text not null,
    "offset"       bigint not null,
    message_id     uuid,
    transaction_id text,
    payload        text,
    error          text,
    retry_count    int default 0,
    failed_at      timestamptz default now()
);
create index log_dlq_partition_failed_idx on queen.log_dlq (partition_id, failed_at desc);
