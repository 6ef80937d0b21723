-- Conflation: pops that say what the group's subscription wants, whatever the request does.
--
-- What is recorded wins. Each result has r_conflated, whether the group conflates in one of the queues, and r_conflict,
-- whether the request wants something else in one. If there is no message but something of that to be said, the result
-- is one row without a partition.

-- Whether a group conflates in some of the queues, and whether some of them disagree with p_wanted.
--
-- Lock:   none.
-- Result: one row; false twice where there is no subscription, as in queue mode.
create or replace function queen.log_conflation_v1(
    p_queue_ids uuid[], p_group text, p_wanted boolean, p_tenant uuid, out r_conflated boolean, out r_conflict boolean
) language sql stable as $$
    select coalesce(bool_or(m.conflation), false), coalesce(bool_or(m.conflation <> p_wanted), false)
    from queen.consumer_groups_metadata m
    where p_group <> '__QUEUE_MODE__' and m.tenant_id = p_tenant and m.consumer_group = p_group
      and m.queue_id = any (p_queue_ids) and m.partition_name = '' and m.namespace = '' and m.task = ''
$$;

-- log_pop_partition_v1 with conflation.
--
-- Lock:   as log_pop_partition_v1.
-- Result: as log_pop_partition_v1, and what is said above.
create or replace function queen.log_pop_partition_v2(
    p_queue text, p_partition text, p_group text, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean, p_sub_mode text, p_sub_from text, p_conflation boolean,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea, r_conflated boolean, r_conflict boolean
) language plpgsql as $$
declare
    v_queue_id uuid;
    v_found    boolean := false;
begin
    select q.id into v_queue_id
    from queen.queues q join queen.log_partitions p on p.queue_id = q.id
    where q.tenant_id = p_tenant and q.name = p_queue and p.name = p_partition;
    if not found then
        return;
    end if;
    perform queen.log_subscribe_v2(array[v_queue_id], p_group, p_sub_mode, p_sub_from, p_conflation, p_tenant);
    for r_pid, r_partition, r_queue, r_base, r_start_idx, r_take, r_msg_count, r_created_at, r_blob in
        select * from queen.log_pop_partition_v1(
            p_queue, p_partition, p_group, p_budget, p_lease_secs, p_worker, p_auto_ack, p_sub_mode, p_sub_from, false,
            p_tenant)
    loop
        if not v_found then
            select c.r_conflated, c.r_conflict into r_conflated, r_conflict
            from queen.log_conflation_v1(array[v_queue_id], p_group, p_conflation, p_tenant) c;
            v_found := true;
        end if;
        return next;
    end loop;
    if not v_found then
        select c.r_conflated, c.r_conflict into r_conflated, r_conflict
        from queen.log_conflation_v1(array[v_queue_id], p_group, p_conflation, p_tenant) c;
        if r_conflated or r_conflict then
            return next;
        end if;
    end if;
end
$$;

-- log_pop_queue_v1 with conflation.
--
-- Lock:   as log_pop_queue_v1.
-- Result: as log_pop_queue_v1, and what is said above.
create or replace function queen.log_pop_queue_v2(
    p_queue text, p_group text, p_partitions int, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean, p_sub_mode text, p_sub_from text, p_conflation boolean,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea, r_conflated boolean, r_conflict boolean
) language plpgsql as $$
declare
    v_queue_id uuid := queen.log_pop_queue_id_v1(p_queue, p_tenant);
    v_found    boolean := false;
begin
    if v_queue_id is null then
        return;
    end if;
    for r_pid, r_partition, r_queue, r_base, r_start_idx, r_take, r_msg_count, r_created_at, r_blob in
        select * from queen.log_pop_queues_v2(
            array[v_queue_id], p_group, p_partitions, p_budget, p_lease_secs, p_worker, p_auto_ack, p_sub_mode,
            p_sub_from, p_conflation, p_tenant)
    loop
        if not v_found then
            select c.r_conflated, c.r_conflict into r_conflated, r_conflict
            from queen.log_conflation_v1(array[v_queue_id], p_group, p_conflation, p_tenant) c;
            v_found := true;
        end if;
        return next;
    end loop;
    if not v_found then
        select c.r_conflated, c.r_conflict into r_conflated, r_conflict
        from queen.log_conflation_v1(array[v_queue_id], p_group, p_conflation, p_tenant) c;
        if r_conflated or r_conflict then
            return next;
        end if;
    end if;
end
$$;

-- log_pop_discover_v1 with conflation.
--
-- Lock:   as log_pop_discover_v1.
-- Result: as log_pop_discover_v1, and what is said above.
create or replace function queen.log_pop_discover_v2(
    p_namespace text, p_task text, p_group text, p_partitions int, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean, p_sub_mode text, p_sub_from text, p_conflation boolean,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea, r_conflated boolean, r_conflict boolean
) language plpgsql as $$
declare
    v_queue_ids uuid[] := queen.log_pop_matching_v1(p_namespace, p_task, p_tenant);
    v_found     boolean := false;
begin
    if v_queue_ids is null then
        return;
    end if;
    for r_pid, r_partition, r_queue, r_base, r_start_idx, r_take, r_msg_count, r_created_at, r_blob in
        select * from queen.log_pop_queues_v2(
            v_queue_ids, p_group, p_partitions, p_budget, p_lease_secs, p_worker, p_auto_ack, p_sub_mode, p_sub_from,
            p_conflation, p_tenant)
    loop
        if not v_found then
            select c.r_conflated, c.r_conflict into r_conflated, r_conflict
            from queen.log_conflation_v1(v_queue_ids, p_group, p_conflation, p_tenant) c;
            v_found := true;
        end if;
        return next;
    end loop;
    if not v_found then
        select c.r_conflated, c.r_conflict into r_conflated, r_conflict
        from queen.log_conflation_v1(v_queue_ids, p_group, p_conflation, p_tenant) c;
        if r_conflated or r_conflict then
            return next;
        end if;
    end if;
end
$$;

-- The subscriptions that conflate.
--
-- Lock:   none.
-- Result: queue and group; only of p_queue or p_group unless that is NULL.
create or replace function queen.log_conflating_v1(
    p_queue text, p_group text, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (r_queue text, r_group text) language sql stable as $$
    select q.name, m.consumer_group
    from queen.consumer_groups_metadata m join queen.queues q on q.id = m.queue_id
    where m.tenant_id = p_tenant and m.conflation
      and (p_queue is null or q.name = p_queue) and (p_group is null or m.consumer_group = p_group)
$$;
