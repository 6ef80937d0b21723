-- Consumer groups as an operator sees them: how far they are, set them elsewhere, forget them.

-- Where a seek puts a cursor in one partition.
--
-- Lock:   none; the caller keeps retention out by its share of the partition.
-- Result: the offset before the first message created at p_at or later, the tail if p_at is NULL; and 'start' or
--         'end' where p_at lies before the first or after the last message, so that the cursor stops there.
-- Why:    created_at never falls along base_offset, so halving the offsets finds the segment in at most 63 probes
--         of the primary key; walking there would cost the backlog.
create or replace function queen.log_seek_target_v1(
    p_pid uuid, p_log_start bigint, p_last_offset bigint, p_at timestamptz,
    out r_committed bigint, out r_clamped text
) language plpgsql stable as $$
declare
    v_low   bigint := p_log_start;
    v_high  bigint := p_last_offset + 1;
    v_mid   bigint;
    v_probe record;
begin
    r_committed := p_last_offset;
    if p_at is null then
        return;
    end if;
    select s.created_at into v_probe from queen.log_segments s
    where s.partition_id = p_pid and p_log_start <= s.base_offset
    order by s.base_offset
    limit 1;
    if found and p_at <= v_probe.created_at then
        r_committed := p_log_start - 1;
        r_clamped := case when p_at < v_probe.created_at then 'start' end;
        return;
    end if;
    -- Every segment below v_low is older than p_at; none from v_high on is, and the first of those follows r_committed.
    r_clamped := 'end';
    while v_low < v_high loop
        v_mid := v_low + (v_high - v_low) / 2;
        select s.base_offset, s.created_at into v_probe from queen.log_segments s
        where s.partition_id = p_pid and v_mid <= s.base_offset and s.base_offset < v_high
        order by s.base_offset
        limit 1;
        if not found then
            v_high := v_mid;
        elsif p_at <= v_probe.created_at then
            v_high := v_mid;
            r_committed := v_probe.base_offset - 1;
            r_clamped := null;
        else
            v_low := v_probe.base_offset + 1;
        end if;
    end loop;
end
$$;

-- Sets the cursors of a group in at most p_max_rows partitions of a queue, those after p_after by name; only in
-- p_partition unless that is NULL. A group without a cursor there gets one.
--
-- Lock:   the partitions for key share, by ascending id; then the cursors, in the same order; then the watermark.
-- Cutoff: to the first message created at p_at or later; NULL is the tail.
-- Result: {"moved", "clamped_to_start", "clamped_to_end", "last": name, "done": bool}
-- Why:    leases and failures belong to the old place. The watermark goes in the same commit: a seek back makes
--         partitions unread that nobody writes to, and discovery would not look at them. One transaction over a
--         whole queue would keep retention and consumers out of all of it.
create or replace function queen.log_seek_step_v1(
    p_queue_id uuid, p_partition text, p_group text, p_at timestamptz, p_after text, p_max_rows int
) returns jsonb language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_rows_max int := greatest(coalesce(p_max_rows, 1), 1);
    v_pids     uuid[];
    v_last     text;
    v_moved    record;
begin
    select array_agg(n.id), max(n.name) into v_pids, v_last
    from (
        select p.id, p.name from queen.log_partitions p
        where p.queue_id = p_queue_id and coalesce(p_after, '') < p.name and (p_partition is null or p.name = p_partition)
        order by p.queue_id, p.name
        limit v_rows_max
    ) n;
    perform from queen.log_partitions p where p.id = any (v_pids) order by p.id for key share;

    with targets as materialized (
        select p.id, t.r_committed, t.r_clamped
        from queen.log_partitions p
        cross join lateral queen.log_seek_target_v1(p.id, p.log_start, p.last_offset, p_at) t
        where p.id = any (v_pids)
    ), moved as (
        insert into queen.log_consumers (partition_id, consumer_group, conflated, committed)
        select t.id, p_group, coalesce((
            select m.conflation from queen.log_partitions p join queen.consumer_groups_metadata m on m.queue_id = p.queue_id
            where p.id = t.id and m.consumer_group = p_group and m.partition_name = '' and m.namespace = '' and m.task = ''
            limit 1), false), t.r_committed
        from targets t order by t.id
        on conflict (partition_id, consumer_group) do update set
            committed = excluded.committed, batch_end = null, worker_id = null, lease_expires_at = null,
            lease_acquired_at = null, batch_retry_count = 0, attempt_offset = null, attempt_count = 0
    )
    select count(*) as partitions, count(*) filter (where t.r_clamped = 'start') as to_start,
           count(*) filter (where t.r_clamped = 'end') as to_end
    into v_moved
    from targets t;

    delete from queen.consumer_watermarks w where w.queue_id = p_queue_id and w.consumer_group = p_group;
    return jsonb_build_object(
        'moved', v_moved.partitions, 'clamped_to_start', v_moved.to_start, 'clamped_to_end', v_moved.to_end,
        'last', v_last, 'done', p_partition is not null or coalesce(cardinality(v_pids), 0) < v_rows_max);
end
$$;

-- Deletes a group's subscriptions: to one queue, or all of them if p_queue_id is NULL.
--
-- Lock:   the records, by ascending id.
-- Result: how many there were.
create or replace function queen.log_group_unsubscribe_v1(
    p_group text, p_queue_id uuid, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns bigint language sql as $$
    with records as materialized (
        select m.id from queen.consumer_groups_metadata m
        where m.tenant_id = p_tenant and m.consumer_group = p_group and (p_queue_id is null or m.queue_id = p_queue_id)
        order by m.id
        for update
    ), gone as (
        delete from queen.consumer_groups_metadata m using records r where m.id = r.id returning 1
    )
    select count(*) from gone
$$;

-- Deletes a group's cursors, and their leases with them, in the next p_max_rows partitions: those of a queue after
-- p_after by name, or of all queues after p_after by id if p_queue_id is NULL.
--
-- Lock:   the cursors, by ascending partition; then watermarks, by ascending queue. No partition.
-- Result: {"deleted": cursors, "queues": [name], "last": text, "done": bool}, the queues being those that had one.
-- Why:    without its cursor an old partition is unread again, and the watermark would hide it. The last call takes
--         the watermarks that are left.
create or replace function queen.log_group_delete_step_v1(
    p_group text, p_queue_id uuid, p_after text, p_max_rows int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_rows_max  int := greatest(coalesce(p_max_rows, 1), 1);
    v_pids      uuid[];
    v_last      text;
    v_seen      bigint;
    v_deleted   bigint;
    v_queue_ids uuid[];
    v_queues    jsonb;
begin
    if p_queue_id is null then
        select array_agg(n.id) filter (where q.tenant_id = p_tenant), (array_agg(n.id order by n.id desc))[1], count(*)
        into v_pids, v_last, v_seen
        from (
            select p.id, p.queue_id from queen.log_partitions p
            where coalesce(nullif(p_after, ''), '00000000-0000-0000-0000-000000000000')::uuid < p.id
            order by p.id
            limit v_rows_max
        ) n
        join queen.queues q on q.id = n.queue_id;
    else
        select array_agg(n.id), max(n.name), count(*) into v_pids, v_last, v_seen
        from (
            select p.id, p.name from queen.log_partitions p
            where p.queue_id = p_queue_id and coalesce(p_after, '') < p.name
            order by p.queue_id, p.name
            limit v_rows_max
        ) n;
    end if;
    perform from queen.log_consumers c where c.partition_id = any (v_pids) and c.consumer_group = p_group
    order by c.partition_id for update;
    with gone as (
        delete from queen.log_consumers c where c.partition_id = any (v_pids) and c.consumer_group = p_group
        returning c.partition_id
    )
    select count(*), array_agg(distinct q.id), coalesce(jsonb_agg(distinct q.name), '[]')
    into v_deleted, v_queue_ids, v_queues
    from gone join queen.log_partitions p on p.id = gone.partition_id join queen.queues q on q.id = p.queue_id;

    if v_seen < v_rows_max then
        select array_agg(q.id) into v_queue_ids from queen.queues q
        where q.tenant_id = p_tenant and (p_queue_id is null or q.id = p_queue_id);
    end if;
    perform from queen.consumer_watermarks w where w.queue_id = any (v_queue_ids) and w.consumer_group = p_group
    order by w.queue_id for update;
    delete from queen.consumer_watermarks w where w.queue_id = any (v_queue_ids) and w.consumer_group = p_group;
    return jsonb_build_object(
        'deleted', v_deleted, 'queues', v_queues, 'last', v_last, 'done', v_seen < v_rows_max);
end
$$;

-- Sets the time from which a group's subscriptions count, in all queues.
--
-- Lock:   the records, by ascending id; then the group's watermarks, by ascending queue.
-- Result: how many records there are.
-- Why:    cursors stay where they are; the time decides where the group starts in partitions where it has none. A
--         subscription to everything has no use for a time, so it becomes one from that time on.
create or replace function queen.log_group_resubscribe_v1(
    p_group text, p_from timestamptz, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns bigint language plpgsql as $$
declare
    v_ids       uuid[];
    v_queue_ids uuid[];
begin
    select array_agg(m.id), array_agg(m.queue_id) into v_ids, v_queue_ids
    from (
        select m.id, m.queue_id from queen.consumer_groups_metadata m
        where m.tenant_id = p_tenant and m.consumer_group = p_group
        order by m.id
        for update
    ) m;
    update queen.consumer_groups_metadata m
    set subscription_timestamp = p_from,
        subscription_mode = case m.subscription_mode when 'all' then 'timestamp' else m.subscription_mode end
    where m.id = any (v_ids);
    perform from queen.consumer_watermarks w where w.queue_id = any (v_queue_ids) and w.consumer_group = p_group
    order by w.queue_id for update;
    delete from queen.consumer_watermarks w where w.queue_id = any (v_queue_ids) and w.consumer_group = p_group;
    return coalesce(cardinality(v_ids), 0);
end
$$;

-- How far a group is in each partition of a queue.
--
-- Lock:   none.
-- Result: r_pending counts what is there and not committed, everything where the group has no cursor; r_gone what was
--         deleted before the cursor came to it; r_oldest_at is the age of the first pending message.
-- Why:    differences of counters, and one probe of the primary key where something is pending.
create or replace function queen.log_group_partitions_v1(
    p_queue_id uuid, p_group text
) returns table (
    r_pid uuid, r_partition text, r_has_cursor boolean, r_worker text, r_is_leased boolean, r_consumed bigint,
    r_pending bigint, r_gone bigint, r_oldest_at timestamptz
) language sql stable as $$
    select p.id, p.name, c.partition_id is not null, c.worker_id,
           c.batch_end is not null and now() < c.lease_expires_at, coalesce(c.total_consumed, 0),
           n.pending, n.gone, head.created_at
    from queen.log_partitions p
    left join lateral (
        select c.* from queen.log_consumers c
        where c.partition_id = p.id and c.consumer_group = p_group
        limit 1
    ) c on true
    cross join lateral (
        select greatest(p.last_offset - greatest(coalesce(c.committed, -1), p.log_start - 1), 0) as pending,
               greatest(p.log_start - 1 - c.committed, 0) as gone
    ) n
    left join lateral (
        select s.created_at from queen.log_segments s
        where s.partition_id = p.id and s.base_offset = case when 0 < n.pending then
            queen.log_head_v1(p.id, p.log_start, greatest(coalesce(c.committed, -1) + 1, p.log_start)) end
        limit 1
    ) head on true
    where p.queue_id = p_queue_id
$$;

-- The pairs of a group and a queue: it has a cursor in one of the queue's partitions, or a subscription to it.
--
-- Lock:   none.
-- Result: NULL columns where there is no subscription. p_group NULL takes all groups.
create or replace function queen.log_group_queues_v1(
    p_group text, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_group text, r_queue_id uuid, r_queue text, r_cursors bigint, r_mode text, r_from timestamptz, r_since timestamptz
) language sql stable as $$
    select coalesce(c.consumer_group, m.consumer_group), q.id, q.name, coalesce(c.cursors, 0),
           m.subscription_mode, m.subscription_timestamp, m.created_at
    from (
        select c.consumer_group, p.queue_id, count(*) as cursors
        from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id
        where p_group is null or c.consumer_group = p_group
        group by c.consumer_group, p.queue_id
    ) c
    full join (
        select m.* from queen.consumer_groups_metadata m
        where m.tenant_id = p_tenant and m.queue_id is not null and m.partition_name = '' and m.namespace = ''
          and m.task = '' and (p_group is null or m.consumer_group = p_group)
    ) m on m.queue_id = c.queue_id and m.consumer_group = c.consumer_group
    join queen.queues q on q.id = coalesce(c.queue_id, m.queue_id) and q.tenant_id = p_tenant
$$;

-- Lists groups with their lag, one row for each queue of a group.
--
-- Lock:   none.
-- Result: a page, by group and queue. r_lag_seconds is the age of the oldest pending message, 0 if none is.
create or replace function queen.log_groups_v1(
    p_limit int, p_offset int, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_group text, r_queue text, r_cursors bigint, r_mode text, r_from timestamptz, r_since timestamptz,
    r_lagging bigint, r_pending bigint, r_gone bigint, r_lag_seconds bigint
) language sql stable as $$
    select g.r_group, g.r_queue, g.r_cursors, g.r_mode, g.r_from, g.r_since, lag.*
    from (
        select g.* from queen.log_group_queues_v1(null, p_tenant) g
        order by g.r_group, g.r_queue
        limit p_limit offset p_offset
    ) g
    cross join lateral (
        select count(*) filter (where 0 < n.r_pending), coalesce(sum(n.r_pending), 0)::bigint,
               coalesce(sum(n.r_gone), 0)::bigint,
               coalesce(floor(extract(epoch from greatest(now() - min(n.r_oldest_at), '0'))), 0)::bigint
        from queen.log_group_partitions_v1(g.r_queue_id, g.r_group) n
    ) lag
    order by g.r_group, g.r_queue
$$;

-- Lists the partitions of a group, or of all groups if p_group is NULL.
--
-- Lock:   none.
-- Cutoff: only those whose oldest pending message is p_lag_seconds old or older; NULL takes all.
-- Result: a page: by queue and partition for one group, the most delayed first for all.
create or replace function queen.log_group_lag_v1(
    p_group text, p_lag_seconds bigint, p_limit int, p_offset int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_group text, r_queue text, r_pid uuid, r_partition text, r_worker text, r_is_leased boolean, r_consumed bigint,
    r_pending bigint, r_gone bigint, r_oldest_at timestamptz, r_lag_seconds bigint
) language sql stable as $$
    select g.r_group, g.r_queue, n.r_pid, n.r_partition, n.r_worker, coalesce(n.r_is_leased, false), n.r_consumed,
           n.r_pending, coalesce(n.r_gone, 0), n.r_oldest_at, age.seconds
    from queen.log_group_queues_v1(p_group, p_tenant) g
    cross join lateral queen.log_group_partitions_v1(g.r_queue_id, g.r_group) n
    cross join lateral (
        select coalesce(floor(extract(epoch from greatest(now() - n.r_oldest_at, '0'))), 0)::bigint as seconds
    ) age
    where p_lag_seconds is null or (n.r_oldest_at is not null and p_lag_seconds <= age.seconds)
    order by case when p_group is null then age.seconds end desc nulls last, g.r_queue, n.r_partition, g.r_group
    limit p_limit offset p_offset
$$;
