-- Queues and their partitions: identity, policy, and the row that serialises each partition.

-- One row a queue and tenant. A window of 0 or NULL is off; the defaults are those of a queue that a
-- push makes, and configure writes its own.
create table queen.queues (
    id                          uuid primary key default gen_random_uuid(),
    name                        varchar(255) not null,
    tenant_id                   uuid not null default '00000000-0000-0000-0000-000000000001',
    namespace                   varchar(255),
    task                        varchar(255),
    priority                    int default 0,
    lease_time                  int default 60,      -- seconds
    retry_limit                 int default 3,
    retry_delay                 int default 1000,    -- milliseconds
    ttl                         int default 3600,    -- seconds
    dead_letter_queue           boolean default true,
    dlq_after_max_retries       boolean default true,
    delayed_processing          int default 0,       -- seconds
    window_buffer               int default 0,       -- seconds
    retention_seconds           int default 0,
    completed_retention_seconds int default 0,
    retention_enabled           boolean default false,
    encryption_enabled          boolean default false,
    max_wait_time_seconds       int default 0,
    max_queue_size              int default 0,
    min_pop_wait_time           int default 0,       -- milliseconds
    dedup_window_seconds        int not null default 3600,
    created_at                  timestamptz not null default now()
);
create unique index queues_tenant_name_uk on queen.queues (tenant_id, name);
create index queues_name_idx on queen.queues (name);

-- The row lock of a partition serialises everything that moves its offsets or watermarks.
-- last_write_at is indexed, so changing it makes an update leave the HOT path; writers
-- therefore change it at most once a second.
create table queen.log_partitions (
    id            uuid primary key default gen_random_uuid(),
    queue_id      uuid not null references queen.queues (id) on delete cascade,
    name          text not null default 'Default',
    last_offset   bigint not null default -1,
    log_start     bigint not null default 0,
    txns_start    bigint not null default 0,
    last_write_at timestamptz not null default now(),
    created_at    timestamptz not null default now(),
    unique (queue_id, name)
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0,
    -- Truncation takes an access-exclusive lock on the table that every push and pop needs.
    vacuum_truncate = off
);
create index log_partitions_queue_write_idx on queen.log_partitions (queue_id, last_write_at);
