-- Stream queries: their registration, their state, and the cycle that changes it together with messages.

-- Registers a query by its name, or finds it.
--
-- Lock:   the query's row, which every cycle of it shares; a reset then takes the rows of its state in key order.
-- Result: {"queryId", "fresh", "reset"}; queryId is NULL if the query runs with another hash and p_reset is false.
-- Why:    a reset keeps the id: runners hold it, and cursors are not part of the state. It is one transaction by
--         contract, since a query whose state went in part would go on with wrong sums.
create or replace function queen.log_streams_register_v1(
    p_name text, p_source_queue text, p_sink_queue text, p_config_hash text, p_reset boolean
) returns jsonb language plpgsql as $$
declare
    v_query queen_streams.queries;
begin
    insert into queen_streams.queries (name, source_queue, sink_queue, config_hash)
    values (p_name, p_source_queue, p_sink_queue, p_config_hash)
    on conflict (name) do nothing
    returning * into v_query;
    if found then
        return jsonb_build_object('queryId', v_query.id, 'fresh', true, 'reset', false);
    end if;

    select * into v_query from queen_streams.queries q where q.name = p_name for update;
    if not found then
        raise exception 'QSTREAM query % vanished', p_name using errcode = 'QN001';
    end if;
    if v_query.config_hash <> p_config_hash and not p_reset then
        return jsonb_build_object('queryId', null, 'fresh', false, 'reset', false);
    end if;
    update queen_streams.queries q
    set source_queue = p_source_queue, sink_queue = p_sink_queue, config_hash = p_config_hash,
        updated_at = clock_timestamp()
    where q.id = v_query.id and (q.source_queue, q.sink_queue, q.config_hash)
        is distinct from (p_source_queue, p_sink_queue, p_config_hash);
    if p_reset then
        perform from queen_streams.state s where s.query_id = v_query.id order by s.partition_id, s.key for update;
        delete from queen_streams.state s where s.query_id = v_query.id;
    end if;
    return jsonb_build_object('queryId', v_query.id, 'fresh', false, 'reset', p_reset);
end
$$;

-- Reads state of a query in a partition; the filters that are not NULL must all hold.
--
-- Lock:   none.
-- Result: rows in key order, at most p_max_rows and one more, and no more once they exceed p_max_bytes: a caller
--         that sees either knows that this is not all.
-- Why:    p_ripe keeps windows that ended at or before it. No key has a byte 255, so that what begins with a prefix
--         lies between it and itself followed by one.
create or replace function queen.log_streams_state_v1(
    p_query uuid, p_pid uuid, p_keys bytea[], p_prefix bytea, p_ripe double precision,
    p_max_rows int, p_max_bytes bigint
) returns table (key bytea, value text, updated_at timestamptz) language sql stable as $$
    select r.key, r.value, r.updated_at
    from (
        select s.key, s.value, s.updated_at,
            sum(octet_length(s.key) + octet_length(s.value)) over (order by s.key rows unbounded preceding)
                - octet_length(s.key) - octet_length(s.value) as bytes_before
        from queen_streams.state s
        where s.query_id = p_query and s.partition_id = p_pid
            and (p_keys is null or s.key = any (p_keys))
            and (p_prefix is null or p_prefix <= s.key and s.key < p_prefix || '\xff'::bytea)
            and (p_ripe is null or s.window_end <= p_ripe)
        order by s.key
        limit p_max_rows::bigint + 1
    ) r
    where r.bytes_before <= p_max_bytes
    order by r.key
$$;

-- Changes the state of a query in a partition.
--
-- Lock:   these rows. The caller has the lock of the query and partition, so that nobody else wants them.
-- Result: nothing. A key in p_expected that has no row raises QN002.
-- Why:    a cycle without an acknowledgement has no lease to prove that its work is not done already. What proves
--         it are the rows that it takes away: who comes second does not find them.
create or replace function queen.log_streams_state_write_v1(
    p_query uuid, p_pid uuid, p_upserts jsonb, p_deletes jsonb, p_expected jsonb
) returns void language plpgsql as $$
declare
    v_missing bigint;
begin
    select count(*) into v_missing
    from jsonb_array_elements_text(p_expected) as e (key)
    where not exists (
        select from queen_streams.state s
        where s.query_id = p_query and s.partition_id = p_pid and s.key = decode(e.key, 'hex'));
    if 0 < v_missing then
        raise exception 'state already gone: % of the keys to delete do not exist, so another cycle has pushed their results',
            v_missing using errcode = 'QN002';
    end if;
    delete from queen_streams.state s
    where s.query_id = p_query and s.partition_id = p_pid
        and s.key = any (array(select decode(d.key, 'hex') from jsonb_array_elements_text(p_deletes) as d (key)));
    insert into queen_streams.state as s (query_id, partition_id, key, value, window_end, updated_at)
    select p_query, p_pid, decode(u.u ->> 'key', 'hex'), u.u ->> 'value', (u.u ->> 'windowEnd')::double precision,
        clock_timestamp()
    from jsonb_array_elements(p_upserts) as u (u)
    on conflict (query_id, partition_id, key) do update
    set value = excluded.value, window_end = excluded.window_end, updated_at = excluded.updated_at;
end
$$;

-- Pushes the results of a cycle, one segment to each partition.
--
-- Lock:   none of its own; the caller has created the partitions and holds their rows.
-- Result: nothing.
-- Why:    the ids of the messages are made for this call, so that none can be stored already, and no sidecar is read.
create or replace function queen.log_streams_push_v1(p_pushes jsonb, p_tenant uuid) returns void
language plpgsql as $$
declare
    c_all_known constant bigint := 9223372036854775807;
    c_any_time  constant int := 2147483647;
    v_sinks     record;
begin
    select array_agg(e.p ->> 'queue' order by e.ord) as queues,
        array_agg(e.p ->> 'partition' order by e.ord) as partitions,
        array_agg(p_tenant) as tenants,
        array_agg((e.p ->> 'count')::int order by e.ord) as counts,
        array_agg(decode(e.p ->> 'hashes', 'hex') order by e.ord) as hashes,
        array_agg(decode(e.p ->> 'blob', 'hex') order by e.ord) as blobs,
        array_agg((e.p ->> 'sealed')::boolean order by e.ord) as sealed
    into v_sinks
    from jsonb_array_elements(p_pushes) with ordinality as e (p, ord);
    perform queen.log_push_batch_v1(
        queen.log_partition_ids_v1(v_sinks.queues, v_sinks.partitions, v_sinks.tenants),
        v_sinks.counts, v_sinks.hashes, v_sinks.blobs,
        array_fill(c_all_known, array[cardinality(v_sinks.counts)]),
        array_fill(c_any_time, array[cardinality(v_sinks.counts)]), null, v_sinks.sealed);
end
$$;

-- Moves the cursor of the source: the proof that a cycle is done once.
--
-- Lock:   this group's cursor. The caller shares the partition's row, so that log_start stands still.
-- Result: {"count", "leaseReleased", "wake": whether messages are left for others}; without a live lease of this
--         worker, or with more messages than are left of it, QN002 is raised.
-- Why:    completed with p_release commits the whole batch. Without it the cursor passes p_ack's count of messages
--         that exist, and the lease stays as it is: nobody gets the rest before it ends. Any other status gives
--         the batch back and charges no failure.
create or replace function queen.log_streams_ack_v1(
    p_pid uuid, p_group text, p_ack jsonb, p_release boolean
) returns jsonb language plpgsql as $$
declare
    v_worker  text := p_ack ->> 'worker';
    v_count   bigint := (p_ack ->> 'count')::bigint;
    v_cursor  queen.log_consumers;
    v_lane    record;
    v_first   bigint;
    v_left    bigint;
    v_to      bigint;
    v_outcome text;
begin
    select * into v_cursor from queen.log_consumers c
    where c.partition_id = p_pid and c.consumer_group = p_group for update;
    if coalesce(v_worker, '') = '' or not coalesce(queen.log_lease_held_v1(
        v_worker, v_cursor.batch_end, v_cursor.worker_id, v_cursor.lease_expires_at), false)
    then
        raise exception 'invalid or expired lease' using errcode = 'QN002';
    end if;
    select p.log_start, p.last_offset into v_lane from queen.log_partitions p where p.id = p_pid;
    v_first := greatest(v_cursor.committed + 1, v_lane.log_start);
    v_left := greatest(v_cursor.batch_end - v_first + 1, 0);
    v_to := v_cursor.committed;

    if not (p_ack ->> 'completed')::boolean then
        v_outcome := 'retry';
        v_count := 0;
    elsif p_release then
        v_outcome := 'done';
        v_to := greatest(v_to, v_cursor.batch_end);
        v_count := v_left;
    elsif v_left < v_count then
        raise exception 'count % is beyond the leased batch, of which % are left', v_count, v_left
            using errcode = 'QN002';
    else
        v_outcome := 'keep';
        v_to := case when v_count = 0 then v_to else v_first + v_count - 1 end;
    end if;
    perform queen.log_cursor_move_v1(p_pid, p_group, v_to, v_outcome);
    return jsonb_build_object('count', v_count, 'leaseReleased', v_outcome <> 'keep',
        'wake', v_outcome <> 'keep' and v_to < v_lane.last_offset);
end
$$;

-- Carries out one cycle of a query in a partition: state, results and acknowledgement, all or nothing.
--
-- Lock:   an advisory one for the query and partition; the query's row, for key share; queues and partitions that
--         are created, in name order; the source's partition, for key share, and those pushed to, ascending by id;
--         the state; the cursor.
-- Result: {"success": true, "queue", "partition", "ack": as log_streams_ack_v1 or NULL}; queue and partition are the
--         source's. {"success": false, "error"} if one of the two does not exist; whatever else is refused raises.
-- Why:    the first lock puts cycles of one query and partition in a row; the second keeps a reset from falling into
--         one; the third keeps cleanup from deleting a partition under state that is being written. One cycle a
--         call: the partitions of a second could not be locked in order once the first has begun.
--
-- p_cycle: {"tenant", "queryId", "partitionId", "group", "release", "upserts": [{"key", "value", "windowEnd"}],
--   "deletes": [key], "expected": [key], "pushes": [{"queue", "partition", "count", "hashes", "blob", "sealed"}],
--   "ack": {"worker", "completed", "count"} or null}; keys, hashes and blob are hexadecimal, a key stands in upserts
--   or deletes once, an empty tenant is the default one.
create or replace function queen.log_streams_cycle_v1(p_cycle jsonb) returns jsonb language plpgsql as $$
declare
    v_tenant     uuid := coalesce((p_cycle ->> 'tenant')::uuid, '00000000-0000-0000-0000-000000000001');
    v_query      uuid := (p_cycle ->> 'queryId')::uuid;
    v_pid        uuid := (p_cycle ->> 'partitionId')::uuid;
    v_pushes     jsonb := coalesce(p_cycle -> 'pushes', '[]');
    v_queues     text[];
    v_partitions text[];
    v_source     record;
    v_acked      jsonb;
begin
    perform pg_advisory_xact_lock(hashtextextended(v_query::text || v_pid::text, 0));
    select q.name as queue, p.name as partition into v_source
    from queen.log_partitions p join queen.queues q on q.id = p.queue_id
    where p.id = v_pid and q.tenant_id = v_tenant;
    if not found then
        return jsonb_build_object('success', false, 'error', 'partition not found');
    end if;
    perform from queen_streams.queries q where q.id = v_query for key share;
    if not found then
        return jsonb_build_object('success', false, 'error', 'query not found');
    end if;

    if v_pushes <> '[]' then
        select array_agg(p.p ->> 'queue'), array_agg(p.p ->> 'partition') into v_queues, v_partitions
        from jsonb_array_elements(v_pushes) as p (p);
        perform queen.log_provision_v1(v_queues, v_partitions, array_fill(v_tenant, array[cardinality(v_queues)]));
    end if;
    perform queen.log_transaction_lock_v1(v_queues, v_partitions, v_tenant, array[v_pid]);
    perform from queen.log_partitions p where p.id = v_pid;
    if not found then
        raise exception 'QSTREAM partition % vanished', v_pid using errcode = 'QN001';
    end if;

    perform queen.log_streams_state_write_v1(v_query, v_pid, coalesce(p_cycle -> 'upserts', '[]'),
        coalesce(p_cycle -> 'deletes', '[]'), coalesce(p_cycle -> 'expected', '[]'));
    if v_pushes <> '[]' then
        perform queen.log_streams_push_v1(v_pushes, v_tenant);
    end if;
    if jsonb_typeof(p_cycle -> 'ack') = 'object' then
        v_acked := queen.log_streams_ack_v1(
            v_pid, p_cycle ->> 'group', p_cycle -> 'ack', coalesce((p_cycle ->> 'release')::boolean, true));
    end if;
    return jsonb_build_object(
        'success', true, 'queue', v_source.queue, 'partition', v_source.partition, 'ack', v_acked);
end
$$;
