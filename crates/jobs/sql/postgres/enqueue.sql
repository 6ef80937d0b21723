-- Puts one job into its queue, with or without deduplication.
--
-- Lock:   the row of the deduplication window, if one is asked for; nothing is locked twice.
-- Result: outcome 'new' with the job's id; 'duplicate' with the id that holds the window; 'held' with the id that
--         holds the unique key, NULL if it finished meanwhile too often. Only 'new' has written anything.
-- Why:    a duplicate is an answer and no error, since an error would end the caller's transaction.
create or replace function ebbtide_jobs.insert_job_v1(
    p_id uuid, p_type text, p_args bytea, p_queue text, p_tenant text, p_metadata jsonb, p_priority int,
    p_max_retries int, p_timeout bigint, p_determinism int, p_run_at timestamptz, p_delay_us bigint,
    p_unique_key text, p_parent_job_id uuid, p_root_job_id uuid, p_trace_context bytea,
    p_scope_hash text, p_window_us bigint, p_takes_over boolean,
    out outcome text, out job_id uuid
) language plpgsql as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    if p_scope_hash is not null then
        job_id := ebbtide_jobs.acquire_window_v1(p_scope_hash, p_id, p_window_us, p_takes_over);
        if job_id <> p_id then
            outcome := 'duplicate';
            return;
        end if;
    end if;
    for v_try in 1..16 loop
        insert into ebbtide_jobs.jobs (
            id, type, args, queue, tenant, metadata, priority, max_retries, timeout, determinism, run_at,
            unique_key, parent_job_id, root_job_id, trace_context, created_at, updated_at)
        values (
            p_id, p_type, p_args, p_queue, p_tenant, p_metadata, p_priority, p_max_retries, p_timeout, p_determinism,
            case when p_delay_us > 0 then v_now + p_delay_us * interval '1 microsecond'
                 when p_run_at > v_now then p_run_at end,
            p_unique_key, p_parent_job_id, p_root_job_id, p_trace_context, v_now, v_now)
        on conflict (unique_key)
            where unique_key <> '' and status in ('pending', 'running', 'waiting', 'paused', 'retrying')
            do nothing;
        if found then
            outcome := 'new';
            job_id := p_id;
            return;
        end if;
        select j.id into job_id from ebbtide_jobs.jobs j
         where j.unique_key = p_unique_key and j.status in ('pending', 'running', 'waiting', 'paused', 'retrying');
        exit when found;
        -- The holder finished between the two statements: the key may be free.
    end loop;
    outcome := 'held';
end $$;

-- Makes p_job_id the holder of a deduplication window, unless another job holds it.
--
-- Lock:   the window's row.
-- Result: the holder, p_job_id itself if the window was free or had expired, or if p_takes_over is true and the
--         holder has failed or was cancelled. A holder whose row is gone keeps the window until it expires.
create or replace function ebbtide_jobs.acquire_window_v1(
    p_scope_hash text, p_job_id uuid, p_window_us bigint, p_takes_over boolean
) returns uuid language plpgsql as $$
declare
    v_now timestamptz;
    v_expires_at timestamptz;
    v_holder uuid;
    v_is_over boolean;
begin
    for v_try in 1..16 loop
        v_now := clock_timestamp();
        v_expires_at := v_now + p_window_us * interval '1 microsecond';
        insert into ebbtide_jobs.unique_locks as l (scope_hash, job_id, expires_at, created_at)
        values (p_scope_hash, p_job_id, v_expires_at, v_now)
        on conflict (scope_hash) do update
            set job_id = excluded.job_id, expires_at = excluded.expires_at, created_at = excluded.created_at
            where l.expires_at <= v_now;
        if found then
            return p_job_id;
        end if;
        select l.job_id, coalesce(j.status in ('failed', 'cancelled'), false) into v_holder, v_is_over
          from ebbtide_jobs.unique_locks l left join ebbtide_jobs.jobs j on j.id = l.job_id
         where l.scope_hash = p_scope_hash;
        if found and not (p_takes_over and v_is_over) then
            return v_holder;
        end if;
        update ebbtide_jobs.unique_locks
           set job_id = p_job_id, expires_at = v_expires_at, created_at = v_now
         where scope_hash = p_scope_hash and job_id = v_holder;
        if found then
            return p_job_id;
        end if;
        -- Somebody else was faster, or the row went: look again.
    end loop;
    raise exception 'deduplication window changes hands too fast' using errcode = '40001';
end $$;

-- As insert_job_v1, and gives back the window that was won for a job whose unique key is taken: the window is then as
-- it was before, an expired one or one taken over included.
create or replace function ebbtide_jobs.enqueue_v1(
    p_id uuid, p_type text, p_args bytea, p_queue text, p_tenant text, p_metadata jsonb, p_priority int,
    p_max_retries int, p_timeout bigint, p_determinism int, p_run_at timestamptz, p_delay_us bigint,
    p_unique_key text, p_parent_job_id uuid, p_root_job_id uuid, p_trace_context bytea,
    p_scope_hash text, p_window_us bigint, p_takes_over boolean,
    out outcome text, out job_id uuid
) language plpgsql as $$
begin
    if p_scope_hash is null or p_unique_key = '' then
        select i.outcome, i.job_id into outcome, job_id from ebbtide_jobs.insert_job_v1(
            p_id, p_type, p_args, p_queue, p_tenant, p_metadata, p_priority, p_max_retries, p_timeout, p_determinism,
            p_run_at, p_delay_us, p_unique_key, p_parent_job_id, p_root_job_id, p_trace_context,
            p_scope_hash, p_window_us, p_takes_over) i;
        return;
    end if;
    begin
        select i.outcome, i.job_id into outcome, job_id from ebbtide_jobs.insert_job_v1(
            p_id, p_type, p_args, p_queue, p_tenant, p_metadata, p_priority, p_max_retries, p_timeout, p_determinism,
            p_run_at, p_delay_us, p_unique_key, p_parent_job_id, p_root_job_id, p_trace_context,
            p_scope_hash, p_window_us, p_takes_over) i;
        if outcome = 'held' then
            raise exception 'the window goes back' using errcode = 'EJ003';
        end if;
    exception when sqlstate 'EJ003' then
        null; -- the block's writes are undone; its two answers stand
    end;
end $$;

create or replace function ebbtide_jobs.length_prefixed(p_part text) returns bytea
language sql immutable parallel safe as $$
    select int8send(octet_length(convert_to(p_part, 'UTF8'))::bigint) || convert_to(p_part, 'UTF8')
$$;

-- Enqueues one job from SQL, in the caller's transaction and in any language.
--
-- p_args is JSON text, kept byte for byte. p_max_retries counts the retries after the first run. p_delay is added to
-- this server's clock. p_idempotency_key needs p_window and deduplicates until that has passed, however the job ends;
-- a long window keeps the job's row that long.
-- Result: outcome 'new', 'duplicate' (the window is taken) or 'held' (an unfinished job has p_unique_key), and the id
--         of the job that is there.
create or replace function ebbtide_jobs.enqueue(
    p_type text, p_args text default 'null', p_queue text default 'default', p_priority int default 0,
    p_max_retries int default 2, p_delay interval default null, p_run_at timestamptz default null,
    p_tenant text default '', p_metadata jsonb default null, p_timeout interval default null,
    p_unique_key text default '', p_idempotency_key text default null, p_window interval default null,
    p_takes_over boolean default false,
    out outcome text, out job_id uuid
) language plpgsql as $$
declare
    v_name constant text := '^[A-Za-z][A-Za-z0-9_.-]{0,254}$';
    v_id uuid := ebbtide_jobs.new_id();
    v_scope_hash text;
    v_window_us bigint := (extract(epoch from p_window) * 1000000)::bigint;
begin
    if p_type is null or p_type !~ v_name then
        raise exception 'type is not a name' using errcode = 'EJ001';
    elsif p_queue is null or p_queue !~ v_name then
        raise exception 'queue is not a name' using errcode = 'EJ001';
    elsif p_args is null or octet_length(p_args) > 1048576 then
        raise exception 'args is JSON of at most 1 MiB' using errcode = 'EJ001';
    elsif octet_length(p_metadata::text) > 65536 or jsonb_typeof(p_metadata) <> 'object'
        or jsonb_path_exists(p_metadata, 'strict $.* ? (@.type() <> "string")') then
        raise exception 'metadata is an object of strings of at most 64 KiB' using errcode = 'EJ001';
    elsif (p_idempotency_key is null) <> (p_window is null) or p_idempotency_key = '' or v_window_us <= 0 then
        raise exception 'a deduplication window needs a key and a length above zero' using errcode = 'EJ002';
    elsif char_length(p_idempotency_key) > 255 then
        raise exception 'idempotency key is at most 255 characters' using errcode = 'EJ001';
    end if;
    begin
        perform p_args::json;
    exception when invalid_text_representation then
        raise exception 'args is JSON of at most 1 MiB' using errcode = 'EJ001';
    end;
    if p_idempotency_key is not null then
        v_scope_hash := encode(sha256(
            ebbtide_jobs.length_prefixed(p_queue) || ebbtide_jobs.length_prefixed(p_type)
            || ebbtide_jobs.length_prefixed('key') || ebbtide_jobs.length_prefixed(p_idempotency_key)), 'hex');
    end if;
    select e.outcome, e.job_id into outcome, job_id from ebbtide_jobs.enqueue_v1(
        v_id, p_type, convert_to(p_args, 'UTF8'), p_queue, coalesce(p_tenant, ''), p_metadata,
        coalesce(p_priority, 0), least(greatest(coalesce(p_max_retries, 2), 0), 100),
        greatest(coalesce((extract(epoch from p_timeout) * 1000000000)::bigint, 0), 0), 0, p_run_at,
        (extract(epoch from p_delay) * 1000000)::bigint, coalesce(p_unique_key, ''), null, null, null,
        v_scope_hash, v_window_us, coalesce(p_takes_over, false)) e;
end $$;
