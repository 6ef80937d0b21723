-- Traces: what a consumer noted about a message. They outlive messages, partitions and queues.
-- Data travels as text in these answers, since as jsonb it would lose key order and refuse a NUL escape.

-- Notes something about a message, which need not exist, nor its partition.
--
-- Lock:   none but the rows it inserts.
-- Result: {"success", "traceId"}
create or replace function queen.record_trace_v1(
    p_pid uuid, p_transaction_id text, p_data text, p_consumer_group text default null,
    p_trace_names text[] default null, p_event_type text default 'info', p_worker_id text default null
) returns jsonb language plpgsql as $$
declare
    v_id uuid;
begin
    insert into queen.message_traces (partition_id, transaction_id, data, consumer_group, event_type, worker_id)
    values (p_pid, p_transaction_id, p_data, p_consumer_group, coalesce(p_event_type, 'info'), p_worker_id)
    returning id into v_id;
    insert into queen.message_trace_names (trace_id, trace_name)
    select distinct v_id, name from unnest(p_trace_names) name;
    return jsonb_build_object('success', true, 'traceId', v_id);
end $$;

-- One trace as listings show it.
--
-- Result: {"id", "event_type", "data", "consumer_group", "worker_id", "created_at", "trace_names"}
create or replace function queen.trace_json(t queen.message_traces) returns jsonb stable language sql as $$
    select jsonb_build_object(
        'id', t.id, 'event_type', t.event_type, 'data', t.data, 'consumer_group', t.consumer_group,
        'worker_id', t.worker_id, 'created_at', queen.iso_milliseconds(t.created_at),
        'trace_names', coalesce(
            (select jsonb_agg(n.trace_name order by n.trace_name)
             from queen.message_trace_names n where n.trace_id = t.id), '[]'))
$$;

-- The traces of one message, oldest first; also when its partition is deleted.
--
-- Lock:   none.
-- Result: {"traces": [trace_json ...], "total"}
create or replace function queen.get_message_traces_v1(
    p_pid uuid, p_transaction_id text, p_limit int default 1000, p_offset int default 0
) returns jsonb stable language sql as $$
    with found as (
        select t from queen.message_traces t
        where t.partition_id = p_pid
          and hashtextextended(t.transaction_id, 0) = hashtextextended(p_transaction_id, 0)
          and t.transaction_id = p_transaction_id
    ), page as (
        select t from found order by (t).created_at, (t).id limit p_limit offset p_offset
    )
    select jsonb_build_object(
        'traces', coalesce((select jsonb_agg(queen.trace_json(t) order by (t).created_at, (t).id) from page), '[]'),
        'total', (select count(*) from found))
$$;

-- The traces of one name, oldest first; those whose partition is deleted are left out, since
-- nothing says any more to which queue and tenant they belong.
--
-- Lock:   none.
-- Result: {"traces": [trace_json with transaction_id, partition_id, queue_name, partition_name and
--         message_payload, which is always null], "total"}
create or replace function queen.get_traces_by_name_v1(
    p_trace_name text, p_limit int default 100, p_offset int default 0,
    p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb stable language sql as $$
    with found as (
        select t, p.name as partition_name, q.name as queue_name
        from queen.message_trace_names n
        join queen.message_traces t on t.id = n.trace_id
        join queen.log_partitions p on p.id = t.partition_id
        join queen.queues q on q.id = p.queue_id
        where n.trace_name = p_trace_name and q.tenant_id = p_tenant
    ), page as (
        select * from found order by (t).created_at, (t).id limit p_limit offset p_offset
    )
    select jsonb_build_object(
        'traces', coalesce((
            select jsonb_agg(queen.trace_json(t) || jsonb_build_object(
                'transaction_id', (t).transaction_id, 'partition_id', (t).partition_id,
                'queue_name', queue_name, 'partition_name', partition_name, 'message_payload', null
            ) order by (t).created_at, (t).id) from page), '[]'),
        'total', (select count(*) from found))
$$;

-- The names that traces have, the one used last first; traces of deleted partitions count.
--
-- Lock:   none.
-- Result: {"trace_names": [{"trace_name", "trace_count", "message_count", "last_seen"}], "total"}
create or replace function queen.get_trace_names_v1(p_limit int default 50, p_offset int default 0)
returns jsonb stable language sql as $$
    with found as (
        select n.trace_name, count(*) as traces,
               count(distinct (t.partition_id, hashtextextended(t.transaction_id, 0))) as messages,
               max(t.created_at) as last_seen
        from queen.message_trace_names n
        join queen.message_traces t on t.id = n.trace_id
        group by n.trace_name
    ), page as (
        select * from found order by last_seen desc, trace_name limit p_limit offset p_offset
    )
    select jsonb_build_object(
        'trace_names', coalesce((
            select jsonb_agg(jsonb_build_object(
                'trace_name', trace_name, 'trace_count', traces, 'message_count', messages,
                'last_seen', queen.iso_milliseconds(last_seen)
            ) order by last_seen desc, trace_name) from page), '[]'),
        'total', (select count(*) from found))
$$;
