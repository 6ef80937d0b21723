-- What the workers of a fleet agree on. Retention never touches these tables.

create table ebbtide_jobs.queue_states (
    queue      varchar(255) primary key,
    paused     boolean not null default false,
    paused_at  timestamptz,
    paused_by  varchar(255) not null default '',
    updated_at timestamptz not null default clock_timestamp()
);

create table ebbtide_jobs.scheduled_fires (
    name          varchar(255) primary key,
    last_fire_at  timestamptz not null,
    last_fired_at timestamptz
);

create table ebbtide_jobs.leases (
    name       varchar(128) primary key,
    owner      varchar(255) not null,
    expires_at timestamptz not null
);

create table ebbtide_jobs.concurrency_slots (
    slot_name  varchar(255) not null,
    job_id     uuid not null,
    worker_id  varchar(255) not null,
    expires_at timestamptz not null,
    primary key (slot_name, job_id)
);
create index concurrency_slots_expiry on ebbtide_jobs.concurrency_slots (slot_name, expires_at);
create index concurrency_slots_job on ebbtide_jobs.concurrency_slots (job_id);

create table ebbtide_jobs.rate_limit_windows (
    limit_name   varchar(255) not null,
    window_start timestamptz not null,
    count        bigint not null default 0,
    created_at   timestamptz not null default clock_timestamp(),
    updated_at   timestamptz not null default clock_timestamp(),
    primary key (limit_name, window_start)
);

create table ebbtide_jobs.job_stats (
    id          bigint generated always as identity primary key,
    queue       varchar(255) not null,
    "timestamp" timestamptz not null,
    pending     bigint not null default 0,
    running     bigint not null default 0,
    completed   bigint not null default 0,
    failed      bigint not null default 0,
    retried     bigint not null default 0,
    constraint job_stats_minute unique (queue, "timestamp")
);
create index job_stats_timestamp on ebbtide_jobs.job_stats ("timestamp");
