-- Which partitions of a queue hold the oldest segments: what the rules look at first.
create index concurrently log_partitions_live_idx on queen.log_partitions (queue_id, oldest_live_at)
    where oldest_live_at is not null and held_next is null;
