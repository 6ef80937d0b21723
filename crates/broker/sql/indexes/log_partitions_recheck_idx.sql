-- When a held partition is looked at again though nobody reported a move.
create index concurrently log_partitions_recheck_idx on queen.log_partitions (recheck_at)
    where recheck_at is not null;
