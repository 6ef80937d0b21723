-- Jobs and what hangs off a job. All times are microseconds since 1970, UTC; ids are the 16 bytes of a UUID.
--
-- No foreign key leads from a job to its parent or root: a parent may be deleted before its finished
-- children, whose references then dangle.

create table jobs (
    id                  blob primary key not null default (randomblob(16)) check (length(id) = 16),
    type                text not null,
    args                blob not null default (x'6e756c6c'),
    queue               text not null default 'default',
    tenant              text not null default '',
    metadata            text,
    priority            integer not null default 0,
    status              text not null default 'pending'
        constraint jobs_status check (status in
            ('pending', 'running', 'waiting', 'paused', 'retrying', 'completed', 'failed', 'cancelled')),
    previous_status     text
        constraint jobs_previous_status check (previous_status in ('pending', 'waiting')),
    attempt             integer not null default 0,
    max_retries         integer not null default 3,
    timeout             integer not null default 0,
    determinism         integer not null default 0
        constraint jobs_determinism check (determinism in (0, 1, 2)),
    last_error          text,
    dead_lettered_at    integer,
    dead_letter_reason  text,
    run_at              integer,
    started_at          integer,
    completed_at        integer,
    created_at          integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000),
    updated_at          integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000),
    locked_by           text not null default '',
    locked_until        integer,
    last_heartbeat_at   integer,
    dispatch_token      blob,
    unique_key          text not null default '',
    parent_job_id       blob,
    root_job_id         blob,
    fan_out_id          blob,
    fan_out_index       integer not null default 0,
    waiting_signal_name text not null default '',
    result              blob,
    trace_context       blob
) strict;

-- Within one queue and priority the due jobs are one range, so that jobs of the future cost a claim nothing.
create index jobs_claim on jobs (queue, priority desc, coalesce(run_at, created_at), id)
    where status = 'pending';
create unique index jobs_unique_live on jobs (unique_key)
    where unique_key <> '' and status in ('pending', 'running', 'waiting', 'paused', 'retrying');
create index jobs_unique_key on jobs (unique_key) where unique_key <> '';
create index jobs_stale on jobs (coalesce(last_heartbeat_at, started_at, locked_until))
    where status = 'running';
create index jobs_retention on jobs (status, completed_at, id)
    where status in ('completed', 'failed', 'cancelled') and completed_at is not null;
create index jobs_completed_at on jobs (completed_at) where completed_at is not null;
create index jobs_dead_lettered_at on jobs (dead_lettered_at desc, id desc)
    where dead_lettered_at is not null;
create index jobs_status on jobs (status, created_at desc);
create index jobs_queue on jobs (queue, created_at desc);
create index jobs_type on jobs (type);
create index jobs_fan_out on jobs (fan_out_id, status) where fan_out_id is not null;
create index jobs_live_parent on jobs (parent_job_id)
    where parent_job_id is not null and status in ('pending', 'running', 'waiting', 'paused', 'retrying');
create index jobs_live_root on jobs (root_job_id)
    where root_job_id is not null and status in ('pending', 'running', 'waiting', 'paused', 'retrying');
create index jobs_parent on jobs (parent_job_id) where parent_job_id is not null;
create index jobs_root on jobs (root_job_id) where root_job_id is not null;
create index jobs_tenant on jobs (tenant) where tenant <> '';

create table checkpoints (
    id                blob primary key not null default (randomblob(16)) check (length(id) = 16),
    job_id            blob not null references jobs (id) on delete cascade,
    call_index        integer not null,
    call_type         text not null,
    result            blob,
    error             text,
    error_kind        text,
    error_cause       text,
    error_delay_nanos integer,
    span_end          integer not null default 0,
    result_shape      text not null default '',
    created_at        integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000),
    constraint checkpoints_call unique (job_id, call_index, call_type)
) strict;

create table signals (
    id          blob primary key not null default (randomblob(16)) check (length(id) = 16),
    job_id      blob not null references jobs (id) on delete cascade,
    name        text not null,
    payload     blob,
    consumed_at integer,
    created_at  integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000)
) strict;
create index signals_job on signals (job_id);
create index signals_pending on signals (job_id, name, created_at, id) where consumed_at is null;
create index signals_retention on signals (consumed_at, id) where consumed_at is not null;

-- No foreign key: a lock is written before its job, and outlives a job that was deleted by hand.
create table unique_locks (
    scope_hash text primary key not null,
    job_id     blob not null,
    expires_at integer not null,
    created_at integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000)
) strict;
create index unique_locks_job on unique_locks (job_id, expires_at);
create index unique_locks_expiry on unique_locks (expires_at, scope_hash);

create table fan_outs (
    id              blob primary key not null default (randomblob(16)) check (length(id) = 16),
    parent_job_id   blob not null references jobs (id) on delete cascade,
    total_count     integer not null,
    completed_count integer not null default 0,
    failed_count    integer not null default 0,
    cancelled_count integer not null default 0,
    strategy        text not null default 'fail_fast'
        constraint fan_outs_strategy check (strategy in ('fail_fast', 'collect_all', 'threshold')),
    threshold       real not null default 1,
    status          text not null default 'pending'
        constraint fan_outs_status check (status in ('pending', 'completed', 'failed', 'cancelled')),
    timeout_at      integer,
    cancel_on_fail  integer not null default 0,
    created_at      integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000),
    updated_at      integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000)
) strict;
create index fan_outs_parent on fan_outs (parent_job_id, status);
create index fan_outs_timeout on fan_outs (timeout_at) where timeout_at is not null;
