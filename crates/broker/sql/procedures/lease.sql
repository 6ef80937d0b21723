-- Leases by their holder: who holds what, keep it longer, give it back.

-- Finds what workers hold, by reading every cursor.
--
-- Lock:   none.
-- Result: a row for each worker and group that holds a live lease at p_as_of.
-- Why:    an index on the worker would make every pop and ack leave the in-place update path, so
--         a server remembers its own leases and asks here only for those of another server.
create or replace function queen.log_lease_holders_v1(
    p_workers text[], p_as_of timestamptz default clock_timestamp()
) returns table (r_worker text, r_group text, r_pids uuid[]) language sql stable as $$
    select c.worker_id, c.consumer_group, array_agg(c.partition_id)
    from queen.log_consumers c
    where c.worker_id = any (p_workers) and c.batch_end is not null and p_as_of < c.lease_expires_at
    group by c.worker_id, c.consumer_group
$$;

-- Locks the cursors that a worker may hold.
--
-- Lock:   the cursors, by ascending partition.
-- Result: the group and the partitions: those given, or those found if p_pids is NULL.
-- Why:    with p_pids it is a lookup by key; NULL finds them by reading every cursor.
create or replace function queen.log_lease_lock_v1(
    p_worker text, inout p_group text, inout p_pids uuid[]
) language plpgsql as $$
begin
    if p_pids is null then
        select h.r_group, h.r_pids into p_group, p_pids from queen.log_lease_holders_v1(array[p_worker]) h;
    end if;
    perform from queen.log_consumers c
    where c.partition_id = any (p_pids) and c.consumer_group = p_group
    order by c.partition_id
    for update;
end
$$;

-- Keeps the live leases of a worker for at least p_seconds from now. Never shortens one, never
-- revives one that expired.
--
-- Lock:   as log_lease_lock_v1.
-- Result: how many were kept, and the earliest of their expiries, NULL if none.
create or replace function queen.log_renew_lease_v1(
    p_worker text, p_seconds int, p_group text default null, p_pids uuid[] default null
) returns table (r_renewed int, r_expires_at timestamptz) language plpgsql as $$
declare
    v_group text;
    v_pids  uuid[];
    v_now   timestamptz;
begin
    select l.p_group, l.p_pids into v_group, v_pids from queen.log_lease_lock_v1(p_worker, p_group, p_pids) l;
    v_now := clock_timestamp();
    return query
    with kept as (
        update queen.log_consumers c
        set lease_expires_at = greatest(c.lease_expires_at, v_now + make_interval(secs => p_seconds))
        where c.partition_id = any (v_pids) and c.consumer_group = v_group
          and c.worker_id = p_worker and c.batch_end is not null and v_now < c.lease_expires_at
        returning c.lease_expires_at
    )
    select count(*)::int, min(k.lease_expires_at) from kept k;
end
$$;

-- Gives back what a worker holds, as if it had not been delivered: no failure is charged and the
-- attempt is not counted.
--
-- Lock:   as log_lease_lock_v1.
-- Result: how many partitions were given back.
create or replace function queen.log_release_lease_v1(
    p_worker text, p_group text default null, p_pids uuid[] default null
) returns int language plpgsql as $$
declare
    v_group    text;
    v_pids     uuid[];
    v_released int;
begin
    select l.p_group, l.p_pids into v_group, v_pids from queen.log_lease_lock_v1(p_worker, p_group, p_pids) l;
    update queen.log_consumers c
    set worker_id = null, batch_end = null, lease_expires_at = null, lease_acquired_at = null,
        attempt_count = greatest(c.attempt_count - 1, 0)
    where c.partition_id = any (v_pids) and c.consumer_group = v_group and c.worker_id = p_worker;
    get diagnostics v_released = row_count;
    return v_released;
end
$$;
