-- Subscription: where a consumer group starts, recorded once per queue and group.

-- Reads what a group asks for at first contact.
--
-- Result: mode 'all' (the oldest message), 'new' (the tail) or 'timestamp', and the time from which
--         a partition that is not there yet counts. A time that cannot be read means the tail.
-- Why:    the words PostgreSQL takes for a time ('tomorrow', 'infinity') are no time here.
create or replace function queen.log_subscription_intent_v1(
    p_sub_mode text, p_sub_from text, p_as_of timestamptz
) returns table (r_mode text, r_from timestamptz) language plpgsql set timezone to 'UTC' set datestyle to 'ISO' as $$
begin
    r_from := p_as_of;
    if coalesce(p_sub_from, '') = '' then
        r_mode := case when lower(p_sub_mode) in ('new', 'new-only', 'new_only', 'newonly') then 'new' else 'all' end;
    elsif p_sub_from ~ '^\d{4}-\d\d-\d\d([T ]|$)' then
        r_mode := 'timestamp';
        r_from := p_sub_from::timestamptz;
    else
        r_mode := 'new';
    end if;
    return next;
exception when datetime_field_overflow or invalid_datetime_format or invalid_text_representation
    or invalid_parameter_value then
    r_mode := 'new';
    r_from := p_as_of;
    return next;
end
$$;

-- The cursor with which a group enters a partition, by its subscription.
--
-- Result: the offset before the first one wanted.
create or replace function queen.log_seed_cursor_v1(
    p_pid uuid, p_log_start bigint, p_last_offset bigint, p_mode text, p_from timestamptz
) returns bigint language sql stable as $$
    select case p_mode
        when 'all' then greatest(p_log_start - 1, -1)
        else coalesce((
            select s.base_offset - 1
            from queen.log_segments s
            where s.partition_id = p_pid and p_log_start <= s.base_offset and p_from <= s.created_at
            order by s.base_offset
            limit 1
        ), p_last_offset)
    end
$$;

-- Records the subscription of a group to queues where it has none, and places its cursor in every
-- partition of those, all or nothing. Whether it conflates is recorded then and stays. Queue mode has no subscription.
--
-- Lock:   the partitions of the new subscriptions, for key share, by ascending id in one statement.
-- Result: whether there was anything to record.
-- Why:    the record decides who seeds: a second first contact waits on its key and then finds it.
--         The locks come in a statement of their own, so that the seeding one reads offsets and
--         segments in one snapshot that is newer than any wait.
create or replace function queen.log_subscribe_v2(
    p_queue_ids uuid[], p_group text, p_sub_mode text, p_sub_from text, p_conflation boolean, p_tenant uuid
) returns boolean language plpgsql as $$
declare
    v_missing uuid[];
    v_mode    text;
    v_from    timestamptz;
begin
    if p_group = '__QUEUE_MODE__' then
        return false;
    end if;
    select array_agg(i.id order by i.id) into v_missing
    from unnest(p_queue_ids) i (id)
    where not exists (
        select from queen.consumer_groups_metadata m
        where m.tenant_id = p_tenant and m.consumer_group = p_group and m.queue_id = i.id
          and m.partition_name = '' and m.namespace = '' and m.task = ''
    );
    if v_missing is null then
        return false;
    end if;
    select i.r_mode, i.r_from into v_mode, v_from
    from queen.log_subscription_intent_v1(p_sub_mode, p_sub_from, clock_timestamp()) i;
    with recorded as (
        insert into queen.consumer_groups_metadata (
            tenant_id, consumer_group, queue_id, subscription_mode, subscription_timestamp, conflation
        )
        select p_tenant, p_group, i.id, v_mode, v_from, p_conflation
        from unnest(v_missing) i (id)
        order by i.id
        on conflict do nothing
        returning queue_id
    )
    select array_agg(queue_id) into v_missing from recorded;
    if v_missing is null then
        return false;
    end if;

    perform from queen.log_partitions p where p.queue_id = any (v_missing) order by p.id for key share;
    insert into queen.log_consumers (partition_id, consumer_group, conflated, committed)
    select p.id, p_group, p_conflation, case v_mode
        when 'new' then p.last_offset
        else queen.log_seed_cursor_v1(p.id, p.log_start, p.last_offset, v_mode, v_from)
    end
    from queen.log_partitions p
    where p.queue_id = any (v_missing)
    order by p.id
    on conflict do nothing;
    return true;
end
$$;

-- log_subscribe_v2 without conflation.
--
-- Lock:   as log_subscribe_v2.
-- Result: as log_subscribe_v2.
create or replace function queen.log_subscribe_v1(
    p_queue_ids uuid[], p_group text, p_sub_mode text, p_sub_from text, p_tenant uuid
) returns boolean language sql as $$
    select queen.log_subscribe_v2(p_queue_ids, p_group, p_sub_mode, p_sub_from, false, p_tenant)
$$;

-- Gives a group its cursor in partitions where it has none: those made after it subscribed, and
-- all of them in queue mode.
--
-- Lock:   an advisory one for each partition and group, only tried: whoever has it inserts. Then
--         the partitions, for key share, by ascending id. The caller holds no cursor yet.
-- Result: nothing.
-- Why:    inserting on every pop, in any order, would make pops wait for each other in chains.
create or replace function queen.log_first_contact_v1(
    p_pids uuid[], p_group text, p_tenant uuid
) returns void language plpgsql as $$
declare
    v_pids uuid[];
begin
    select array_agg(i.id) into v_pids
    from unnest(p_pids) i (id)
    where pg_try_advisory_xact_lock(hashtext(i.id::text), hashtext(p_group));
    if v_pids is null then
        return;
    end if;
    perform from queen.log_partitions p where p.id = any (v_pids) order by p.id for key share;
    insert into queen.log_consumers (partition_id, consumer_group, conflated, committed)
    select p.id, p_group, coalesce(m.conflation, false), case p_group
        when '__QUEUE_MODE__' then -1
        else queen.log_seed_cursor_v1(
            p.id, p.log_start, p.last_offset, coalesce(m.subscription_mode, 'all'), m.subscription_timestamp)
    end
    from queen.log_partitions p
    left join queen.consumer_groups_metadata m
        on m.tenant_id = p_tenant and m.consumer_group = p_group and m.queue_id = p.queue_id
        and m.partition_name = '' and m.namespace = '' and m.task = ''
    where p.id = any (v_pids)
    order by p.id
    on conflict do nothing;
end
$$;
