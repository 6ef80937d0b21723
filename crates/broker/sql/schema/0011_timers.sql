-- Messages that are to be pushed later, by queue and key.

-- No foreign key to queues: the queue is made when the message is pushed, as by any other push.
-- due_at is when a server looks at the row next: the time of delivery, the end of a claim, or the end of a pause.
create table queen.log_timers (
    tenant_id     uuid not null default '00000000-0000-0000-0000-000000000001',
    queue         text collate "C" not null,
    timer_key     text collate "C" not null,
    partition     text not null,
    deliver_at    timestamptz not null,
    due_at        timestamptz not null,
    txn           text not null,
    message_id    uuid not null,
    payload       bytea not null,
    payload_zstd  boolean not null,
    payload_bytes int not null,  -- once it is unpacked
    encrypted     boolean not null,
    producer_sub  text,
    attempts      int not null default 0,
    last_error    text,
    claim_token   uuid,
    claimed_until timestamptz,
    created_at    timestamptz not null,
    updated_at    timestamptz not null,
    primary key (tenant_id, queue, timer_key)
) with (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
create index log_timers_due_idx on queen.log_timers (due_at);
