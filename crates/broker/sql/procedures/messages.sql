-- Messages as an operator sees them: listed, read one by one, moved away. What is listed or found by its transaction id
-- is found in the sidecar: a message whose hash is purged is not.

-- Where the sidecar rows of a partition begin that are no older than p_cutoff.
--
-- Lock:   none.
-- Cutoff: rows created before p_cutoff are passed over.
-- Result: the base_offset of the first such row; p_to + 1 if there is none.
create or replace function queen.log_browse_edge_v1(
    p_pid uuid, p_from bigint, p_to bigint, p_cutoff timestamptz
) returns bigint language sql stable as $$
    select coalesce((
        select t.base_offset from queen.log_txns t
        where t.partition_id = p_pid and queen.log_txns_window_start_v1(p_pid, p_from, p_to, p_cutoff) <= t.base_offset
          and t.base_offset <= p_to and p_cutoff <= t.created_at
        order by t.base_offset
        limit 1
    ), p_to + 1)
$$;

-- How far the groups of a partition have come with one message.
--
-- Lock:   none.
-- Result: one row. r_status is dead_letter, completed, processing or pending, the first that is true: filed by any
--         group; passed by every named group, or by queue mode if there is none, or deleted by retention; leased.
--         r_queue_status is the same for queue mode alone, NULL if it was never here. r_lease is the latest end.
create or replace function queen.log_message_state_v1(
    p_pid uuid, p_offset bigint, p_log_start bigint,
    out r_status text, out r_queue_status text, out r_consumed_by int, out r_groups int, out r_lease timestamptz
) language sql stable as $$
    select case
            when exists (select from queen.log_dlq d where d.partition_id = p_pid and d."offset" = p_offset)
                then 'dead_letter'
            when p_offset < greatest(p_log_start, 1 + coalesce(
                min(c.committed) filter (where c.is_named), min(c.committed) filter (where not c.is_named), -1))
                then 'completed'
            when bool_or(c.is_leased) then 'processing'
            else 'pending'
        end,
        max(case when p_offset <= c.committed then 'completed' when c.is_leased then 'processing' else 'pending' end)
            filter (where not c.is_named),
        (count(*) filter (where c.is_named and p_offset <= c.committed))::int,
        (count(*) filter (where c.is_named))::int,
        max(c.lease_expires_at) filter (where c.is_leased)
    from (
        select c.committed, c.lease_expires_at, c.consumer_group <> '__QUEUE_MODE__' as is_named,
            c.committed < p_offset and p_offset <= c.batch_end and now() < c.lease_expires_at as is_leased
        from queen.log_consumers c where c.partition_id = p_pid
    ) c
$$;

-- The messages of one status among p_low to p_high - 1 of a partition, as log_message_state_v1 would say.
--
-- Lock:   none.
-- Result: ranges of offsets; without a status all of them.
-- Why:    counting ranges costs the groups and the dead letters, not the messages.
create or replace function queen.log_browse_ranges_v1(
    p_pid uuid, p_low bigint, p_high bigint, p_log_start bigint, p_status text
) returns int8multirange language sql stable as $$
    with cursors as (
        select greatest(p_log_start, 1 + coalesce(
                min(c.committed) filter (where c.consumer_group <> '__QUEUE_MODE__'), min(c.committed), -1)) as wanted,
            coalesce(range_agg(int8range(c.committed, c.batch_end, '(]'))
                filter (where c.committed < c.batch_end and now() < c.lease_expires_at), '{}') as leased
        from queen.log_consumers c where c.partition_id = p_pid
    ), span as (
        select int8multirange(int8range(p_low, greatest(p_low, p_high))) as span, coalesce((
            select range_agg(int8range(d."offset", d."offset", '[]')) from queen.log_dlq d
            where p_status is not null and d.partition_id = p_pid and p_low <= d."offset" and d."offset" < p_high
        ), '{}') as dead
    )
    select case p_status
        when 'dead_letter' then span.dead
        when 'completed' then span.span * int8multirange(int8range(null, c.wanted)) - span.dead
        when 'processing' then span.span * c.leased * int8multirange(int8range(c.wanted, null)) - span.dead
        when 'pending' then span.span * int8multirange(int8range(c.wanted, null)) - c.leased - span.dead
        else span.span
    end
    from cursors c cross join span
$$;

-- The p_nth highest offset in ranges, from 1.
--
-- Lock:   none.
-- Result: NULL if there are fewer.
create or replace function queen.log_browse_nth_v1(p_ranges int8multirange, p_nth bigint)
returns bigint language sql immutable as $$
    select upper(s.r) - p_nth + s.above
    from (
        select r, sum(upper(r) - lower(r)) over (order by r desc) - (upper(r) - lower(r)) as above
        from unnest(p_ranges) r
    ) s
    where s.above < p_nth and p_nth <= s.above + upper(s.r) - lower(s.r)
$$;

-- The sidecar row that holds an offset.
--
-- Lock:   none.
-- Result: one row, or none below the sidecar. The caller knows that p_offset was given out.
create or replace function queen.log_sidecar_at_v1(p_pid uuid, p_offset bigint)
returns table (base_offset bigint, created_at timestamptz) language sql stable as $$
    select t.base_offset, t.created_at from queen.log_txns t
    where t.partition_id = p_pid and t.base_offset <= p_offset
    order by t.base_offset desc
    limit 1
$$;

-- The partitions that filters let through and that were written since p_from, with the messages that count in each.
--
-- Lock:   none.
-- Cutoff: messages created from p_from to p_to, both inclusive; p_to may be NULL.
-- Result: at most p_lanes + 1 rows, the one written last first.
-- Why:    last_write_at lags behind a write by up to a second. Two searches in the sidecar say where the time span
--         begins and ends, so no message is looked at.
create or replace function queen.log_browse_lanes_v1(
    p_queue text, p_partition text, p_namespace text, p_task text, p_status text, p_from timestamptz, p_to timestamptz,
    p_lanes int, p_tenant uuid
) returns table (
    pid uuid, queue text, partition text, namespace text, task text, priority int, log_start bigint, low bigint,
    high bigint, ranges int8multirange
) language sql stable as $$
    with lanes as materialized (
        select p.*, q.name as queue, q.namespace, q.task, q.priority
        from queen.queues q cross join lateral (
            select p.id, p.name, p.log_start, p.txns_start, p.last_offset, p.last_write_at
            from queen.log_partitions p
            where p.queue_id = q.id and p_from - interval '1 second' <= p.last_write_at
              and (p_partition is null or p.name = p_partition)
            order by p.last_write_at desc
            limit p_lanes + 1
        ) p
        where q.tenant_id = p_tenant and (p_queue is null or q.name = p_queue)
          and (p_namespace is null or q.namespace = p_namespace) and (p_task is null or q.task = p_task)
        order by p.last_write_at desc, p.id
        limit p_lanes + 1
    )
    select l.id, l.queue, l.name, l.namespace, l.task, l.priority, l.log_start, e.low, h.high,
        queen.log_browse_ranges_v1(l.id, e.low, h.high, l.log_start, p_status)
    from lanes l
    cross join lateral queen.log_browse_edge_v1(l.id, l.txns_start, l.last_offset, p_from) e (low)
    cross join lateral (
        select case when p_to is null then l.last_offset + 1
            else queen.log_browse_edge_v1(l.id, e.low, l.last_offset, p_to + interval '1 microsecond') end as high
    ) h
$$;

-- Lists messages, newest first.
--
-- Lock:   none.
-- Cutoff: messages created from p_from to p_to, both inclusive. NULL is an hour ago, and no end.
-- Result: a page of rows. On each, total counts all that the filters let through, and truncated says that more than
--         p_lanes partitions were written since p_from, so that only those written last were looked at; queue_mode
--         and groups say who consumes these. A page beyond the end is one row with a NULL partition_id.
-- Why:    of n messages wanted, some j partitions hold n / j each that are no older than the j-th newest n / j-th
--         message; the newest such time, over powers of two, leaves about n to look at, however many partitions.
create or replace function queen.list_messages_v1(
    p_queue text, p_partition text, p_namespace text, p_task text, p_status text, p_from timestamptz, p_to timestamptz,
    p_limit int, p_offset int, p_lanes int default 500, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    total bigint, truncated boolean, queue_mode boolean, groups bigint, partition_id uuid, queue text, partition text,
    namespace text, task text, priority int, base_offset bigint, "offset" bigint, created_at timestamptz, hash bytea,
    status text, queue_status text, consumed_by int, group_count int, lease_expires_at timestamptz
) language sql stable
-- The plans are index probes whatever the statistics say; compiling them would take longer than running them.
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
    with found as materialized (
        select row_number() over () as n, l.* from queen.log_browse_lanes_v1(
            p_queue, p_partition, p_namespace, p_task, p_status, coalesce(p_from, now() - interval '1 hour'), p_to,
            p_lanes, p_tenant) l
    ), lanes as materialized (
        select f.* from found f where f.n <= p_lanes
    ), levels as (
        select j.lanes, lanes.pid, queen.log_browse_nth_v1(
                lanes.ranges, ceil((p_limit + p_offset)::numeric / j.lanes)::bigint) as off
        from (select 1 << e as lanes from generate_series(0, 20) e) j cross join lanes
        where j.lanes <= (select count(*) from lanes) and 0 < p_limit
    ), floors as (
        select levels.lanes, t.created_at,
            row_number() over (partition by levels.lanes order by t.created_at desc) as rank
        from levels cross join lateral queen.log_sidecar_at_v1(levels.pid, levels.off) t
    ), newest as materialized (
        select max(f.created_at) as since from floors f where f.rank = f.lanes
    ), candidates as (
        select lanes.pid, o.off, t.base_offset, t.created_at
        from newest cross join lanes
        cross join lateral (
            select case when newest.since is null or lanes.high <= lanes.low then lanes.low
                else queen.log_browse_edge_v1(lanes.pid, lanes.low, lanes.high - 1, newest.since) end as low
        ) e
        cross join lateral (
            select g.off
            from unnest(lanes.ranges * int8multirange(int8range(e.low, greatest(e.low, lanes.high)))) r
            cross join lateral generate_series(
                upper(r) - 1, greatest(lower(r), upper(r) - p_limit - p_offset), -1) g (off)
            order by g.off desc
            limit p_limit + p_offset
        ) o
        cross join lateral queen.log_sidecar_at_v1(lanes.pid, o.off) t
    ), page as materialized (
        select * from candidates c order by c.created_at desc, c.pid, c.off desc limit p_limit offset p_offset
    ), sums as (
        select (select coalesce(sum(upper(r) - lower(r)), 0)::bigint from lanes cross join lateral unnest(lanes.ranges) r),
            (select p_lanes < count(*) from found), coalesce(bool_or(c.consumer_group = '__QUEUE_MODE__'), false),
            count(distinct c.consumer_group) filter (where c.consumer_group <> '__QUEUE_MODE__')
        from lanes join queen.log_consumers c on c.partition_id = lanes.pid
    )
    select sums.*, page.pid, lanes.queue, lanes.partition, lanes.namespace, lanes.task, lanes.priority,
        page.base_offset, page.off, page.created_at, hash.h, s.r_status, s.r_queue_status, s.r_consumed_by, s.r_groups,
        s.r_lease
    from sums
    left join (page join lanes on lanes.pid = page.pid) on true
    left join lateral (
        select substr(t.hashes, (1 + 16 * (page.off - page.base_offset))::int, 16) as h from queen.log_txns t
        where t.partition_id = page.pid and t.base_offset = page.base_offset
    ) hash on true
    left join lateral queen.log_message_state_v1(page.pid, page.off, lanes.log_start) s on true
    order by page.created_at desc, page.pid, page.off desc
$$;

-- The segments of listed messages, unless they would take too much memory.
--
-- Lock:   none.
-- Result: one row per element in input order; blob is NULL where retention has deleted the segment, and where
--         is_omitted says that those before it unpack to p_bytes or more.
create or replace function queen.log_message_segments_v1(
    p_pids uuid[], p_offsets bigint[], p_bytes bigint
) returns table (blob bytea, is_omitted boolean) language sql stable as $$
    select case when b.before < p_bytes then b.blob end, b.blob is not null and p_bytes <= b.before
    from (
        select m.ordinal, s.blob,
            coalesce(sum(queen.log_plain_bytes_v1(s.blob)) over (
                order by m.ordinal rows between unbounded preceding and 1 preceding), 0) as before
        from unnest(p_pids, p_offsets) with ordinality as m (pid, "offset", ordinal)
        left join lateral queen.log_segment_at_v1(m.pid, m."offset") s on true
    ) b
    order by b.ordinal
$$;

-- The offset of the newest message with a transaction id, by its hash.
--
-- Lock:   none.
-- Result: NULL if its hash is not among the newest p_span of the partition.
-- Why:    no index knows hashes: an entry a message would cost every push more than this costs an operator. Five million
--         take part of a second.
create or replace function queen.log_message_offset_v1(p_pid uuid, p_hash bytea, p_span bigint default 5000000)
returns bigint language sql stable
set enable_seqscan = off set enable_bitmapscan = off set jit = off
as $$
    select t.base_offset + u.idx
    from (
        select t.base_offset, t.hashes
        from queen.log_partitions p join queen.log_txns t on t.partition_id = p.id
        where p.id = p_pid and p.last_offset - p_span < t.base_offset and 0 < position(p_hash in t.hashes)
        order by t.base_offset desc
        limit 1
    ) t
    cross join lateral queen.log_unnest_hashes(t.hashes) u
    where u.h = p_hash
    order by u.idx desc
    limit 1
$$;

-- An earlier shape, which answers less.
drop function if exists queen.get_message_v1(uuid, text, bytea, uuid);

-- Reads one message: the newest with a transaction id, and the newest dead letter with it.
--
-- Lock:   none.
-- Result: one row, or none without the partition. blob is NULL if no live segment has the message, letter_id if no
--         dead letter has it; either may be. The group_* arrays say of each cursor whether it has passed, and until
--         when it leases the message; retry_count is the failures charged to it where it is next.
create or replace function queen.get_message_v1(
    p_pid uuid, p_transaction_id text, p_hash bytea, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    queue text, partition text, namespace text, task text, options jsonb, base_offset bigint, "offset" bigint,
    created_at timestamptz, blob bytea, status text, lease_expires_at timestamptz, retry_count int,
    group_names text[], group_consumed boolean[], group_leases timestamptz[],
    letter_id uuid, letter_offset bigint, letter_message_id uuid, letter_payload text, letter_error text,
    letter_retry_count int, letter_failed_at timestamptz, letter_trace_id uuid, letter_producer text,
    letter_is_encrypted boolean
) language sql stable as $$
    select q.name, p.name, q.namespace, q.task, queen.queue_options(q), s.base_offset, m.off, s.created_at, s.blob,
        state.r_status, state.r_lease, g.retries, g.names, g.consumed, g.leases, d.id, d."offset", d.message_id,
        d.payload, d.error, coalesce(d.retry_count, 0), d.failed_at, d.trace_id, d.producer, d.is_encrypted
    from queen.log_partitions p
    join queen.queues q on q.id = p.queue_id
    cross join lateral queen.log_message_offset_v1(p.id, p_hash) m (off)
    left join lateral queen.log_segment_at_v1(p.id, m.off) s on true
    left join lateral (
        select d.* from queen.log_dlq d
        where d.partition_id = p.id and d.transaction_id = p_transaction_id
          and hashtextextended(d.transaction_id, 0) = hashtextextended(p_transaction_id, 0)
        order by d.failed_at desc, d.id desc
        limit 1
    ) d on true
    cross join lateral (select case when s.blob is null then d."offset" else m.off end as off) o
    cross join lateral queen.log_message_state_v1(p.id, o.off, p.log_start) state
    cross join lateral (
        select array_agg(c.consumer_group order by c.consumer_group) as names,
            array_agg(coalesce(o.off <= c.committed, false) order by c.consumer_group) as consumed,
            array_agg(case when c.committed < o.off and o.off <= c.batch_end and now() < c.lease_expires_at
                then c.lease_expires_at end order by c.consumer_group) as leases,
            coalesce(max(c.batch_retry_count) filter (where c.committed + 1 = o.off), 0) as retries
        from queen.log_consumers c where c.partition_id = p.id
    ) g
    where p.id = p_pid and q.tenant_id = p_tenant
$$;

-- Deletes the dead letters with a transaction id, those of all groups. A live message cannot be deleted.
--
-- Lock:   as log_dlq_delete_v1.
-- Result: {"success": bool, "deleted": n}; success is false if there was none.
create or replace function queen.delete_message_v1(
    p_pid uuid, p_transaction_id text, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql as $$
declare
    v_deleted int;
begin
    v_deleted := queen.log_dlq_delete_v1(array(
        select d.id from queen.log_dlq d
        where d.partition_id = p_pid and d.transaction_id = p_transaction_id
          and hashtextextended(d.transaction_id, 0) = hashtextextended(p_transaction_id, 0)), p_tenant);
    return jsonb_build_object('success', 0 < v_deleted, 'deleted', v_deleted);
end
$$;
