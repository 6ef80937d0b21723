-- What a dead letter keeps of its message besides the payload, so that a replay loses nothing.

alter table queen.log_dlq
    add column trace_id     uuid,
    add column producer     text,
    -- The payload is an encryption envelope, sealed for message_id.
    add column is_encrypted boolean not null default false;
