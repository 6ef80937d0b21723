-- Metrics: what servers flush, the triggers that note births and deaths of partitions, the purge by age.

-- A time as listings print it: UTC, milliseconds.
create or replace function queen.iso_milliseconds(p_at timestamptz) returns text stable language sql as $$
    select to_char(p_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
$$;

-- Deletes metrics and audit rows older than a number of days, at most p_max_rows from each table.
--
-- Lock:   metric rows only, and none that another session holds: a queue delete or a flush that
--         is at work on a row is passed by, so that no order of locks can matter.
-- Cutoff: now() less retention_days, which is held within 1 to 36500: more leaves the range of
--         timestamps and would make every cycle fail. The window is the contract's argument,
--         so the clock is read here.
-- Result: {"deletedMetrics", "deletedLagMetrics", "deletedParkedReplica",
--         "deletedRetentionHistory", "done"}; done once no table filled its batch.
-- Why:    "ctid = any(array(...))", because "in (select ... limit)" may be planned as a join
--         that runs its limit again and again.
create or replace function queen.cleanup_worker_metrics_v1(
    retention_days int default 7, p_max_rows int default null
) returns jsonb language plpgsql as $$
declare
    v_cutoff  timestamptz := now() - make_interval(days => least(greatest(coalesce(retention_days, 7), 1), 36500));
    v_limit   bigint := greatest(coalesce(p_max_rows, 1000), 1);
    v_workers bigint;
    v_queues  bigint;
    v_parked  bigint;
    v_history bigint;
begin
    delete from queen.worker_metrics
    where ctid = any (array(
        select ctid from queen.worker_metrics where bucket_time < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_workers = row_count;

    delete from queen.queue_lag_metrics
    where ctid = any (array(
        select ctid from queen.queue_lag_metrics where bucket_time < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_queues = row_count;

    delete from queen.queue_parked_replica
    where ctid = any (array(
        select ctid from queen.queue_parked_replica where bucket_time < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_parked = row_count;

    delete from queen.retention_history
    where ctid = any (array(
        select ctid from queen.retention_history where executed_at < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_history = row_count;

    return jsonb_build_object(
        'deletedMetrics', v_workers,
        'deletedLagMetrics', v_queues,
        'deletedParkedReplica', v_parked,
        'deletedRetentionHistory', v_history,
        'done', greatest(v_workers, v_queues, v_parked, v_history) < v_limit);
end $$;

-- Notes how many partitions each queue gained by one statement.
--
-- Lock:   none but the rows it appends: the statement may hold partition locks, and an upsert of
--         a counter shared between queues would let two such statements wait for each other.
-- Result: one row of partition_events a queue.
create or replace function queen.note_partitions_created() returns trigger language plpgsql as $$
begin
    insert into queen.partition_events (queue_id, at, created)
    select queue_id, now(), count(*) from created group by queue_id;
    return null;
end $$;

-- Notes how many partitions each queue lost by one statement.
--
-- Lock:   as note_partitions_created.
-- Result: one row of partition_events a queue; none for a queue that is being deleted itself,
--         whose metrics go with it.
create or replace function queen.note_partitions_deleted() returns trigger language plpgsql as $$
begin
    insert into queen.partition_events (queue_id, at, deleted)
    select d.queue_id, now(), count(*)
    from deleted d
    where exists (select from queen.queues q where q.id = d.queue_id)
    group by d.queue_id;
    return null;
end $$;

-- Attached once and then left alone: making a trigger again would stall all traffic on its table.
do $$
begin
    if not exists (
        select from pg_trigger
        where tgrelid = 'queen.log_partitions'::regclass and tgname = 'note_partitions_created'
    ) then
        create trigger note_partitions_created after insert on queen.log_partitions
            referencing new table as created
            for each statement execute function queen.note_partitions_created();
    end if;
    if not exists (
        select from pg_trigger
        where tgrelid = 'queen.log_partitions'::regclass and tgname = 'note_partitions_deleted'
    ) then
        create trigger note_partitions_deleted after delete on queen.log_partitions
            referencing old table as deleted
            for each statement execute function queen.note_partitions_deleted();
    end if;
end $$;

-- Adds what a server counted since its last flush to the lifetime totals.
--
-- Lock:   the one row of totals, after the rows that the statement inserted.
-- Result: nothing; every flush inserts a row of its own, so an insert is all there is to add.
create or replace function queen.sum_worker_metrics() returns trigger language plpgsql as $$
begin
    update queen.worker_metrics_summary s set
        push_request_count = s.push_request_count + f.push_request_count,
        pop_request_count = s.pop_request_count + f.pop_request_count,
        ack_request_count = s.ack_request_count + f.ack_request_count,
        transaction_count = s.transaction_count + f.transaction_count,
        push_message_count = s.push_message_count + f.push_message_count,
        pop_message_count = s.pop_message_count + f.pop_message_count,
        ack_message_count = s.ack_message_count + f.ack_message_count,
        ack_success_count = s.ack_success_count + f.ack_success_count,
        ack_failed_count = s.ack_failed_count + f.ack_failed_count,
        db_error_count = s.db_error_count + f.db_error_count,
        dlq_count = s.dlq_count + f.dlq_count,
        updated_at = now()
    from (
        select sum(push_request_count) as push_request_count, sum(pop_request_count) as pop_request_count,
               sum(ack_request_count) as ack_request_count, sum(transaction_count) as transaction_count,
               sum(push_message_count) as push_message_count, sum(pop_message_count) as pop_message_count,
               sum(ack_message_count) as ack_message_count, sum(ack_success_count) as ack_success_count,
               sum(ack_failed_count) as ack_failed_count, sum(db_error_count) as db_error_count,
               sum(dlq_count) as dlq_count, count(*) as rows
        from flushed
    ) f
    where f.rows > 0;
    return null;
end $$;

do $$
begin
    if not exists (
        select from pg_trigger
        where tgrelid = 'queen.worker_metrics'::regclass and tgname = 'sum_worker_metrics'
    ) then
        create trigger sum_worker_metrics after insert on queen.worker_metrics
            referencing new table as flushed
            for each statement execute function queen.sum_worker_metrics();
    end if;
end $$;

-- Writes what one server counted and measured since its last flush.
--
-- Lock:   none but the rows it inserts, then the row of totals.
-- Result: {"at"}: the database's time, by which the server tells the age of what it delivers.
-- Why:    a row a flush and not a row a minute: means and extremes stay those that were measured.
create or replace function queen.flush_server_metrics_v1(
    p_hostname text, p_port int, p_worker_id int, p_pid int, p_counts jsonb, p_sample_count int, p_system jsonb
) returns jsonb language plpgsql as $$
declare
    v_at timestamptz := clock_timestamp();
begin
    insert into queen.worker_metrics
    select (jsonb_populate_record(null::queen.worker_metrics, to_jsonb(zero) || p_counts || jsonb_build_object(
        'hostname', p_hostname, 'worker_id', p_worker_id, 'pid', p_pid, 'bucket_time', v_at, 'created_at', v_at))).*
    from (
        select 0 as avg_event_loop_lag_ms, 0 as max_event_loop_lag_ms, 0 as avg_free_slots, 0 as min_free_slots,
               0 as db_connections, 0 as avg_job_queue_size, 0 as max_job_queue_size, 0 as backoff_size,
               0 as jobs_done, 0 as push_request_count, 0 as pop_request_count, 0 as ack_request_count,
               0 as transaction_count, 0 as push_message_count, 0 as pop_message_count, 0 as ack_message_count,
               0 as ack_success_count, 0 as ack_failed_count, 0 as lag_count, 0 as avg_lag_ms, 0 as max_lag_ms,
               0 as db_error_count, 0 as dlq_count
    ) zero;
    insert into queen.system_metrics ("timestamp", hostname, port, worker_id, sample_count, metrics)
    values (v_at, p_hostname, p_port, p_worker_id::text, p_sample_count, p_system);
    return jsonb_build_object('at', v_at);
end $$;

-- Adds what one server counted by queue to the minute that it is. Each element names its queue by
-- "queue", or by "partition" where only that is known; one that no longer exists is left out.
--
-- Lock:   rows of queue_lag_metrics by ascending (minute, queue), as every flush and queue delete.
-- Result: {"queues"}: how many rows were written.
create or replace function queen.flush_queue_metrics_v1(
    p_counts jsonb, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql as $$
declare
    v_queues bigint;
begin
    insert into queen.queue_lag_metrics as m (
        bucket_time, queue_id, pop_count, lag_count, avg_lag_ms, max_lag_ms, push_request_count,
        push_message_count, ack_request_count, ack_success_count, ack_failed_count, transaction_count,
        pop_empty_count)
    select date_trunc('minute', now()), coalesce(q.id, p.queue_id), sum(c.pop_count), sum(c.lag_count),
           coalesce(sum(c.lag_sum_ms) / nullif(sum(c.lag_count), 0), 0), max(c.max_lag_ms),
           sum(c.push_request_count), sum(c.push_message_count), sum(c.ack_request_count),
           sum(c.ack_success_count), sum(c.ack_failed_count), sum(c.transaction_count), sum(c.pop_empty_count)
    from jsonb_to_recordset(p_counts) as c (
        queue text, partition uuid, pop_count bigint, lag_count bigint, lag_sum_ms bigint, max_lag_ms bigint,
        push_request_count bigint, push_message_count bigint, ack_request_count bigint,
        ack_success_count bigint, ack_failed_count bigint, transaction_count bigint, pop_empty_count bigint)
    left join queen.queues q on q.tenant_id = p_tenant and q.name = c.queue
    left join queen.log_partitions p on p.id = c.partition
    where coalesce(q.id, p.queue_id) is not null
    group by 2 order by 1, 2
    on conflict (bucket_time, queue_id) do update set
        pop_count = m.pop_count + excluded.pop_count,
        lag_count = m.lag_count + excluded.lag_count,
        avg_lag_ms = coalesce(
            (m.avg_lag_ms * m.lag_count + excluded.avg_lag_ms * excluded.lag_count)
            / nullif(m.lag_count + excluded.lag_count, 0), 0),
        max_lag_ms = greatest(m.max_lag_ms, excluded.max_lag_ms),
        push_request_count = m.push_request_count + excluded.push_request_count,
        push_message_count = m.push_message_count + excluded.push_message_count,
        ack_request_count = m.ack_request_count + excluded.ack_request_count,
        ack_success_count = m.ack_success_count + excluded.ack_success_count,
        ack_failed_count = m.ack_failed_count + excluded.ack_failed_count,
        transaction_count = m.transaction_count + excluded.transaction_count,
        pop_empty_count = m.pop_empty_count + excluded.pop_empty_count;
    get diagnostics v_queues = row_count;
    return jsonb_build_object('queues', v_queues);
end $$;

-- Notes how many pops wait on one server, by queue: [{"queue", "parked"}].
--
-- Lock:   rows of that server alone.
-- Result: nothing. Of several notes in a minute the largest stays.
create or replace function queen.flush_parked_v1(
    p_hostname text, p_worker_id int, p_parked jsonb, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns void language sql as $$
    insert into queen.queue_parked_replica as m (bucket_time, queue_name, hostname, worker_id, tenant_id, parked_count)
    select date_trunc('minute', now()), w.queue, p_hostname, p_worker_id, p_tenant, max(w.parked)
    from jsonb_to_recordset(p_parked) as w (queue text, parked int)
    group by w.queue order by w.queue
    on conflict (bucket_time, queue_name, hostname, worker_id, tenant_id) do update
    set parked_count = greatest(m.parked_count, excluded.parked_count)
$$;

-- Moves births and deaths of partitions, at most p_max_rows statements' worth, into the minute and
-- queue that they belong to. Those of a queue that is gone are thrown away.
--
-- Lock:   events that no other session holds; then rows of queue_lag_metrics by ascending
--         (minute, queue), as every flush and queue delete. No partition.
-- Result: {"folded", "done"}
create or replace function queen.fold_partition_events_v1(p_max_rows int default 1000)
returns jsonb language sql as $$
    with taken as (
        delete from queen.partition_events
        where ctid = any (array(
            select ctid from queen.partition_events limit greatest(p_max_rows, 1) for update skip locked))
        returning queue_id, at, created, deleted
    ), folded as (
        insert into queen.queue_lag_metrics as m (
            bucket_time, queue_id, partitions_created, partitions_deleted, partition_count)
        select date_trunc('minute', t.at), t.queue_id, sum(t.created), sum(t.deleted),
               (select count(*) from queen.log_partitions p where p.queue_id = t.queue_id)
        from taken t
        where exists (select from queen.queues q where q.id = t.queue_id)
        group by 1, 2 order by 1, 2
        on conflict (bucket_time, queue_id) do update set
            partitions_created = m.partitions_created + excluded.partitions_created,
            partitions_deleted = m.partitions_deleted + excluded.partitions_deleted,
            partition_count = excluded.partition_count
    )
    select jsonb_build_object('folded', count(*), 'done', count(*) < greatest(p_max_rows, 1)) from taken
$$;

-- How wide a bucket of a time line is, so that a line has at most a few hundred of them.
create or replace function queen.bucket_minutes(p_from timestamptz, p_to timestamptz)
returns int immutable language sql as $$
    select case
        when p_to - p_from <= interval '60 minutes' then 1
        when p_to - p_from <= interval '360 minutes' then 5
        when p_to - p_from <= interval '1440 minutes' then 15
        when p_to - p_from <= interval '10080 minutes' then 60
        else 360
    end
$$;

-- What retention deleted over time, by rule; buckets in which nothing went are left out.
-- Filters: "from" and "to" (the last hour), "queue", "namespace", "task", "_tenant".
--
-- Lock:   none.
-- Result: {"timeRange": {"from", "to"}, "bucketMinutes", "series": [{"bucket", "retentionMsgs",
--         "completedRetentionMsgs", "evictionMsgs", "totalMsgs", "eventCount"}], "totals"}
-- Why:    the queue stands in the history row, so that rows of a deleted partition still pass the
--         filter; one written without it is looked up, and without either belongs to the default
--         tenant and to no queue. Types of the form __x__ record something else than messages.
create or replace function queen.get_retention_timeseries_v1(filters jsonb default '{}')
returns jsonb stable language plpgsql as $$
declare
    v_default uuid := '00000000-0000-0000-0000-000000000001';
    v_tenant  uuid := coalesce((filters ->> '_tenant')::uuid, v_default);
    v_queue   text := nullif(filters ->> 'queue', '');
    v_space   text := nullif(filters ->> 'namespace', '');
    v_task    text := nullif(filters ->> 'task', '');
    v_to      timestamptz := coalesce((filters ->> 'to')::timestamptz, now());
    v_from    timestamptz := coalesce((filters ->> 'from')::timestamptz, v_to - interval '1 hour');
    v_minutes int := queen.bucket_minutes(v_from, v_to);
begin
    return (
        with deleted as (
            select date_bin(make_interval(mins => v_minutes), h.executed_at, '2000-01-01 00:00:00Z') as bucket,
                   h.retention_type as rule, coalesce(h.messages_deleted, 0)::bigint as messages
            from queen.retention_history h
            left join queen.log_partitions p on h.queue_id is null and p.id = h.partition_id
            left join queen.queues q on q.id = coalesce(h.queue_id, p.queue_id)
            where v_from <= h.executed_at and h.executed_at <= v_to
              and coalesce(h.retention_type, '') not like '\_\_%\_\_'
              and coalesce(h.tenant_id, q.tenant_id, v_default) = v_tenant
              and (v_queue is null or q.name = v_queue)
              and (v_space is null or q.namespace = v_space) and (v_task is null or q.task = v_task)
        ), sums as (
            select bucket, grouping(bucket) = 1 as is_total, jsonb_build_object(
                'retentionMsgs', coalesce(sum(messages) filter (where rule = 'retention'), 0),
                'completedRetentionMsgs', coalesce(sum(messages) filter (where rule = 'completed_retention'), 0),
                'evictionMsgs', coalesce(sum(messages) filter (where rule = 'max_wait_time_eviction'), 0),
                'totalMsgs', coalesce(sum(messages), 0),
                'eventCount', count(*)) as counts
            from deleted group by grouping sets ((bucket), ())
        )
        select jsonb_build_object(
            'timeRange', jsonb_build_object('from', queen.iso_milliseconds(v_from), 'to', queen.iso_milliseconds(v_to)),
            'bucketMinutes', v_minutes,
            'series', coalesce(
                jsonb_agg(jsonb_build_object('bucket', queen.iso_milliseconds(bucket)) || counts order by bucket)
                filter (where not is_total), '[]'),
            'totals', (select counts from sums where is_total))
        from sums
    );
end $$;
