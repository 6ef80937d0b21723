-- Metrics: their purge by age, and the triggers that note births and deaths of partitions.

-- Deletes metrics and audit rows older than a number of days, at most p_max_rows from each table.
--
-- Lock:   metric rows only, and none that another session holds: a queue delete or a flush that
--         is at work on a row is passed by, so that no order of locks can matter.
-- Cutoff: now() less retention_days, which is held within 1 to 36500: more leaves the range of
--         timestamps and would make every cycle fail. The window is the contract's argument,
--         so the clock is read here.
-- Result: {"deletedMetrics", "deletedLagMetrics", "deletedParkedReplica",
--         "deletedRetentionHistory", "done"}; done once no table filled its batch.
-- Why:    "ctid = any(array(...))", because "in (select ... limit)" may be planned as a join
--         that runs its limit again and again.
create or replace function queen.cleanup_worker_metrics_v1(
    retention_days int default 7, p_max_rows int default null
) returns jsonb language plpgsql as $$
declare
    v_cutoff  timestamptz := now() - make_interval(days => least(greatest(coalesce(retention_days, 7), 1), 36500));
    v_limit   bigint := greatest(coalesce(p_max_rows, 1000), 1);
    v_workers bigint;
    v_queues  bigint;
    v_parked  bigint;
    v_history bigint;
begin
    delete from queen.worker_metrics
    where ctid = any (array(
        select ctid from queen.worker_metrics where bucket_time < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_workers = row_count;

    delete from queen.queue_lag_metrics
    where ctid = any (array(
        select ctid from queen.queue_lag_metrics where bucket_time < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_queues = row_count;

    delete from queen.queue_parked_replica
    where ctid = any (array(
        select ctid from queen.queue_parked_replica where bucket_time < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_parked = row_count;

    delete from queen.retention_history
    where ctid = any (array(
        select ctid from queen.retention_history where executed_at < v_cutoff
        limit v_limit for update skip locked));
    get diagnostics v_history = row_count;

    return jsonb_build_object(
        'deletedMetrics', v_workers,
        'deletedLagMetrics', v_queues,
        'deletedParkedReplica', v_parked,
        'deletedRetentionHistory', v_history,
        'done', greatest(v_workers, v_queues, v_parked, v_history) < v_limit);
end $$;

-- Notes how many partitions each queue gained by one statement.
--
-- Lock:   none but the rows it appends: the statement may hold partition locks, and an upsert of
--         a counter shared between queues would let two such statements wait for each other.
-- Result: one row of partition_events a queue.
create or replace function queen.note_partitions_created() returns trigger language plpgsql as $$
begin
    insert into queen.partition_events (queue_id, at, created)
    select queue_id, now(), count(*) from created group by queue_id;
    return null;
end $$;

-- Notes how many partitions each queue lost by one statement.
--
-- Lock:   as note_partitions_created.
-- Result: one row of partition_events a queue; none for a queue that is being deleted itself,
--         whose metrics go with it.
create or replace function queen.note_partitions_deleted() returns trigger language plpgsql as $$
begin
    insert into queen.partition_events (queue_id, at, deleted)
    select d.queue_id, now(), count(*)
    from deleted d
    where exists (select from queen.queues q where q.id = d.queue_id)
    group by d.queue_id;
    return null;
end $$;

-- Attached once and then left alone: making a trigger again would stall all traffic on its table.
do $$
begin
    if not exists (
        select from pg_trigger
        where tgrelid = 'queen.log_partitions'::regclass and tgname = 'note_partitions_created'
    ) then
        create trigger note_partitions_created after insert on queen.log_partitions
            referencing new table as created
            for each statement execute function queen.note_partitions_created();
    end if;
    if not exists (
        select from pg_trigger
        where tgrelid = 'queen.log_partitions'::regclass and tgname = 'note_partitions_deleted'
    ) then
        create trigger note_partitions_deleted after delete on queen.log_partitions
            referencing old table as deleted
            for each statement execute function queen.note_partitions_deleted();
    end if;
end $$;
