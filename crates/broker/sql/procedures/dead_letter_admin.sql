-- Dead letters in an operator's hands: moved there, picked, deleted, replayed.

-- Earlier shapes, which a call would match as well.
drop function if exists queen.log_dlq_move_v1(uuid, text, bigint, uuid, text, text, text);
drop function if exists queen.log_dlq_letters_v1(uuid[], bigint, uuid);
drop function if exists queen.log_dlq_replay_v1(uuid[], uuid[], int[], bytea[], bytea[]);

-- Files the message that a group wants next as a dead letter, and moves the group's cursor past it.
--
-- Lock:   the partition's row for key share, then the group's cursor.
-- Result: as log_dlq_head_v1. A refusal says what stands in the way, and changed nothing.
-- Why:    a cursor has no holes: of a message behind others, the group would be given the message as well as its dead
--         letter. A live lease is somebody's work under way. Queue mode enters a partition that no group consumes, as
--         its first pop would; beside named groups that pop may never come, and the cursor would hold retention up.
create or replace function queen.log_dlq_move_v1(
    p_pid uuid, p_group text, p_offset bigint, p_message_id uuid, p_transaction_id text, p_payload text, p_error text,
    p_trace_id uuid default null, p_producer text default null, p_is_encrypted boolean default false
) returns jsonb language plpgsql as $$
declare
    v_log_start bigint;
    v_cursor    queen.log_consumers;
    v_others    text;
    v_is_new    boolean;
    v_head      bigint;
begin
    select p.log_start into v_log_start from queen.log_partitions p where p.id = p_pid for key share;
    if not found then
        return queen.log_ack_refused_v1('the partition is gone');
    end if;
    select string_agg(c.consumer_group, ', ' order by c.consumer_group) into v_others
    from queen.log_consumers c where c.partition_id = p_pid;
    select * into v_cursor from queen.log_consumers
    where partition_id = p_pid and consumer_group = p_group for update;
    v_is_new := not found and v_others is null and p_group = '__QUEUE_MODE__';
    if v_is_new then
        v_cursor.committed := -1;
    elsif v_cursor.committed is null then
        return queen.log_ack_refused_v1(format('consumerGroup: %s has no cursor in this partition; those that have: %s',
            p_group, coalesce(v_others, 'none')));
    end if;
    if p_offset <= v_cursor.committed then
        return queen.log_ack_refused_v1(format('%s is past this message already', p_group));
    elsif v_cursor.batch_end is not null and clock_timestamp() < v_cursor.lease_expires_at then
        return queen.log_ack_refused_v1(format(
            'a consumer of %s has leased messages of this partition; acknowledge it there with status dlq, or wait',
            p_group));
    end if;
    v_head := queen.log_head_v1(p_pid, v_log_start, v_cursor.committed + 1);
    if v_head is null or p_offset < v_head then
        return queen.log_ack_refused_v1('the message is gone');
    elsif greatest(v_head, v_cursor.committed + 1) < p_offset then
        return queen.log_ack_refused_v1(format('%s has messages before this one to consume: up to offset %s',
            p_group, p_offset - 1));
    end if;
    if v_is_new then
        insert into queen.log_consumers (partition_id, consumer_group) values (p_pid, p_group) on conflict do nothing;
        if not found then
            return queen.log_ack_refused_v1('a consumer has just come to this partition; look again');
        end if;
    end if;
    -- What is left of an expired lease may end before the message, where retention has deleted what was leased.
    perform queen.log_cursor_move_v1(p_pid, p_group, v_cursor.committed, 'retry');
    return queen.log_dlq_head_v1(p_pid, p_group, '', p_offset, p_message_id, p_transaction_id, p_payload, p_error,
        p_trace_id, p_producer, p_is_encrypted);
end
$$;

-- The dead letters of the message that was filed last with a transaction id.
--
-- Lock:   none.
-- Result: ids, those of one message in every group; empty if there is none.
-- Why:    once its window is over, a transaction id may be that of another message too.
create or replace function queen.log_dlq_of_message_v1(p_pid uuid, p_transaction_id text)
returns uuid[] language sql stable as $$
    with letters as (
        select d.id, d."offset", d.failed_at from queen.log_dlq d
        where d.partition_id = p_pid and d.transaction_id = p_transaction_id
          and hashtextextended(d.transaction_id, 0) = hashtextextended(p_transaction_id, 0)
    )
    select array(
        select l.id from letters l
        where l."offset" = (select n."offset" from letters n order by n.failed_at desc, n.id desc limit 1)
        order by l.id
    )
$$;

-- Picks dead letters by the filters of log_dlq_list_v1, or by their ids, oldest first.
--
-- Lock:   none.
-- Result: ids of at most p_limit of them. With p_replayable those without a payload are passed over. matched counts
--         all that the filters let through, and lost those of them without a payload.
create or replace function queen.log_dlq_pick_v1(
    p_queue text, p_group text, p_partition text, p_from timestamptz, p_to timestamptz, p_ids uuid[],
    p_replayable boolean, p_limit int, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (ids uuid[], matched bigint, lost bigint) language sql stable as $$
    with lanes as materialized (
        select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id
        where q.tenant_id = p_tenant and (p_queue is null or q.name = p_queue)
            and (p_partition is null or p.name = p_partition)
    ), letters as materialized (
        select d.id, d.failed_at, d.payload is null as is_lost
        from queen.log_dlq d join lanes on lanes.id = d.partition_id
        where (p_ids is null or d.id = any (p_ids)) and (p_group is null or d.consumer_group = p_group)
            and (p_from is null or p_from <= d.failed_at) and (p_to is null or d.failed_at <= p_to)
    )
    select array(
            select l.id from letters l where not (p_replayable and l.is_lost) order by l.failed_at, l.id limit p_limit),
        count(*), count(*) filter (where l.is_lost)
    from letters l
$$;

-- Deletes dead letters for good.
--
-- Lock:   their partitions for key share, ascending by id; then the dead letters, ascending by id.
-- Result: how many there still were.
-- Why:    whoever deletes many dead letters locks their partitions first, a queue's deletion among them: so none waits
--         for a row while it holds another that somebody waits for.
create or replace function queen.log_dlq_delete_v1(
    p_ids uuid[], p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns int language plpgsql as $$
declare
    v_pids    uuid[];
    v_deleted int;
begin
    select array_agg(distinct d.partition_id) into v_pids
    from queen.log_dlq d
    join queen.log_partitions p on p.id = d.partition_id
    join queen.queues q on q.id = p.queue_id
    where d.id = any (p_ids) and q.tenant_id = p_tenant;
    perform from queen.log_partitions p where p.id = any (v_pids) order by p.id for key share;
    perform from queen.log_dlq d where d.id = any (p_ids) and d.partition_id = any (v_pids) order by d.id for update;
    delete from queen.log_dlq d where d.id = any (p_ids) and d.partition_id = any (v_pids);
    get diagnostics v_deleted = row_count;
    return v_deleted;
end
$$;

-- The dead letters that are about to be replayed.
--
-- Lock:   none.
-- Result: those that still exist, in the order of their messages; of p_ids only as many from the front as it takes
--         to reach p_bytes of payload.
create or replace function queen.log_dlq_letters_v1(
    p_ids uuid[], p_bytes bigint, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    ordinal bigint, id uuid, partition_id uuid, queue text, partition text, "offset" bigint, payload text,
    message_id uuid, trace_id uuid, producer text, is_encrypted boolean, queue_is_encrypted boolean
) language sql stable as $$
    select l.ordinal, l.id, l.partition_id, l.queue, l.partition, l."offset", l.payload, l.message_id, l.trace_id,
        l.producer, l.is_encrypted, l.queue_is_encrypted
    from (
        select i.ordinal, d.id, d.partition_id, q.name as queue, p.name as partition, d."offset", d.payload,
            d.message_id, d.trace_id, d.producer, d.is_encrypted,
            coalesce(q.encryption_enabled, false) as queue_is_encrypted,
            coalesce(sum(octet_length(d.payload)) over (
                order by i.ordinal rows between unbounded preceding and 1 preceding), 0) as before
        from unnest(p_ids) with ordinality i (id, ordinal)
        join queen.log_dlq d on d.id = i.id
        join queen.log_partitions p on p.id = d.partition_id
        join queen.queues q on q.id = p.queue_id
        where q.tenant_id = p_tenant
    ) l
    where l.before < p_bytes
    order by l.partition_id, l."offset", l.id
$$;

-- Pushes messages and deletes the dead letters that they were, in one transaction.
--
-- Lock:   the partitions, ascending by id, in one statement; then the dead letters, ascending by id.
-- Result: nothing. Raises QN001 if a dead letter or a partition is gone: then nothing happened, and the caller looks
--         again at what is left.
-- Why:    their transaction ids are new, so no sidecar is searched for them: the highest offset counts as verified.
create or replace function queen.log_dlq_replay_v1(
    p_ids uuid[], p_pids uuid[], p_counts int[], p_hashes bytea[], p_blobs bytea[], p_sealed boolean[] default null
) returns void language plpgsql as $$
declare
    v_deleted int;
begin
    perform queen.log_push_batch_v1(p_pids, p_counts, p_hashes, p_blobs,
        array_fill(9223372036854775807, array[cardinality(p_pids)]), array_fill(2147483647, array[cardinality(p_pids)]),
        null, p_sealed);
    perform from queen.log_dlq d where d.id = any (p_ids) and d.partition_id = any (p_pids) order by d.id for update;
    delete from queen.log_dlq d where d.id = any (p_ids) and d.partition_id = any (p_pids);
    get diagnostics v_deleted = row_count;
    if v_deleted <> cardinality(p_ids) then
        raise exception 'QDLQ replayed % of % dead letters', v_deleted, cardinality(p_ids) using errcode = 'QN001';
    end if;
end
$$;
