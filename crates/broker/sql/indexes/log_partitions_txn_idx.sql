-- Which partitions of a queue have the oldest sidecar rows.
create index concurrently log_partitions_txn_idx on queen.log_partitions (queue_id, oldest_txn_at)
    where oldest_txn_at is not null;
