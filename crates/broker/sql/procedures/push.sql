-- The hashes of a sidecar row, numbered from 0 in frame order.
--
-- Lock:   none.
-- Result: one row a hash.
-- Why:    the concatenation fetches an out-of-line value once; substr alone would fetch it for each hash.
create or replace function queen.log_unnest_hashes(p_hashes bytea)
returns table (idx int, h bytea) language sql immutable parallel safe as $$
    select g.idx, substr(f.flat, g.idx * 16 + 1, 16)
    from (select p_hashes || ''::bytea as flat offset 0) f
    cross join lateral generate_series(0, octet_length(f.flat) / 16 - 1) g (idx)
$$;

-- The segment that holds an offset.
--
-- Lock:   none.
-- Result: one row, or none if no live segment covers p_off.
-- Why:    the cover test stands outside the limit; inside, a miss would walk the whole partition.
create or replace function queen.log_segment_at_v1(p_pid uuid, p_off bigint)
returns table (base_offset bigint, end_offset bigint, created_at timestamptz, blob bytea)
language sql stable as $$
    select s.base_offset, s.end_offset, s.created_at, s.blob
    from (
        select c.* from queen.log_segments c
        where c.partition_id = p_pid and c.base_offset <= p_off
        order by c.base_offset desc
        limit 1
    ) s
    where s.end_offset >= p_off
$$;

-- The lowest offset from which the sidecar rows of a partition are no older than p_cutoff.
--
-- Lock:   none of its own; the caller holds the partition row.
-- Cutoff: rows created before p_cutoff are passed over.
-- Result: an offset in [p_from, p_to + 1], never beyond the first fresh row.
-- Why:    stamps grow with offsets, so halving finds the edge in some 30 probes of the primary key where
--         a scan would read everything that a longer retention keeps.
create or replace function queen.log_txns_window_start_v1(
    p_pid uuid, p_from bigint, p_to bigint, p_cutoff timestamptz
) returns bigint language plpgsql as $$
declare
    v_low  bigint := p_from;    -- every row below is stale
    v_high bigint := p_to + 1;  -- no row at or beyond is stale
    v_mid  bigint := p_from;
    v_base bigint;
    v_created_at timestamptz;
begin
    while v_low < v_high loop
        select t.base_offset, t.created_at into v_base, v_created_at from queen.log_txns t
        where t.partition_id = p_pid and t.base_offset >= v_mid
        order by t.base_offset
        limit 1;
        if v_created_at < p_cutoff then
            v_low := v_base + 1;
        else
            v_high := v_mid;
        end if;
        v_mid := v_low + (v_high - v_low) / 2;
    end loop;
    return v_low;
end
$$;

-- Which of p_hashes are stored in a partition, inside the window and beyond p_verified.
--
-- Lock:   none of its own; the caller holds the partition row.
-- Cutoff: rows created before p_cutoff do not count.
-- Result: the position of each stored hash and the smallest offset that holds it.
create or replace function queen.log_push_dups_v1(
    p_pid uuid, p_hashes bytea, p_verified bigint, p_txns_start bigint, p_last_offset bigint, p_cutoff timestamptz
) returns table (idx int, off bigint) language plpgsql
-- The caller may have switched it off for its own plans; here it is the only plan that ends.
set enable_hashjoin = on
as $$
declare
    v_unknown bigint := greatest(p_verified + 1, p_txns_start, 0);
    v_base    bigint;
begin
    if v_unknown > p_last_offset then
        return;
    end if;
    -- The row that covers the first unknown offset may begin before it.
    select t.base_offset into v_base from queen.log_txns t
    where t.partition_id = p_pid and t.base_offset <= v_unknown
    order by t.base_offset desc
    limit 1;
    v_base := queen.log_txns_window_start_v1(p_pid, coalesce(v_base, v_unknown), p_last_offset, p_cutoff);
    return query
        select i.idx, min(t.base_offset + s.idx)
        from queen.log_txns t
        cross join lateral queen.log_unnest_hashes(t.hashes) s
        join queen.log_unnest_hashes(p_hashes) i on i.h = s.h
        where t.partition_id = p_pid and t.base_offset >= v_base
          and t.end_offset >= v_unknown and t.created_at >= p_cutoff
        group by i.idx;
end
$$;

-- An earlier shape, which a call would match as well.
drop function if exists queen.log_push_batch_v1(uuid[], int[], bytea[], bytea[], bigint[], int[], int);

-- Appends one segment to each of many partitions: one transaction, all or (but for duplicates) nothing.
--
-- Lock:   the partition rows, ascending by id, in one statement, and not their keys: a foreign key that
--         is checked meanwhile does not wait. With p_lock_ms no lock is waited for any longer than that.
-- Result: one row of arrays in input order. o_bases is NULL for an element of which some hash is stored
--         already: none of it is written, and o_dup_* say which (element from 1, message from 0, offset).
-- Why:    p_verified and p_windows say what the caller's index holds: within p_windows seconds, every hash
--         up to offset p_verified is known to differ. That counts only if the window is still no longer.
--         The stamp is taken under the locks, so that it never falls along the offsets of a partition.
--         Segments are inserted before the row is updated: their foreign key then finds its lock held.
--         p_sealed says which blobs have their payloads encrypted. One that is not as its queue wants it raises QN005:
--         whatever a server remembers, nothing is stored in clear once encryption is on. NULL is not compared.
create or replace function queen.log_push_batch_v1(
    p_pids uuid[], p_counts int[], p_hashes bytea[], p_blobs bytea[], p_verified bigint[], p_windows int[],
    p_lock_ms int default null, p_sealed boolean[] default null,
    out o_bases bigint[], out o_windows int[], out o_created_at timestamptz,
    out o_dup_elements int[], out o_dup_indexes int[], out o_dup_offsets bigint[]
) language plpgsql
-- The plans are index probes whatever the statistics say, and are made once a session.
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_verified bigint[];
    v_starts   bigint[];
    v_probe    boolean;
    v_valid    boolean;
    v_written  timestamptz[];
    v_reseal   boolean;
begin
    if p_lock_ms is not null then
        perform set_config('lock_timeout', p_lock_ms::text, true);
    end if;
    select array_agg(l.last_offset + 1), array_agg(l.dedup_window_seconds), array_agg(l.last_write_at),
           array_agg(l.verified), array_agg(l.txns_start),
           bool_or(l.dedup_window_seconds > 0 and greatest(l.verified, l.txns_start - 1) < l.last_offset),
           bool_and(l.n > 0 and octet_length(l.hashes) = 16 * l.n), bool_or(l.sealed <> l.encryption_enabled)
    into o_bases, o_windows, v_written, v_verified, v_starts, v_probe, v_valid, v_reseal
    from (
        select k.* from (
            select i.ord, i.n, i.hashes, p.last_offset, p.txns_start, p.last_write_at, q.dedup_window_seconds,
                   i.sealed, coalesce(q.encryption_enabled, false) as encryption_enabled,
                   case when q.dedup_window_seconds <= i.win then i.verified else -1 end as verified
            from unnest(p_pids, p_counts, p_hashes, p_verified, p_windows, p_sealed)
                 with ordinality i (pid, n, hashes, verified, win, sealed, ord)
            join queen.log_partitions p on p.id = i.pid
            join queen.queues q on q.id = p.queue_id
            order by p.id
            for no key update of p
        ) k
        order by k.ord
    ) l;
    if coalesce(cardinality(o_bases), 0) <> cardinality(p_pids) then
        raise exception 'QMULTI resolved % of % segments', coalesce(cardinality(o_bases), 0), cardinality(p_pids)
            using errcode = 'QN001';
    end if;
    if v_valid is not true then
        raise exception 'QPUSH bad segment: its hashes are not 16 bytes a message' using errcode = '22023';
    end if;
    if v_reseal then
        raise exception 'QSEAL the encryption of a queue was switched' using errcode = 'QN005';
    end if;
    o_created_at := clock_timestamp();

    if v_probe then
        select array_agg(e.ord::int order by e.ord, d.idx), array_agg(d.idx order by e.ord, d.idx),
               array_agg(d.off order by e.ord, d.idx)
        into o_dup_elements, o_dup_indexes, o_dup_offsets
        from unnest(p_pids, p_hashes, v_verified, v_starts, o_bases, o_windows)
             with ordinality e (pid, hashes, verified, txns_start, base, win, ord)
        cross join lateral queen.log_push_dups_v1(
            e.pid, e.hashes, e.verified, e.txns_start, e.base - 1, o_created_at - make_interval(secs => e.win)) d
        where e.win > 0 and greatest(e.verified, e.txns_start - 1) < e.base - 1;
        if o_dup_elements is not null then
            select array_agg(case when e.ord = any (o_dup_elements) then null else e.base end order by e.ord)
            into o_bases
            from unnest(o_bases) with ordinality e (base, ord);
        end if;
    end if;

    -- A clock that was set back must not stamp new rows older than those before them.
    insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
    select e.pid, e.base, e.base + e.n - 1, greatest(o_created_at, e.written), e.blob
    from unnest(p_pids, o_bases, p_counts, p_blobs, v_written) e (pid, base, n, blob, written)
    where e.base is not null;
    insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
    select e.pid, e.base, e.base + e.n - 1, greatest(o_created_at, e.written), e.hashes
    from unnest(p_pids, o_bases, p_counts, p_hashes, v_written) e (pid, base, n, hashes, written)
    where e.base is not null;
    update queen.log_partitions p
    set last_offset = e.base + e.n - 1,
        oldest_live_at = coalesce(p.oldest_live_at, greatest(o_created_at, e.written)),
        oldest_txn_at = coalesce(p.oldest_txn_at, greatest(o_created_at, e.written)),
        last_write_at = case when p.last_write_at < o_created_at - interval '1 second' then o_created_at
                             else p.last_write_at end
    from unnest(p_pids, o_bases, p_counts, v_written) e (pid, base, n, written)
    where p.id = e.pid and e.base is not null;
end
$$;

-- One element of a push's answer.
--
-- Lock:   none.
-- Result: {"status":"queued","baseOffset":B,"createdAt":T}, or {"status":"duplicate","dups":[{"i":k,"off":O}]}
--         if p_dups is given; partitionId in both.
create or replace function queen.log_push_answer_v1(
    p_pid uuid, p_base bigint, p_created_at timestamptz, p_dups jsonb
) returns jsonb language sql stable as $$
    select case
        when p_dups is null then jsonb_build_object(
            'status', 'queued', 'partitionId', p_pid, 'baseOffset', p_base,
            'createdAt', to_char(p_created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
        else jsonb_build_object('status', 'duplicate', 'partitionId', p_pid, 'dups', p_dups)
    end
$$;

-- Appends one segment to one partition, which is created if need be.
--
-- Lock:   this partition's row and no other.
-- Result: as log_push_answer_v1. With a duplicate in it nothing is written.
-- Why:    p_verified says that the caller knows every hash up to that offset to differ; -1 is always true.
--         Without a window there is nothing to probe, and the allocating update is itself the lock.
create or replace function queen.log_push_one_v1(
    p_queue text, p_partition text, p_msg_count int, p_hashes bytea, p_verified bigint, p_blob bytea,
    p_pid uuid default null, p_window int default null,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql as $$
declare
    v_pid        uuid := p_pid;
    v_window     int := p_window;
    v_last       bigint;
    v_txns_start bigint;
    v_newest     timestamptz;
    v_stamp      timestamptz;
    v_dups       jsonb;
begin
    if octet_length(p_hashes) is distinct from 16 * p_msg_count or p_msg_count < 1 then
        raise exception 'QPUSH bad segment: % messages, % bytes of hashes', p_msg_count, octet_length(p_hashes)
            using errcode = '22023';
    end if;
    if v_pid is null then
        v_pid := (queen.log_provision_v1(array[p_queue], array[p_partition], array[p_tenant]))[1];
    end if;
    if v_window is null then
        select q.dedup_window_seconds into v_window
        from queen.log_partitions p
        join queen.queues q on q.id = p.queue_id
        where p.id = v_pid;
    end if;

    if v_window > 0 then
        select p.last_offset, p.txns_start, p.last_write_at into v_last, v_txns_start, v_newest
        from queen.log_partitions p
        where p.id = v_pid
        for no key update;
        v_stamp := greatest(clock_timestamp(), v_newest);
        select jsonb_agg(jsonb_build_object('i', d.idx, 'off', d.off) order by d.idx) into v_dups
        from queen.log_push_dups_v1(
            v_pid, p_hashes, p_verified, v_txns_start, v_last, v_stamp - make_interval(secs => v_window)) d;
        if v_dups is not null then
            return queen.log_push_answer_v1(v_pid, null, v_stamp, v_dups);
        end if;
    end if;

    update queen.log_partitions p
    set last_offset = p.last_offset + p_msg_count,
        -- No younger than the segment will be, whose stamp is taken under this lock.
        oldest_live_at = coalesce(p.oldest_live_at, greatest(clock_timestamp(), p.last_write_at)),
        oldest_txn_at = coalesce(p.oldest_txn_at, greatest(clock_timestamp(), p.last_write_at)),
        last_write_at = case when p.last_write_at < clock_timestamp() - interval '1 second' then clock_timestamp()
                             else p.last_write_at end
    where p.id = v_pid
    returning p.last_offset, p.last_write_at into v_last, v_newest;
    if v_last is null then
        raise exception 'QPUSH partition % vanished mid-push', coalesce(v_pid::text, p_partition)
            using errcode = 'QN001';
    end if;
    v_stamp := greatest(clock_timestamp(), v_newest);
    insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, blob)
    values (v_pid, v_last - p_msg_count + 1, v_last, v_stamp, p_blob);
    insert into queen.log_txns (partition_id, base_offset, end_offset, created_at, hashes)
    values (v_pid, v_last - p_msg_count + 1, v_last, v_stamp, p_hashes);
    return queen.log_push_answer_v1(v_pid, v_last - p_msg_count + 1, v_stamp, null);
end
$$;

-- Appends one segment to each of many partitions, which are created if need be.
--
-- Lock:   the partition rows, ascending by id, in one statement.
-- Result: a JSON array in input order, each as log_push_answer_v1. Duplicates of one element do not keep
--         the others from being written. A partition named twice takes its elements in input order.
create or replace function queen.log_push_multi_v1(
    p_queues text[], p_partitions text[], p_counts int[], p_hashes bytea[], p_verified bigint[], p_blobs bytea[],
    p_tenants uuid[] default null
) returns jsonb language plpgsql as $$
declare
    v_n       int := cardinality(p_queues);
    v_pids    uuid[];
    v_answer  jsonb;
begin
    if array[cardinality(p_partitions), cardinality(p_counts), cardinality(p_hashes), cardinality(p_verified),
             cardinality(p_blobs), coalesce(cardinality(p_tenants), v_n)]
       is distinct from array[v_n, v_n, v_n, v_n, v_n, v_n] then
        raise exception 'QMULTI misaligned arrays' using errcode = '22023';
    end if;
    if v_n = 0 then
        return '[]';
    end if;
    v_pids := queen.log_provision_v1(p_queues, p_partitions, p_tenants);
    if array_position(v_pids, null) is not null then
        raise exception 'QMULTI resolved % of % segments', cardinality(array_remove(v_pids, null)), v_n
            using errcode = 'QN001';
    end if;
    if (select count(distinct k) from unnest(v_pids) k) < v_n then
        perform from queen.log_partitions p where p.id = any (v_pids) order by p.id for no key update;
        v_answer := '[]';
        for v_i in 1 .. v_n loop
            v_answer := v_answer || queen.log_push_one_v1(
                p_queues[v_i], p_partitions[v_i], p_counts[v_i], p_hashes[v_i], p_verified[v_i], p_blobs[v_i],
                v_pids[v_i], null, coalesce(p_tenants[v_i], '00000000-0000-0000-0000-000000000001'));
        end loop;
        return v_answer;
    end if;
    select jsonb_agg(queen.log_push_answer_v1(
               e.pid, e.base, greatest(b.o_created_at, p.last_write_at), (
                   select jsonb_agg(jsonb_build_object('i', d.i, 'off', d.off) order by d.i)
                   from unnest(b.o_dup_elements, b.o_dup_indexes, b.o_dup_offsets) d (element, i, off)
                   where d.element = e.ord)
           ) order by e.ord)
    into v_answer
    from queen.log_push_batch_v1(
             v_pids, p_counts, p_hashes, p_blobs, p_verified, array_fill(2147483647, array[v_n])) b
    cross join lateral unnest(v_pids, b.o_bases) with ordinality e (pid, base, ord)
    join queen.log_partitions p on p.id = e.pid;
    return v_answer;
end
$$;

-- Where the window of a partition begins and where its log ends.
--
-- Lock:   none; both may move on at once.
-- Result: one row, or none if the partition is gone.
create or replace function queen.log_txns_window_v1(p_pid uuid, p_window int)
returns table (start_offset bigint, last_offset bigint) language sql as $$
    select queen.log_txns_window_start_v1(
               p.id, p.txns_start, p.last_offset, clock_timestamp() - make_interval(secs => p_window)),
           p.last_offset
    from queen.log_partitions p
    where p.id = p_pid
$$;

-- Sidecar rows of a partition from the one that begins at or after p_from, in offset order.
--
-- Lock:   none.
-- Result: rows of p_max_messages messages or few more, at most 4096 rows, at least one if there is one.
create or replace function queen.log_txns_read_v1(p_pid uuid, p_from bigint, p_max_messages bigint)
returns table (base_offset bigint, created_at timestamptz, hashes bytea) language sql stable as $$
    select r.base_offset, r.created_at, r.hashes
    from (
        select t.*, sum(t.end_offset - t.base_offset + 1) over (order by t.base_offset)
                    - (t.end_offset - t.base_offset + 1) as messages_before
        from (
            select c.* from queen.log_txns c
            where c.partition_id = p_pid and c.base_offset >= p_from
            order by c.base_offset
            limit 4096
        ) t
    ) r
    where r.messages_before < p_max_messages
    order by r.base_offset
$$;
