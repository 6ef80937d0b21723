-- What the workers of a fleet agree on. Retention never touches these tables.

create table queue_states (
    queue      text primary key not null,
    paused     integer not null default 0,
    paused_at  integer,
    paused_by  text not null default '',
    updated_at integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000)
) strict;

create table scheduled_fires (
    name          text primary key not null,
    last_fire_at  integer not null,
    last_fired_at integer
) strict;

create table leases (
    name       text primary key not null,
    owner      text not null,
    expires_at integer not null
) strict;

create table concurrency_slots (
    slot_name  text not null,
    job_id     blob not null,
    worker_id  text not null,
    expires_at integer not null,
    primary key (slot_name, job_id)
) strict;
create index concurrency_slots_expiry on concurrency_slots (slot_name, expires_at);
create index concurrency_slots_job on concurrency_slots (job_id);

create table rate_limit_windows (
    limit_name   text not null,
    window_start integer not null,
    count        integer not null default 0,
    created_at   integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000),
    updated_at   integer not null default (cast(round(unixepoch('subsec') * 1000) as integer) * 1000),
    primary key (limit_name, window_start)
) strict;

create table job_stats (
    id          integer primary key,
    queue       text not null,
    "timestamp" integer not null,
    pending     integer not null default 0,
    running     integer not null default 0,
    completed   integer not null default 0,
    failed      integer not null default 0,
    retried     integer not null default 0,
    constraint job_stats_minute unique (queue, "timestamp")
) strict;
create index job_stats_timestamp on job_stats ("timestamp");
