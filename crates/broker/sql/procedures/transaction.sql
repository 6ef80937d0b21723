-- Pushes and acknowledgements that commit together or not at all.

-- Locks the partitions that a transaction pushes to and those where it may file a dead letter.
--
-- Lock:   ascending by id, for no key update where it pushes and for key share elsewhere.
-- Result: nothing. A partition that is missing is found missing by whoever needs it.
-- Why:    both kinds must be taken in one order. Two statements, one for each kind, deadlock with a push that
--         holds a partition of the second kind and waits for one of the first.
create or replace function queen.log_transaction_lock_v1(
    p_queues text[], p_partitions text[], p_tenant uuid, p_acked uuid[]
) returns void language plpgsql as $$
declare
    v_lane record;
begin
    for v_lane in
        select l.id, bool_or(l.is_pushed) as is_pushed
        from (
            select i.id, true as is_pushed
            from unnest(queen.log_partition_ids_v1(
                p_queues, p_partitions, array_fill(p_tenant, array[coalesce(cardinality(p_queues), 0)]))) as i (id)
            where i.id is not null
            union all
            select a.id, false from unnest(p_acked) as a (id)
        ) l
        group by l.id order by l.id
    loop
        if v_lane.is_pushed then
            perform from queen.log_partitions where id = v_lane.id for no key update;
        else
            perform from queen.log_partitions where id = v_lane.id for key share;
        end if;
    end loop;
end
$$;

-- Pushes a transaction's segments, each to a partition of its own.
--
-- Lock:   the partition rows, ascending by id.
-- Result: array of {"partitionId", "baseOffset"} in input order; a stored transaction id raises QN003.
create or replace function queen.log_transaction_push_v1(p_pushes jsonb, p_tenant uuid) returns jsonb
language plpgsql as $$
declare
    v_pids   uuid[];
    v_pushed record;
    v_dup    jsonb;
begin
    select queen.log_partition_ids_v1(
               array_agg(e.p ->> 'queue' order by e.ord), array_agg(e.p ->> 'partition' order by e.ord),
               array_agg(p_tenant))
    into v_pids
    from jsonb_array_elements(p_pushes) with ordinality as e (p, ord);
    select r.* into v_pushed
    from (
        select array_agg((e.p ->> 'count')::int order by e.ord) as counts,
            array_agg(decode(e.p ->> 'hashes', 'hex') order by e.ord) as hashes,
            array_agg(decode(e.p ->> 'blob', 'hex') order by e.ord) as blobs,
            array_agg((e.p ->> 'sealed')::boolean order by e.ord) as sealed
        from jsonb_array_elements(p_pushes) with ordinality as e (p, ord)
    ) a
    cross join lateral queen.log_push_batch_v1(
        v_pids, a.counts, a.hashes, a.blobs, '{}', '{}', null, a.sealed) r;
    if v_pushed.o_dup_elements is not null then
        v_dup := p_pushes -> (v_pushed.o_dup_elements[1] - 1);
        raise exception 'QDUP transaction id % is already stored in partition % of queue %',
            v_dup -> 'transactionIds' ->> v_pushed.o_dup_indexes[1], v_dup ->> 'partition', v_dup ->> 'queue'
            using errcode = 'QN003';
    end if;
    return (
        select jsonb_agg(jsonb_build_object('partitionId', r.pid, 'baseOffset', r.base) order by r.ord)
        from unnest(v_pids, v_pushed.o_bases) with ordinality as r (pid, base, ord)
    );
end
$$;

-- Whose lease an acknowledgement of a transaction must hold.
--
-- Lock:   the cursor, if there are several leases to choose from.
-- Result: the one lease given, or that of several which holds the cursor; empty if none was given; NULL if
--         the holder is none of them.
create or replace function queen.log_transaction_worker_v1(p_pid uuid, p_group text, p_workers jsonb) returns text
language plpgsql as $$
declare
    v_holder text;
begin
    if jsonb_array_length(p_workers) < 2 then
        return coalesce(p_workers ->> 0, '');
    end if;
    select worker_id into v_holder from queen.log_consumers
    where partition_id = p_pid and consumer_group = p_group for update;
    if not found then
        return '';
    end if;
    return case when p_workers ? v_holder then v_holder end;
end
$$;

-- Carries out one batch of acknowledgements inside a transaction; what is refused raises QN002.
--
-- Lock:   this group's cursor; for a dead letter the partition row is locked already.
-- Result: as log_ack_by_hash_v1. Where that would wait for a dead letter, the letter in p_letters is filed;
--         with none at hand nothing is filed and the answer lacks the key filed.
create or replace function queen.log_transaction_ack_v1(p_ack jsonb, p_letters jsonb) returns jsonb
language plpgsql as $$
declare
    v_pid    uuid := (p_ack ->> 'partitionId')::uuid;
    v_group  text := p_ack ->> 'group';
    v_worker text := queen.log_transaction_worker_v1(v_pid, v_group, p_ack -> 'workers');
    v_hashes bytea[] := array(
        select u.h from queen.log_unnest_hashes(decode(p_ack ->> 'hashes', 'hex')) as u (idx, h) order by u.idx);
    v_result jsonb;
    v_letter jsonb;
    v_filed  jsonb;
begin
    if v_worker is null then
        v_result := queen.log_ack_refused_v1('invalid or expired lease');
    else
        v_result := queen.log_ack_by_hash_v1(
            v_pid, v_group, v_worker, v_hashes, string_to_array(p_ack ->> 'statuses', ','));
    end if;
    if not (v_result ->> 'success')::boolean then
        raise exception 'QTXN %: partition %, group %', v_result ->> 'error', v_pid, v_group using errcode = 'QN002';
    elsif v_result -> 'unresolvedHashes' <> '[]' then
        raise exception 'QTXN unresolvable: transaction id % is unknown in partition %',
            p_ack -> 'transactionIds' ->> (
                array_position(v_hashes, decode(v_result -> 'unresolvedHashes' ->> 0, 'hex')) - 1), v_pid
            using errcode = 'QN002';
    elsif (v_result ->> 'dlq')::boolean then
        select l into v_letter from jsonb_array_elements(p_letters) as l (l)
        where (l ->> 'partitionId')::uuid = v_pid and l ->> 'group' = v_group and l -> 'offset' = v_result -> 'offset';
        if found then
            v_filed := queen.log_dlq_head_v1(v_pid, v_group, v_worker, (v_letter ->> 'offset')::bigint,
                (v_letter ->> 'messageId')::uuid, v_letter ->> 'transactionId', v_letter ->> 'payload',
                v_letter ->> 'error', (v_letter ->> 'traceId')::uuid, v_letter ->> 'producer',
                (v_letter ->> 'isEncrypted')::boolean);
            if not (v_filed ->> 'success')::boolean then
                raise exception 'QTXN %: partition %, group %', v_filed ->> 'error', v_pid, v_group
                    using errcode = 'QN002';
            end if;
            v_result := v_result || v_filed || '{"filed": true}';
        end if;
    end if;
    return v_result;
end
$$;

-- Pushes and acknowledges in one transaction, with key/value and timer operations that ride along.
--
-- Lock:   the keys, then the timers, each in byte order; queues and partitions that are created, in name order; the partitions pushed to, and those where a
--         dead letter may be filed, ascending by id; then the cursors, ascending by (partition, group).
-- Result: {"pushes": [{"partitionId", "baseOffset"}], "acks": [as log_ack_by_hash_v1], "kv": [as kv_apply_v1],
--         "timers": [as log_timers_apply_v1]}, each in input order.
--         Raises QN003 for a stored transaction id, QN002 for a refused acknowledgement, and QN004, whose
--         detail lists {"ack", "offset", "hash"}, if dead letters are needed that p_request does not bring.
-- Why:    the payload of a dead letter is inside a compressed segment, which only the caller can open. It is
--         rarely needed, so the caller is told, everything rolls back, and it asks again with the letters.
--
-- p_request: {"tenant", "pushes": [{"queue", "partition", "count", "hashes", "blob", "sealed", "transactionIds"}],
--   "acks": [{"partitionId", "group", "workers", "hashes", "statuses", "transactionIds"}],
--   "letters": [{"partitionId", "group", "offset", "messageId", "transactionId", "payload", "error", "traceId",
--   "producer", "isEncrypted"}], "kv": [as kv_apply_v1], "kvBytes", "timers": [as log_timers_apply_v1]}; hashes and blob are hexadecimal, statuses are joined by commas, an empty tenant is
--   the default one.
create or replace function queen.log_transaction_wire_v1(p_request jsonb) returns jsonb language plpgsql as $$
declare
    v_tenant     uuid := coalesce((p_request ->> 'tenant')::uuid, '00000000-0000-0000-0000-000000000001');
    v_pushes     jsonb := coalesce(p_request -> 'pushes', '[]');
    v_acks       jsonb := coalesce(p_request -> 'acks', '[]');
    v_queues     text[];
    v_partitions text[];
    v_pushed     jsonb := '[]';
    v_results    jsonb[] := array_fill(null::jsonb, array[jsonb_array_length(v_acks)]);
    v_missing    jsonb := '[]';
    v_foreign    text;
    v_ack        record;
    v_kv         jsonb := '[]';
    v_timers     jsonb := '[]';
begin
    select a.a ->> 'partitionId' into v_foreign
    from jsonb_array_elements(v_acks) as a (a)
    where not exists (
        select from queen.log_partitions p join queen.queues q on q.id = p.queue_id
        where p.id = (a.a ->> 'partitionId')::uuid and q.tenant_id = v_tenant)
    limit 1;
    if found then
        raise exception 'QTXN consumer not found: partition %', v_foreign using errcode = 'QN002';
    end if;
    if p_request -> 'kv' <> '[]' then
        v_kv := queen.kv_apply_v1(p_request -> 'kv', (p_request ->> 'kvBytes')::bigint, v_tenant);
    end if;
    if p_request -> 'timers' <> '[]' then
        v_timers := queen.log_timers_apply_v1(p_request -> 'timers', v_tenant);
    end if;
    if v_pushes <> '[]' then
        select array_agg(p.p ->> 'queue'), array_agg(p.p ->> 'partition') into v_queues, v_partitions
        from jsonb_array_elements(v_pushes) as p (p);
        perform queen.log_provision_v1(v_queues, v_partitions, array_fill(v_tenant, array[cardinality(v_queues)]));
    end if;
    perform queen.log_transaction_lock_v1(v_queues, v_partitions, v_tenant, array(
        select (a.a ->> 'partitionId')::uuid from jsonb_array_elements(v_acks) as a (a)
        where exists (
            select from unnest(string_to_array(a.a ->> 'statuses', ',')) as s (status)
            where 1 < queen.log_ack_rank_v1(s.status))));
    if v_pushes <> '[]' then
        v_pushed := queen.log_transaction_push_v1(v_pushes, v_tenant);
    end if;
    for v_ack in
        select a.a as body, a.ord from jsonb_array_elements(v_acks) with ordinality as a (a, ord)
        order by (a.a ->> 'partitionId')::uuid, a.a ->> 'group', a.ord
    loop
        v_results[v_ack.ord] :=
            queen.log_transaction_ack_v1(v_ack.body, coalesce(p_request -> 'letters', '[]'));
        if (v_results[v_ack.ord] ->> 'dlq')::boolean and not v_results[v_ack.ord] ? 'filed' then
            v_missing := v_missing || jsonb_build_object('ack', v_ack.ord - 1,
                'offset', v_results[v_ack.ord] -> 'offset', 'hash', v_results[v_ack.ord] -> 'hash');
        end if;
    end loop;
    if v_missing <> '[]' then
        raise exception 'QLETTER dead letters are needed' using errcode = 'QN004', detail = v_missing::text;
    end if;
    return jsonb_build_object(
        'pushes', v_pushed, 'acks', to_jsonb(v_results), 'kv', v_kv, 'timers', v_timers);
end
$$;
