-- Queues as an operator sees them: configure, delete.

-- Deletes a queue and all that belongs to it; traces and retention history stay.
--
-- Lock:   the queues row, then the queue's partitions by ascending id, then their cursors by
--         (partition, group), then rows that no other session waits for while it holds one of
--         these. A push that makes partitions takes a share of the queues row before any
--         partition; transactions and bundled pushes lock partitions by ascending id;
--         a retention step holds one partition and asks for no second one; cleanup passes
--         held partitions by; acks lock cursors in the order above. So each of them waits
--         before this or is waited for, and none does both. New partitions cannot appear
--         meanwhile: their foreign key needs the queues row.
-- Result: {"deleted", "queue", "existed"}
-- Why:    log_txns, log_dlq and the metrics have no foreign key, so nothing else would ever
--         delete their rows. It is one transaction by contract: a queue of many segments holds
--         its locks, and keeps the rows of the whole database from being vacuumed, until all
--         are gone. Letting retention empty a large queue first makes this short.
create or replace function queen.delete_queue_v1(
    p_name text, p_tenant uuid default '00000000-0000-0000-0000-000000000001'
) returns jsonb language plpgsql as $$
declare
    v_id uuid;
begin
    select id into v_id from queen.queues where tenant_id = p_tenant and name = p_name for update;
    if not found then
        return jsonb_build_object('deleted', false, 'queue', p_name, 'existed', false);
    end if;
    perform from queen.log_partitions where queue_id = v_id order by id for update;
    perform from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id
    where p.queue_id = v_id order by c.partition_id, c.consumer_group for update of c;

    delete from queen.log_txns t using queen.log_partitions p
    where p.queue_id = v_id and t.partition_id = p.id;
    delete from queen.log_dlq d using queen.log_partitions p
    where p.queue_id = v_id and d.partition_id = p.id;
    delete from queen.queues where id = v_id;
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
