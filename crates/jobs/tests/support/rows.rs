//! Rows of every age and state, written past the storage.

use std::time::Duration;

use ebbtide_jobs::{JobId, JobStatus};

use crate::support::{DAY, SECOND, Store};

/// A job as a row. Every time that it has lies at another age, so that a wrong column shows.
#[derive(Clone)]
pub struct Row {
    status: JobStatus,
    ended: Option<String>,
    parent: Option<JobId>,
    root: Option<JobId>,
    fan_out: Option<JobId>,
    queue: &'static str,
}

impl Row {
    pub fn new(status: JobStatus) -> Self {
        Self { status, ended: None, parent: None, root: None, fan_out: None, queue: "default" }
    }

    pub fn completed() -> Self {
        Self::new(JobStatus::Completed)
    }

    /// It ended this long ago.
    pub fn ended(self, t: &Store, ago: Duration) -> Self {
        self.ended_at(t.ago(ago))
    }

    /// It ended at the time that the expression gives.
    pub fn ended_at(mut self, expression: String) -> Self {
        self.ended = Some(expression);
        self
    }

    pub fn parent(mut self, id: JobId) -> Self {
        self.parent = Some(id);
        self
    }

    pub fn root(mut self, id: JobId) -> Self {
        self.root = Some(id);
        self
    }

    /// It is a child of that fan-out.
    pub fn fan_out(mut self, id: JobId) -> Self {
        self.fan_out = Some(id);
        self
    }

    pub fn queue(mut self, queue: &'static str) -> Self {
        self.queue = queue;
        self
    }

    pub async fn put(self, t: &Store) -> JobId {
        let id = JobId::new();
        let link = |link: Option<JobId>| link.map_or("null".to_owned(), |id| t.id(id));
        t.exec(&format!(
            "insert into @jobs (id, type, status, queue, created_at, updated_at, started_at, dead_lettered_at,
                                completed_at, parent_job_id, root_job_id, fan_out_id)
             values ({}, 'row', '{}', '{}', {}, {}, {}, {}, {}, {}, {}, {})",
            t.id(id),
            self.status,
            self.queue,
            t.ago(DAY * 4000),
            t.ago(SECOND * 7),
            t.ago(DAY * 3000),
            t.ago(DAY * 2000),
            self.ended.unwrap_or("null".to_owned()),
            link(self.parent),
            link(self.root),
            link(self.fan_out),
        ))
        .await;
        id
    }
}

impl Store {
    /// A signal of the job, consumed this long ago or still pending, sent a year ago.
    pub async fn signal(&self, job: JobId, consumed: Option<String>) -> JobId {
        let id = JobId::new();
        let consumed = consumed.unwrap_or("null".to_owned());
        let values = format!("{}, {}, 's', {consumed}, {}", self.id(id), self.id(job), self.ago(DAY * 365));
        self.exec(&format!("insert into @signals (id, job_id, name, consumed_at, created_at) values ({values})")).await;
        id
    }

    /// A deduplication window that names the job.
    pub async fn window(&self, job: JobId, expires_at: &str) {
        let scope = job.as_uuid().simple().to_string().repeat(2);
        let values = format!("'{scope}', {}, {expires_at}, {}", self.id(job), self.ago(DAY * 500));
        self.exec(&format!("insert into @unique_locks (scope_hash, job_id, expires_at, created_at) values ({values})"))
            .await;
    }

    /// A fan-out of the job.
    pub async fn fan_out(&self, parent: JobId, status: &str) -> JobId {
        let id = JobId::new();
        let values = format!("{}, {}, 2, '{status}'", self.id(id), self.id(parent));
        self.exec(&format!("insert into @fan_outs (id, parent_job_id, total_count, status) values ({values})")).await;
        id
    }

    pub async fn set_status(&self, id: JobId, status: JobStatus) {
        self.exec(&format!("update @jobs set status = '{status}' where id = {}", self.id(id))).await;
    }

    /// Side rows that name no job that is there. No storage may ever leave one, but for a window kept on purpose.
    pub async fn orphans(&self) -> i64 {
        let mut orphans = 0;
        for (table, column) in [
            ("checkpoints", "job_id"),
            ("signals", "job_id"),
            ("fan_outs", "parent_job_id"),
            ("unique_locks", "job_id"),
        ] {
            let lost = format!("{column} not in (select id from @jobs)");
            orphans += self.number(&format!("select count(*) from @{table} where {lost}")).await;
        }
        orphans
    }
}
