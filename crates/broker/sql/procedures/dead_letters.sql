-- Dead letters: file the head of a batch or of a partition, list, delete and replay what was filed.

-- Earlier shapes, which a call would match as well.
drop function if exists queen.log_dlq_head_v1(uuid, text, text, bigint, uuid, text, text, text);
drop function if exists queen.log_dlq_head_multi_v1(uuid[], text[], text[], bigint[], uuid[], text[], text[], text[]);
drop function if exists queen.log_dlq_list_v1(text, text, text, timestamptz, timestamptz, int, int, uuid);

-- Files the message at p_offset as a dead letter, moves the cursor past it and ends the lease.
--
-- Lock:   the partition's row for key share, then this group's cursor. The first keeps cleanup, which spares a
--         partition with dead letters, from deleting the partition while one is being written.
-- Result: {"success": bool, "error": text, "leaseReleased": bool, "dlq": bool, "wake": {"queue", "partition"}}; a
--         refusal has no wake and filed nothing.
-- Why:    the lease is checked again, because the decision to file was an earlier transaction and somebody else
--         may have been given the message since. A NULL payload says that its segment was gone.
create or replace function queen.log_dlq_head_v1(
    p_pid uuid, p_group text, p_worker text, p_offset bigint, p_message_id uuid, p_transaction_id text, p_payload text,
    p_error text, p_trace_id uuid default null, p_producer text default null, p_is_encrypted boolean default false
) returns jsonb language plpgsql as $$
declare
    v_partition record;
    v_cursor    queen.log_consumers;
    v_wake      jsonb;
begin
    select p.last_offset, p.name, q.name as queue into v_partition
    from queen.log_partitions p join queen.queues q on q.id = p.queue_id where p.id = p_pid for key share of p;
    if not found then
        return queen.log_ack_refused_v1('consumer not found');
    end if;
    select * into v_cursor from queen.log_consumers
    where partition_id = p_pid and consumer_group = p_group for update;
    if not found then
        return queen.log_ack_refused_v1('consumer not found');
    elsif not queen.log_lease_held_v1(p_worker, v_cursor.batch_end, v_cursor.worker_id, v_cursor.lease_expires_at) then
        return queen.log_ack_refused_v1('invalid or expired lease');
    elsif p_offset <= v_cursor.committed then
        return queen.log_ack_refused_v1('already committed: the cursor is past offset ' || p_offset);
    elsif v_cursor.batch_end < p_offset then
        return queen.log_ack_refused_v1('position beyond the leased batch');
    end if;
    insert into queen.log_dlq (
        partition_id, consumer_group, "offset", message_id, transaction_id, payload, error, retry_count, failed_at,
        trace_id, producer, is_encrypted)
    values (p_pid, p_group, p_offset, p_message_id, p_transaction_id, p_payload, p_error, v_cursor.batch_retry_count,
        clock_timestamp(), p_trace_id, p_producer, coalesce(p_is_encrypted, false));
    perform queen.log_cursor_move_v1(p_pid, p_group, p_offset, 'done');
    if p_offset < v_partition.last_offset then
        v_wake := jsonb_build_object('queue', v_partition.queue, 'partition', v_partition.name);
    end if;
    return jsonb_build_object('success', true, 'error', null, 'leaseReleased', true, 'dlq', true, 'wake', v_wake);
end
$$;

-- log_dlq_head_v1 for many messages in one commit.
--
-- Lock:   every partition's row for key share, ascending by id; then the cursors, ascending by (partition, group).
-- Result: array of its results, in input order.
create or replace function queen.log_dlq_head_multi_v1(
    p_pids uuid[], p_groups text[], p_workers text[], p_offsets bigint[], p_message_ids uuid[],
    p_transaction_ids text[], p_payloads text[], p_errors text[], p_trace_ids uuid[] default null,
    p_producers text[] default null, p_are_encrypted boolean[] default null
) returns jsonb language plpgsql as $$
declare
    v_letter  record;
    v_results jsonb[] := array_fill(null::jsonb, array[cardinality(p_pids)]);
begin
    perform from queen.log_partitions p where p.id = any (p_pids) order by p.id for key share;
    for v_letter in
        select l.* from unnest(p_pids, p_groups, p_workers, p_offsets, p_message_ids, p_transaction_ids, p_payloads,
            p_errors, p_trace_ids, p_producers, p_are_encrypted) with ordinality as l (pid, "group", worker, "offset",
            message_id, transaction_id, payload, error, trace_id, producer, is_encrypted, ordinal)
        order by l.pid, l."group", l.ordinal
    loop
        v_results[v_letter.ordinal] := queen.log_dlq_head_v1(
            v_letter.pid, v_letter."group", v_letter.worker, v_letter."offset", v_letter.message_id,
            v_letter.transaction_id, v_letter.payload, v_letter.error, v_letter.trace_id, v_letter.producer,
            v_letter.is_encrypted);
    end loop;
    return to_jsonb(v_results);
end
$$;

-- The segments that hold the given messages, for the snapshots of dead letters.
--
-- Lock:   none.
-- Result: one row per message in input order, NULL where retention has deleted the segment.
create or replace function queen.log_dlq_segments_v1(
    p_pids uuid[], p_offsets bigint[]
) returns table (base_offset bigint, blob bytea) language sql stable as $$
    select s.base_offset, s.blob
    from unnest(p_pids, p_offsets) with ordinality as m (pid, "offset", ordinal)
    left join lateral queen.log_segment_at_v1(m.pid, m."offset") s on true
    order by m.ordinal
$$;

-- Lists dead letters, newest first.
--
-- Lock:   none.
-- Result: a page of rows. total, on each row, counts all that the filters let through; a page beyond the end
--         is one row with a NULL id and that total. payload is NULL where is_omitted says that those before it on the
--         page have p_bytes or more.
-- Why:    a filter that is NULL lets everything through. Both ends of the time span are inclusive. The id
--         breaks ties, so that pages neither repeat nor skip a row.
create or replace function queen.log_dlq_list_v1(
    p_queue text, p_group text, p_partition text, p_from timestamptz, p_to timestamptz, p_limit int, p_offset int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001', p_bytes bigint default null
) returns table (
    total bigint, id uuid, partition_id uuid, queue text, partition text, consumer_group text, "offset" bigint,
    message_id uuid, transaction_id text, payload text, error text, retry_count int, failed_at timestamptz,
    trace_id uuid, producer text, is_encrypted boolean, is_omitted boolean
) language sql stable as $$
    with lanes as materialized (
        select p.id, p.name as partition, q.name as queue
        from queen.log_partitions p join queen.queues q on q.id = p.queue_id
        where q.tenant_id = p_tenant and (p_queue is null or q.name = p_queue)
            and (p_partition is null or p.name = p_partition)
    ), letters as not materialized (
        select d.*, lanes.partition, lanes.queue
        from queen.log_dlq d join lanes on lanes.id = d.partition_id
        where (p_group is null or d.consumer_group = p_group)
            and (p_from is null or p_from <= d.failed_at) and (p_to is null or d.failed_at <= p_to)
    ), page as (
        select l.*, p_bytes <= coalesce(sum(octet_length(l.payload)) over (
                order by l.failed_at desc, l.id desc rows between unbounded preceding and 1 preceding), 0) as is_beyond
        from (select * from letters l order by l.failed_at desc, l.id desc limit p_limit offset p_offset) l
    )
    select n.total, page.id, page.partition_id, page.queue, page.partition, page.consumer_group, page."offset",
        page.message_id, page.transaction_id, case when page.is_beyond is not true then page.payload end, page.error,
        page.retry_count, page.failed_at, page.trace_id, page.producer, page.is_encrypted,
        coalesce(page.is_beyond and page.payload is not null, false)
    from (select count(*) as total from letters) n left join page on true
    order by page.failed_at desc, page.id desc
$$;
