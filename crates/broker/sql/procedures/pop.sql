-- Pop: claim what a consumer group may read next, and hand it over segment by segment.

-- How much memory a segment takes once it is unpacked.
--
-- Lock:   none.
-- Result: the size that the header of its zstd frame states, and never less than the blob itself; eight times
--         the blob if there is none.
-- Why:    a blob can unpack to a thousand times its size. Of one stored out of line only the first chunk is read.
create or replace function queen.log_plain_bytes_v1(p_blob bytea)
returns bigint language plpgsql immutable parallel safe as $$
declare
    -- Magic number, descriptor, window descriptor, dictionary id and size: 4 + 1 + 1 + 4 + 8.
    v_head       bytea := substr(p_blob, 1, 18);
    v_stored     bigint := octet_length(p_blob);
    v_descriptor int;
    v_width      int;
    v_at         int;
    v_plain      bigint := 0;
begin
    if octet_length(v_head) < 6 or substr(v_head, 1, 4) <> '\x28b52ffd' then
        return 8 * v_stored;
    end if;
    v_descriptor := get_byte(v_head, 4);
    v_width := (array[v_descriptor >> 5 & 1, 2, 4, 8])[1 + (v_descriptor >> 6)];
    v_at := 6 - (v_descriptor >> 5 & 1) + (array[0, 1, 2, 4])[1 + (v_descriptor & 3)];
    if v_width = 0 or octet_length(v_head) < v_at + v_width then
        return 8 * v_stored;
    end if;
    -- Six bytes count to 256 TiB; more than that is no size.
    for v_i in reverse least(v_width, 6) - 1 .. 0 loop
        v_plain := v_plain << 8 | get_byte(v_head, v_at + v_i);
    end loop;
    return greatest(v_stored, v_plain + case v_width when 2 then 256 else 0 end);
end
$$;

-- Claims one partition for a group that has a cursor there, and reads from it.
--
-- Lock:   the cursor, if nobody has it. Not the partition.
-- Result: a row for each segment: messages r_start_idx to r_start_idx + r_take - 1 of the blob are
--         delivered. At most p_budget messages; no further segment once those taken unpack to p_bytes. A group that
--         conflates is given the newest visible message alone, under a lease on everything up to it.
-- Why:    last_offset is read before the segments are looked for, so an emptied partition is
--         sealed only up to what was there; else its messages would look pending for ever.
create or replace function queen.log_pop_claim_v1(
    p_pid uuid, p_group text, p_budget int, p_bytes bigint, p_lease_secs int, p_worker text, p_auto_ack boolean,
    p_skip_window_debounce boolean
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea
) language plpgsql as $$
declare
    v_part   record;
    v_cursor record;
    v_seg    record;
    v_now    timestamptz := clock_timestamp();
    v_head   bigint;
    v_start  bigint;
    v_first  bigint;
    v_last   bigint;
    v_left   int := p_budget;
    v_bytes  bigint := p_bytes;
begin
    select p.name, q.name as queue, p.log_start, p.last_offset, q.lease_time,
           coalesce(q.delayed_processing, 0) as delay_seconds,
           case when p_skip_window_debounce then 0 else coalesce(q.window_buffer, 0) end as window_seconds
    into v_part
    from queen.log_partitions p join queen.queues q on q.id = p.queue_id
    where p.id = p_pid;
    if not found then
        return;
    end if;
    select c.committed, c.conflated into v_cursor from queen.log_consumers c
    where c.partition_id = p_pid and c.consumer_group = p_group
      and (c.batch_end is null or c.lease_expires_at <= v_now)
    for update skip locked;
    if not found or v_part.last_offset <= v_cursor.committed or queen.log_is_resting_v1(
        p_pid, v_part.log_start, v_part.last_offset, v_cursor.committed, v_part.window_seconds, 0, v_now) then
        return;
    end if;

    v_head := queen.log_head_v1(p_pid, v_part.log_start, v_cursor.committed + 1);
    if v_cursor.conflated then
        -- Everything before the newest visible message counts as passed with it.
        select s.base_offset into v_head from queen.log_segments s
        where s.partition_id = p_pid and v_head <= s.base_offset
          and (v_part.delay_seconds = 0 or s.created_at <= v_now - make_interval(secs => v_part.delay_seconds))
        order by s.base_offset desc
        limit 1;
    end if;
    for v_seg in
        select s.base_offset, s.end_offset, s.created_at, s.blob from queen.log_segments s
        where s.partition_id = p_pid and v_head <= s.base_offset
        order by s.base_offset
    loop
        exit when 0 < v_part.delay_seconds
            and v_now - make_interval(secs => v_part.delay_seconds) < v_seg.created_at;
        v_start := case when v_cursor.conflated then v_seg.end_offset
            else greatest(v_seg.base_offset, v_cursor.committed + 1) end;
        v_first := coalesce(v_first, v_start);
        r_start_idx := v_start - v_seg.base_offset;
        r_take := least(v_seg.end_offset - v_start + 1, v_left);
        v_last := v_start + r_take - 1;
        v_left := v_left - r_take;
        v_bytes := v_bytes - queen.log_plain_bytes_v1(v_seg.blob);
        r_pid := p_pid; r_partition := v_part.name; r_queue := v_part.queue;
        r_base := v_seg.base_offset; r_msg_count := v_seg.end_offset - v_seg.base_offset + 1;
        r_created_at := v_seg.created_at; r_blob := v_seg.blob;
        return next;
        exit when v_left <= 0 or v_bytes <= 0 or v_cursor.conflated;
    end loop;

    if v_first is null then
        if not exists (select from queen.log_segments s where s.partition_id = p_pid) then
            perform queen.log_cursor_pass_v1(p_pid, p_group, v_part.last_offset, 0);
        end if;
    elsif p_auto_ack then
        perform queen.log_cursor_pass_v1(p_pid, p_group, v_last, p_budget - v_left);
    else
        update queen.log_consumers c
        set worker_id = p_worker, batch_end = v_last, lease_acquired_at = v_now,
            lease_expires_at = v_now + make_interval(
                secs => coalesce(nullif(greatest(p_lease_secs, 0), 0), nullif(greatest(v_part.lease_time, 0), 0), 60)),
            attempt_count = case when c.attempt_offset = v_first then c.attempt_count + 1 else 1 end,
            -- A newer message that takes the place of a failed one has not failed yet.
            batch_retry_count = case when c.conflated and c.attempt_offset is distinct from v_first then 0
                else c.batch_retry_count end,
            attempt_offset = v_first
        where c.partition_id = p_pid and c.consumer_group = p_group;
    end if;
end
$$;

-- Moves a cursor that the caller has locked past messages that are done with, and leaves no lease.
--
-- Lock:   none of its own.
-- Result: nothing. p_taken messages count as consumed.
create or replace function queen.log_cursor_pass_v1(
    p_pid uuid, p_group text, p_last bigint, p_taken int
) returns void language sql as $$
    update queen.log_consumers c
    set committed = greatest(c.committed, p_last), total_consumed = c.total_consumed + p_taken,
        worker_id = null, batch_end = null, lease_expires_at = null, lease_acquired_at = null,
        batch_retry_count = 0, attempt_offset = null, attempt_count = 0
    where c.partition_id = p_pid and c.consumer_group = p_group
$$;

-- Claims partitions one after the other until a call has what it asked for.
--
-- Lock:   a cursor for each partition, if nobody has it; before that those of log_first_contact_v1,
--         since partitions come before cursors.
-- Result: as log_pop_claim_v1, over at most p_partitions partitions and p_budget messages.
-- Why:    16 MiB unpacked is what one answer may cost the server, but for the segment that crosses it. The
--         cursors made ahead are few: enough that pops that come together find some each, not a queue's worth,
--         since each takes an entry of the lock table that all sessions share.
create or replace function queen.log_pop_many_v1(
    p_pids uuid[], p_new_pids uuid[], p_group text, p_partitions int, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean, p_tenant uuid
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea
) language plpgsql as $$
declare
    v_pid     uuid;
    v_claimed int := 0;
    v_left    int := p_budget;
    v_bytes   bigint := 16 << 20;
    v_found   boolean;
begin
    perform queen.log_first_contact_v1(p_new_pids[1:least(64, greatest(16, p_partitions))], p_group, p_tenant);
    foreach v_pid in array p_pids loop
        exit when p_partitions <= v_claimed or v_left <= 0 or v_bytes <= 0;
        v_found := false;
        for r_pid, r_partition, r_queue, r_base, r_start_idx, r_take, r_msg_count, r_created_at, r_blob in
            select * from queen.log_pop_claim_v1(
                v_pid, p_group, v_left, v_bytes, p_lease_secs, p_worker, p_auto_ack, false)
        loop
            v_found := true;
            v_left := v_left - r_take;
            v_bytes := v_bytes - queen.log_plain_bytes_v1(r_blob);
            return next;
        end loop;
        v_claimed := v_claimed + v_found::int;
    end loop;
end
$$;

-- How many partitions a call looks at: four times what it wants, 64 to 512.
create or replace function queen.log_pop_cap_v1(p_partitions int) returns int
language sql immutable
return case when 128 <= p_partitions then 512 else greatest(64, least(512, 4 * p_partitions)) end;

-- Pops from one partition. A queue or partition that does not exist has nothing.
--
-- Lock:   the cursor, if nobody has it; at first contact those of log_subscribe_v1 and
--         log_first_contact_v1 before.
-- Result: as log_pop_claim_v1.
create or replace function queen.log_pop_partition_v1(
    p_queue text, p_partition text, p_group text, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean default false, p_sub_mode text default 'all', p_sub_from text default '',
    p_skip_window_debounce boolean default false, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea
) language plpgsql as $$
declare
    v_pid      uuid;
    v_queue_id uuid;
begin
    select p.id, q.id into v_pid, v_queue_id
    from queen.queues q join queen.log_partitions p on p.queue_id = q.id
    where q.tenant_id = p_tenant and q.name = p_queue and p.name = p_partition;
    if not found then
        return;
    end if;
    perform queen.log_subscribe_v1(array[v_queue_id], p_group, p_sub_mode, p_sub_from, p_tenant);
    if not exists (
        select from queen.log_consumers c where c.partition_id = v_pid and c.consumer_group = p_group
    ) then
        perform queen.log_first_contact_v1(array[v_pid], p_group, p_tenant);
    end if;
    return query select * from queen.log_pop_claim_v1(
        v_pid, p_group, p_budget, 16 << 20, p_lease_secs, p_worker, p_auto_ack, p_skip_window_debounce);
end
$$;

-- Pops from one partition, without saying which.
--
-- Lock:   as log_pop_partition_v1.
-- Result: the rows of log_pop_partition_v1 without the names.
create or replace function queen.log_pop_v1(
    p_queue text, p_partition text, p_group text, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean default false, p_sub_mode text default 'all', p_sub_from text default '',
    p_skip_window_debounce boolean default false, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_base bigint, r_start_idx int, r_take int, r_msg_count int, r_created_at timestamptz, r_blob bytea
) language sql as $$
    select r.r_base, r.r_start_idx, r.r_take, r.r_msg_count, r.r_created_at, r.r_blob
    from queen.log_pop_partition_v1(
        p_queue, p_partition, p_group, p_budget, p_lease_secs, p_worker, p_auto_ack, p_sub_mode, p_sub_from,
        p_skip_window_debounce, p_tenant) r
$$;

-- The queue of a pop, which is made if it is not there.
--
-- Lock:   none but the row it inserts.
-- Result: its id; NULL if somebody made it and deleted it again meanwhile.
create or replace function queen.log_pop_queue_id_v1(p_queue text, p_tenant uuid) returns uuid language plpgsql as $$
declare
    v_queue_id uuid;
begin
    select q.id into v_queue_id from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue;
    if not found then
        insert into queen.queues (tenant_id, name, namespace, task)
        values (p_tenant, p_queue, split_part(p_queue, '.', 1), nullif(split_part(p_queue, '.', 2), ''))
        on conflict (tenant_id, name) do nothing;
        select q.id into v_queue_id from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue;
    end if;
    return v_queue_id;
end
$$;

-- The queues that match a namespace and a task; an empty filter matches all.
--
-- Lock:   none.
-- Result: at most 1,000 of them, others each time; NULL if there is none.
create or replace function queen.log_pop_matching_v1(p_namespace text, p_task text, p_tenant uuid)
returns uuid[] language sql volatile as $$
    select array_agg(q.id)
    from (
        select q.id from queen.queues q
        where q.tenant_id = p_tenant
          and (p_namespace = '' or q.namespace = p_namespace) and (p_task = '' or q.task = p_task)
        order by random()
        limit 1000
    ) q
$$;

-- Pops from any partitions of a queue. A queue that does not exist is made, so that a group may
-- subscribe before the first push.
--
-- Lock:   as log_pop_many_v1; at first contact those of log_subscribe_v1 before.
-- Result: as log_pop_many_v1.
create or replace function queen.log_pop_queue_v1(
    p_queue text, p_group text, p_partitions int, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean default false, p_sub_mode text default 'all', p_sub_from text default '',
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea
) language plpgsql as $$
declare
    v_queue_id uuid;
begin
    v_queue_id := queen.log_pop_queue_id_v1(p_queue, p_tenant);
    if v_queue_id is null then
        return;
    end if;
    return query select * from queen.log_pop_queues_v1(
        array[v_queue_id], p_group, p_partitions, p_budget, p_lease_secs, p_worker, p_auto_ack, p_sub_mode, p_sub_from,
        p_tenant);
end
$$;

-- Pops from any partitions of the queues that match a namespace and a task; an empty filter
-- matches all. Nothing is made but subscriptions and cursors.
--
-- Lock:   as log_pop_queue_v1.
-- Result: as log_pop_many_v1.
-- Why:    a call looks at 1,000 of the matching queues, another 1,000 each time.
create or replace function queen.log_pop_discover_v1(
    p_namespace text, p_task text, p_group text, p_partitions int, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean default false, p_sub_mode text default 'all', p_sub_from text default '',
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea
) language plpgsql as $$
declare
    v_queue_ids uuid[] := queen.log_pop_matching_v1(p_namespace, p_task, p_tenant);
begin
    if v_queue_ids is null then
        return;
    end if;
    return query select * from queen.log_pop_queues_v1(
        v_queue_ids, p_group, p_partitions, p_budget, p_lease_secs, p_worker, p_auto_ack, p_sub_mode, p_sub_from,
        p_tenant);
end
$$;

-- Pops from any partitions of queues known by id.
--
-- Lock:   as log_pop_queue_v1; before, the share of a queue that its first watermark takes; after, watermarks,
--         if nobody has them: a queue delete locks the queue, partitions, cursors, watermarks in this order.
-- Result: as log_pop_many_v1.
-- Why:    a call that has just subscribed makes no further cursors and no watermark: it holds
--         partitions already, and more of them would break the ascending order.
create or replace function queen.log_pop_queues_v2(
    p_queue_ids uuid[], p_group text, p_partitions int, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean, p_sub_mode text, p_sub_from text, p_conflation boolean, p_tenant uuid
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea
) language plpgsql as $$
declare
    v_cap        int := queen.log_pop_cap_v1(p_partitions);
    v_subscribed boolean := queen.log_subscribe_v2(
        p_queue_ids, p_group, p_sub_mode, p_sub_from, p_conflation, p_tenant);
    v_now        timestamptz := clock_timestamp();
    v_queue      record;
    v_pids       uuid[] := '{}';
    v_new_pids   uuid[] := '{}';
    v_found      uuid[];
    v_found_new  uuid[];
    v_seen_ids   uuid[] := '{}';
    v_seen_at    timestamptz[] := '{}';
begin
    for v_queue in
        select i.id, w.updated_at,
               case when w.last_empty_scan_at <= v_now + interval '1 minute' then w.last_empty_scan_at end as watermark
        from unnest(p_queue_ids) i (id)
        left join queen.consumer_watermarks w on w.queue_id = i.id and w.consumer_group = p_group
        order by i.id
    loop
        select array_agg(c.r_pid), coalesce(array_agg(c.r_pid) filter (where not c.r_has_cursor), '{}')
        into v_found, v_found_new
        from queen.log_pop_candidates_v1(
            v_queue.id, p_group, coalesce(v_queue.watermark, 'epoch'), v_now, v_cap) c;
        if v_queue.updated_at is null then
            if not v_subscribed then
                perform queen.log_watermark_raise_v1(v_queue.id, p_group, null, v_now);
            end if;
        else
            v_seen_ids := v_seen_ids || v_queue.id;
            v_seen_at := v_seen_at || v_queue.updated_at;
        end if;
        v_pids := v_pids || coalesce(v_found, '{}');
        v_new_pids := v_new_pids || v_found_new;
    end loop;
    if 1 < cardinality(p_queue_ids) then
        select coalesce(array_agg(s.id), '{}') into v_pids
        from (select i.id from unnest(v_pids) i (id) order by random() limit v_cap) s;
        select coalesce(array_agg(i.id), '{}') into v_new_pids
        from unnest(v_pids) i (id) where i.id = any (v_new_pids);
    end if;
    return query select * from queen.log_pop_many_v1(
        v_pids, case when v_subscribed then '{}' else v_new_pids end, p_group, p_partitions, p_budget, p_lease_secs,
        p_worker, p_auto_ack, p_tenant);
    perform queen.log_watermark_raise_v1(w.id, p_group, w.seen_at, v_now)
    from (
        select s.id, s.seen_at from unnest(v_seen_ids, v_seen_at) s (id, seen_at)
        where s.seen_at <= v_now - interval '30 seconds'
        order by s.seen_at
        limit 8
    ) w;
end
$$;

-- log_pop_queues_v2 without conflation.
--
-- Lock:   as log_pop_queues_v2.
-- Result: as log_pop_queues_v2.
create or replace function queen.log_pop_queues_v1(
    p_queue_ids uuid[], p_group text, p_partitions int, p_budget int, p_lease_secs int, p_worker text,
    p_auto_ack boolean, p_sub_mode text, p_sub_from text, p_tenant uuid
) returns table (
    r_pid uuid, r_partition text, r_queue text, r_base bigint, r_start_idx int, r_take int, r_msg_count int,
    r_created_at timestamptz, r_blob bytea
) language sql as $$
    select * from queen.log_pop_queues_v2(
        p_queue_ids, p_group, p_partitions, p_budget, p_lease_secs, p_worker, p_auto_ack, p_sub_mode, p_sub_from, false,
        p_tenant)
$$;
