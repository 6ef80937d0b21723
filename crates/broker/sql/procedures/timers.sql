-- Messages that are pushed later: scheduling, and firing by whichever server comes first.

-- Schedules, moves and cancels timers, each by queue and key, all or none.
--
-- Lock:   the rows, ascending by (queue, key) in byte order.
-- Cutoff: a claim counts until its time; the times of delivery are counted from the clock under the lock.
-- Result: an array in input order of {"ok", "status", "queue", "timerKey"} and, where there is one, "txn", "messageId",
--         "deliverAt". Raises QN011 if an operator has paused scheduling; cancelling is never paused. Raises QN005 if
--         a payload is not encrypted as its queue wants it; "compared" says whether that matters.
--
-- p_ops: [{"op": schedule | cancel, "queue", "timerKey", "partition", "delayMs", "txn", "messageId", "payload" (base64),
--   "payloadZstd", "payloadBytes", "encrypted", "compared", "producer"}]; no key twice.
create or replace function queen.log_timers_apply_v1(
    p_ops jsonb, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
    v_op      record;
    v_row     queen.log_timers;
    v_status  text;
    v_results jsonb[] := array_fill(null::jsonb, array[jsonb_array_length(p_ops)]);
begin
    if p_ops @> '[{"op": "schedule"}]' then
        perform queen.refuse_paused_v1('timers_schedule_paused', 'timers_disabled');
    end if;
    if exists (
        select from jsonb_array_elements(p_ops) as e (o)
        left join queen.queues q on q.tenant_id = p_tenant and q.name = e.o ->> 'queue'
        where (e.o ->> 'compared')::boolean
          and (e.o ->> 'encrypted')::boolean <> coalesce(q.encryption_enabled, false)
    ) then
        raise exception 'QSEAL the encryption of a queue was switched' using errcode = 'QN005';
    end if;
    for v_op in
        select e.o as body, e.o ->> 'queue' as queue, e.o ->> 'timerKey' as key, e.ord
        from jsonb_array_elements(p_ops) with ordinality as e (o, ord)
        order by (e.o ->> 'queue') collate "C", (e.o ->> 'timerKey') collate "C"
    loop
        loop
            select * into v_row from queen.log_timers t
            where t.tenant_id = p_tenant and t.queue = v_op.queue and t.timer_key = v_op.key for update;
            if found then
                v_status := case when clock_timestamp() < v_row.claimed_until then 'too_late'
                                 when v_op.body ->> 'op' = 'cancel' then 'cancelled'
                                 else 'rescheduled' end;
                exit;
            end if;
            v_status := 'absent';
            exit when v_op.body ->> 'op' = 'cancel';
            v_status := 'scheduled';
            v_row := queen.log_timers_new_v1(v_op.body, p_tenant);
            insert into queen.log_timers select v_row.* on conflict do nothing;
            exit when found;
        end loop;
        if v_status = 'cancelled' then
            delete from queen.log_timers t
            where t.tenant_id = p_tenant and t.queue = v_op.queue and t.timer_key = v_op.key;
        elsif v_status = 'rescheduled' then
            v_row := queen.log_timers_new_v1(v_op.body, p_tenant);
            update queen.log_timers t
            set partition = v_row.partition, deliver_at = v_row.deliver_at, due_at = v_row.due_at, txn = v_row.txn,
                message_id = v_row.message_id, payload = v_row.payload, payload_zstd = v_row.payload_zstd,
                payload_bytes = v_row.payload_bytes, encrypted = v_row.encrypted, producer_sub = v_row.producer_sub,
                attempts = 0, last_error = null, claim_token = null, claimed_until = null, updated_at = v_row.updated_at
            where t.tenant_id = p_tenant and t.queue = v_op.queue and t.timer_key = v_op.key;
        end if;
        v_results[v_op.ord] := jsonb_build_object(
            'ok', v_status not in ('absent', 'too_late'), 'status', v_status, 'queue', v_op.queue, 'timerKey', v_op.key)
            || case v_status
                   when 'too_late' then '{}'
                   when 'absent' then jsonb_build_object('txn', v_op.body -> 'txn')
                   when 'cancelled' then jsonb_build_object('txn', v_row.txn)
                   else jsonb_build_object('txn', v_row.txn, 'messageId', v_row.message_id,
                       'deliverAt', queen.wire_time_v1(v_row.deliver_at))
               end;
    end loop;
    return to_jsonb(v_results);
end
$$;

-- The row that an operation of log_timers_apply_v1 asks for.
--
-- Lock:   none.
-- Result: a row that is not stored.
create or replace function queen.log_timers_new_v1(p_op jsonb, p_tenant uuid) returns queen.log_timers
language plpgsql as $$
declare
    v_row queen.log_timers;
    v_now timestamptz := clock_timestamp();
begin
    v_row.tenant_id := p_tenant;
    v_row.queue := p_op ->> 'queue';
    v_row.timer_key := p_op ->> 'timerKey';
    v_row.partition := p_op ->> 'partition';
    v_row.deliver_at := v_now + (p_op ->> 'delayMs')::bigint * interval '1 millisecond';
    v_row.due_at := v_row.deliver_at;
    v_row.txn := p_op ->> 'txn';
    v_row.message_id := (p_op ->> 'messageId')::uuid;
    v_row.payload := decode(p_op ->> 'payload', 'base64');
    v_row.payload_zstd := (p_op ->> 'payloadZstd')::boolean;
    v_row.payload_bytes := (p_op ->> 'payloadBytes')::int;
    v_row.encrypted := (p_op ->> 'encrypted')::boolean;
    v_row.producer_sub := p_op ->> 'producer';
    v_row.attempts := 0;
    v_row.created_at := v_now;
    v_row.updated_at := v_now;
    return v_row;
end
$$;

-- How long until a timer is due.
--
-- Lock:   none.
-- Result: milliseconds, 0 if one is due; NULL if there is none, or an operator has paused the firing.
-- Why:    asked for ever again by every server; it reads one entry of an index and writes nothing.
create or replace function queen.log_timers_due_v1() returns bigint language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
begin
    if exists (select from queen.system_state s where s.key = 'timers_fire_paused' and s.value = 'true') then
        return null;
    end if;
    return (
        select greatest(ceil(extract(epoch from t.due_at - clock_timestamp()) * 1000), 0)::bigint
        from queen.log_timers t
        order by t.due_at
        limit 1
    );
end
$$;

-- Claims timers that are due, for one server and a short while.
--
-- Lock:   the rows; one that another server holds is passed over.
-- Cutoff: rows that are due at the statement's time or before.
-- Result: at most p_max_rows rows, and of those as many as p_max_bytes of payload reach, one at least. Empty if an
--         operator has paused the firing.
-- Why:    the claim is committed before the payloads are packed. If its holder dies, the rows are due again when the
--         claim ends.
create or replace function queen.log_timers_claim_v1(
    p_token uuid, p_lease_ms int, p_max_rows int, p_max_bytes bigint
) returns setof queen.log_timers language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = on
set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_until timestamptz := clock_timestamp() + p_lease_ms * interval '1 millisecond';
begin
    if exists (select from queen.system_state s where s.key = 'timers_fire_paused' and s.value = 'true') then
        return;
    end if;
    return query
        with due as materialized (
            select t.tenant_id, t.queue, t.timer_key, t.due_at, t.payload_bytes from queen.log_timers t
            where t.due_at <= now()
            order by t.due_at
            limit p_max_rows
            for update skip locked
        ), fitting as materialized (
            select f.tenant_id, f.queue, f.timer_key
            from (
                select d.*, sum(d.payload_bytes) over w as bytes, row_number() over w as n
                from due d
                window w as (order by d.due_at, d.queue, d.timer_key)
            ) f
            where f.n = 1 or f.bytes <= p_max_bytes
        )
        update queen.log_timers t
        set claim_token = p_token, claimed_until = v_until, due_at = v_until
        from fitting f
        where t.tenant_id = f.tenant_id and t.queue = f.queue and t.timer_key = f.timer_key
        returning t.*;
end
$$;

-- Pushes the messages of claimed timers and deletes those timers, in one transaction.
--
-- Lock:   the timers, ascending by (queue, key); queues and partitions that are created, in name order; the partitions,
--         ascending by id.
-- Result: the ids of the messages that are stored now, and of those that were stored before (their transaction id is in
--         the partition's window). Both kinds of timers are deleted. A segment with a duplicate in it is not written:
--         its other timers are in neither list and stay claimed. Raises QN012 if a claim is not p_token's any more.
-- Why:    a timer that is deleted has its message stored, and one that is not has none: whoever fires it again, after a
--         crash or a lost claim, does so exactly once.
--
-- p_queues to p_sealed describe the segments, p_lanes to p_ids the timers: in which segment, in frame order.
create or replace function queen.log_timers_fire_v1(
    p_token uuid, p_queues text[], p_partitions text[], p_counts int[], p_hashes bytea[], p_blobs bytea[],
    p_sealed boolean[], p_lanes int[], p_keys text[], p_ids uuid[], p_lock_ms int,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001',
    out o_stored uuid[], out o_duplicates uuid[]
) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    v_held   int := 0;
    v_timer  record;
    v_pids   uuid[];
    v_pushed record;
begin
    for v_timer in
        select p_queues[i.lane] as queue, i.key, i.id from unnest(p_lanes, p_keys, p_ids) as i (lane, key, id)
        order by p_queues[i.lane] collate "C", i.key collate "C"
    loop
        perform from queen.log_timers t
        where t.tenant_id = p_tenant and t.queue = v_timer.queue and t.timer_key = v_timer.key
          and t.claim_token = p_token and t.message_id = v_timer.id
        for update;
        v_held := v_held + found::int;
    end loop;
    if v_held <> cardinality(p_ids) then
        raise exception 'QTIMER % of % claims are held', v_held, cardinality(p_ids) using errcode = 'QN012';
    end if;
    v_pids := queen.log_provision_v1(p_queues, p_partitions, array_fill(p_tenant, array[cardinality(p_queues)]));
    if array_position(v_pids, null) is not null then
        raise exception 'QTIMER a partition was deleted as it was made' using errcode = 'QN001';
    end if;
    select r.* into v_pushed
    from queen.log_push_batch_v1(v_pids, p_counts, p_hashes, p_blobs, '{}', '{}', p_lock_ms, p_sealed) r;
    select coalesce(array_agg(i.id) filter (where v_pushed.o_bases[i.lane] is not null), '{}'),
           coalesce(array_agg(i.id) filter (where d.element is not null), '{}')
    into o_stored, o_duplicates
    from (
        select u.lane, u.id, row_number() over (partition by u.lane order by u.ord) - 1 as idx
        from unnest(p_lanes, p_ids) with ordinality as u (lane, id, ord)
    ) i
    left join unnest(v_pushed.o_dup_elements, v_pushed.o_dup_indexes) as d (element, idx)
      on d.element = i.lane and d.idx = i.idx;
    delete from queen.log_timers t
    using unnest(p_lanes, p_keys, p_ids) as i (lane, key, id)
    where t.tenant_id = p_tenant and t.queue = p_queues[i.lane] and t.timer_key = i.key
      and (i.id = any (o_stored) or i.id = any (o_duplicates));
end
$$;

-- Writes down that a claimed timer could not be fired.
--
-- Lock:   the timer; for a dead letter the queue and the partition if they are created.
-- Result: "paused" until it is tried again, "dead" if it became a dead letter, "lost" if the claim is not p_token's any
--         more. Without p_counts the failure is not the timer's and no attempt is counted.
-- Why:    the claim ends with it, so that a timer that waits for its next attempt can be cancelled.
create or replace function queen.log_timers_failed_v1(
    p_token uuid, p_queue text, p_key text, p_error text, p_counts boolean, p_attempts_max int, p_pause_ms int,
    p_payload text, p_encrypted boolean, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns text language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
    v_row queen.log_timers;
    v_pid uuid;
begin
    select * into v_row from queen.log_timers t
    where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key and t.claim_token = p_token for update;
    if not found then
        return 'lost';
    end if;
    if p_counts and p_attempts_max <= v_row.attempts + 1 then
        v_pid := (queen.log_provision_v1(array[p_queue], array[v_row.partition], array[p_tenant]))[1];
        insert into queen.log_dlq (partition_id, consumer_group, "offset", message_id, transaction_id, payload, error,
            retry_count, producer, is_encrypted)
        values (v_pid, '__timer__', -1, v_row.message_id, v_row.txn, p_payload, p_error, v_row.attempts + 1,
            v_row.producer_sub, p_encrypted);
        delete from queen.log_timers t where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key;
        return 'dead';
    end if;
    update queen.log_timers t
    set attempts = t.attempts + p_counts::int, last_error = p_error, claim_token = null, claimed_until = null,
        due_at = clock_timestamp() + p_pause_ms * interval '1 millisecond'
    where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key;
    return 'paused';
end
$$;

-- Timers of a queue, in byte order of their keys, without their payloads.
--
-- Lock:   none.
-- Result: at most p_limit rows behind p_after; payload is NULL.
create or replace function queen.log_timers_list_v1(
    p_queue text, p_after text, p_limit int, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    timer_key text, partition text, deliver_at timestamptz, txn text, message_id uuid, payload bytea,
    payload_zstd boolean, encrypted boolean, producer_sub text, attempts int, last_error text, claimed boolean,
    created_at timestamptz, updated_at timestamptz
) language sql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
    select t.timer_key, t.partition, t.deliver_at, t.txn, t.message_id, null::bytea, t.payload_zstd, t.encrypted,
        t.producer_sub, t.attempts, t.last_error, coalesce(clock_timestamp() < t.claimed_until, false), t.created_at,
        t.updated_at
    from queen.log_timers t
    where t.tenant_id = p_tenant and t.queue = p_queue and (p_after is null or t.timer_key > p_after)
    order by t.queue, t.timer_key
    limit p_limit
$$;

-- One timer with its payload as it is stored.
--
-- Lock:   none.
-- Result: as log_timers_list_v1, one row or none.
create or replace function queen.log_timer_peek_v1(
    p_queue text, p_key text, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    timer_key text, partition text, deliver_at timestamptz, txn text, message_id uuid, payload bytea,
    payload_zstd boolean, encrypted boolean, producer_sub text, attempts int, last_error text, claimed boolean,
    created_at timestamptz, updated_at timestamptz
) language sql stable as $$
    select t.timer_key, t.partition, t.deliver_at, t.txn, t.message_id, t.payload, t.payload_zstd, t.encrypted,
        t.producer_sub, t.attempts, t.last_error, coalesce(clock_timestamp() < t.claimed_until, false), t.created_at,
        t.updated_at
    from queen.log_timers t
    where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key
$$;
