-- Values by namespace and key, each of its own, with an expiry.

-- Every write takes a number, whatever key it writes: a version says which write a caller has seen. 0 is none.
create sequence queen.kv_version_seq;

-- Names sort by their bytes, so that a page of a prefix is one stretch of the primary key.
-- value is text, so that it comes back as sent.
create table queen.kv (
    tenant_id  uuid not null default '00000000-0000-0000-0000-000000000001',
    namespace  text collate "C" not null,
    key        text collate "C" not null,
    value      text not null,
    version    bigint not null,
    expires_at timestamptz,
    updated_at timestamptz not null,
    primary key (tenant_id, namespace, key)
) with (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);
create index kv_expires_idx on queen.kv (expires_at) where expires_at is not null;
