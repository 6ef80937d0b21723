-- What a consumer group asked for at first contact, and how far its discovery has looked.

-- The durable subscription, one per queue and group. Deleting an empty partition costs a
-- group nothing that this row cannot restore.
create table queen.consumer_groups_metadata (
    id                     uuid primary key default gen_random_uuid(),
    tenant_id              uuid not null default '00000000-0000-0000-0000-000000000001',
    consumer_group         text not null,
    queue_id               uuid references queen.queues (id) on delete cascade,
    partition_name         text not null default '',
    namespace              text not null default '',
    task                   text not null default '',
    subscription_mode      text not null,
    subscription_timestamp timestamptz not null,
    created_at             timestamptz not null default now(),
    unique nulls not distinct (tenant_id, consumer_group, queue_id, partition_name, namespace, task)
);
create index consumer_groups_metadata_queue_idx on queen.consumer_groups_metadata (queue_id);

-- When a group last looked through a whole queue and found nothing: what was written before needs no
-- second look.
create table queen.consumer_watermarks (
    queue_id           uuid not null references queen.queues (id) on delete cascade,
    consumer_group     text not null,
    last_empty_scan_at timestamptz not null default 'epoch',
    updated_at         timestamptz not null default now(),
    primary key (queue_id, consumer_group)
);
