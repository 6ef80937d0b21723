-- Discovery: which partitions of a queue may have something for a group, at a cost that follows
-- what was written lately and not how many partitions there are.

-- Where reading starts when an offset is wanted.
--
-- Result: base offset of the segment that holds it, else of the first one after; NULL if neither.
-- Why:    retention deletes a prefix, so one step forward crosses the gap it leaves. Offsets below
--         p_log_start are gone, and their dead index entries are not walked over.
create or replace function queen.log_head_v1(
    p_pid uuid, p_log_start bigint, p_wanted bigint
) returns bigint language sql stable as $$
    select coalesce(
        (select c.base_offset
         from (
             select s.base_offset, s.end_offset from queen.log_segments s
             where s.partition_id = p_pid and p_log_start <= s.base_offset and s.base_offset <= p_wanted
             order by s.base_offset desc
             limit 1
         ) c
         where p_wanted <= c.end_offset),
        (select s.base_offset from queen.log_segments s
         where s.partition_id = p_pid and p_log_start <= s.base_offset and p_wanted < s.base_offset
         order by s.base_offset
         limit 1)
    )
$$;

-- Whether a partition's next message may not be seen yet.
--
-- Cutoff: with a window, a partition rests until its newest segment is that old, or 100 messages
--         wait; with a delay, each segment rests by itself, so the next one decides.
-- Result: a fact at p_as_of. False for a partition without segments.
create or replace function queen.log_is_resting_v1(
    p_pid uuid, p_log_start bigint, p_last_offset bigint, p_committed bigint,
    p_window_seconds int, p_delay_seconds int, p_as_of timestamptz
) returns boolean language sql stable as $$
    select (
        0 < p_window_seconds and p_last_offset - p_committed < 100 and exists (
            select from (
                select s.created_at from queen.log_segments s
                where s.partition_id = p_pid
                order by s.base_offset desc
                limit 1
            ) newest
            where p_as_of - make_interval(secs => p_window_seconds) < newest.created_at
        )
    ) or (
        0 < p_delay_seconds and exists (
            select from queen.log_segments s
            where s.partition_id = p_pid
              and s.base_offset = queen.log_head_v1(p_pid, p_log_start, p_committed + 1)
              and p_as_of - make_interval(secs => p_delay_seconds) < s.created_at
        )
    )
$$;

-- Partitions of a queue, written in a span of time, that hold something a group has not consumed.
--
-- Cutoff: p_free_at leaves out those under a lease that is live then, and those that rest then.
-- Result: at most p_rows, longest without a write first; whether the group has a cursor there.
-- Why:    the lateral keeps the cursor a lookup by key, whatever the planner believes.
create or replace function queen.log_unread_v1(
    p_queue_id uuid, p_group text, p_from timestamptz, p_before timestamptz, p_free_at timestamptz, p_rows int
) returns table (r_pid uuid, r_has_cursor boolean) language sql stable as $$
    select p.id, c.partition_id is not null
    from queen.queues q
    join queen.log_partitions p on p.queue_id = q.id
    left join lateral (
        select c.partition_id, c.committed, c.batch_end, c.lease_expires_at
        from queen.log_consumers c
        where c.partition_id = p.id and c.consumer_group = p_group
        limit 1
    ) c on true
    where q.id = p_queue_id
      and p_from <= p.last_write_at and p.last_write_at < p_before
      and coalesce(c.committed, -1) < p.last_offset
      and (c.batch_end is null or c.lease_expires_at <= p_free_at)
      and ((coalesce(q.window_buffer, 0) <= 0 and coalesce(q.delayed_processing, 0) <= 0)
           or not queen.log_is_resting_v1(p.id, p.log_start, p.last_offset, coalesce(c.committed, -1),
                                          q.window_buffer, q.delayed_processing, p_free_at))
    order by p.last_write_at
    limit p_rows
$$;

-- Partitions of a queue that a group may try to claim, in random order.
--
-- Cutoff: written no longer than two minutes before the watermark; the slack covers that a write
--         is stamped at most once a second, before its commit.
-- Result: at most p_rows.
-- Why:    the look starts at a random time and wraps, and stops when it has enough to choose
--         from: a busy queue is not read whole, and no partition is always last.
create or replace function queen.log_pop_candidates_v1(
    p_queue_id uuid, p_group text, p_watermark timestamptz, p_as_of timestamptz, p_rows int
) returns table (r_pid uuid, r_has_cursor boolean) language plpgsql as $$
declare
    v_low    timestamptz := p_watermark - interval '2 minutes';
    v_pool   int := p_rows * 4;
    v_oldest timestamptz;
    v_newest timestamptz;
    v_pivot  timestamptz;
begin
    select p.last_write_at into v_oldest from queen.log_partitions p
    where p.queue_id = p_queue_id and v_low <= p.last_write_at
    order by p.last_write_at
    limit 1;
    if not found then
        return;
    end if;
    select p.last_write_at into v_newest from queen.log_partitions p
    where p.queue_id = p_queue_id and v_low <= p.last_write_at
    order by p.last_write_at desc
    limit 1;
    v_pivot := v_oldest + (v_newest - v_oldest) * random();
    return query
    select u.r_pid, u.r_has_cursor
    from (
        select * from queen.log_unread_v1(p_queue_id, p_group, v_pivot, 'infinity', p_as_of, v_pool)
        union all
        select * from queen.log_unread_v1(p_queue_id, p_group, v_low, v_pivot, p_as_of, v_pool)
        limit v_pool
    ) u
    order by random()
    limit p_rows;
end
$$;

-- Moves a group's watermark in a queue up to where the group has something left to read, or to p_as_of, the
-- time of a look.
--
-- Lock:   the watermark's row, if nobody has it.
-- Cutoff: at most every 30 seconds. What is unread counts also under leases and rests: raised over
--         those, the watermark would hide them when the lease expires or the rest ends.
-- Result: nothing.
-- Why:    p_seen_at is when the row was last written, as the look saw it. A seek deletes the row,
--         so a look from before the seek cannot raise what a look after it relies on.
--         A queue in which something is always unread has a watermark too; else every look would read all its
--         partitions. The walk is bounded, and while it makes way the next call may go on at once. The slack
--         that readers subtract is added here, but not beyond p_as_of: that is what the slack is for.
--         A watermark in the future is from a clock that was set back, and does not count.
create or replace function queen.log_watermark_raise_v1(
    p_queue_id uuid, p_group text, p_seen_at timestamptz, p_as_of timestamptz
) returns void language plpgsql as $$
declare
    c_rows_max constant int := 5000;
    c_slack    constant interval := interval '2 minutes';
    v_from     timestamptz;
    v_last     timestamptz;
    v_to       timestamptz;
begin
    if p_seen_at is null then
        insert into queen.consumer_watermarks (queue_id, consumer_group, updated_at)
        values (p_queue_id, p_group, p_as_of - interval '30 seconds')
        on conflict do nothing;
        return;
    end if;
    if p_as_of - interval '30 seconds' < p_seen_at then
        return;
    end if;
    select case when w.last_empty_scan_at <= p_as_of + interval '1 minute' then w.last_empty_scan_at else 'epoch' end
    into v_from
    from queen.consumer_watermarks w
    where w.queue_id = p_queue_id and w.consumer_group = p_group and w.updated_at = p_seen_at
    for update skip locked;
    if not found then
        return;
    end if;
    select p.last_write_at into v_last from queen.log_partitions p
    where p.queue_id = p_queue_id and v_from - c_slack <= p.last_write_at
    order by p.last_write_at
    offset c_rows_max - 1 limit 1;
    select u.last_write_at into v_to
    from (
        select p.last_write_at, coalesce(c.committed, -1) < p.last_offset as is_unread
        from queen.log_partitions p
        left join lateral (
            select c.committed from queen.log_consumers c
            where c.partition_id = p.id and c.consumer_group = p_group
            limit 1
        ) c on true
        where p.queue_id = p_queue_id and v_from - c_slack <= p.last_write_at
        order by p.last_write_at
        limit c_rows_max
    ) u
    where u.is_unread
    order by u.last_write_at
    limit 1;
    v_last := case when v_to is null then v_last end;
    v_to := greatest(v_from, least(coalesce(v_to, v_last, p_as_of) + c_slack, p_as_of));
    update queen.consumer_watermarks w
    set last_empty_scan_at = v_to,
        updated_at = p_as_of - case when v_from < v_to and v_last is not null then interval '30 seconds' else '0' end
    where w.queue_id = p_queue_id and w.consumer_group = p_group;
end
$$;
