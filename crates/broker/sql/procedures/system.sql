-- Switches that all servers obey, and the declarations of ephemeral queues.

-- The switches that are on.
--
-- Lock:   none.
-- Result: their keys.
create or replace function queen.system_switches_v1() returns text[] language sql stable as $$
    select coalesce(array_agg(s.key order by s.key), '{}')
    from queen.system_state s
    where s.value = 'true'::jsonb;
$$;

-- Turns a switch on or off.
--
-- Lock:   its row.
create or replace function queen.system_switch_v1(p_key text, p_is_on boolean) returns void language sql as $$
    insert into queen.system_state (key, value) values (p_key, to_jsonb(p_is_on))
    on conflict (key) do update set value = excluded.value, updated_at = now();
$$;

-- Declares an ephemeral queue, or replaces what was declared.
--
-- Lock:   its row.
create or replace function queen.ephemeral_declare_v1(
    p_tenant uuid, p_name text, p_max_bytes bigint, p_max_length bigint, p_drops_oldest boolean, p_ttl_seconds bigint,
    p_lease_seconds bigint, p_retry_limit bigint, p_window_ms bigint, p_window_count bigint
) returns void language sql as $$
    insert into queen.ephemeral_queues as q (
        tenant_id, name, max_bytes, max_length, drops_oldest, ttl_seconds, lease_seconds, retry_limit, window_ms, window_count
    ) values (
        p_tenant, p_name, p_max_bytes, p_max_length, p_drops_oldest, p_ttl_seconds, p_lease_seconds, p_retry_limit,
        p_window_ms, p_window_count
    )
    on conflict (tenant_id, name) do update set
        max_bytes = excluded.max_bytes,
        max_length = excluded.max_length,
        drops_oldest = excluded.drops_oldest,
        ttl_seconds = excluded.ttl_seconds,
        lease_seconds = excluded.lease_seconds,
        retry_limit = excluded.retry_limit,
        window_ms = excluded.window_ms,
        window_count = excluded.window_count,
        updated_at = now();
$$;

-- Takes a declaration back.
--
-- Lock:   its row.
-- Result: whether there was one.
create or replace function queen.ephemeral_delete_v1(p_tenant uuid, p_name text) returns boolean language sql as $$
    with gone as (
        delete from queen.ephemeral_queues q where q.tenant_id = p_tenant and q.name = p_name returning 1
    )
    select exists (select from gone);
$$;

-- What is declared, by name, at most p_limit rows.
--
-- Lock:   none.
create or replace function queen.ephemeral_declared_v1(p_tenant uuid, p_limit int)
returns table (
    name text, max_bytes bigint, max_length bigint, drops_oldest boolean, ttl_seconds bigint, lease_seconds bigint,
    retry_limit bigint, window_ms bigint, window_count bigint
) language sql stable as $$
    select q.name, q.max_bytes, q.max_length, q.drops_oldest, q.ttl_seconds, q.lease_seconds, q.retry_limit,
        q.window_ms, q.window_count
    from queen.ephemeral_queues q
    where q.tenant_id = p_tenant
    order by q.name
    limit p_limit;
$$;
