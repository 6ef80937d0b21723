-- Retention, eviction and the sidecar purge: one bounded step of one partition.
--
-- Every function here that reads many rows reads them along a primary key. The planner
-- settings on them keep it so while statistics are missing or old: a plan that sorts a
-- whole partition would make a step cost the backlog.

-- The first offset that a time rule keeps, walking up from p_from.
--
-- Cutoff: a segment created at p_cutoff or later is kept; NULL keeps everything.
-- Result: the base of the first fresh segment; past the last one when all are stale;
--         p_from when there is none.
-- Why:    created_at never falls along base_offset, so the first fresh segment ends the walk.
create or replace function queen.log_retention_boundary_v1(
    p_pid uuid, p_from bigint, p_cutoff timestamptz
) returns bigint language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_boundary bigint;
begin
    -- Without a cutoff no segment counts as fresh, and the fallback would give up all of them.
    if p_cutoff is null then
        return p_from;
    end if;
    select s.base_offset into v_boundary
      from queen.log_segments s
     where s.partition_id = p_pid and s.base_offset >= p_from and s.created_at >= p_cutoff
     order by s.base_offset
     limit 1;
    if v_boundary is null then
        select s.end_offset + 1 into v_boundary
          from queen.log_segments s
         where s.partition_id = p_pid and s.base_offset >= p_from
         order by s.base_offset desc
         limit 1;
    end if;
    return coalesce(v_boundary, p_from);
end $$;

-- The same boundary for a log that ends p_horizon segments above p_from.
--
-- Cutoff: as log_retention_boundary_v1.
-- Result: as log_retention_boundary_v1, and never beyond the last segment in sight.
-- Why:    a step that can delete n segments needs to see n + 1 of them: the last one only says
--         that more is to be done. Walking the whole backlog in every step is quadratic.
create or replace function queen.log_retention_boundary_windowed_v1(
    p_pid uuid, p_from bigint, p_cutoff timestamptz, p_horizon bigint
) returns bigint language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_horizon  bigint := greatest(coalesce(p_horizon, 1), 1);
    v_boundary bigint;
begin
    if p_cutoff is null then
        return p_from;
    end if;
    select w.base_offset into v_boundary
      from (select s.base_offset, s.created_at
              from queen.log_segments s
             where s.partition_id = p_pid and s.base_offset >= p_from
             order by s.base_offset
             limit v_horizon) w
     where w.created_at >= p_cutoff
     order by w.base_offset
     limit 1;
    if v_boundary is null then
        select max(w.end_offset) + 1 into v_boundary
          from (select s.end_offset
                  from queen.log_segments s
                 where s.partition_id = p_pid and s.base_offset >= p_from
                 order by s.base_offset
                 limit v_horizon) w;
    end if;
    return coalesce(v_boundary, p_from);
end $$;

-- Deletes what the time rules give up in one partition, at most p_max_rows segments.
--
-- Lock:   this partition's row and no other, until the call commits.
-- Cutoff: rule 1 gives up segments created before p_all_cutoff, read or not; rule 2 those
--         created before p_completed_cutoff that every cursor has passed. NULL is off.
-- Result: {"deleted": segments, "new_log_start": x, "done": bool}, and "skipped" if groups lost what they had
--         not read: offsets, added up over the groups.
-- Why:    rule 2 can end inside a segment, which then stays whole: log_start is always the
--         base of a segment.
create or replace function queen.log_retention_step_v1(
    p_pid uuid, p_all_cutoff timestamptz, p_completed_cutoff timestamptz, p_max_rows int,
    p_history_type text default null
) returns jsonb language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_rows_max     int := greatest(coalesce(p_max_rows, 1), 1);
    v_horizon      bigint := v_rows_max::bigint + 1;
    v_type         text := coalesce(p_history_type, 'retention');
    v_queue_id     uuid;
    v_log_start    bigint;
    v_boundary     bigint;
    v_next         bigint;
    v_completed    bigint;
    v_chosen_base  bigint;
    v_chosen_end   bigint;
    v_segments     bigint;
    v_frames       numeric;
    v_more         boolean;
    v_skipped      numeric;
begin
    select p.log_start, p.queue_id into v_log_start, v_queue_id
      from queen.log_partitions p where p.id = p_pid for update;
    if not found then
        -- A cursor's note may have outlived its partition.
        delete from queen.due_events e where e.partition_id = p_pid;
        return jsonb_build_object('deleted', 0, 'new_log_start', null, 'done', true);
    end if;

    v_boundary := v_log_start;
    if p_all_cutoff is not null then
        v_boundary := greatest(v_boundary,
            queen.log_retention_boundary_windowed_v1(p_pid, v_log_start, p_all_cutoff, v_horizon));
    end if;
    if p_completed_cutoff is not null then
        -- No cursor at all: nothing is consumed, and v_next stays NULL.
        select min(c.committed) + 1 into v_next from queen.log_consumers c where c.partition_id = p_pid;
        if v_next > v_log_start then
            v_completed := least(v_next,
                queen.log_retention_boundary_windowed_v1(p_pid, v_log_start, p_completed_cutoff, v_horizon));
            if v_completed > v_boundary then
                v_boundary := v_completed;
                v_type := coalesce(p_history_type, 'completed_retention');
            end if;
        end if;
    end if;

    select max(c.base_offset), max(c.end_offset) into v_chosen_base, v_chosen_end
      from (select s.base_offset, s.end_offset
              from queen.log_segments s
             where s.partition_id = p_pid
               and s.base_offset >= v_log_start and s.base_offset < v_boundary
               and s.end_offset < v_boundary
             order by s.base_offset
             limit v_rows_max) c;
    if v_chosen_base is null then
        perform queen.log_segments_mark_v1(p_pid, v_log_start, p_completed_cutoff, v_next);
        return jsonb_build_object('deleted', 0, 'new_log_start', v_log_start, 'done', true);
    end if;

    -- Ranges are disjoint and ordered, so that this range is the chosen batch.
    with gone as (
        delete from queen.log_segments s
         where s.partition_id = p_pid and s.base_offset between v_log_start and v_chosen_base
        returning s.base_offset, s.end_offset
    )
    select count(*), coalesce(sum(g.end_offset - g.base_offset + 1), 0) into v_segments, v_frames from gone g;

    select sum(greatest(v_chosen_end - greatest(c.committed, v_log_start - 1), 0)) into v_skipped
      from queen.log_consumers c where c.partition_id = p_pid;

    -- Committed with the delete or not at all. Frames can exceed the column; the audit must not
    -- stop the sweep.
    insert into queen.retention_history (partition_id, messages_deleted, retention_type, queue_id, tenant_id)
    values (p_pid, least(v_frames, 2147483647)::int, v_type, v_queue_id,
            (select q.tenant_id from queen.queues q where q.id = v_queue_id));

    select s.end_offset < v_boundary into v_more
      from queen.log_segments s
     where s.partition_id = p_pid and s.base_offset > v_chosen_base
     order by s.base_offset
     limit 1;
    perform queen.log_segments_mark_v1(
        p_pid, v_chosen_end + 1, case when v_more then null else p_completed_cutoff end, v_next);
    return jsonb_build_object('deleted', v_segments, 'new_log_start', v_chosen_end + 1,
                              'done', not coalesce(v_more, false))
        || case when 0 < v_skipped then jsonb_build_object('skipped', v_skipped) else '{}' end;
end $$;

-- Evicts what has waited too long in one partition, at most p_max_rows segments.
--
-- Lock:   as log_retention_step_v1, which does the work.
-- Cutoff: segments created before p_cutoff go; NULL evicts nothing.
-- Result: as log_retention_step_v1.
-- Why:    unread messages go too, for every group and under live leases: the option bounds
--         how long data may sit.
create or replace function queen.log_evict_max_wait_step_v1(
    p_pid uuid, p_cutoff timestamptz, p_max_rows int
) returns jsonb language sql volatile as $$
    select queen.log_retention_step_v1(p_pid, p_cutoff, null, p_max_rows, 'max_wait_time_eviction')
$$;

-- The first sidecar offset that the purge keeps, looking at p_horizon rows above p_from.
--
-- Cutoff: a row created at p_cutoff or later is kept; NULL keeps everything.
-- Result: as log_retention_boundary_windowed_v1.
create or replace function queen.log_txns_boundary_windowed_v1(
    p_pid uuid, p_from bigint, p_cutoff timestamptz, p_horizon bigint
) returns bigint language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_horizon  bigint := greatest(coalesce(p_horizon, 1), 1);
    v_boundary bigint;
begin
    if p_cutoff is null then
        return p_from;
    end if;
    select w.base_offset into v_boundary
      from (select t.base_offset, t.created_at
              from queen.log_txns t
             where t.partition_id = p_pid and t.base_offset >= p_from
             order by t.base_offset
             limit v_horizon) w
     where w.created_at >= p_cutoff
     order by w.base_offset
     limit 1;
    if v_boundary is null then
        select max(w.end_offset) + 1 into v_boundary
          from (select t.end_offset
                  from queen.log_txns t
                 where t.partition_id = p_pid and t.base_offset >= p_from
                 order by t.base_offset
                 limit v_horizon) w;
    end if;
    return coalesce(v_boundary, p_from);
end $$;

-- Purges the dedup sidecar of one partition, at most p_max_rows rows.
--
-- Lock:   this partition's row and no other; push reads txns_start under it.
-- Cutoff: rows created before p_cutoff go; NULL purges nothing.
-- Result: {"deleted": n, "new_txns_start": x, "done": bool}
-- Why:    a row is whole, so no rule can end inside one, and the watermark lands on the boundary.
create or replace function queen.log_txns_purge_step_v1(
    p_pid uuid, p_cutoff timestamptz, p_max_rows int
) returns jsonb language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    v_rows_max    int := greatest(coalesce(p_max_rows, 1), 1);
    v_txns_start  bigint;
    v_boundary    bigint;
    v_chosen_base bigint;
    v_chosen_end  bigint;
    v_deleted     bigint;
    v_more        boolean;
begin
    select p.txns_start into v_txns_start from queen.log_partitions p where p.id = p_pid for update;
    if not found then
        return jsonb_build_object('deleted', 0, 'new_txns_start', null, 'done', true);
    end if;
    if p_cutoff is null then
        return jsonb_build_object('deleted', 0, 'new_txns_start', v_txns_start, 'done', true);
    end if;
    v_boundary := queen.log_txns_boundary_windowed_v1(p_pid, v_txns_start, p_cutoff, v_rows_max::bigint + 1);

    select max(c.base_offset), max(c.end_offset) into v_chosen_base, v_chosen_end
      from (select t.base_offset, t.end_offset
              from queen.log_txns t
             where t.partition_id = p_pid and t.base_offset >= v_txns_start and t.base_offset < v_boundary
             order by t.base_offset
             limit v_rows_max) c;
    if v_chosen_base is null then
        perform queen.log_txns_mark_v1(p_pid, v_txns_start);
        return jsonb_build_object('deleted', 0, 'new_txns_start', v_txns_start, 'done', true);
    end if;

    delete from queen.log_txns t
     where t.partition_id = p_pid and t.base_offset between v_txns_start and v_chosen_base;
    get diagnostics v_deleted = row_count;

    perform queen.log_txns_mark_v1(p_pid, v_chosen_end + 1);

    select t.base_offset < v_boundary into v_more
      from queen.log_txns t
     where t.partition_id = p_pid and t.base_offset > v_chosen_base
     order by t.base_offset
     limit 1;
    return jsonb_build_object('deleted', v_deleted, 'new_txns_start', v_chosen_end + 1,
                              'done', not coalesce(v_more, false));
end $$;

grant execute on function
    queen.log_retention_boundary_v1(uuid, bigint, timestamptz),
    queen.log_retention_boundary_windowed_v1(uuid, bigint, timestamptz, bigint),
    queen.log_retention_step_v1(uuid, timestamptz, timestamptz, int, text),
    queen.log_evict_max_wait_step_v1(uuid, timestamptz, int),
    queen.log_txns_boundary_windowed_v1(uuid, bigint, timestamptz, bigint),
    queen.log_txns_purge_step_v1(uuid, timestamptz, int)
to public;
