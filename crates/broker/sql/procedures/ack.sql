-- Acknowledgement: move cursors, release leases, count failures.

-- Whether p_worker may act on a cursor: it holds the lease and the lease is live.
--
-- Lock:   none; the caller has locked the cursor.
-- Result: true also for an empty worker, which claims no lease and is not checked.
-- Why:    the clock is read after the lock. A transaction that waited for it must not judge the lease
--         by the time at which it began.
create or replace function queen.log_lease_held_v1(
    p_worker text, p_batch_end bigint, p_holder text, p_expires_at timestamptz
) returns boolean language sql volatile as $$
    select coalesce(p_worker, '') = ''
        or (p_batch_end is not null and coalesce(p_holder = p_worker and clock_timestamp() < p_expires_at, false))
$$;

-- Moves a cursor forward, never back, and ends its lease in one of four ways.
--
-- Lock:   this cursor's row, which the caller holds.
-- Result: nothing. p_outcome: keep the lease; done releases it and forgets all failures; failed
--         releases and charges one; retry releases and charges none.
-- Why:    a released lease keeps its time stamps: they are how cleanup sees recent activity. plpgsql plans once a
--         session, a function in SQL at every call.
create or replace function queen.log_cursor_move_v1(
    p_pid uuid, p_group text, p_to bigint, p_outcome text
) returns void language plpgsql as $$
begin
    update queen.log_consumers c set
        committed = greatest(c.committed, p_to),
        -- What retention deleted before the cursor reached it was not consumed.
        total_consumed = c.total_consumed + greatest(0, p_to - greatest(c.committed, p.log_start - 1)),
        batch_end = case when p_outcome = 'keep' then c.batch_end end,
        worker_id = case when p_outcome = 'keep' then c.worker_id end,
        -- Failures are charged to the message at the head; a head that moves on leaves them behind.
        batch_retry_count = case when p_outcome = 'done' or c.committed < p_to then 0 else c.batch_retry_count end
            + (p_outcome = 'failed')::int,
        attempt_offset = case when p_outcome <> 'done' then c.attempt_offset end,
        attempt_count = case when p_outcome = 'done' then 0 else c.attempt_count end
    from queen.log_partitions p
    where c.partition_id = p_pid and c.consumer_group = p_group and p.id = p_pid;
end
$$;

-- A refused acknowledgement, which changed nothing.
--
-- Lock:   none.
-- Result: {"success": false, "error": text, "leaseReleased": false, "dlq": false}
create or replace function queen.log_ack_refused_v1(p_error text) returns jsonb language sql immutable as $$
    select jsonb_build_object('success', false, 'error', p_error, 'leaseReleased', false, 'dlq', false)
$$;

-- How strong a status is: 0 done, 1 retry, 2 failed, 3 dlq. What is not known has failed.
--
-- Lock:   none.
-- Result: the rank; of two signals for one message the higher one counts.
create or replace function queen.log_ack_rank_v1(p_status text) returns int language sql immutable as $$
    select case coalesce(p_status, '')
        when '' then 0 when 'completed' then 0 when 'success' then 0 when 'acked' then 0 when 'ok' then 0
        when 'retry' then 1 when 'dlq' then 3 else 2 end
$$;

-- Finds the acknowledged messages that lie between the cursor and the end of the batch.
--
-- Lock:   none.
-- Result: one row per hash and rank; live is the smallest offset in (p_after, p_high], NULL if none.
-- Why:    grouping instead of joining costs the same whatever the planner believes about the sizes;
--         only the hashes of the span itself are unpacked from the rows that overlap it.
create or replace function queen.log_ack_resolve_v1(
    p_pid uuid, p_hashes bytea[], p_statuses text[], p_after bigint, p_high bigint
) returns table (h bytea, rank int, live bigint) language sql stable as $$
    with acked as materialized (
        select distinct a.h, queen.log_ack_rank_v1(a.status) as rank
        from unnest(p_hashes, p_statuses) as a (h, status)
    ), spans as (
        select greatest(t.base_offset, p_after + 1) as low, t.base_offset, t.hashes,
            least(t.end_offset, p_high) as high
        from queen.log_txns t
        where t.partition_id = p_pid
            and coalesce((
                select below.base_offset from queen.log_txns below
                where below.partition_id = p_pid and below.base_offset <= p_after + 1
                order by below.base_offset desc limit 1), 0) <= t.base_offset
            and t.base_offset <= p_high and p_after < t.end_offset
    ), located as (
        select s.h, min(s.off) as live
        from (
            select u.h, spans.low + u.idx as off, false as wanted
            from spans cross join lateral queen.log_unnest_hashes(substr(
                spans.hashes, (1 + 16 * (spans.low - spans.base_offset))::int,
                (16 * (spans.high - spans.low + 1))::int)) as u (idx, h)
            union all
            select acked.h, null, true from acked
        ) s
        group by s.h having bool_or(s.wanted)
    )
    select acked.h, acked.rank, located.live from acked join located using (h)
$$;

-- Which of the hashes belong to messages at or below the cursor.
--
-- Lock:   none.
-- Result: those found, in no order.
-- Why:    walks back from the cursor and stops once all are found, since what is acknowledged twice
--         was mostly acknowledged a moment ago. A hash that is nowhere costs a million messages and is
--         then taken for one that was never pushed.
create or replace function queen.log_ack_passed_v1(
    p_pid uuid, p_hashes bytea[], p_committed bigint
) returns bytea[] language plpgsql as $$
declare
    c_rows_max constant int := 100;
    c_span_max constant bigint := 1000000;
    v_left     bytea[] := p_hashes;
    v_found    bytea[] := '{}';
    v_hit      bytea[];
    v_below    bigint := p_committed + 1;
    v_lowest   bigint;
begin
    while 0 < cardinality(v_left) and p_committed - c_span_max < v_below loop
        with rows as materialized (
            select t.base_offset, t.hashes from queen.log_txns t
            where t.partition_id = p_pid and t.base_offset < v_below
            order by t.base_offset desc limit c_rows_max
        ), hit as (
            select u.h from rows cross join lateral queen.log_unnest_hashes(rows.hashes) as u (idx, h)
            where rows.base_offset + u.idx <= p_committed
            intersect
            select l.h from unnest(v_left) as l (h)
        )
        select (select min(rows.base_offset) from rows), array(select hit.h from hit) into v_lowest, v_hit;
        exit when v_lowest is null;
        v_below := v_lowest;
        if 0 < cardinality(v_hit) then
            v_found := v_found || v_hit;
            v_left := array(select l.h from unnest(v_left) as l (h) except select f.h from unnest(v_hit) as f (h));
        end if;
    end loop;
    return v_found;
end
$$;

-- Names the hashes that were not found in the batch, by what became of them.
--
-- Lock:   none.
-- Result: {"noopHashes": […], "staleHashes": […], "unresolvedHashes": […]}, in hexadecimal: done again
--         what is behind the cursor, a signal for what is behind it, found nowhere.
create or replace function queen.log_ack_leftovers_v1(
    p_pid uuid, p_hashes bytea[], p_ranks int[], p_committed bigint
) returns jsonb language plpgsql as $$
declare
    v_passed bytea[] := queen.log_ack_passed_v1(p_pid, p_hashes, p_committed);
begin
    return (
        select jsonb_build_object(
            'noopHashes', coalesce(jsonb_agg(encode(g.h, 'hex')) filter (where g.passed and g.is_done), '[]'),
            'staleHashes', coalesce(jsonb_agg(encode(g.h, 'hex')) filter (where g.passed and g.is_signal), '[]'),
            'unresolvedHashes', coalesce(jsonb_agg(encode(g.h, 'hex')) filter (where not g.passed), '[]'))
        from (
            select s.h, bool_or(s.passed) as passed, bool_or(s.rank = 0) as is_done, bool_or(0 < s.rank) as is_signal
            from (
                select m.h, m.rank, false as passed from unnest(p_hashes, p_ranks) as m (h, rank)
                union all
                select f.h, null, true from unnest(v_passed) as f (h)
            ) s
            group by s.h
        ) g
    );
end
$$;

-- Acknowledges messages of one leased batch by the hashes of their transaction ids.
--
-- Lock:   this group's cursor and nothing else.
-- Result: {"success": bool, "error": text, "leaseReleased": bool, "dlq": bool, "offset": n, "hash": hex,
--          "committed": n, "noopHashes", "staleHashes", "unresolvedHashes", "goneHashes", "logStart": n,
--          "wake": {"queue", "partition"}}. A refusal has the first four keys; goneHashes are signals for what
--         retention has deleted; logStart is there if it has deleted some of the batch; wake is there if the lease
--         ended and messages are left.
-- Why:    what is done completes everything before it in the batch, up to the lowest message that is not.
--         dlq keeps the lease: the caller unpacks the message at offset and calls log_dlq_head_v1. If it never
--         comes to that, the lease runs out and the message is delivered again.
create or replace function queen.log_ack_by_hash_v1(
    p_pid uuid, p_group text, p_worker text, p_hashes bytea[], p_statuses text[]
) returns jsonb language plpgsql as $$
declare
    -- Without a lease there is no batch to bound the search.
    c_span_max  constant bigint := 1000000;
    v_cursor    queen.log_consumers;
    v_context   record;
    v_done      bigint;
    v_bad       bigint;
    v_signal    int;
    v_hash      bytea;
    v_to        bigint;
    v_failures  int;
    v_outcome   text;
    v_dlq       boolean := false;
    v_missing   bytea[];
    v_ranks     int[];
    v_gone      text[];
    v_leftovers jsonb := '{"noopHashes": [], "staleHashes": [], "unresolvedHashes": []}';
    v_wake      jsonb;
begin
    if cardinality(p_hashes) <> cardinality(p_statuses) then
        raise exception 'QACK misaligned: % hashes, % statuses', cardinality(p_hashes), cardinality(p_statuses);
    end if;
    select * into v_cursor from queen.log_consumers
    where partition_id = p_pid and consumer_group = p_group for update;
    if not found then
        return queen.log_ack_refused_v1('consumer not found');
    end if;
    if not queen.log_lease_held_v1(p_worker, v_cursor.batch_end, v_cursor.worker_id, v_cursor.lease_expires_at) then
        return queen.log_ack_refused_v1('invalid or expired lease');
    end if;
    select p.txns_start, p.log_start, p.last_offset, p.name as partition, q.name as queue, coalesce(q.retry_limit, 3) as retry_limit,
        coalesce(q.dead_letter_queue, true) or coalesce(q.dlq_after_max_retries, true) as files_letters
    into v_context
    from queen.log_partitions p join queen.queues q on q.id = p.queue_id where p.id = p_pid;

    with r as materialized (
        select * from queen.log_ack_resolve_v1(p_pid, p_hashes, p_statuses,
            -- Of a conflated lease only the last message was delivered; an id that stands in it twice means that one.
            greatest(v_cursor.committed, v_context.txns_start - 1,
                case when v_cursor.conflated then v_cursor.batch_end - 1 end), coalesce(v_cursor.batch_end, least(v_context.last_offset, v_cursor.committed + c_span_max)))
    ), s as (
        select max(r.live) filter (where r.rank = 0) as done, min(r.live) filter (where 0 < r.rank) as bad,
            array_agg(r.h) filter (where r.live is null) as missing,
            array_agg(r.rank) filter (where r.live is null) as ranks,
            array_agg(encode(r.h, 'hex')) filter (where 0 < r.rank and r.live < v_context.log_start) as gone
        from r
    )
    select s.done, s.bad, s.missing, s.ranks, s.gone, worst.rank, worst.h
    into v_done, v_bad, v_missing, v_ranks, v_gone, v_signal, v_hash
    from s left join lateral (
        select r.rank, r.h from r where r.live = s.bad order by r.rank desc limit 1
    ) worst on true;
    if v_missing is not null then
        v_leftovers := queen.log_ack_leftovers_v1(p_pid, v_missing, v_ranks, v_cursor.committed);
    end if;

    v_to := greatest(v_cursor.committed, v_done);
    if v_bad is not null then
        v_to := greatest(v_cursor.committed, least(v_to, v_bad - 1));
        v_failures := case when v_cursor.committed < v_to then 0 else v_cursor.batch_retry_count end;
        if v_signal = 1 then
            v_outcome := 'retry';
        elsif v_signal = 2 and v_failures < v_context.retry_limit then
            v_outcome := 'failed';
        elsif v_signal = 3 or v_context.files_letters then
            v_outcome := 'keep';
            v_dlq := true;
        else
            v_to := v_bad;
            v_outcome := 'done';
        end if;
    elsif v_done is not null then
        v_outcome := case when v_to < v_cursor.batch_end then 'keep' else 'done' end;
    end if;

    if v_outcome is not null then
        perform queen.log_cursor_move_v1(p_pid, p_group, v_to, v_outcome);
        if v_outcome <> 'keep' and v_to < v_context.last_offset then
            v_wake := jsonb_build_object('queue', v_context.queue, 'partition', v_context.partition);
        end if;
    end if;
    return v_leftovers || jsonb_build_object('success', true, 'error', null, 'dlq', v_dlq,
        'leaseReleased', v_cursor.batch_end is null or coalesce(v_outcome <> 'keep', false),
        'offset', case when v_dlq then v_bad end, 'hash', case when v_dlq then encode(v_hash, 'hex') end,
        'committed', v_to, 'wake', v_wake, 'goneHashes', coalesce(v_gone, '{}'),
        'logStart', case when v_cursor.committed + 1 < v_context.log_start then v_context.log_start end);
end
$$;

-- log_ack_by_hash_v1 for many batches in one commit.
--
-- Lock:   the cursors, ascending by (partition, group).
-- Result: array of its results, in input order.
-- Why:    the hashes of a batch are one bytea, 16 bytes each; its statuses are joined by commas.
create or replace function queen.log_ack_by_hash_multi_v1(
    p_pids uuid[], p_groups text[], p_workers text[], p_hashes bytea[], p_statuses text[]
) returns jsonb language plpgsql as $$
declare
    v_bundle  record;
    v_results jsonb[] := array_fill(null::jsonb, array[cardinality(p_pids)]);
begin
    for v_bundle in
        select b.* from unnest(p_pids, p_groups, p_workers, p_hashes, p_statuses)
            with ordinality as b (pid, "group", worker, hashes, statuses, ordinal)
        order by b.pid, b."group", b.ordinal
    loop
        v_results[v_bundle.ordinal] := queen.log_ack_by_hash_v1(
            v_bundle.pid, v_bundle."group", v_bundle.worker,
            array(select u.h from queen.log_unnest_hashes(v_bundle.hashes) as u (idx, h) order by u.idx),
            string_to_array(v_bundle.statuses, ','));
    end loop;
    return to_jsonb(v_results);
end
$$;

-- Acknowledges a leased batch up to an offset, or gives it back.
--
-- Lock:   this group's cursor and nothing else.
-- Result: {"success": bool, "error": text, "leaseReleased": bool, "dlq": false, "committed": n}; a refusal has no
--         committed.
create or replace function queen.log_ack_at_v1(
    p_pid uuid, p_group text, p_worker text, p_offset bigint, p_success boolean default true
) returns jsonb language plpgsql as $$
declare
    v_cursor  queen.log_consumers;
    v_to      bigint;
    v_outcome text;
begin
    select * into v_cursor from queen.log_consumers
    where partition_id = p_pid and consumer_group = p_group for update;
    if not found then
        return queen.log_ack_refused_v1('consumer not found');
    elsif not queen.log_lease_held_v1(p_worker, v_cursor.batch_end, v_cursor.worker_id, v_cursor.lease_expires_at) then
        return queen.log_ack_refused_v1('invalid or expired lease');
    elsif v_cursor.batch_end is null then
        return queen.log_ack_refused_v1('no leased batch');
    elsif v_cursor.batch_end < p_offset then
        return queen.log_ack_refused_v1('position beyond the leased batch');
    end if;
    v_to := case when p_success then greatest(v_cursor.committed, p_offset) else v_cursor.committed end;
    v_outcome := case when not p_success then 'retry' when v_to < v_cursor.batch_end then 'keep' else 'done' end;
    perform queen.log_cursor_move_v1(p_pid, p_group, v_to, v_outcome);
    return jsonb_build_object('success', true, 'error', null, 'leaseReleased', v_outcome <> 'keep', 'dlq', false,
        'committed', v_to);
end
$$;

-- log_ack_at_v1 by the names of queue and partition.
--
-- Lock:   as log_ack_at_v1.
-- Result: as log_ack_at_v1.
create or replace function queen.log_ack_v1(
    p_queue text, p_partition text, p_group text, p_worker text, p_offset bigint, p_success boolean default true,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language sql as $$
    select queen.log_ack_at_v1((
        select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id
        where q.tenant_id = p_tenant and q.name = p_queue and p.name = p_partition
    ), p_group, p_worker, p_offset, p_success)
$$;

-- log_ack_at_v1 for many batches in one commit.
--
-- Lock:   the cursors, ascending by (partition, group).
-- Result: array of its results, in input order.
create or replace function queen.log_ack_multi_v1(
    p_pids uuid[], p_groups text[], p_workers text[], p_offsets bigint[], p_success boolean[]
) returns jsonb language plpgsql as $$
declare
    v_batch   record;
    v_results jsonb[] := array_fill(null::jsonb, array[cardinality(p_pids)]);
begin
    for v_batch in
        select b.* from unnest(p_pids, p_groups, p_workers, p_offsets, p_success)
            with ordinality as b (pid, "group", worker, "offset", success, ordinal)
        order by b.pid, b."group", b.ordinal
    loop
        v_results[v_batch.ordinal] := queen.log_ack_at_v1(
            v_batch.pid, v_batch."group", v_batch.worker, v_batch."offset", v_batch.success);
    end loop;
    return to_jsonb(v_results);
end
$$;
