-- Resources: queues, partitions, namespaces and tasks with their counts, and the clearing of a queue.
--
-- Counts are differences of a partition's counters. Nothing here reads segments but to find one time by its key.

-- Counts the messages of one partition.
--
-- Lock:   none.
-- Result: r_committed is the cursor that counts: the slowest named group's, queue mode's only where no named group has
--         one, -1 where nobody has. r_pending lies above it, r_processing of that is under live leases, r_completed
--         is the rest less the dead letters.
create or replace function queen.log_counts_v1(
    p_pid uuid, p_log_start bigint, p_last_offset bigint
) returns table (
    r_committed bigint, r_total bigint, r_pending bigint, r_processing bigint, r_completed bigint, r_dead bigint
) language sql stable as $$
    select c.committed, n.total, n.pending, least(c.leased, n.pending), greatest(n.total - n.pending - d.dead, 0), d.dead
    from (
        select coalesce(min(c.committed) filter (where c.consumer_group <> '__QUEUE_MODE__'), min(c.committed), -1)
                   as committed,
               coalesce(sum(greatest(c.batch_end - greatest(c.committed, p_log_start - 1), 0))
                   filter (where now() < c.lease_expires_at), 0)::bigint as leased
        from queen.log_consumers c
        where c.partition_id = p_pid
    ) c
    cross join lateral (
        select p_last_offset - p_log_start + 1 as total,
               greatest(p_last_offset - greatest(c.committed, p_log_start - 1), 0) as pending
    ) n
    cross join lateral (select count(*) as dead from queen.log_dlq d where d.partition_id = p_pid) d
$$;

-- Counts all of a queue.
--
-- Lock:   none.
-- Result: one row; zeros for a queue without partitions.
create or replace function queen.log_queue_counts_v1(p_queue_id uuid) returns table (
    r_partitions bigint, r_total bigint, r_pending bigint, r_processing bigint, r_completed bigint, r_dead bigint
) language sql stable as $$
    select count(*), coalesce(sum(n.r_total), 0)::bigint, coalesce(sum(n.r_pending), 0)::bigint,
           coalesce(sum(n.r_processing), 0)::bigint, coalesce(sum(n.r_completed), 0)::bigint,
           coalesce(sum(n.r_dead), 0)::bigint
    from queen.log_partitions p
    cross join lateral queen.log_counts_v1(p.id, p.log_start, p.last_offset) n
    where p.queue_id = p_queue_id
$$;

-- Lists queues, newest first.
--
-- Lock:   none.
-- Result: a page. r_found, on each row, counts all that the filters let through; a page beyond the end is one row
--         with a NULL id and that count. r_retained_bytes is NULL where nobody has measured them. A filter that is
--         NULL lets everything through; p_search is part of a name, in any case.
create or replace function queen.log_queue_list_v1(
    p_name text, p_search text, p_namespace text, p_task text, p_limit int, p_offset int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_found bigint, r_id uuid, r_name text, r_namespace text, r_task text, r_created_at timestamptz, r_options jsonb,
    r_retained_bytes bigint, r_partitions bigint, r_total bigint, r_pending bigint, r_processing bigint,
    r_completed bigint, r_dead bigint
) language sql stable as $$
    with found as materialized (
        select q.id, q.created_at from queen.queues q
        where q.tenant_id = p_tenant and (p_name is null or q.name = p_name)
          and (p_search is null or position(lower(p_search) in lower(q.name)) > 0)
          and (p_namespace is null or q.namespace = p_namespace) and (p_task is null or q.task = p_task)
    ), page as (
        select f.id from found f order by f.created_at desc, f.id desc limit p_limit offset p_offset
    )
    select f.found, q.id, q.name, q.namespace, q.task, q.created_at, queen.queue_options(q), b.retained_bytes, n.*
    from (select count(*) as found from found) f
    left join (page join queen.queues q on q.id = page.id) on true
    left join lateral (
        select s.retained_bytes from queen.stats s
        where s.stat_type = 'queue' and s.stat_key = q.id::text and s.measured_at is not null
    ) b on true
    left join lateral queen.log_queue_counts_v1(q.id) n on true
    order by q.created_at desc, q.id desc
$$;

-- Lists partitions by queue and name.
--
-- Lock:   none.
-- Result: a page of those of a queue, or of all if p_queue is NULL; r_found as log_queue_list_v1. r_oldest_at and
--         r_newest_at are the times of the first and the last message that are there.
create or replace function queen.log_partition_list_v1(
    p_queue text, p_limit int, p_offset int, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_found bigint, r_id uuid, r_queue text, r_name text, r_created_at timestamptz, r_last_write_at timestamptz,
    r_log_start bigint, r_last_offset bigint, r_oldest_at timestamptz, r_newest_at timestamptz,
    r_total bigint, r_pending bigint, r_processing bigint, r_completed bigint, r_dead bigint
) language sql stable as $$
    with found as (
        select count(*) as found from queen.queues q join queen.log_partitions p on p.queue_id = q.id
        where q.tenant_id = p_tenant and (p_queue is null or q.name = p_queue)
    ), page as (
        select q.name as queue, p.* from queen.queues q join queen.log_partitions p on p.queue_id = q.id
        where q.tenant_id = p_tenant and (p_queue is null or q.name = p_queue)
        order by q.name, p.name
        limit p_limit offset p_offset
    )
    select f.found, p.id, p.queue, p.name, p.created_at, p.last_write_at, p.log_start, p.last_offset,
           oldest.created_at, newest.created_at, n.r_total, n.r_pending, n.r_processing, n.r_completed, n.r_dead
    from found f
    left join page p on true
    left join lateral (
        select s.created_at from queen.log_segments s
        where s.partition_id = p.id and p.log_start <= s.base_offset
        order by s.base_offset
        limit 1
    ) oldest on true
    left join lateral (
        select s.created_at from queen.log_segments s
        where s.partition_id = p.id and p.log_start <= s.base_offset
        order by s.base_offset desc
        limit 1
    ) newest on true
    left join lateral queen.log_counts_v1(p.id, p.log_start, p.last_offset) n on true
    order by p.queue, p.name
$$;

-- How much of a queue is pending: for a group, or if p_group is NULL for whoever is slowest.
--
-- Lock:   none.
-- Result: a page of partitions, the deepest first. r_pending and r_partitions_pending, on each row, count all of
--         them. A page beyond the end is one row with a NULL partition; no row if there is no such queue.
create or replace function queen.log_depth_v1(
    p_queue text, p_group text, p_limit int, p_offset int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_pending bigint, r_partitions_pending bigint, r_partition text, r_partition_pending bigint
) language sql stable as $$
    with queue as materialized (
        select q.id from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue
    ), depths as materialized (
        select p.name, n.r_pending as pending
        from queue q join queen.log_partitions p on p.queue_id = q.id
        cross join lateral queen.log_counts_v1(p.id, p.log_start, p.last_offset) n
        where p_group is null
        union all
        select n.r_partition, n.r_pending
        from queue q cross join lateral queen.log_group_partitions_v1(q.id, p_group) n
        where p_group is not null
    )
    select t.pending, t.partitions_pending, page.name, page.pending
    from queue
    cross join (
        select coalesce(sum(d.pending), 0)::bigint as pending, count(*) filter (where 0 < d.pending) as partitions_pending
        from depths d
    ) t
    left join lateral (
        select d.name, d.pending from depths d order by d.pending desc, d.name limit p_limit offset p_offset
    ) page on true
    order by page.pending desc, page.name
$$;

-- Lists namespaces, or tasks if p_by is 'task', with what their queues hold. A queue that has none is in none.
--
-- Lock:   none.
-- Result: a page by name; r_found as log_queue_list_v1.
create or replace function queen.log_label_list_v1(
    p_by text, p_limit int, p_offset int, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_found bigint, r_label text, r_queues bigint, r_partitions bigint, r_total bigint, r_pending bigint
) language sql stable as $$
    with labelled as materialized (
        select q.id, nullif(case p_by when 'task' then q.task else q.namespace end, '') as label
        from queen.queues q
        where q.tenant_id = p_tenant
    ), page as (
        select l.label from labelled l where l.label is not null
        group by l.label order by l.label limit p_limit offset p_offset
    )
    select f.found, n.*
    from (select count(distinct l.label) as found from labelled l) f
    left join (
        select page.label, count(*) as queues, sum(c.r_partitions)::bigint, sum(c.r_total)::bigint, sum(c.r_pending)::bigint
        from page join labelled l on l.label = page.label cross join lateral queen.log_queue_counts_v1(l.id) c
        group by page.label
    ) n on true
    order by n.label
$$;

-- Counts everything.
--
-- Lock:   none.
-- Result: one object. Lag is over the partitions in which something is pending; rates are what servers reported for
--         the last five minutes.
create or replace function queen.log_overview_v1(
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    with lanes as materialized (
        select n.*, case when 0 < n.r_pending then floor(extract(epoch from greatest(now() - head.created_at, '0'))) end as age
        from queen.queues q join queen.log_partitions p on p.queue_id = q.id
        cross join lateral queen.log_counts_v1(p.id, p.log_start, p.last_offset) n
        left join lateral (
            select s.created_at from queen.log_segments s
            where s.partition_id = p.id and s.base_offset = case when 0 < n.r_pending then
                queen.log_head_v1(p.id, p.log_start, greatest(n.r_committed + 1, p.log_start)) end
            limit 1
        ) head on true
        where q.tenant_id = p_tenant
    ), labels as (
        select count(*) as queues, count(distinct nullif(q.namespace, '')) as namespaces,
               count(distinct nullif(q.task, '')) as tasks
        from queen.queues q where q.tenant_id = p_tenant
    ), rates as (
        select coalesce(sum(m.push_message_count), 0) / 300.0 as pushed, coalesce(sum(m.ack_success_count), 0) / 300.0 as acked
        from queen.queue_lag_metrics m join queen.queues q on q.id = m.queue_id
        where q.tenant_id = p_tenant and now() - interval '5 minutes' <= m.bucket_time
    )
    select jsonb_build_object(
        'queues', min(l.queues), 'namespaces', min(l.namespaces), 'tasks', min(l.tasks), 'partitions', count(n.r_total),
        'total', coalesce(sum(n.r_total), 0), 'pending', coalesce(sum(n.r_pending), 0),
        'processing', coalesce(sum(n.r_processing), 0), 'completed', coalesce(sum(n.r_completed), 0),
        'dead', coalesce(sum(n.r_dead), 0),
        'time_lag', jsonb_build_array(
            coalesce(round(avg(n.age)), 0), coalesce(round(percentile_cont(0.5) within group (order by n.age)), 0),
            coalesce(min(n.age), 0), coalesce(max(n.age), 0)),
        'offset_lag', jsonb_build_array(
            coalesce(round(avg(n.r_pending) filter (where 0 < n.r_pending)), 0),
            coalesce(round(percentile_cont(0.5) within group (order by n.r_pending) filter (where 0 < n.r_pending)), 0),
            coalesce(min(n.r_pending) filter (where 0 < n.r_pending), 0), coalesce(max(n.r_pending), 0)),
        'pushed_per_second', round(min(r.pushed), 3), 'acked_per_second', round(min(r.acked), 3))
    from labels l cross join rates r left join lanes n on true
$$;

-- The partitions of a queue that a clearing has work in, at most p_max_rows of those after p_after by name; only
-- p_partition unless that is NULL.
--
-- Lock:   none.
-- Result: in the order of their names, with the last offset: what is pushed later is not the clearing's.
create or replace function queen.log_clear_list_v1(
    p_queue_id uuid, p_partition text, p_after text, p_max_rows int
) returns table (r_pid uuid, r_name text, r_last_offset bigint) language sql stable as $$
    select p.id, p.name, p.last_offset
    from queen.log_partitions p
    where p.queue_id = p_queue_id and coalesce(p_after, '') < p.name and (p_partition is null or p.name = p_partition)
      and (p.log_start <= p.last_offset or exists (
          select from queen.log_consumers c where c.partition_id = p.id and c.committed < p.last_offset))
    order by p.queue_id, p.name
    limit greatest(coalesce(p_max_rows, 1), 1)
$$;

-- Deletes the first segments of a partition, at most p_max_rows, read or not. Once all up to p_last are gone, every
-- cursor stands behind them, and leases on nothing else end.
--
-- Lock:   this partition's row; in the last step then its cursors, by group.
-- Result: {"deleted": segments, "messages", "cursors", "new_log_start", "done"}
-- Why:    a retention step without an end of time, so the same watermark, batch and history. Transaction ids stay
--         known for their window, and dead letters stay.
create or replace function queen.log_clear_step_v1(
    p_pid uuid, p_last bigint, p_max_rows int
) returns jsonb language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_step      jsonb;
    v_log_start bigint;
    v_end       bigint;
    v_done      boolean;
    v_cursors   bigint := 0;
begin
    select p.log_start into v_log_start from queen.log_partitions p where p.id = p_pid for update;
    v_step := queen.log_retention_step_v1(p_pid, 'infinity', null, p_max_rows, 'clear');
    v_end := (v_step ->> 'new_log_start')::bigint - 1;
    v_done := (v_step ->> 'done')::boolean or p_last <= v_end;
    if v_done then
        perform from queen.log_consumers c where c.partition_id = p_pid and c.committed < v_end
        order by c.consumer_group for update;
        update queen.log_consumers c
        set committed = v_end, batch_end = case when v_end < c.batch_end then c.batch_end end,
            worker_id = case when v_end < c.batch_end then c.worker_id end,
            batch_retry_count = 0, attempt_offset = null, attempt_count = 0
        where c.partition_id = p_pid and c.committed < v_end;
        get diagnostics v_cursors = row_count;
    end if;
    return v_step || jsonb_build_object(
        'messages', coalesce(v_end + 1 - v_log_start, 0), 'cursors', v_cursors, 'done', v_done);
end
$$;
