-- What a schedule enqueues, and when next, for whoever looks. The workers that carry the schedule say so when they start.

alter table ebbtide_jobs.scheduled_fires add column rule varchar(255) not null default '';
alter table ebbtide_jobs.scheduled_fires add column job_type varchar(255) not null default '';
alter table ebbtide_jobs.scheduled_fires add column queue varchar(255) not null default '';
alter table ebbtide_jobs.scheduled_fires add column next_fire_at timestamptz;
alter table ebbtide_jobs.scheduled_fires add column paused boolean not null default false;
