-- What a refresh of statistics has counted of a queue so far: it counts a number of partitions a step.

-- progress is NULL but while a queue is being counted: {"after": name of the last partition, sums by name}.
-- retained_bytes is a measurement once measured_at is set.
alter table queen.stats
    add column progress    jsonb,
    add column measured_at timestamptz;
