-- Statistics: the counters of each queue as a refresh found them, with the bytes that its segments take.

-- Estimates the bytes of the segments of one partition.
--
-- Lock:   none.
-- Result: exact up to 64 segments; beyond, what the first and the last 32 take of a message, times the messages.
-- Why:    a sum would read every segment there is. octet_length of a blob that lies out of line reads its pointer.
create or replace function queen.log_bytes_v1(p_pid uuid, p_log_start bigint, p_last_offset bigint)
returns bigint language sql stable as $$
    with ends as (
        (select s.base_offset, s.end_offset, octet_length(s.blob) as bytes from queen.log_segments s
         where s.partition_id = p_pid and p_log_start <= s.base_offset
         order by s.base_offset limit 32)
        union
        (select s.base_offset, s.end_offset, octet_length(s.blob) from queen.log_segments s
         where s.partition_id = p_pid and p_log_start <= s.base_offset
         order by s.base_offset desc limit 32)
    )
    select coalesce(case when count(*) < 64 then sum(e.bytes)
        else sum(e.bytes)::numeric / sum(e.end_offset - e.base_offset + 1) * (p_last_offset - p_log_start + 1) end, 0)::bigint
    from ends e
$$;

-- Counts at most p_max_rows partitions of the queue that was counted longest ago, if that was before p_before, or if that
-- is NULL longer ago than p_age_seconds. The step that comes to a queue's end writes what was summed up.
--
-- Lock:   advisory 737003 for the transaction, so that servers share the work; then rows of queen.stats. No partition.
-- Result: {"before", "partitions", "queues", "done"}: the time that counted; queues is 1 if one was finished; done if no
--         queue is left, or, unless p_wait, if somebody else is counting.
create or replace function queen.stats_count_v1(
    p_before timestamptz, p_age_seconds double precision, p_max_rows int, p_wait boolean,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql as $$
declare
    v_before timestamptz := coalesce(p_before, clock_timestamp() - make_interval(secs => p_age_seconds));
    v_queue uuid;
    v_was   jsonb;
    v_sum   jsonb;
    v_rows  bigint;
    v_ended boolean;
begin
    if p_wait then
        perform pg_advisory_xact_lock(737003);
    elsif not pg_try_advisory_xact_lock(737003) then
        return jsonb_build_object('before', v_before, 'partitions', 0, 'queues', 0, 'done', true);
    end if;
    select q.id, coalesce(s.progress, '{}') into v_queue, v_was
    from queen.queues q left join queen.stats s on s.stat_type = 'queue' and s.stat_key = q.id::text
    where q.tenant_id = p_tenant and (s.measured_at is null or s.measured_at < v_before)
    order by s.progress is null, s.measured_at nulls first, q.id
    limit 1;
    if not found then
        return jsonb_build_object('before', v_before, 'partitions', 0, 'queues', 0, 'done', true);
    end if;
    select count(*), jsonb_build_object(
        'after', max(p.name),
        'partitions', coalesce((v_was ->> 'partitions')::bigint, 0) + count(*),
        'total', coalesce((v_was ->> 'total')::bigint, 0) + coalesce(sum(n.r_total), 0),
        'pending', coalesce((v_was ->> 'pending')::bigint, 0) + coalesce(sum(n.r_pending), 0),
        'processing', coalesce((v_was ->> 'processing')::bigint, 0) + coalesce(sum(n.r_processing), 0),
        'completed', coalesce((v_was ->> 'completed')::bigint, 0) + coalesce(sum(n.r_completed), 0),
        'dead', coalesce((v_was ->> 'dead')::bigint, 0) + coalesce(sum(n.r_dead), 0),
        'bytes', coalesce((v_was ->> 'bytes')::bigint, 0) + coalesce(sum(b.bytes), 0))
    into v_rows, v_sum
    from (
        select p.id, p.name, p.log_start, p.last_offset from queen.log_partitions p
        where p.queue_id = v_queue and coalesce(v_was ->> 'after', '') < p.name
        order by p.queue_id, p.name
        limit greatest(p_max_rows, 1)
    ) p
    cross join lateral queen.log_counts_v1(p.id, p.log_start, p.last_offset) n
    left join lateral (select queen.log_bytes_v1(p.id, p.log_start, p.last_offset) as bytes) b
        on p.log_start <= p.last_offset;
    v_ended := v_rows < greatest(p_max_rows, 1);
    insert into queen.stats as s (stat_type, stat_key, queue_id, tenant_id, progress)
    values ('queue', v_queue::text, v_queue, p_tenant, v_sum)
    on conflict (stat_type, stat_key) do update set progress = excluded.progress;
    if v_ended then
        update queen.stats s set
            progress = null, measured_at = clock_timestamp(), last_computed_at = clock_timestamp(),
            partition_count = (v_sum ->> 'partitions')::bigint, total_messages = (v_sum ->> 'total')::bigint,
            pending_messages = (v_sum ->> 'pending')::bigint, processing_messages = (v_sum ->> 'processing')::bigint,
            completed_messages = (v_sum ->> 'completed')::bigint, dead_letter_messages = (v_sum ->> 'dead')::bigint,
            retained_bytes = (v_sum ->> 'bytes')::bigint
        where s.stat_type = 'queue' and s.stat_key = v_queue::text;
    end if;
    return jsonb_build_object('before', v_before, 'partitions', v_rows, 'queues', v_ended::int, 'done', false);
end
$$;

-- What the last refresh found, over all queues.
--
-- Lock:   none.
-- Result: {"queues", "partitions", "messages", "retainedBytes", "refreshedAt"}; queues counts those measured.
create or replace function queen.stats_summary_v1(
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'queues', count(*), 'partitions', coalesce(sum(s.partition_count), 0)::bigint,
        'messages', coalesce(sum(s.total_messages), 0)::bigint,
        'retainedBytes', coalesce(sum(s.retained_bytes), 0)::bigint,
        'refreshedAt', queen.iso_milliseconds(now()))
    from queen.stats s where s.stat_type = 'queue' and s.tenant_id = p_tenant and s.measured_at is not null
$$;
