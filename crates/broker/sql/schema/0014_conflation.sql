-- Conflation: a group that wants only the newest message of each partition.

-- Recorded at the group's first contact; each of its cursors says it again, so that a claim needs no look-up.
alter table queen.consumer_groups_metadata add column conflation boolean not null default false;
alter table queen.log_consumers            add column conflated  boolean not null default false;
