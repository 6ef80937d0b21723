-- The partitions in which rule 2 waits for a consumer group; the other rules do not wait with it.
create index concurrently log_partitions_held_idx on queen.log_partitions (queue_id, oldest_live_at)
    where held_next is not null;
