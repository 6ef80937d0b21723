-- What looks after fan-outs that a lost process left behind needs to find.

-- Whether the children that a failed fan-out left behind have been cancelled, if it asked for that.
alter table ebbtide_jobs.fan_outs add column is_settled boolean not null default false;

create index fan_outs_parent_pending on ebbtide_jobs.fan_outs (parent_job_id) where status = 'pending';
create index fan_outs_losers on ebbtide_jobs.fan_outs (id)
    where status = 'failed' and cancel_on_fail and not is_settled;
create index jobs_joining on ebbtide_jobs.jobs (id) where status = 'waiting' and waiting_signal_name = '_fanout';
