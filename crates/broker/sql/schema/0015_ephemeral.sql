-- Ephemeral queues that were declared: their options. What is pushed to them is in no table.
create table queen.ephemeral_queues (
    tenant_id     uuid not null,
    name          text not null,
    -- NULL is the server's own default.
    max_bytes     bigint,
    max_length    bigint,
    drops_oldest  boolean not null default false,
    ttl_seconds   bigint,
    lease_seconds bigint,
    retry_limit   bigint,
    window_ms     bigint,
    window_count  bigint,
    created_at    timestamptz not null default now(),
    updated_at    timestamptz not null default now(),
    primary key (tenant_id, name)
);
