-- Dead letters found by their message: by its offset, and by its transaction id.

create index log_dlq_offset_idx on queen.log_dlq (partition_id, "offset");
-- A transaction id can exceed what a b-tree entry holds, so its hash is indexed.
create index log_dlq_message_idx on queen.log_dlq (partition_id, hashtextextended(transaction_id, 0));
