-- The partitions that may be empty, the longest silent first: the candidates of cleanup.
create index concurrently log_partitions_empty_idx on queen.log_partitions (last_write_at)
    where oldest_live_at is null or oldest_live_at = '-infinity';
