-- Time lines of what servers flushed: by worker, by system, by queue. Nothing here reads partitions or segments.
--
-- Each takes a time range, both ends included, of which NULL means now and an hour before; and filters, of which NULL
-- lets everything through. A bucket in which nothing was flushed is left out.

-- The range that a request means, and how wide its buckets are.
--
-- Lock:   none.
-- Result: one row.
create or replace function queen.metrics_range_v1(
    p_from timestamptz, p_to timestamptz, p_default interval default '1 hour',
    out r_from timestamptz, out r_to timestamptz, out r_minutes int
) language plpgsql stable as $$
begin
    r_to := coalesce(p_to, now());
    r_from := coalesce(p_from, r_to - p_default);
    r_minutes := queen.bucket_minutes(r_from, r_to);
end
$$;

-- The bucket that a time lies in. Buckets of every width begin at midnight UTC.
--
-- Lock:   none.
-- Result: the bucket's beginning.
create or replace function queen.metrics_bucket_v1(p_minutes int, p_at timestamptz)
returns timestamptz language sql immutable as $$
    select date_bin(make_interval(mins => p_minutes), p_at, '2000-01-01 00:00:00Z')
$$;

-- The seconds of a bucket that lie in the range: what counts are divided by.
--
-- Lock:   none.
-- Result: at least 1.
create or replace function queen.metrics_seconds_v1(
    p_bucket timestamptz, p_minutes int, p_from timestamptz, p_to timestamptz
) returns double precision language sql immutable as $$
    select greatest(extract(epoch from least(p_bucket + make_interval(mins => p_minutes), p_to) - greatest(p_bucket, p_from)), 1)
$$;

-- The queues that filters let through.
--
-- Lock:   none.
-- Result: their rows.
create or replace function queen.filtered_queues_v1(
    p_queue text, p_namespace text, p_task text, p_tenant uuid
) returns setof queen.queues language sql stable as $$
    select q.* from queen.queues q
    where q.tenant_id = p_tenant and (p_queue is null or q.name = p_queue)
      and (p_namespace is null or q.namespace = p_namespace) and (p_task is null or q.task = p_task)
$$;

-- The servers that flushed in a range, as their last flush says, at most 1,000 of them.
--
-- Lock:   none.
-- Result: an array, those that were heard from last first.
create or replace function queen.metrics_workers_v1(
    p_from timestamptz, p_to timestamptz, p_hostname text, p_worker int
) returns jsonb language sql stable as $$
    select coalesce(jsonb_agg(jsonb_build_object(
        'hostname', w.hostname, 'workerId', w.worker_id, 'pid', w.pid,
        'lastSeen', queen.iso_milliseconds(w.bucket_time), 'avgEventLoopLagMs', w.avg_event_loop_lag_ms,
        'maxEventLoopLagMs', w.max_event_loop_lag_ms, 'freeSlots', w.min_free_slots,
        'dbConnections', w.db_connections, 'jobQueueSize', w.max_job_queue_size
    ) order by w.bucket_time desc, w.hostname, w.pid), '[]')
    from (
        select l.* from (
            select distinct on (m.hostname, m.worker_id, m.pid) m.* from queen.worker_metrics m
            where p_from <= m.bucket_time and m.bucket_time <= p_to
              and (p_hostname is null or m.hostname = p_hostname) and (p_worker is null or m.worker_id = p_worker)
            order by m.hostname, m.worker_id, m.pid, m.bucket_time desc
        ) l
        order by l.bucket_time desc limit 1000
    ) w
$$;

-- What servers did.
--
-- Lock:   none.
-- Result: {"timeRange", "bucketMinutes", "pointCount", "timeSeries", "workers", "queues", "summary"}. The queues, at
--         most 100 of them, are those that were popped most; only they can be filtered, since a server's counts are of
--         all queues together. The summary is of the range, and what is pending now.
create or replace function queen.get_worker_metrics_v1(
    p_from timestamptz, p_to timestamptz, p_queue text, p_namespace text, p_task text, p_hostname text, p_worker int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    with range as (
        select * from queen.metrics_range_v1(p_from, p_to)
    ), flushed as materialized (
        select queen.metrics_bucket_v1(r.r_minutes, m.bucket_time) as bucket, m.*
        from range r join queen.worker_metrics m on r.r_from <= m.bucket_time and m.bucket_time <= r.r_to
        where (p_hostname is null or m.hostname = p_hostname) and (p_worker is null or m.worker_id = p_worker)
    ), points as (
        select f.bucket, sum(f.push_message_count)::bigint as pushed, sum(f.pop_message_count)::bigint as popped,
               sum(f.ack_message_count)::bigint as acked,
               min(queen.metrics_seconds_v1(f.bucket, r.r_minutes, r.r_from, r.r_to)) as seconds,
               jsonb_build_object(
                   'pushRequests', sum(f.push_request_count), 'popRequests', sum(f.pop_request_count),
                   'ackRequests', sum(f.ack_request_count), 'transactions', sum(f.transaction_count),
                   'jobsDone', sum(f.jobs_done),
                   'avgEventLoopLagMs', round(avg(f.avg_event_loop_lag_ms), 3)::double precision,
                   'maxEventLoopLagMs', max(f.max_event_loop_lag_ms),
                   'avgFreeSlots', round(avg(f.avg_free_slots), 3)::double precision, 'minFreeSlots', min(f.min_free_slots),
                   'dbConnections', max(f.db_connections),
                   'avgJobQueueSize', round(avg(f.avg_job_queue_size), 3)::double precision,
                   'maxJobQueueSize', max(f.max_job_queue_size), 'backoffSize', max(f.backoff_size),
                   'avgLagMs', coalesce((sum(f.avg_lag_ms * f.lag_count) / nullif(sum(f.lag_count), 0))::bigint, 0),
                   'maxLagMs', max(f.max_lag_ms), 'lagCount', sum(f.lag_count), 'dbErrors', sum(f.db_error_count),
                   'ackSuccess', sum(f.ack_success_count), 'ackFailed', sum(f.ack_failed_count),
                   'dlqCount', sum(f.dlq_count)) as counts
        from flushed f cross join range r
        group by f.bucket
    ), popped as (
        select q.name, sum(m.pop_count)::bigint as pops,
               coalesce((sum(m.avg_lag_ms * m.lag_count) / nullif(sum(m.lag_count), 0))::bigint, 0) as avg_lag_ms,
               max(m.max_lag_ms) as max_lag_ms
        from range r join queen.queue_lag_metrics m
            on date_trunc('minute', r.r_from) <= m.bucket_time and m.bucket_time <= r.r_to
        join queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q on q.id = m.queue_id
        group by q.name
        having 0 < sum(m.pop_count)
        order by pops desc, q.name
        limit 100
    )
    select jsonb_build_object(
        'timeRange', jsonb_build_object('from', queen.iso_milliseconds(r.r_from), 'to', queen.iso_milliseconds(r.r_to)),
        'bucketMinutes', r.r_minutes,
        'pointCount', (select count(*) from points),
        'timeSeries', coalesce((
            select jsonb_agg(p.counts || jsonb_build_object(
                'timestamp', queen.iso_milliseconds(p.bucket), 'pushMessages', p.pushed, 'popMessages', p.popped,
                'ackMessages', p.acked, 'pushPerSecond', round((p.pushed / p.seconds)::numeric, 3),
                'popPerSecond', round((p.popped / p.seconds)::numeric, 3),
                'ackPerSecond', round((p.acked / p.seconds)::numeric, 3)) order by p.bucket desc)
            from points p), '[]'),
        'workers', queen.metrics_workers_v1(r.r_from, r.r_to, p_hostname, p_worker),
        'queues', coalesce((
            select jsonb_agg(jsonb_build_object(
                'queueName', p.name, 'popCount', p.pops, 'avgLagMs', p.avg_lag_ms, 'maxLagMs', p.max_lag_ms
            ) order by p.pops desc, p.name) from popped p), '[]'),
        'summary', (
            select jsonb_build_object(
                'totalPushMessages', coalesce(sum(f.push_message_count), 0), 'totalPopMessages', coalesce(sum(f.pop_message_count), 0),
                'totalAckMessages', coalesce(sum(f.ack_message_count), 0), 'totalPushRequests', coalesce(sum(f.push_request_count), 0),
                'totalPopRequests', coalesce(sum(f.pop_request_count), 0), 'totalAckRequests', coalesce(sum(f.ack_request_count), 0),
                'totalTransactions', coalesce(sum(f.transaction_count), 0), 'totalJobsDone', coalesce(sum(f.jobs_done), 0),
                'totalDbErrors', coalesce(sum(f.db_error_count), 0), 'totalAckSuccess', coalesce(sum(f.ack_success_count), 0),
                'totalAckFailed', coalesce(sum(f.ack_failed_count), 0), 'totalDlq', coalesce(sum(f.dlq_count), 0),
                'maxLagMs', coalesce(max(f.max_lag_ms), 0))
            from flushed f) || (
            select jsonb_build_object('pendingMessages', coalesce(sum(n.r_pending), 0)::bigint)
            from queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q
            cross join lateral queen.log_queue_counts_v1(q.id) n))
    from range r
$$;

-- One measurement of several flushes: {"avg", "min", "max", "last"}, NULL where nobody measured.
--
-- Lock:   none.
-- Result: the mean is weighted by the samples of each flush; the last is the newest one's.
create or replace function queen.merged_gauge_v1(p_flushes jsonb, p_path text[])
returns jsonb language sql immutable as $$
    select case when 0 < count(g.gauge) then jsonb_build_object(
        'avg', round(sum((g.gauge ->> 'avg')::numeric * g.samples) / sum(g.samples), 3),
        'min', min((g.gauge ->> 'min')::numeric), 'max', max((g.gauge ->> 'max')::numeric),
        'last', ((array_agg(g.gauge ->> 'last' order by g.at desc))[1])::numeric) end
    from (
        select nullif(f.metrics #> p_path, 'null') as gauge, greatest(f.samples, 1) as samples, f.at
        from jsonb_to_recordset(p_flushes) as f (at timestamptz, samples int, metrics jsonb)
    ) g
    where g.gauge is not null
$$;

-- What the processes of servers used.
--
-- Lock:   none.
-- Result: {"timeRange", "replicas": [{"hostname", "port", "workerId", "timeSeries"}], "replicaCount", "bucketMinutes",
--         "pointCount"}: of at most 100 servers, those that were heard from last.
create or replace function queen.get_system_metrics_v1(
    p_from timestamptz, p_to timestamptz, p_hostname text, p_worker text
) returns jsonb language sql stable as $$
    with range as (
        select * from queen.metrics_range_v1(p_from, p_to)
    ), replicas as (
        select m.hostname, m.port, m.worker_id, max(m."timestamp") as seen
        from range r join queen.system_metrics m on r.r_from <= m."timestamp" and m."timestamp" <= r.r_to
        where (p_hostname is null or m.hostname = p_hostname) and (p_worker is null or m.worker_id = p_worker)
        group by 1, 2, 3
        order by seen desc, 1, 2, 3
        limit 100
    ), points as (
        select p.hostname, p.port, p.worker_id, queen.metrics_bucket_v1(r.r_minutes, m."timestamp") as bucket,
               sum(m.sample_count)::bigint as samples,
               jsonb_agg(jsonb_build_object('at', m."timestamp", 'samples', m.sample_count, 'metrics', m.metrics)) as flushes
        from range r cross join replicas p join queen.system_metrics m
            on m.hostname = p.hostname and m.port = p.port and m.worker_id = p.worker_id
            and r.r_from <= m."timestamp" and m."timestamp" <= r.r_to
        group by 1, 2, 3, 4
    ), lines as (
        select p.hostname, p.port, p.worker_id, count(*) as points, jsonb_agg(jsonb_build_object(
            'timestamp', queen.iso_milliseconds(p.bucket), 'sampleCount', p.samples, 'metrics', jsonb_build_object(
                'cpu', jsonb_build_object(
                    'user_us', queen.merged_gauge_v1(p.flushes, '{cpu,user_us}'),
                    'system_us', queen.merged_gauge_v1(p.flushes, '{cpu,system_us}')),
                'memory', jsonb_build_object(
                    'rss_bytes', queen.merged_gauge_v1(p.flushes, '{memory,rss_bytes}'),
                    'virtual_bytes', queen.merged_gauge_v1(p.flushes, '{memory,virtual_bytes}')),
                'database', jsonb_build_object(
                    'pool_size', queen.merged_gauge_v1(p.flushes, '{database,pool_size}'),
                    'pool_idle', queen.merged_gauge_v1(p.flushes, '{database,pool_idle}'),
                    'pool_active', queen.merged_gauge_v1(p.flushes, '{database,pool_active}'),
                    'pool_waiting', queen.merged_gauge_v1(p.flushes, '{database,pool_waiting}')),
                'timers', jsonb_build_object('lag_ms', queen.merged_gauge_v1(p.flushes, '{timers,lag_ms}')))
            ) order by p.bucket) as line
        from points p
        group by 1, 2, 3
    )
    select jsonb_build_object(
        'timeRange', jsonb_build_object('from', queen.iso_milliseconds(r.r_from), 'to', queen.iso_milliseconds(r.r_to)),
        'replicas', coalesce((
            select jsonb_agg(jsonb_build_object(
                'hostname', l.hostname, 'port', l.port, 'workerId', l.worker_id, 'timeSeries', l.line
            ) order by l.hostname, l.port, l.worker_id) from lines l), '[]'),
        'replicaCount', (select count(*) from lines),
        'bucketMinutes', r.r_minutes,
        'pointCount', coalesce((select sum(l.points) from lines l), 0)::bigint)
    from range r
$$;

-- What was done to queues.
--
-- Lock:   none.
-- Result: {"timeRange", "bucketMinutes", "series", "queues"}: of p_limit queues after the first p_offset, those with
--         the most messages first. partitionCount is as of the last birth or death in the bucket; parkedCount is the
--         most pops that waited at a time, added up over servers.
create or replace function queen.get_queue_ops_v1(
    p_from timestamptz, p_to timestamptz, p_queue text, p_namespace text, p_task text, p_limit int, p_offset int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    with range as (
        select * from queen.metrics_range_v1(p_from, p_to)
    ), flushed as materialized (
        select q.name, queen.metrics_bucket_v1(r.r_minutes, m.bucket_time) as bucket, m.*
        from range r join queen.queue_lag_metrics m
            on date_trunc('minute', r.r_from) <= m.bucket_time and m.bucket_time <= r.r_to
        join queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q on q.id = m.queue_id
    ), parked as materialized (
        select w.name, w.bucket, sum(w.most)::bigint as parked from (
            select q.name, queen.metrics_bucket_v1(r.r_minutes, m.bucket_time) as bucket, max(m.parked_count) as most
            from range r join queen.queue_parked_replica m
                on date_trunc('minute', r.r_from) <= m.bucket_time and m.bucket_time <= r.r_to and m.tenant_id = p_tenant
            join queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q on q.name = m.queue_name
            group by 1, 2, m.hostname, m.worker_id
        ) w
        group by 1, 2
    ), page as (
        select u.name from (
            select f.name, f.push_message_count + f.pop_count + f.ack_success_count as messages from flushed f
            union all select p.name, 0 from parked p
        ) u
        group by u.name
        order by sum(u.messages) desc, u.name
        limit p_limit offset p_offset
    ), points as (
        select f.name, f.bucket, min(queen.metrics_seconds_v1(f.bucket, r.r_minutes, r.r_from, r.r_to)) as seconds,
               sum(f.push_request_count)::bigint as push_requests, sum(f.push_message_count)::bigint as pushed,
               sum(f.pop_count)::bigint as popped, sum(f.pop_empty_count)::bigint as empty,
               sum(f.ack_request_count)::bigint as ack_requests, sum(f.ack_success_count)::bigint as acked,
               sum(f.ack_failed_count)::bigint as failed, sum(f.transaction_count)::bigint as transactions,
               sum(f.partitions_created)::bigint as created, sum(f.partitions_deleted)::bigint as deleted,
               (array_agg(f.partition_count order by f.bucket_time desc) filter (where f.partition_count is not null))[1]
                   as partitions,
               coalesce((sum(f.avg_lag_ms * f.lag_count) / nullif(sum(f.lag_count), 0))::bigint, 0) as avg_lag_ms,
               max(f.max_lag_ms) as max_lag_ms
        from flushed f join page on page.name = f.name cross join range r
        group by f.name, f.bucket
    )
    select jsonb_build_object(
        'timeRange', jsonb_build_object('from', queen.iso_milliseconds(r.r_from), 'to', queen.iso_milliseconds(r.r_to)),
        'bucketMinutes', r.r_minutes,
        'series', coalesce((
            select jsonb_agg(jsonb_build_object(
                'bucket', queen.iso_milliseconds(coalesce(p.bucket, w.bucket)), 'queueName', coalesce(p.name, w.name),
                'pushRequests', coalesce(p.push_requests, 0), 'pushMessages', coalesce(p.pushed, 0),
                'popMessages', coalesce(p.popped, 0), 'popEmpty', coalesce(p.empty, 0),
                'ackRequests', coalesce(p.ack_requests, 0), 'ackSuccess', coalesce(p.acked, 0),
                'ackFailed', coalesce(p.failed, 0), 'transactions', coalesce(p.transactions, 0),
                'partitionsCreated', coalesce(p.created, 0), 'partitionsDeleted', coalesce(p.deleted, 0),
                'partitionCount', p.partitions, 'avgLagMs', coalesce(p.avg_lag_ms, 0), 'maxLagMs', coalesce(p.max_lag_ms, 0),
                'pushPerSecond', coalesce(round((p.pushed / p.seconds)::numeric, 3), 0),
                'popPerSecond', coalesce(round((p.popped / p.seconds)::numeric, 3), 0),
                'ackPerSecond', coalesce(round((p.acked / p.seconds)::numeric, 3), 0),
                'emptyPerSecond', coalesce(round((p.empty / p.seconds)::numeric, 3), 0),
                'parkedCount', coalesce(w.parked, 0)
            ) order by coalesce(p.bucket, w.bucket), coalesce(p.name, w.name))
            from points p full join (select k.* from parked k join page on page.name = k.name) w
                on w.name = p.name and w.bucket = p.bucket), '[]'),
        'queues', coalesce((select jsonb_agg(page.name order by page.name) from page), '[]'))
    from range r
$$;

-- How old messages were when they were delivered, by queue and bucket.
--
-- Lock:   none.
-- Result: an array of p_limit elements after the first p_offset, by bucket and name; buckets without deliveries are
--         left out.
create or replace function queen.get_queue_lag_v1(
    p_from timestamptz, p_to timestamptz, p_queue text, p_namespace text, p_task text, p_limit int, p_offset int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    with range as (
        select * from queen.metrics_range_v1(p_from, p_to)
    ), points as (
        select queen.metrics_bucket_v1(r.r_minutes, m.bucket_time) as bucket, q.name, q.namespace, q.task,
               sum(m.pop_count)::bigint as pops, sum(m.lag_count)::bigint as lags,
               coalesce((sum(m.avg_lag_ms * m.lag_count) / nullif(sum(m.lag_count), 0))::bigint, 0) as avg_lag_ms,
               max(m.max_lag_ms) as max_lag_ms
        from range r join queen.queue_lag_metrics m
            on date_trunc('minute', r.r_from) <= m.bucket_time and m.bucket_time <= r.r_to and 0 < m.pop_count
        join queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q on q.id = m.queue_id
        group by 1, 2, 3, 4
        order by 1, 2
        limit p_limit offset p_offset
    )
    select coalesce(jsonb_agg(jsonb_build_object(
        'bucket', queen.iso_milliseconds(p.bucket), 'queueName', p.name, 'namespace', p.namespace, 'task', p.task,
        'popCount', p.pops, 'lagCount', p.lags, 'avgLagMs', p.avg_lag_ms, 'maxLagMs', p.max_lag_ms
    ) order by p.bucket, p.name), '[]')
    from points p
$$;

-- How many pops waited on which server, for which queue.
--
-- Lock:   none.
-- Result: {"timeRange", "bucketMinutes", "series"}: p_limit elements after the first p_offset, by bucket, queue and
--         server. A queue need not exist to be waited for, but one filtered by namespace or task must.
create or replace function queen.get_parked_replicas_v1(
    p_from timestamptz, p_to timestamptz, p_queue text, p_namespace text, p_task text, p_hostname text,
    p_limit int, p_offset int, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    with range as (
        select * from queen.metrics_range_v1(p_from, p_to)
    ), points as (
        select queen.metrics_bucket_v1(r.r_minutes, m.bucket_time) as bucket, m.queue_name, m.hostname, m.worker_id,
               max(m.parked_count) as parked
        from range r join queen.queue_parked_replica m
            on date_trunc('minute', r.r_from) <= m.bucket_time and m.bucket_time <= r.r_to and m.tenant_id = p_tenant
        where (p_queue is null or m.queue_name = p_queue) and (p_hostname is null or m.hostname = p_hostname)
          and (coalesce(p_namespace, p_task) is null or exists (
              select from queen.filtered_queues_v1(m.queue_name, p_namespace, p_task, p_tenant)))
        group by 1, 2, 3, 4
        order by 1, 2, 3, 4
        limit p_limit offset p_offset
    )
    select jsonb_build_object(
        'timeRange', jsonb_build_object('from', queen.iso_milliseconds(r.r_from), 'to', queen.iso_milliseconds(r.r_to)),
        'bucketMinutes', r.r_minutes,
        'series', coalesce((
            select jsonb_agg(jsonb_build_object(
                'bucket', queen.iso_milliseconds(p.bucket), 'queueName', p.queue_name, 'hostname', p.hostname,
                'workerId', p.worker_id, 'parkedCount', p.parked
            ) order by p.bucket, p.queue_name, p.hostname, p.worker_id) from points p), '[]'))
    from range r
$$;

-- How many messages were pushed, by minute, hour or day of UTC.
--
-- Lock:   none.
-- Result: {"dataPoints": [{"timestamp", "messages"}], "interval", "from", "to"}: the newest p_limit points after the
--         first p_offset of them, oldest first. Without a range it is the last 24 hours.
create or replace function queen.get_pushed_series_v1(
    p_interval text, p_from timestamptz, p_to timestamptz, p_queue text, p_namespace text, p_task text,
    p_limit int, p_offset int, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    with range as (
        select * from queen.metrics_range_v1(p_from, p_to, '24 hours')
    ), points as (
        select date_trunc(p_interval, m.bucket_time, 'UTC') as at, sum(m.push_message_count)::bigint as messages
        from range r join queen.queue_lag_metrics m
            on date_trunc('minute', r.r_from) <= m.bucket_time and m.bucket_time <= r.r_to
        join queen.filtered_queues_v1(p_queue, p_namespace, p_task, p_tenant) q on q.id = m.queue_id
        group by 1
        order by 1 desc
        limit p_limit offset p_offset
    )
    select jsonb_build_object(
        'dataPoints', coalesce((
            select jsonb_agg(jsonb_build_object('timestamp', queen.iso_milliseconds(p.at), 'messages', p.messages) order by p.at)
            from points p), '[]'),
        'interval', p_interval, 'from', queen.iso_milliseconds(r.r_from), 'to', queen.iso_milliseconds(r.r_to))
    from range r
$$;

-- What PostgreSQL says about itself and about the tables of this schema.
--
-- Lock:   none.
-- Result: {"database", "activity", "tables"}: from the statistics views, and sizes from the file system.
create or replace function queen.get_postgres_stats_v1() returns jsonb language sql stable as $$
    select jsonb_build_object(
        'timestamp', queen.iso_milliseconds(now()),
        'database', jsonb_build_object(
            'name', d.datname, 'version', current_setting('server_version'), 'sizeBytes', pg_database_size(d.datid),
            'connections', d.numbackends, 'maxConnections', current_setting('max_connections')::int,
            'commits', d.xact_commit, 'rollbacks', d.xact_rollback, 'deadlocks', d.deadlocks,
            'temporaryBytes', d.temp_bytes,
            'cacheHitRatio', round(d.blks_hit::numeric / nullif(d.blks_hit + d.blks_read, 0), 4)),
        'activity', (
            select jsonb_build_object(
                'active', count(*) filter (where a.state = 'active'), 'idle', count(*) filter (where a.state = 'idle'),
                'idleInTransaction', count(*) filter (where a.state like 'idle in transaction%'),
                'waitingForLocks', count(*) filter (where a.wait_event_type = 'Lock'),
                'longestTransactionSeconds', coalesce(
                    round(extract(epoch from max(clock_timestamp() - a.xact_start) filter (where a.pid <> pg_backend_pid())), 3),
                    0))
            from pg_stat_activity a where a.datid = d.datid and a.backend_type = 'client backend'),
        'tables', (
            select coalesce(jsonb_agg(jsonb_build_object(
                'name', t.relname, 'totalBytes', pg_total_relation_size(t.relid), 'indexBytes', pg_indexes_size(t.relid),
                'liveRows', t.n_live_tup, 'deadRows', t.n_dead_tup, 'sequentialScans', t.seq_scan,
                'indexScans', coalesce(t.idx_scan, 0), 'rowsInserted', t.n_tup_ins, 'rowsUpdated', t.n_tup_upd,
                'rowsUpdatedInPlace', t.n_tup_hot_upd, 'rowsDeleted', t.n_tup_del,
                'lastAutovacuum', queen.iso_milliseconds(t.last_autovacuum),
                'lastAutoanalyze', queen.iso_milliseconds(t.last_autoanalyze)) order by pg_total_relation_size(t.relid) desc), '[]')
            from pg_stat_user_tables t where t.schemaname in ('queen', 'queen_streams')))
    from pg_stat_database d where d.datname = current_database()
$$;
