-- Status: everything an operator looks at first, from counters and flushed metrics. Nothing here reads segments.

-- What requests did, flush by flush: as servers counted it, or with a filter as it was counted by queue.
--
-- Lock:   none.
-- Result: a row a flush, with the bucket that it lies in. By queue nobody counts the requests of pops.
create or replace function queen.status_counted_v1(
    p_from timestamptz, p_to timestamptz, p_minutes int, p_queue text, p_namespace text, p_task text, p_tenant uuid
) returns table (
    r_bucket timestamptz, r_push_requests bigint, r_pop_requests bigint, r_ack_requests bigint, r_pushed bigint,
    r_popped bigint, r_acked bigint, r_failed bigint, r_lag_count bigint, r_avg_lag_ms bigint, r_max_lag_ms bigint
) language sql stable as $$
    select queen.metrics_bucket_v1(p_minutes, w.bucket_time), w.push_request_count, w.pop_request_count,
           w.ack_request_count, w.push_message_count, w.pop_message_count, w.ack_success_count, w.ack_failed_count,
           w.lag_count, w.avg_lag_ms, w.max_lag_ms
    from queen.worker_metrics w
    where coalesce(p_queue, p_namespace, p_task) is null and p_from <= w.bucket_time and w.bucket_time <= p_to
    union all
    select queen.metrics_bucket_v1(p_minutes, m.bucket_time), m.push_request_count, null, m.ack_request_count,
           m.push_message_count, m.pop_count, m.ack_success_count, m.ack_failed_count, m.lag_count, m.avg_lag_ms,
           m.max_lag_ms
    from queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q
    join queen.queue_lag_metrics m on m.queue_id = q.id
    where coalesce(p_queue, p_namespace, p_task) is not null
      and date_trunc('minute', p_from) <= m.bucket_time and m.bucket_time <= p_to
$$;

-- What servers used, by bucket.
--
-- Lock:   none.
-- Result: a row for each bucket in which one flushed; NULL where nobody measured.
create or replace function queen.status_used_v1(p_from timestamptz, p_to timestamptz, p_minutes int) returns table (
    r_bucket timestamptz, r_db_errors bigint, r_dead bigint, r_used jsonb
) language sql stable as $$
    with servers as (
        select queen.metrics_bucket_v1(p_minutes, w.bucket_time) as bucket, sum(w.db_error_count)::bigint as db_errors,
               sum(w.dlq_count)::bigint as dead, jsonb_build_object(
                   'avgEventLoopLagMs', round(avg(w.avg_event_loop_lag_ms), 3),
                   'maxEventLoopLagMs', max(w.max_event_loop_lag_ms), 'minFreeSlots', min(w.min_free_slots)) as used
        from queen.worker_metrics w where p_from <= w.bucket_time and w.bucket_time <= p_to
        group by 1
    ), processes as (
        select queen.metrics_bucket_v1(p_minutes, m."timestamp") as bucket, jsonb_build_object(
            -- Processor time counts on from the start of a process, in samples a second apart.
            'queenCpuUserPct', round(sum((m.metrics #>> '{cpu,user_us,last}')::numeric - (m.metrics #>> '{cpu,user_us,min}')::numeric)
                / sum(greatest(m.sample_count - 1, 1)) / 1e4, 2),
            'queenCpuSysPct', round(sum((m.metrics #>> '{cpu,system_us,last}')::numeric - (m.metrics #>> '{cpu,system_us,min}')::numeric)
                / sum(greatest(m.sample_count - 1, 1)) / 1e4, 2),
            'queenRssMb', round(max((m.metrics #>> '{memory,rss_bytes,max}')::numeric) / 1048576, 1),
            'dbPoolActive', max((m.metrics #>> '{database,pool_active,max}')::numeric)::bigint,
            'dbPoolIdle', min((m.metrics #>> '{database,pool_idle,min}')::numeric)::bigint,
            'dbPoolSize', max((m.metrics #>> '{database,pool_size,max}')::numeric)::bigint) as used
        from queen.system_metrics m where p_from <= m."timestamp" and m."timestamp" <= p_to
        group by 1
    )
    select coalesce(s.bucket, p.bucket), coalesce(s.db_errors, 0), coalesce(s.dead, 0),
           coalesce(s.used, '{}') || coalesce(p.used, '{}')
    from servers s full join processes p on p.bucket = s.bucket
$$;

-- The time line of a status, and the sums over it.
--
-- Lock:   none.
-- Result: {"pointCount", "throughput", "errors", "requests", "batchEfficiency"}
create or replace function queen.status_throughput_v1(
    p_from timestamptz, p_to timestamptz, p_minutes int, p_queue text, p_namespace text, p_task text, p_tenant uuid
) returns jsonb language sql stable as $$
    with counted as materialized (
        select * from queen.status_counted_v1(p_from, p_to, p_minutes, p_queue, p_namespace, p_task, p_tenant)
    ), sums as (
        select c.r_bucket as bucket, sum(c.r_pushed)::bigint as pushed, sum(c.r_popped)::bigint as popped,
               sum(c.r_acked)::bigint as acked, sum(c.r_failed)::bigint as failed, max(c.r_max_lag_ms) as max_lag_ms,
               coalesce((sum(c.r_avg_lag_ms * c.r_lag_count) / nullif(sum(c.r_lag_count), 0))::bigint, 0) as avg_lag_ms
        from counted c group by c.r_bucket
    ), points as materialized (
        select b.bucket, coalesce(b.failed, 0) as failed, coalesce(b.r_db_errors, 0) as db_errors,
               coalesce(b.r_dead, 0) as dead, b.r_used, coalesce(b.pushed, 0) as pushed, coalesce(b.popped, 0) as popped,
               coalesce(b.acked, 0) as acked, coalesce(b.avg_lag_ms, 0) as avg_lag_ms, coalesce(b.max_lag_ms, 0) as max_lag_ms,
               queen.metrics_seconds_v1(b.bucket, p_minutes, p_from, p_to) as seconds
        from (
            select coalesce(s.bucket, u.r_bucket) as bucket, s.pushed, s.popped, s.acked, s.failed, s.avg_lag_ms, s.max_lag_ms,
                   u.r_db_errors, u.r_dead, u.r_used
            from sums s full join queen.status_used_v1(p_from, p_to, p_minutes) u on u.r_bucket = s.bucket
        ) b
    )
    select jsonb_build_object(
        'pointCount', count(*),
        'throughput', coalesce(jsonb_agg(jsonb_build_object(
            'timestamp', queen.iso_milliseconds(p.bucket),
            'ingested', p.pushed, 'processed', p.acked, 'popMessages', p.popped,
            'ingestedPerSecond', round((p.pushed / p.seconds)::numeric, 3),
            'processedPerSecond', round((p.acked / p.seconds)::numeric, 3),
            'popPerSecond', round((p.popped / p.seconds)::numeric, 3),
            'avgLagMs', p.avg_lag_ms, 'maxLagMs', p.max_lag_ms, 'dbErrors', p.db_errors, 'ackFailed', p.failed,
            'dlqCount', p.dead) || coalesce(p.r_used, '{}') order by p.bucket desc), '[]'),
        'errors', jsonb_build_object(
            'dbErrors', coalesce(sum(p.db_errors), 0)::bigint, 'ackFailed', coalesce(sum(p.failed), 0)::bigint,
            'dlqMessages', coalesce(sum(p.dead), 0)::bigint)) || (
        select jsonb_build_object(
            'requests', jsonb_build_object(
                'push', coalesce(sum(c.r_push_requests), 0)::bigint, 'pop', sum(c.r_pop_requests)::bigint,
                'ack', coalesce(sum(c.r_ack_requests), 0)::bigint),
            'batchEfficiency', jsonb_build_object(
                'push', round(sum(c.r_pushed) / nullif(sum(c.r_push_requests), 0), 3),
                'pop', round(sum(c.r_popped) / nullif(sum(c.r_pop_requests), 0), 3),
                'ack', round(sum(c.r_acked + c.r_failed) / nullif(sum(c.r_ack_requests), 0), 3)))
        from counted c)
    from points p
$$;

-- What queues hold now, what is leased of it and what was given up.
--
-- Lock:   none.
-- Result: {"queues", "messages", "leases", "deadLetterQueue"}: p_limit queues after the first p_offset, newest first;
--         the 10 most frequent errors of the newest 10,000 dead letters.
create or replace function queen.status_held_v1(
    p_queue text, p_namespace text, p_task text, p_limit int, p_offset int, p_tenant uuid
) returns jsonb language sql stable as $$
    with filtered as materialized (
        select q.id, q.name, q.namespace, q.task, q.created_at
        from queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q
    ), lanes as materialized (
        select p.id, p.queue_id, n.*, c.* from filtered q join queen.log_partitions p on p.queue_id = q.id
        cross join lateral queen.log_counts_v1(p.id, p.log_start, p.last_offset) n
        cross join lateral (
            select coalesce(sum(c.total_consumed), 0)::bigint as consumed, count(*) filter (where l.is_live) as leases,
                   coalesce(sum(c.batch_end - c.attempt_offset + 1) filter (where l.is_live), 0)::bigint as leased,
                   coalesce(sum(greatest(c.committed - c.attempt_offset + 1, 0)) filter (where l.is_live), 0)::bigint as acked
            from queen.log_consumers c
            cross join lateral (select c.batch_end is not null and now() < c.lease_expires_at as is_live) l
            where c.partition_id = p.id
        ) c
    ), page as (
        select q.*, (select count(*) from lanes l where l.queue_id = q.id) as partitions,
               (select coalesce(sum(l.consumed), 0)::bigint from lanes l where l.queue_id = q.id) as consumed
        from filtered q order by q.created_at desc, q.id desc limit p_limit offset p_offset
    ), letters as (
        select d.error from lanes l join queen.log_dlq d on d.partition_id = l.id
        where 0 < l.r_dead
        order by d.failed_at desc limit 10000
    ), errors as (
        select left(coalesce(d.error, ''), 500) as error, count(*) as many from letters d group by 1 order by 2 desc, 1 limit 10
    )
    select jsonb_build_object(
        'queues', coalesce((
            select jsonb_agg(jsonb_build_object('id', q.id, 'name', q.name, 'namespace', q.namespace, 'task', q.task,
                'partitions', q.partitions, 'totalConsumed', q.consumed) order by q.created_at desc, q.id desc)
            from page q), '[]'),
        'messages', jsonb_build_object(
            'total', coalesce(sum(l.r_total), 0)::bigint, 'pending', coalesce(sum(l.r_pending), 0)::bigint,
            'processing', coalesce(sum(l.r_processing), 0)::bigint, 'completed', coalesce(sum(l.r_completed), 0)::bigint,
            'failed', null, 'deadLetter', coalesce(sum(l.r_dead), 0)::bigint),
        'leases', jsonb_build_object(
            'active', coalesce(sum(l.leases), 0)::bigint, 'partitionsWithLeases', count(*) filter (where 0 < l.leases),
            'totalBatchSize', coalesce(sum(l.leased), 0)::bigint, 'totalAcked', coalesce(sum(l.acked), 0)::bigint),
        'deadLetterQueue', jsonb_build_object(
            'totalMessages', coalesce(sum(l.r_dead), 0)::bigint, 'currentMessages', coalesce(sum(l.r_dead), 0)::bigint,
            'affectedPartitions', count(*) filter (where 0 < l.r_dead),
            'topErrors', coalesce((
                select jsonb_agg(jsonb_build_object('error', e.error, 'count', e.many) order by e.many desc, e.error)
                from errors e), '[]')))
    from lanes l
$$;

-- What servers and queues did and hold.
--
-- Lock:   none.
-- Result: one object. With a filter the counts of the time line are those of the queues it lets through, without one
--         those of the servers. What a process used is of all servers either way.
create or replace function queen.get_status_v1(
    p_from timestamptz, p_to timestamptz, p_queue text, p_namespace text, p_task text, p_limit int, p_offset int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'timeRange', jsonb_build_object('from', queen.iso_milliseconds(r.r_from), 'to', queen.iso_milliseconds(r.r_to)),
        'bucketMinutes', r.r_minutes, 'workers', queen.metrics_workers_v1(r.r_from, r.r_to, null, null))
        || h.held || (d.done - '{requests,batchEfficiency}'::text[]) || jsonb_build_object(
            'messages', (h.held -> 'messages') || jsonb_build_object(
                'requests', d.done -> 'requests', 'batchEfficiency', d.done -> 'batchEfficiency'))
    from queen.metrics_range_v1(p_from, p_to) r
    cross join lateral (
        select queen.status_held_v1(p_queue, p_namespace, p_task, p_limit, p_offset, p_tenant) as held
    ) h
    cross join lateral (
        select queen.status_throughput_v1(r.r_from, r.r_to, r.r_minutes, p_queue, p_namespace, p_task, p_tenant) as done
    ) d
$$;

-- Lists the partitions of a queue with what was done in them.
--
-- Lock:   none.
-- Result: a page by name. r_consumed counts what groups took, all of them together.
create or replace function queen.log_partition_status_v1(p_queue_id uuid, p_limit int, p_offset int) returns table (
    r_id uuid, r_name text, r_created_at timestamptz, r_last_write_at timestamptz, r_log_start bigint,
    r_last_offset bigint, r_consumed bigint, r_total bigint, r_pending bigint, r_processing bigint, r_completed bigint,
    r_dead bigint
) language sql stable as $$
    select p.id, p.name, p.created_at, p.last_write_at, p.log_start, p.last_offset, c.consumed,
           n.r_total, n.r_pending, n.r_processing, n.r_completed, n.r_dead
    from (
        select p.* from queen.log_partitions p where p.queue_id = p_queue_id
        order by p.queue_id, p.name limit p_limit offset p_offset
    ) p
    cross join lateral queen.log_counts_v1(p.id, p.log_start, p.last_offset) n
    cross join lateral (
        select coalesce(sum(c.total_consumed), 0)::bigint as consumed from queen.log_consumers c where c.partition_id = p.id
    ) c
    order by p.name
$$;
