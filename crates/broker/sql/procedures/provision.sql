-- The ids of partitions by name.
--
-- Lock:   none.
-- Result: an array in input order; NULL for one that does not exist.
-- Why:    a table that just grew has no statistics, and the planner would walk a queue's partitions by
--         another index. Asking for the order of (queue_id, name) with sorts switched off leaves it one plan.
create or replace function queen.log_partition_ids_v1(
    p_queues text[], p_partitions text[], p_tenants uuid[] default null
) returns uuid[] language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set enable_sort = off set enable_bitmapscan = off
as $$
begin
    return (
        select array_agg(case when n.name = i.partition then n.id end order by i.ord)
        from unnest(p_queues, p_partitions, p_tenants) with ordinality i (queue, partition, tenant, ord)
        left join queen.queues q
          on q.tenant_id = coalesce(i.tenant, '00000000-0000-0000-0000-000000000001') and q.name = i.queue
        left join lateral (
            select p.id, p.name from queen.log_partitions p
            where p.queue_id = q.id and p.name >= i.partition
            order by p.queue_id, p.name
            limit 1
        ) n on true
    );
end
$$;

-- Creates the queues and partitions that a push names and that do not exist.
--
-- Lock:   queue rows are inserted in (tenant, name) order, then partition rows in (queue, name) order,
--         so that servers that create the same ones at once queue up and do not deadlock.
-- Result: the partitions' ids, as log_partition_ids_v1. What exists stays as it is.
-- Why:    names that exist cost no write; the conflict clauses are for the race alone. Namespace and task
--         are the first two parts of a dotted name.
create or replace function queen.log_provision_v1(
    p_queues text[], p_partitions text[], p_tenants uuid[] default null
) returns uuid[] language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_ids uuid[] := queen.log_partition_ids_v1(p_queues, p_partitions, p_tenants);
begin
    if array_position(v_ids, null) is null then
        return v_ids;
    end if;

    insert into queen.queues (tenant_id, name, namespace, task)
    select n.tenant, n.queue, split_part(n.queue, '.', 1), nullif(split_part(n.queue, '.', 2), '')
    from (
        select distinct coalesce(i.tenant, '00000000-0000-0000-0000-000000000001') as tenant, i.queue
        from unnest(p_queues, p_tenants) i (queue, tenant)
    ) n
    where not exists (select from queen.queues q where q.tenant_id = n.tenant and q.name = n.queue)
    order by n.tenant, n.queue
    on conflict (tenant_id, name) do nothing;

    insert into queen.log_partitions (queue_id, name, oldest_live_at, oldest_txn_at)
    select n.queue_id, n.partition, null, null
    from (
        select distinct q.id as queue_id, i.partition
        from unnest(p_queues, p_partitions, p_tenants, v_ids) i (queue, partition, tenant, id)
        join queen.queues q
          on q.tenant_id = coalesce(i.tenant, '00000000-0000-0000-0000-000000000001') and q.name = i.queue
        where i.id is null
    ) n
    order by n.queue_id, n.partition
    on conflict (queue_id, name) do nothing;

    return queen.log_partition_ids_v1(p_queues, p_partitions, p_tenants);
end
$$;

-- Which queues want their payloads encrypted.
--
-- Lock:   none.
-- Result: an array in input order; false for a queue that does not exist, since one that a push makes is not.
create or replace function queen.log_queue_encryption_v1(p_queues text[], p_tenants uuid[] default null)
returns boolean[] language sql stable as $$
    select array_agg(coalesce(q.encryption_enabled, false) order by i.ord)
    from unnest(p_queues, p_tenants) with ordinality i (queue, tenant, ord)
    left join queen.queues q
      on q.tenant_id = coalesce(i.tenant, '00000000-0000-0000-0000-000000000001') and q.name = i.queue
$$;
