-- What keeps the due list true: stamps, holds, and the walk that repairs them.

-- Writes down what a step found out about the segments of a partition: where the log starts, how old
-- its first segment is, and whether rule 2 waits for a consumer group.
--
-- Lock:   none of its own; the caller holds the partition row.
-- Cutoff: p_held_cutoff is rule 2's once nothing more can go; a first segment that is older is held by the
--         group that has to read p_next. NULL says that nothing is held.
-- Result: nothing. A row that is right already is not written.
-- Why:    a hold that lasts is looked at ever less often, but soon at first: an acknowledgement that was under
--         way while the hold was written could not see it.
create or replace function queen.log_segments_mark_v1(
    p_pid uuid, p_log_start bigint, p_held_cutoff timestamptz, p_next bigint
) returns void language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_oldest timestamptz;
    v_next   bigint;
begin
    select s.created_at into v_oldest
      from queen.log_segments s
     where s.partition_id = p_pid and s.base_offset >= p_log_start
     order by s.base_offset
     limit 1;
    if v_oldest < p_held_cutoff then
        v_next := greatest(p_next, p_log_start);
    end if;
    update queen.log_partitions p
       set log_start = greatest(p.log_start, p_log_start),
           oldest_live_at = v_oldest,
           held_next = v_next,
           held_since = h.since,
           recheck_at = case when v_next is not null then
               now() + least(greatest(now() - h.since, interval '5 seconds'), interval '45 minutes') end
      from (select case when v_next is null then null
                        when o.held_next = v_next then o.held_since
                        else now() end as since
              from queen.log_partitions o where o.id = p_pid) h
     where p.id = p_pid
       and (v_next is not null or p.held_next is not null or p.log_start < p_log_start
            or p.oldest_live_at is distinct from v_oldest);
    delete from queen.due_events e where e.partition_id = p_pid;
end $$;

-- Writes down what a step found out about the sidecar of a partition.
--
-- Lock:   none of its own; the caller holds the partition row.
-- Result: nothing. A row that is right already is not written.
create or replace function queen.log_txns_mark_v1(p_pid uuid, p_txns_start bigint) returns void language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_oldest timestamptz;
begin
    select t.created_at into v_oldest
      from queen.log_txns t
     where t.partition_id = p_pid and t.base_offset >= p_txns_start
     order by t.base_offset
     limit 1;
    update queen.log_partitions p
       set txns_start = greatest(p.txns_start, p_txns_start), oldest_txn_at = v_oldest
     where p.id = p_pid
       and (p.txns_start < p_txns_start or p.oldest_txn_at is distinct from v_oldest);
end $$;

-- Notes that a cursor moved for which rule 2 may have waited.
--
-- Lock:   none: it reads the partition and appends.
-- Result: one row of due_events if the partition is held and this cursor can have held it.
create or replace function queen.note_cursor_moved() returns trigger language plpgsql as $$
declare
    v_pid  uuid := case when tg_op = 'DELETE' then old.partition_id else new.partition_id end;
    v_next bigint;
begin
    select p.held_next into v_next from queen.log_partitions p where p.id = v_pid;
    -- A first cursor ends the wait for anybody at all; any other cursor matters only if it was the slowest.
    if v_next is not null
       and (case when tg_op = 'INSERT' then v_next <= new.committed else old.committed < v_next end) then
        insert into queen.due_events (partition_id) values (v_pid);
    end if;
    return null;
end $$;

-- Forgets the stamps of partitions that got messages from a writer who does not keep stamps.
--
-- Lock:   this partition's row, which the statement has changed.
-- Result: a stamp of -infinity where there was none, and a row of due_events.
create or replace function queen.note_stamp_missing() returns trigger language plpgsql as $$
begin
    update queen.log_partitions p
       set oldest_live_at = coalesce(p.oldest_live_at, '-infinity'),
           oldest_txn_at = coalesce(p.oldest_txn_at, '-infinity')
     where p.id = new.id and (p.oldest_live_at is null or p.oldest_txn_at is null);
    insert into queen.due_events (partition_id) values (new.id);
    return null;
end $$;

-- Forgets the stamps of partitions whose segments or sidecar rows were changed by hand.
--
-- Lock:   the partition rows, ascending by id, in one statement.
-- Result: stamps of -infinity, no hold, and a row of due_events for each.
create or replace function queen.note_rows_changed() returns trigger language plpgsql as $$
begin
    update queen.log_partitions p
       set oldest_live_at = '-infinity', oldest_txn_at = '-infinity',
           held_next = null, held_since = null, recheck_at = null
      from (select l.id from queen.log_partitions l
             where l.id in (select c.partition_id from changed c)
             order by l.id
               for no key update) k
     where p.id = k.id;
    insert into queen.due_events (partition_id) select distinct c.partition_id from changed c;
    return null;
end $$;

-- Notes partitions of whose rows nothing is known: those that a writer made who does not keep stamps.
--
-- Lock:   none.
-- Result: a row of due_events for each.
create or replace function queen.note_stamps_unknown() returns trigger language plpgsql as $$
begin
    insert into queen.due_events (partition_id)
    select c.id from created c where c.oldest_live_at = '-infinity' or c.oldest_txn_at = '-infinity';
    return null;
end $$;

-- Attached once and then left alone: making a trigger again would stall all traffic on its table. The engine
-- never updates a segment or a sidecar row, and its pushes keep the stamps, so that it pays for none of
-- those. A cursor that does not move fires nothing either.
do $$
declare
    v_table text;
    v_name  text;
    v_make  text;
begin
    foreach v_make in array array[
        'create trigger note_cursor_advanced after update of committed on queen.log_consumers
            for each row when (old.committed < new.committed) execute function queen.note_cursor_moved()',
        'create trigger note_cursor_changed after insert or delete on queen.log_consumers
            for each row execute function queen.note_cursor_moved()',
        'create trigger note_stamp_missing after update of last_offset on queen.log_partitions
            for each row when (old.last_offset < new.last_offset
                               and (new.oldest_live_at is null or new.oldest_txn_at is null))
            execute function queen.note_stamp_missing()',
        'create trigger note_stamps_unknown after insert on queen.log_partitions
            referencing new table as created
            for each statement execute function queen.note_stamps_unknown()',
        'create trigger note_segments_changed after update on queen.log_segments
            referencing new table as changed
            for each statement execute function queen.note_rows_changed()',
        'create trigger note_txns_changed after update on queen.log_txns
            referencing new table as changed
            for each statement execute function queen.note_rows_changed()'
    ] loop
        v_name := split_part(v_make, ' ', 3);
        v_table := substring(v_make from 'on (queen\.[a-z_]+)');
        if not exists (select from pg_trigger where tgrelid = v_table::regclass and tgname = v_name) then
            execute v_make;
        end if;
    end loop;
end $$;

-- Partitions whose stamps are not what their first rows say, among the next p_max_rows by id.
--
-- Lock:   none; log_stamps_repair_v1 looks again under the lock.
-- Result: how many were looked at, the id to go on after (NULL at the end), and the partitions that differ.
create or replace function queen.log_stamps_walk_v1(
    p_after uuid, p_max_rows int, out o_scanned int, out o_last uuid, out o_wrong uuid[]
) language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
begin
    select count(*), (array_agg(w.id order by w.id desc))[1],
           array_agg(w.id order by w.id) filter (where w.live_at is distinct from w.oldest_live_at
                                                    or w.txn_at is distinct from w.oldest_txn_at)
    into o_scanned, o_last, o_wrong
    from (
        select p.id, p.oldest_live_at, p.oldest_txn_at,
               (select s.created_at from queen.log_segments s
                 where s.partition_id = p.id and s.base_offset >= p.log_start
                 order by s.base_offset limit 1) as live_at,
               (select t.created_at from queen.log_txns t
                 where t.partition_id = p.id and t.base_offset >= p.txns_start
                 order by t.base_offset limit 1) as txn_at
        from queen.log_partitions p
        where p.id > p_after
        order by p.id
        limit greatest(coalesce(p_max_rows, 1000), 1)
    ) w;
    if o_scanned < greatest(coalesce(p_max_rows, 1000), 1) then
        o_last := null;
    end if;
end $$;

-- Sets the stamps of one partition by its first rows.
--
-- Lock:   this partition's row and no other.
-- Result: {"repaired": bool}, false if they were right, or the partition is gone.
create or replace function queen.log_stamps_repair_v1(p_pid uuid) returns jsonb language plpgsql as $$
declare
    v_before queen.log_partitions;
    v_after  queen.log_partitions;
begin
    select * into v_before from queen.log_partitions p where p.id = p_pid for no key update;
    if not found then
        return jsonb_build_object('repaired', false);
    end if;
    perform queen.log_segments_mark_v1(p_pid, v_before.log_start, null, null);
    perform queen.log_txns_mark_v1(p_pid, v_before.txns_start);
    select * into v_after from queen.log_partitions p where p.id = p_pid;
    return jsonb_build_object('repaired',
        (v_before.oldest_live_at, v_before.oldest_txn_at) is distinct from (v_after.oldest_live_at, v_after.oldest_txn_at));
end $$;

grant execute on function
    queen.log_segments_mark_v1(uuid, bigint, timestamptz, bigint),
    queen.log_txns_mark_v1(uuid, bigint),
    queen.log_stamps_walk_v1(uuid, int),
    queen.log_stamps_repair_v1(uuid)
to public;
