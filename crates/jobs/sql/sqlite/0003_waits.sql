-- Jobs that wait for a time or for a signal, for the look that wakes them.

create index jobs_waiting_time on jobs (run_at) where status = 'waiting' and run_at is not null;
create index jobs_waiting on jobs (id) where status = 'waiting';
