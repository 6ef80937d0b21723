-- Creates the queues and partitions that a push names and that do not exist.
--
-- Lock:   queue rows are inserted in (tenant, name) order, then partition rows in (queue, name) order,
--         so that servers that create the same ones at once queue up and do not deadlock.
-- Result: nothing. What exists stays as it is.
-- Why:    the anti-joins keep a push to names that exist from touching any row; the conflict clauses
--         are for the race alone. Namespace and task are the first two parts of a dotted name.
create or replace function queen.log_provision_v1(
    p_queues text[], p_partitions text[], p_tenants uuid[] default null
) returns void language plpgsql as $$
begin
    insert into queen.queues (tenant_id, name, namespace, task)
    select n.tenant, n.queue, split_part(n.queue, '.', 1), nullif(split_part(n.queue, '.', 2), '')
    from (
        select distinct coalesce(i.tenant, '00000000-0000-0000-0000-000000000001') as tenant, i.queue
        from unnest(p_queues, p_tenants) i (queue, tenant)
    ) n
    where not exists (select from queen.queues q where q.tenant_id = n.tenant and q.name = n.queue)
    order by n.tenant, n.queue
    on conflict (tenant_id, name) do nothing;

    insert into queen.log_partitions (queue_id, name)
    select n.queue_id, n.partition
    from (
        select distinct q.id as queue_id, i.partition
        from unnest(p_queues, p_partitions, p_tenants) i (queue, partition, tenant)
        join queen.queues q
          on q.tenant_id = coalesce(i.tenant, '00000000-0000-0000-0000-000000000001') and q.name = i.queue
    ) n
    where not exists (
        select from queen.log_partitions p where p.queue_id = n.queue_id and p.name = n.partition
    )
    order by n.queue_id, n.partition
    on conflict (queue_id, name) do nothing;
end
$$;
