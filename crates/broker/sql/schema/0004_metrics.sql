-- Audit and metrics: everything here is written beside the data path and purged by age.

-- No foreign key: the row must outlive the partition whose deletion it records.
-- queue_id and tenant_id let readers filter rows of partitions that are gone.
create table queen.retention_history (
    id               uuid primary key default gen_random_uuid(),
    partition_id     uuid,
    messages_deleted int default 0,
    retention_type   varchar(50),
    executed_at      timestamptz default now(),
    queue_id         uuid,
    tenant_id        uuid
);
create index retention_history_partition_idx on queen.retention_history (partition_id);
create index retention_history_executed_idx on queen.retention_history (executed_at);

-- What a server's process used between two flushes. No queue is named, so nothing of a tenant is here.
create table queen.system_metrics (
    id           uuid primary key default gen_random_uuid(),
    "timestamp"  timestamptz not null,
    hostname     text not null,
    port         int not null,
    worker_id    text not null,
    sample_count int not null default 60,
    metrics      jsonb not null,
    unique ("timestamp", hostname, port, worker_id)
);

-- What a server did between two flushes: counts, and gauges of its pool and its timers.
create table queen.worker_metrics (
    hostname            text not null,
    worker_id           int not null,
    pid                 int not null,
    bucket_time         timestamptz not null,
    avg_event_loop_lag_ms int not null default 0,
    max_event_loop_lag_ms int not null default 0,
    avg_free_slots      int not null default 0,
    min_free_slots      int not null default 0,
    db_connections      int not null default 0,
    avg_job_queue_size  int not null default 0,
    max_job_queue_size  int not null default 0,
    backoff_size        int not null default 0,
    jobs_done           bigint not null default 0,
    push_request_count  bigint not null default 0,
    pop_request_count   bigint not null default 0,
    ack_request_count   bigint not null default 0,
    transaction_count   bigint not null default 0,
    push_message_count  bigint not null default 0,
    pop_message_count   bigint not null default 0,
    ack_message_count   bigint not null default 0,
    ack_success_count   bigint not null default 0,
    ack_failed_count    bigint not null default 0,
    lag_count           bigint not null default 0,
    avg_lag_ms          bigint not null default 0,
    max_lag_ms          bigint not null default 0,
    db_error_count      bigint not null default 0,
    dlq_count           bigint not null default 0,
    created_at          timestamptz not null default now(),
    primary key (hostname, worker_id, pid, bucket_time)
);
create index worker_metrics_bucket_idx on queen.worker_metrics (bucket_time);

-- Lifetime totals, one row, kept by a trigger on worker_metrics.
create table queen.worker_metrics_summary (
    id                  int primary key default 1 check (id = 1),
    push_request_count  bigint not null default 0,
    pop_request_count   bigint not null default 0,
    ack_request_count   bigint not null default 0,
    transaction_count   bigint not null default 0,
    push_message_count  bigint not null default 0,
    pop_message_count   bigint not null default 0,
    ack_message_count   bigint not null default 0,
    ack_success_count   bigint not null default 0,
    ack_failed_count    bigint not null default 0,
    db_error_count      bigint not null default 0,
    dlq_count           bigint not null default 0,
    updated_at          timestamptz not null default now()
);
insert into queen.worker_metrics_summary default values;

-- No foreign key: a metric of a partition that is being deleted must not lock its queue.
create table queen.queue_lag_metrics (
    bucket_time        timestamptz not null,
    queue_id           uuid not null,
    pop_count          bigint not null default 0,
    avg_lag_ms         bigint not null default 0,
    max_lag_ms         bigint not null default 0,
    lag_count          bigint not null default 0,
    push_request_count bigint not null default 0,
    push_message_count bigint not null default 0,
    ack_request_count  bigint not null default 0,
    ack_success_count  bigint not null default 0,
    ack_failed_count   bigint not null default 0,
    transaction_count  bigint not null default 0,
    pop_empty_count    bigint not null default 0,
    partitions_created bigint not null default 0,
    partitions_deleted bigint not null default 0,
    partition_count    bigint,
    parked_count       int not null default 0,
    primary key (bucket_time, queue_id)
);
create index queue_lag_metrics_queue_idx on queen.queue_lag_metrics (queue_id);

-- Pops that waited on one server, by queue name: a pop may wait for a queue that does not exist yet.
create table queen.queue_parked_replica (
    bucket_time  timestamptz not null,
    queue_name   text not null,
    hostname     text not null,
    worker_id    int not null,
    tenant_id    uuid not null default '00000000-0000-0000-0000-000000000001',
    parked_count int not null default 0,
    primary key (bucket_time, queue_name, hostname, worker_id, tenant_id)
);

-- Births and deaths of partitions, appended by triggers that run under partition locks.
-- No key and no index: an upsert of a shared counter row there can deadlock with other
-- lockers. The metrics flush folds these rows into queue_lag_metrics.
create table queen.partition_events (
    queue_id uuid not null,
    at       timestamptz not null,
    created  int not null default 0,
    deleted  int not null default 0
);

-- Counters of a queue, a task, a namespace or all, as of last_computed_at. They follow from the
-- partitions' offsets and can be made again at any time.
create table queen.stats (
    stat_type         text not null,
    stat_key          text not null,
    queue_id          uuid references queen.queues (id) on delete cascade,
    tenant_id         uuid not null default '00000000-0000-0000-0000-000000000001',
    partition_count   bigint not null default 0,
    total_messages    bigint not null default 0,
    pending_messages  bigint not null default 0,
    processing_messages bigint not null default 0,
    completed_messages bigint not null default 0,
    dead_letter_messages bigint not null default 0,
    retained_bytes    bigint not null default 0,
    oldest_message_at timestamptz,
    newest_message_at timestamptz,
    avg_lag_seconds   bigint not null default 0,
    median_lag_seconds bigint not null default 0,
    min_lag_seconds   bigint not null default 0,
    max_lag_seconds   bigint not null default 0,
    avg_offset_lag    bigint not null default 0,
    median_offset_lag bigint not null default 0,
    min_offset_lag    bigint not null default 0,
    max_offset_lag    bigint not null default 0,
    ingested_per_second double precision not null default 0,
    processed_per_second double precision not null default 0,
    prev_total_messages bigint,
    prev_completed_messages bigint,
    prev_snapshot_at  timestamptz,
    last_computed_at  timestamptz not null default now(),
    primary key (stat_type, stat_key)
);
create index stats_queue_idx on queen.stats (queue_id);

-- Kept for tools that expect it; nothing writes or reads it.
create table queen.stats_history (
    stat_type   text not null,
    stat_key    text not null,
    bucket_time timestamptz not null,
    metrics     jsonb,
    primary key (stat_type, stat_key, bucket_time)
);
