-- Jobs and what hangs off a job. All times are of this server's clock.
--
-- No foreign key leads from a job to its parent or root: a parent may be deleted before its finished
-- children, whose references then dangle.

-- A UUID of version 7 for writers that name no id. The version and variant bits are laid over a random UUID.
create function ebbtide_jobs.new_id() returns uuid language sql volatile parallel safe as $$
    select encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                placing substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3)
                from 1 for 6),
            52, 1), 53, 1),
        'hex')::uuid
$$;

create table ebbtide_jobs.jobs (
    id                  uuid primary key default ebbtide_jobs.new_id(),
    type                varchar(255) not null,
    args                bytea not null default 'null',
    queue               varchar(255) not null default 'default',
    tenant              varchar(255) not null default '',
    metadata            jsonb,
    priority            int not null default 0,
    status              varchar(20) not null default 'pending'
        constraint jobs_status check (status in
            ('pending', 'running', 'waiting', 'paused', 'retrying', 'completed', 'failed', 'cancelled')),
    previous_status     varchar(20)
        constraint jobs_previous_status check (previous_status in ('pending', 'waiting')),
    attempt             int not null default 0,
    max_retries         int not null default 3,
    timeout             bigint not null default 0,
    determinism         int not null default 0
        constraint jobs_determinism check (determinism in (0, 1, 2)),
    last_error          text,
    dead_lettered_at    timestamptz,
    dead_letter_reason  text,
    run_at              timestamptz,
    started_at          timestamptz,
    completed_at        timestamptz,
    created_at          timestamptz not null default clock_timestamp(),
    updated_at          timestamptz not null default clock_timestamp(),
    locked_by           varchar(255) not null default '',
    locked_until        timestamptz,
    last_heartbeat_at   timestamptz,
    dispatch_token      uuid,
    unique_key          varchar(255) not null default '',
    parent_job_id       uuid,
    root_job_id         uuid,
    fan_out_id          uuid,
    fan_out_index       int not null default 0,
    waiting_signal_name varchar(255) not null default '',
    result              bytea,
    trace_context       bytea
);

-- Within one queue and priority the due jobs are one range, so that jobs of the future cost a claim nothing.
create index jobs_claim on ebbtide_jobs.jobs (queue, priority desc, (coalesce(run_at, created_at)), id)
    where status = 'pending';
create unique index jobs_unique_live on ebbtide_jobs.jobs (unique_key)
    where unique_key <> '' and status in ('pending', 'running', 'waiting', 'paused', 'retrying');
create index jobs_unique_key on ebbtide_jobs.jobs (unique_key) where unique_key <> '';
create index jobs_stale on ebbtide_jobs.jobs ((coalesce(last_heartbeat_at, started_at, locked_until)))
    where status = 'running';
create index jobs_retention on ebbtide_jobs.jobs (status, completed_at, id)
    where status in ('completed', 'failed', 'cancelled') and completed_at is not null;
create index jobs_completed_at on ebbtide_jobs.jobs (completed_at) where completed_at is not null;
create index jobs_dead_lettered_at on ebbtide_jobs.jobs (dead_lettered_at desc, id desc)
    where dead_lettered_at is not null;
create index jobs_status on ebbtide_jobs.jobs (status, created_at desc);
create index jobs_queue on ebbtide_jobs.jobs (queue, created_at desc);
create index jobs_type on ebbtide_jobs.jobs (type);
create index jobs_fan_out on ebbtide_jobs.jobs (fan_out_id, status) where fan_out_id is not null;
create index jobs_live_parent on ebbtide_jobs.jobs (parent_job_id)
    where parent_job_id is not null and status in ('pending', 'running', 'waiting', 'paused', 'retrying');
create index jobs_live_root on ebbtide_jobs.jobs (root_job_id)
    where root_job_id is not null and status in ('pending', 'running', 'waiting', 'paused', 'retrying');
create index jobs_parent on ebbtide_jobs.jobs (parent_job_id) where parent_job_id is not null;
create index jobs_root on ebbtide_jobs.jobs (root_job_id) where root_job_id is not null;
create index jobs_tenant on ebbtide_jobs.jobs (tenant) where tenant <> '';
create index jobs_metadata on ebbtide_jobs.jobs using gin (metadata) where metadata is not null;

create table ebbtide_jobs.checkpoints (
    id                uuid primary key default ebbtide_jobs.new_id(),
    job_id            uuid not null references ebbtide_jobs.jobs (id) on delete cascade,
    call_index        int not null,
    call_type         varchar(255) not null,
    result            bytea,
    error             text,
    error_kind        varchar(64),
    error_cause       text,
    error_delay_nanos bigint,
    span_end          int not null default 0,
    result_shape      varchar(32) not null default '',
    created_at        timestamptz not null default clock_timestamp(),
    constraint checkpoints_call unique (job_id, call_index, call_type)
);

create table ebbtide_jobs.signals (
    id          uuid primary key default ebbtide_jobs.new_id(),
    job_id      uuid not null references ebbtide_jobs.jobs (id) on delete cascade,
    name        varchar(255) not null,
    payload     bytea,
    consumed_at timestamptz,
    created_at  timestamptz not null default clock_timestamp()
);
create index signals_job on ebbtide_jobs.signals (job_id);
create index signals_pending on ebbtide_jobs.signals (job_id, name, created_at, id) where consumed_at is null;
create index signals_retention on ebbtide_jobs.signals (consumed_at, id) where consumed_at is not null;

-- No foreign key: a lock is written before its job, and outlives a job that was deleted by hand.
create table ebbtide_jobs.unique_locks (
    scope_hash char(64) primary key,
    job_id     uuid not null,
    expires_at timestamptz not null,
    created_at timestamptz not null default clock_timestamp()
);
create index unique_locks_job on ebbtide_jobs.unique_locks (job_id, expires_at);
create index unique_locks_expiry on ebbtide_jobs.unique_locks (expires_at, scope_hash);

create table ebbtide_jobs.fan_outs (
    id              uuid primary key default ebbtide_jobs.new_id(),
    parent_job_id   uuid not null references ebbtide_jobs.jobs (id) on delete cascade,
    total_count     int not null,
    completed_count int not null default 0,
    failed_count    int not null default 0,
    cancelled_count int not null default 0,
    strategy        varchar(20) not null default 'fail_fast'
        constraint fan_outs_strategy check (strategy in ('fail_fast', 'collect_all', 'threshold')),
    threshold       double precision not null default 1,
    status          varchar(20) not null default 'pending'
        constraint fan_outs_status check (status in ('pending', 'completed', 'failed', 'cancelled')),
    timeout_at      timestamptz,
    cancel_on_fail  boolean not null default false,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp()
);
create index fan_outs_parent on ebbtide_jobs.fan_outs (parent_job_id, status);
create index fan_outs_timeout on ebbtide_jobs.fan_outs (timeout_at) where timeout_at is not null;
