-- State keys as bytes, since a text cannot hold U+0000 and a key may; and the end of a window beside the value
-- that says it, since nothing parses a value again once it is stored.

-- window_end is the number windowEnd of a value that is an object with one, in milliseconds since 1970.
alter table queen_streams.state
    alter column key type bytea using convert_to(key, 'UTF8'),
    add column window_end double precision;

-- A window's row is written again with every batch; with room on its page it stays out of the indexes.
alter table queen_streams.state set (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 0
);
