-- Cleanup of empty partitions that have been silent for the whole window.

-- Whether nothing speaks for keeping a partition.
--
-- Lock:   none; the caller decides whether the answer can still change.
-- Cutoff: whatever happened at p_cutoff or later speaks for it; NULL answers NULL, which is not true.
-- Result: true for a dead partition; NULL for one that does not exist.
-- Why:    dead letters and streams state have no foreign key and would be out of reach without
--         their partition. An expired lease is no veto: on an empty partition no pop comes to
--         clear it. Traces are no veto, since nothing purges them and they stay readable.
create or replace function queen.log_partition_dead_v1(
    p_pid uuid, p_cutoff timestamptz
) returns boolean language sql stable as $$
    select p.created_at < p_cutoff
       and p.last_write_at < p_cutoff
       and not exists (select from queen.log_segments s where s.partition_id = p.id)
       and not exists (select from queen.log_dlq d where d.partition_id = p.id)
       and not exists (select from queen_streams.state t where t.partition_id = p.id)
       and not exists (
           select from queen.log_consumers c
            where c.partition_id = p.id
              and ((c.batch_end is not null and (c.lease_expires_at is null or c.lease_expires_at > now()))
                   or c.lease_expires_at >= p_cutoff
                   or c.lease_acquired_at >= p_cutoff
                   or c.created_at >= p_cutoff))
      from queen.log_partitions p
     where p.id = p_pid
$$;

-- Deletes dead partitions, at most p_max_rows of them, with their cursors and sidecar rows.
--
-- Lock:   the partitions' rows ascending by id, then their cursors by (partition, group); what
--         is locked elsewhere is in use, and skipped.
-- Cutoff: partitions silent since before p_cutoff go; NULL deletes nothing.
-- Result: {"deleted": partitions, "done": bool}
-- Why:    the choosing statement may have looked before a writer committed, so that the second
--         look, under the locks, is the one that counts. The cursors are locked for the writers that
--         file dead letters and streams state: they hold a cursor and no partition.
create or replace function queen.log_partition_cleanup_step_v1(
    p_cutoff timestamptz, p_max_rows int
) returns jsonb language plpgsql as $$
declare
    v_rows_max   int := greatest(coalesce(p_max_rows, 1000), 1);
    v_candidates uuid[];
    v_cursors    uuid[];  -- the partition of each cursor that could be locked
    v_dead       uuid[];
    v_deleted    bigint;
begin
    if p_cutoff is null then
        return jsonb_build_object('deleted', 0, 'done', true);
    end if;

    -- The longest silent first, by the index over partitions without segments; a stamp of -infinity does not say.
    -- Twice the batch, so that those that are locked elsewhere leave a full one.
    select array_agg(c.id) into v_candidates
      from (select p.id
              from queen.log_partitions p
             where p.id = any(array(
                       select o.id
                         from queen.log_partitions o
                        where (o.oldest_live_at is null or o.oldest_live_at = '-infinity')
                          and o.created_at < p_cutoff and o.last_write_at < p_cutoff
                          and queen.log_partition_dead_v1(o.id, p_cutoff)
                        order by o.last_write_at
                        limit 2 * v_rows_max::bigint))
             order by p.id
             limit v_rows_max
               for update of p skip locked) c;
    if v_candidates is null then
        return jsonb_build_object('deleted', 0, 'done', true);
    end if;

    -- No cursor can be added now: its foreign key waits for the lock on the partition.
    select array_agg(c.partition_id) into v_cursors
      from (select c.partition_id
              from queen.log_consumers c
             where c.partition_id = any(v_candidates)
             order by c.partition_id, c.consumer_group
               for update skip locked) c;

    with locked as (
        select u.id, count(*) as cursors from unnest(v_cursors) u(id) group by u.id
    )
    select array_agg(d.id order by d.id) into v_dead
      from unnest(v_candidates) d(id)
      left join locked l on l.id = d.id
     where coalesce(l.cursors, 0) = (select count(*) from queen.log_consumers c where c.partition_id = d.id)
       and queen.log_partition_dead_v1(d.id, p_cutoff);
    -- Done, or the same spared partitions would be chosen again at once.
    if v_dead is null then
        return jsonb_build_object('deleted', 0, 'done', true);
    end if;

    -- No cascade reaches the sidecar, and nothing else would ever delete these rows.
    delete from queen.log_txns t where t.partition_id = any(v_dead);
    insert into queen.retention_history (partition_id, messages_deleted, retention_type, queue_id, tenant_id)
    select p.id, 0, '__partition_deleted__', p.queue_id, q.tenant_id
      from queen.log_partitions p
      join queen.queues q on p.queue_id = q.id
     where p.id = any(v_dead);
    delete from queen.log_partitions p where p.id = any(v_dead);
    get diagnostics v_deleted = row_count;
    -- Last: whoever moved one of the cursors has been waited for, and its note is there to be seen.
    delete from queen.due_events e where e.partition_id = any(v_dead);
    return jsonb_build_object('deleted', v_deleted, 'done', cardinality(v_candidates) < v_rows_max);
end $$;

grant execute on function
    queen.log_partition_dead_v1(uuid, timestamptz),
    queen.log_partition_cleanup_step_v1(timestamptz, int)
to public;
