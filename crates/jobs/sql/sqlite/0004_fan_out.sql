-- What looks after fan-outs that a lost process left behind needs to find.

-- Whether the children that a failed fan-out left behind have been cancelled, if it asked for that.
alter table fan_outs add column is_settled integer not null default 0;

create index fan_outs_parent_pending on fan_outs (parent_job_id) where status = 'pending';
create index fan_outs_losers on fan_outs (id) where status = 'failed' and cancel_on_fail and not is_settled;
create index jobs_joining on jobs (id) where status = 'waiting' and waiting_signal_name = '_fanout';
