-- Queues as an operator sees them: configure, delete.

-- Deletes a queue and all that belongs to it; traces and retention history stay.
--
-- Lock:   the queues row, then the queue's partitions by ascending id, then their cursors by
--         (partition, group), then the state of streams by its key, then rows that no other session
--         waits for while it holds one of these. A push that makes partitions takes a share of the
--         queues row before any partition; transactions, bundled pushes and cycles of streams lock
--         partitions by ascending id; a retention step holds one partition and asks for no second
--         one; cleanup passes held partitions by; acks lock cursors in the order above; whoever
--         writes state of streams holds its partition, and a reset takes state in the order above.
--         So each of them waits before this or is waited for, and none does both. New partitions
--         cannot appear meanwhile: their foreign key needs the queues row.
-- Result: {"deleted", "queue", "existed"}
-- Why:    log_txns, log_dlq, streams state and the metrics have no foreign key, so nothing else would ever
--         delete their rows. It is one transaction by contract: a queue of many segments holds
--         its locks, and keeps the rows of the whole database from being vacuumed, until all
--         are gone. Letting retention empty a large queue first makes this short.
create or replace function queen.delete_queue_v1(
    p_name text, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql as $$
declare
    v_id   uuid;
    v_pids uuid[];
begin
    select id into v_id from queen.queues where tenant_id = p_tenant and name = p_name for update;
    if not found then
        return jsonb_build_object('deleted', false, 'queue', p_name, 'existed', false);
    end if;
    -- By array and not by join: a plan made for any queue would read the sidecar of all of them.
    select array_agg(p.id) into v_pids
    from (select id from queen.log_partitions where queue_id = v_id order by id for update) p;
    perform from queen.log_consumers c
    where c.partition_id = any (v_pids) order by c.partition_id, c.consumer_group for update;

    perform from queen_streams.state s
    where s.partition_id = any (v_pids) order by s.query_id, s.partition_id, s.key for update;

    delete from queen.log_txns where partition_id = any (v_pids);
    delete from queen.log_dlq where partition_id = any (v_pids);
    delete from queen_streams.state where partition_id = any (v_pids);
    delete from queen.queues where id = v_id;
    delete from queen.due_events where partition_id = any (v_pids);
    perform queen.delete_queue_metrics(v_id, p_name, p_tenant);
    return jsonb_build_object('deleted', true, 'queue', p_name, 'existed', true);
end $$;

-- Deletes the metrics of one queue.
--
-- Lock:   metric rows in the order in which a flush writes them; of partition_events only rows
--         that no flush is folding, which are thrown away there when the queue is gone.
-- Result: nothing.
create or replace function queen.delete_queue_metrics(p_queue_id uuid, p_name text, p_tenant uuid)
returns void language plpgsql as $$
begin
    perform from queen.queue_lag_metrics where queue_id = p_queue_id order by bucket_time for update;
    delete from queen.queue_lag_metrics where queue_id = p_queue_id;
    perform from queen.queue_parked_replica where queue_name = p_name and tenant_id = p_tenant
    order by bucket_time, hostname, worker_id for update;
    delete from queen.queue_parked_replica where queue_name = p_name and tenant_id = p_tenant;
    delete from queen.partition_events
    where ctid = any (array(
        select ctid from queen.partition_events where queue_id = p_queue_id for update skip locked));
end $$;

-- What a queue's options are when nobody says.
--
-- Result: option name -> value, every option there is.
create or replace function queen.queue_option_defaults() returns jsonb immutable language sql as $$
    select '{
        "namespace": "", "task": "", "leaseTime": 300, "retryLimit": 3, "retryDelay": 1000, "maxSize": 0,
        "ttl": 3600, "priority": 0, "deadLetterQueue": true, "dlqAfterMaxRetries": true,
        "delayedProcessing": 0, "windowBuffer": 0, "minPopWaitTime": 0, "retentionEnabled": false,
        "retentionSeconds": 0, "completedRetentionSeconds": 0, "maxWaitTimeSeconds": 0,
        "encryptionEnabled": false, "dedupWindowSeconds": 3600
    }'::jsonb
$$;

-- A queue's options as they are stored.
--
-- Result: the keys of queue_option_defaults; a column that is NULL counts as what its readers
--         take it for.
create or replace function queen.queue_options(q queen.queues) returns jsonb stable language sql as $$
    select jsonb_build_object(
        'namespace', coalesce(q.namespace, ''),
        'task', coalesce(q.task, ''),
        'leaseTime', coalesce(q.lease_time, 60),
        'retryLimit', coalesce(q.retry_limit, 3),
        'retryDelay', coalesce(q.retry_delay, 1000),
        'maxSize', coalesce(q.max_queue_size, 0),
        'ttl', coalesce(q.ttl, 3600),
        'priority', coalesce(q.priority, 0),
        'deadLetterQueue', coalesce(q.dead_letter_queue, true),
        'dlqAfterMaxRetries', coalesce(q.dlq_after_max_retries, true),
        'delayedProcessing', coalesce(q.delayed_processing, 0),
        'windowBuffer', coalesce(q.window_buffer, 0),
        'minPopWaitTime', coalesce(q.min_pop_wait_time, 0),
        'retentionEnabled', coalesce(q.retention_enabled, false),
        'retentionSeconds', coalesce(q.retention_seconds, 0),
        'completedRetentionSeconds', coalesce(q.completed_retention_seconds, 0),
        'maxWaitTimeSeconds', coalesce(q.max_wait_time_seconds, 0),
        'encryptionEnabled', coalesce(q.encryption_enabled, false),
        'dedupWindowSeconds', q.dedup_window_seconds)
$$;

-- Options as the columns of queen.queues, in the order in which configure_queue_v1 writes them.
--
-- Result: one row.
create or replace function queen.queue_option_columns(
    p_options jsonb,
    out namespace text, out task text, out lease_time int, out retry_limit int, out retry_delay int,
    out max_queue_size int, out ttl int, out priority int, out dead_letter_queue boolean,
    out dlq_after_max_retries boolean, out delayed_processing int, out window_buffer int,
    out min_pop_wait_time int, out retention_enabled boolean, out retention_seconds int,
    out completed_retention_seconds int, out max_wait_time_seconds int, out encryption_enabled boolean,
    out dedup_window_seconds int
) immutable language sql as $$
    select o.*
    from jsonb_to_record(p_options) as o (
        "namespace" text, "task" text, "leaseTime" int, "retryLimit" int, "retryDelay" int,
        "maxSize" int, "ttl" int, "priority" int, "deadLetterQueue" boolean,
        "dlqAfterMaxRetries" boolean, "delayedProcessing" int, "windowBuffer" int,
        "minPopWaitTime" int, "retentionEnabled" boolean, "retentionSeconds" int,
        "completedRetentionSeconds" int, "maxWaitTimeSeconds" int, "encryptionEnabled" boolean,
        "dedupWindowSeconds" int)
$$;

-- Makes a queue or changes one. An option that is not given returns to its default; with
-- "mode": "merge" among the options it keeps its value. One that is null is its default either way.
--
-- Lock:   the queues row and no other; pushes, which only share its key, do not wait for it.
-- Result: {"configured", "queueId", "partitionId", "queue", "namespace", "task", "storage",
--         "options"}, the options as they are in force.
-- Why:    one insert with its conflict clause, so that any number of callers may make the same
--         queue at once. Values are the caller's to check; only minPopWaitTime is held in range.
create or replace function queen.configure_queue_v1(
    p_name text, p_options jsonb default '{}', p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql as $$
declare
    v_defaults jsonb := queen.queue_option_defaults();
    v_merge    boolean := coalesce(p_options ->> 'mode' = 'merge', false);
    v_given    jsonb;
    v_queue    queen.queues;
    v_options  jsonb;
begin
    select coalesce(jsonb_object_agg(key, case when value = 'null' then v_defaults -> key else value end), '{}')
    into v_given
    from jsonb_each(p_options) where v_defaults ? key;
    if v_given ? 'minPopWaitTime' then
        v_given := v_given || jsonb_build_object(
            'minPopWaitTime', least(greatest((v_given ->> 'minPopWaitTime')::numeric, 0), 60000)::int);
    end if;

    insert into queen.queues as q (
        name, tenant_id, namespace, task, lease_time, retry_limit, retry_delay, max_queue_size, ttl,
        priority, dead_letter_queue, dlq_after_max_retries, delayed_processing, window_buffer,
        min_pop_wait_time, retention_enabled, retention_seconds, completed_retention_seconds,
        max_wait_time_seconds, encryption_enabled, dedup_window_seconds)
    select p_name, p_tenant, o.* from queen.queue_option_columns(v_defaults || v_given) o
    on conflict (tenant_id, name) do update set (
        namespace, task, lease_time, retry_limit, retry_delay, max_queue_size, ttl,
        priority, dead_letter_queue, dlq_after_max_retries, delayed_processing, window_buffer,
        min_pop_wait_time, retention_enabled, retention_seconds, completed_retention_seconds,
        max_wait_time_seconds, encryption_enabled, dedup_window_seconds
    ) = (
        select o.* from queen.queue_option_columns(
            case when v_merge then queen.queue_options(q) else v_defaults end || v_given) o)
    returning q.* into v_queue;

    v_options := queen.queue_options(v_queue);
    return jsonb_build_object(
        'configured', true, 'queueId', v_queue.id, 'partitionId', null, 'queue', v_queue.name,
        'namespace', v_options -> 'namespace', 'task', v_options -> 'task', 'storage', 'segments',
        'options', v_options - '{namespace,task}'::text[]);
end $$;

-- How many queues want their payloads encrypted, of all tenants.
--
-- Lock:   none.
-- Result: a count.
create or replace function queen.encrypted_queues_v1() returns bigint stable language sql as $$
    select count(*) from queen.queues where encryption_enabled
$$;
