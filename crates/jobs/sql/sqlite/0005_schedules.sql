-- What a schedule enqueues, and when next, for whoever looks. The workers that carry the schedule say so when they start.

alter table scheduled_fires add column rule text not null default '';
alter table scheduled_fires add column job_type text not null default '';
alter table scheduled_fires add column queue text not null default '';
alter table scheduled_fires add column next_fire_at integer;
alter table scheduled_fires add column paused integer not null default 0;
