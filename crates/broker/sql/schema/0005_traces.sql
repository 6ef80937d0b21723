-- Diagnostic traces. They outlive messages and partitions, and nothing purges them.

-- One note about a message, by what identifies it. No foreign key: the message may be gone, or never come.
create table queen.message_traces (
    id             uuid primary key default gen_random_uuid(),
    message_id     uuid,
    partition_id   uuid not null,
    transaction_id text not null,
    consumer_group text,
    event_type     text not null default 'info',
    data           text not null,
    worker_id      text,
    created_at     timestamptz not null default now()
);
-- A transaction id can exceed what a b-tree entry holds, so its hash is indexed.
create index message_traces_message_idx
    on queen.message_traces (partition_id, hashtextextended(transaction_id, 0), created_at);

-- The names under which a trace can be found again; without one it is found by its message only.
create table queen.message_trace_names (
    trace_id   uuid not null references queen.message_traces (id) on delete cascade,
    trace_name varchar(255) not null,
    primary key (trace_id, trace_name)
);
create index message_trace_names_name_idx on queen.message_trace_names (trace_name);
