-- When something in a partition comes due, so that retention asks an index and never every partition.

-- A stamp is never younger than the oldest row that it stands for. NULL means that there is none;
-- -infinity that nobody has looked, so that the next look decides. A push sets a stamp only when it
-- is NULL: an index holds it, and changing it at each push would leave the HOT path.
--
-- held_next is set while rule 2 waits for consumer groups: the offset that the slowest one has to
-- read. Such a partition is looked at again when that group moves, or at recheck_at.
alter table queen.log_partitions
    add column oldest_live_at timestamptz default '-infinity',
    add column oldest_txn_at  timestamptz default '-infinity',
    add column held_next      bigint,
    add column held_since     timestamptz,
    add column recheck_at     timestamptz;

-- Partitions to look at in the next cycle, whatever was known of their queue: a hold may have ended, or rows
-- were written or changed by hand. No key and no foreign key: the writer may hold a cursor, and must neither
-- wait for a partition nor for another writer.
create table queen.due_events (
    partition_id uuid not null
);
create index due_events_partition_idx on queen.due_events (partition_id);
