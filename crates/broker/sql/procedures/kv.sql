-- Values by key: batches that read and write together, and the sweep of what has expired.

-- Refuses a feature that an operator has paused.
--
-- Lock:   none.
-- Result: nothing; raises QN011, whose text is the code for the client.
create or replace function queen.refuse_paused_v1(p_key text, p_code text) returns void language plpgsql as $$
begin
    if exists (select from queen.system_state s where s.key = p_key and s.value = 'true') then
        raise exception using errcode = 'QN011', message = p_code;
    end if;
end
$$;

-- A time as the wire has it.
--
-- Lock:   none.
-- Result: UTC with microseconds; NULL for NULL.
create or replace function queen.wire_time_v1(p_at timestamptz) returns text language sql stable as $$
    select to_char(p_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
$$;

-- Locks every key that a batch writes.
--
-- Lock:   the rows, ascending by (namespace, key) in byte order; a key without a row gets one of version 0 first, so
--         that whoever writes it next waits.
-- Result: nothing. What stays at version 0 is deleted by the batch that made it.
create or replace function queen.kv_lock_v1(p_ops jsonb, p_tenant uuid) returns void language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
    v_op record;
begin
    for v_op in
        select e.o ->> 'ns' as ns, e.o ->> 'key' as key
        from jsonb_array_elements(p_ops) as e (o)
        where e.o ->> 'op' in ('put', 'delete', 'incr')
        order by (e.o ->> 'ns') collate "C", (e.o ->> 'key') collate "C"
    loop
        loop
            perform from queen.kv k
            where k.tenant_id = p_tenant and k.namespace = v_op.ns and k.key = v_op.key for update;
            exit when found;
            -- Expired for ever, so that no other operation of this batch sees it.
            insert into queen.kv (tenant_id, namespace, key, value, version, expires_at, updated_at)
            values (p_tenant, v_op.ns, v_op.key, 'null', 0, '-infinity', now())
            on conflict do nothing;
            exit when found;
        end loop;
    end loop;
end
$$;

-- The value that an increment makes of the stored one.
--
-- Lock:   none.
-- Result: the new value, or why there is none: "type" if the old one is no number that can be added to, "limit" if the
--         new one would lie outside.
-- Why:    numbers are exact decimals of a bounded length, so that adding a tenth ten times makes one.
create or replace function queen.kv_added_v1(
    p_old text, p_op jsonb, out o_value text, out o_reason text
) language plpgsql immutable as $$
declare
    v_new numeric;
begin
    if length(p_old) > 256 or p_old !~ '^-?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]{1,2})?$' then
        o_reason := 'type';
        return;
    end if;
    v_new := p_old::numeric + (p_op ->> 'delta')::numeric;
    if v_new < (p_op ->> 'min')::numeric or (p_op ->> 'max')::numeric < v_new or length(v_new::text) > 256 then
        o_reason := 'limit';
    else
        o_value := v_new::text;
    end if;
end
$$;

-- Carries out one write of a batch.
--
-- Lock:   the row is locked already.
-- Cutoff: a row that expires at p_now or before does not exist.
-- Result: {"applied", "key", "value", "version", "reason"}: what is stored now, or was deleted. A write that does not
--         apply and is required raises QN010 with the details.
create or replace function queen.kv_write_v1(p_op jsonb, p_index int, p_tenant uuid, p_now timestamptz) returns jsonb
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
    v_kind   text := p_op ->> 'op';
    v_expect bigint := (p_op ->> 'expect')::bigint;
    v_row    queen.kv;
    v_live   boolean;
    v_value  text := p_op ->> 'value';
    v_reason text;
begin
    select * into v_row from queen.kv k
    where k.tenant_id = p_tenant and k.namespace = p_op ->> 'ns' and k.key = p_op ->> 'key';
    v_live := v_row.expires_at is null or p_now < v_row.expires_at;
    if not v_live then
        v_row.version := 0;
        v_row.value := case when v_kind = 'incr' then '0' else 'null' end;
        v_row.expires_at := p_now + make_interval(secs => (p_op ->> 'ttl')::float8);
    elsif v_kind = 'put' then
        v_row.expires_at := p_now + make_interval(secs => (p_op ->> 'ttl')::float8);
    end if;

    if v_kind = 'incr' then
        select a.o_value, a.o_reason into v_value, v_reason from queen.kv_added_v1(v_row.value, p_op) a;
    elsif v_kind = 'delete' and not v_live then
        v_reason := 'absent';
    elsif v_expect = 0 then
        v_reason := case when v_live then 'exists' end;
    elsif v_expect is not null and v_row.version <> v_expect then
        v_reason := case when v_live then 'version' else 'absent' end;
    end if;

    if v_reason is not null then
        if (p_op ->> 'required')::boolean then
            raise exception 'QKV operation % did not apply: %', p_index, v_reason
                using errcode = 'QN010', detail = jsonb_build_object(
                    'failedIndex', p_index, 'kvReason', v_reason, 'version', v_row.version, 'value', v_row.value);
        end if;
    elsif v_kind = 'delete' then
        delete from queen.kv k
        where k.tenant_id = p_tenant and k.namespace = p_op ->> 'ns' and k.key = p_op ->> 'key';
    else
        update queen.kv k
        set value = v_value, version = nextval('queen.kv_version_seq'), expires_at = v_row.expires_at, updated_at = p_now
        where k.tenant_id = p_tenant and k.namespace = p_op ->> 'ns' and k.key = p_op ->> 'key'
        returning k.value, k.version into v_row.value, v_row.version;
    end if;
    return jsonb_build_object('applied', v_reason is null, 'key', p_op ->> 'key', 'value', v_row.value,
        'version', v_row.version, 'reason', v_reason);
end
$$;

-- Reads some keys of a namespace, in the order asked for, as far as p_bytes reach.
--
-- Lock:   none.
-- Cutoff: as kv_write_v1.
-- Result: {"rows", "missing", "truncated", "bytes"}. One row is answered whatever its size; a key beyond the bytes is
--         neither among the rows nor missing.
create or replace function queen.kv_read_many_v1(p_op jsonb, p_tenant uuid, p_now timestamptz, p_bytes bigint)
returns jsonb language sql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
    select jsonb_build_object(
        'rows', coalesce(jsonb_agg(jsonb_build_object('key', r.key, 'value', r.value, 'version', r.version,
            'expiresAt', queen.wire_time_v1(r.expires_at), 'updatedAt', queen.wire_time_v1(r.updated_at)) order by r.ord)
            filter (where r.version is not null and (r.before = 0 or r.before + r.size <= p_bytes)), '[]'),
        'missing', coalesce(jsonb_agg(r.asked order by r.ord) filter (where r.version is null), '[]'),
        'truncated', coalesce(bool_or(r.version is not null and r.before > 0 and p_bytes < r.before + r.size), false),
        'bytes', coalesce(sum(r.size), 0))
    from (
        select w.*, sum(w.size) over (order by w.ord) - w.size as before
        from (
            select a.asked, a.ord, k.*, coalesce(octet_length(k.value) + octet_length(k.key) + 128, 0) as size
            from jsonb_array_elements_text(p_op -> 'keys') with ordinality as a (asked, ord)
            left join queen.kv k
              on k.tenant_id = p_tenant and k.namespace = p_op ->> 'ns' and k.key = a.asked
             and (k.expires_at is null or p_now < k.expires_at)
        ) w
    ) r
$$;

-- Reads a page of the keys that begin with a prefix, in byte order, as far as p_bytes reach.
--
-- Lock:   none.
-- Cutoff: as kv_write_v1.
-- Result: {"rows", "truncated", "nextAfter", "bytes"}. One row is answered whatever its size.
-- Why:    "end" is the first text behind all that begin with the prefix; NULL if nothing is. The expired are passed
--         over here and counted as read, so that a page costs its rows and not what lies dead between them.
create or replace function queen.kv_read_prefix_v1(p_op jsonb, p_tenant uuid, p_now timestamptz, p_bytes bigint)
returns jsonb language plpgsql stable
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
as $$
declare
    v_limit int := (p_op ->> 'limit')::int;
    v_keys  boolean := (p_op ->> 'keysOnly')::boolean;
    v_after text := p_op ->> 'after';
    v_bytes bigint := 0;
    v_count int := 0;
    v_rows  jsonb[] := '{}';
    v_row   record;
    v_size  bigint;
    v_more  boolean := false;
begin
    for v_row in
        select k.key, k.version, k.expires_at, k.updated_at, case when v_keys then null else k.value end as value
        from queen.kv k
        where k.tenant_id = p_tenant and k.namespace = p_op ->> 'ns' and k.key >= p_op ->> 'prefix'
          and (p_op ->> 'end' is null or k.key < p_op ->> 'end')
          and (v_after is null or k.key > v_after)
        order by k.namespace, k.key
        limit v_limit + 1
    loop
        v_size := coalesce(octet_length(v_row.value), 0) + octet_length(v_row.key) + 128;
        v_more := v_count = v_limit or (0 < v_bytes and p_bytes < v_bytes + v_size);
        exit when v_more;
        v_count := v_count + 1;
        v_after := v_row.key;
        if v_row.expires_at is null or p_now < v_row.expires_at then
            v_bytes := v_bytes + v_size;
            v_rows := v_rows || (jsonb_build_object('key', v_row.key, 'version', v_row.version,
                'expiresAt', queen.wire_time_v1(v_row.expires_at), 'updatedAt', queen.wire_time_v1(v_row.updated_at))
                || case when v_keys then '{}' else jsonb_build_object('value', v_row.value) end);
        end if;
    end loop;
    return jsonb_build_object('rows', to_jsonb(v_rows), 'truncated', v_more,
        'nextAfter', case when v_more then v_after end, 'bytes', v_bytes);
end
$$;

-- Carries out a batch of operations in their order, all or none.
--
-- Lock:   the keys that it writes, in byte order.
-- Cutoff: the clock after the locks: what expires at it or before does not exist.
-- Result: an array in input order. Values are texts that hold JSON. Raises QN010 for a required write that does not
--         apply and QN011 if an operator has paused the feature.
-- Why:    the pages of one batch share p_bytes, and each has one row at least.
--
-- p_ops: [{"op": get | getMany | getPrefix | put | delete | incr, "ns", "key", "keys", "prefix", "end", "after", "limit",
--   "keysOnly", "value", "ttl", "expect", "delta", "min", "max", "required"}]; no key is written twice.
create or replace function queen.kv_apply_v1(
    p_ops jsonb, p_bytes bigint, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
    v_now     timestamptz;
    v_bytes   bigint := p_bytes;
    v_op      record;
    v_result  jsonb;
    v_results jsonb[] := '{}';
begin
    perform queen.refuse_paused_v1('kv_paused', 'kv_disabled');
    perform queen.kv_lock_v1(p_ops, p_tenant);
    v_now := clock_timestamp();
    for v_op in
        select e.o as body, e.o ->> 'op' as kind, e.ord from jsonb_array_elements(p_ops) with ordinality as e (o, ord)
        order by e.ord
    loop
        if v_op.kind = 'get' then
            select jsonb_build_object('key', v_op.body ->> 'key', 'found', k.key is not null, 'value', k.value,
                'version', coalesce(k.version, 0), 'expiresAt', queen.wire_time_v1(k.expires_at),
                'updatedAt', queen.wire_time_v1(k.updated_at))
            into v_result
            from (values (1)) as one (n)
            left join queen.kv k
              on k.tenant_id = p_tenant and k.namespace = v_op.body ->> 'ns' and k.key = v_op.body ->> 'key'
             and (k.expires_at is null or v_now < k.expires_at);
        elsif v_op.kind = 'getMany' then
            v_result := queen.kv_read_many_v1(v_op.body, p_tenant, v_now, greatest(v_bytes, 0));
            v_bytes := v_bytes - (v_result ->> 'bytes')::bigint;
        elsif v_op.kind = 'getPrefix' then
            v_result := queen.kv_read_prefix_v1(v_op.body, p_tenant, v_now, greatest(v_bytes, 0));
            v_bytes := v_bytes - (v_result ->> 'bytes')::bigint;
        else
            v_result := queen.kv_write_v1(v_op.body, v_op.ord::int - 1, p_tenant, v_now);
        end if;
        v_results := v_results || v_result;
    end loop;
    delete from queen.kv k
    using jsonb_array_elements(p_ops) as e (o)
    where k.tenant_id = p_tenant and k.namespace = e.o ->> 'ns' and k.key = e.o ->> 'key' and k.version = 0
      and e.o ->> 'op' in ('put', 'delete', 'incr');
    return to_jsonb(v_results);
end
$$;

-- Deletes a batch of expired values.
--
-- Lock:   the rows that it deletes; one that somebody holds is passed over, so this step waits for nobody.
-- Cutoff: rows that expired before p_cutoff go; NULL deletes nothing.
-- Result: {"deleted", "done"}, done when the batch was not full.
create or replace function queen.kv_sweep_step_v1(p_cutoff timestamptz, p_max_rows int) returns jsonb
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
    v_rows_max int := greatest(coalesce(p_max_rows, 1000), 1);
    v_deleted  bigint;
begin
    if p_cutoff is null then
        return jsonb_build_object('deleted', 0, 'done', true);
    end if;
    with expired as materialized (
        select k.tenant_id, k.namespace, k.key from queen.kv k
        where k.expires_at < p_cutoff
        order by k.expires_at
        limit v_rows_max
        for update skip locked
    ), gone as (
        delete from queen.kv k using expired e
        where k.tenant_id = e.tenant_id and k.namespace = e.namespace and k.key = e.key
        returning 1
    )
    select count(*) into v_deleted from gone;
    return jsonb_build_object('deleted', v_deleted, 'done', v_deleted < v_rows_max);
end
$$;

-- Which features an operator has paused, on every server.
--
-- Lock:   none.
-- Result: one row.
create or replace function queen.features_paused_v1(
    out o_kv boolean, out o_timers_schedule boolean, out o_timers_fire boolean
) language sql stable as $$
    select coalesce(bool_or(s.key = 'kv_paused'), false), coalesce(bool_or(s.key = 'timers_schedule_paused'), false),
        coalesce(bool_or(s.key = 'timers_fire_paused'), false)
    from queen.system_state s
    where s.key in ('kv_paused', 'timers_schedule_paused', 'timers_fire_paused') and s.value = 'true'
$$;

-- Pauses features, or lets them go on. NULL leaves one as it is.
--
-- Lock:   the rows of system_state, in the order of their names.
-- Result: nothing. It holds for every statement that begins after it.
create or replace function queen.pause_features_v1(
    p_kv boolean, p_timers_schedule boolean, p_timers_fire boolean
) returns void language sql as $$
    insert into queen.system_state (key, value)
    select f.key, to_jsonb(f.paused)
    from (values ('kv_paused', p_kv), ('timers_fire_paused', p_timers_fire),
                 ('timers_schedule_paused', p_timers_schedule)) as f (key, paused)
    where f.paused is not null
    order by f.key
    on conflict (key) do update set value = excluded.value, updated_at = now()
$$;
