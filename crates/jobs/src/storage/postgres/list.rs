//! Lists of jobs, queues and deduplication windows.

use std::collections::BTreeMap;

use async_trait::async_trait;
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::PostgresStorage;
use super::row::{self, get};
use super::session::Sql as _;
use crate::error::Error;
use crate::job::JobId;
use crate::list::{JobFilter, ListStore, Page, QueueCounts, UniqueLock};
use crate::storage::fragment::live;

const JOBS: &str = concat!(
    "select ",
    row::columns!(),
    " from ebbtide_jobs.jobs j
      where ($1::text is null or j.status = $1) and ($2::text is null or j.queue = $2)
        and ($3::text is null or j.type = $3) and ($4::text is null or j.tenant = $4)
        and ($5::text is null or j.metadata @> $5::text::jsonb)
        and ($6::text is null or strpos(j.type, $6) > 0 or strpos(j.queue, $6) > 0 or strpos(j.unique_key, $6) > 0
             or strpos(coalesce(j.last_error, ''), $6) > 0)
        and ($7::timestamptz is null or j.created_at >= $7) and ($8::timestamptz is null or j.created_at < $8)
        and ($9::uuid is null or j.root_job_id = $9) and ($10::uuid is null or j.id < $10)
      order by j.id desc limit $11"
);

const QUEUES: &str = concat!(
    "select j.queue, case when j.status = 'retrying' then 'pending' else j.status end as status, count(*) as count,
            min(coalesce(j.run_at, j.created_at)) as oldest
       from ebbtide_jobs.jobs j where j.status in ",
    live!(),
    " group by 1, 2
     union all
     select j.queue, 'dead', count(*), null from ebbtide_jobs.jobs j
      where j.dead_lettered_at is not null and j.status = 'failed' group by 1
     union all
     select s.queue, 'stopped', 1, null from ebbtide_jobs.queue_states s where s.paused"
);

fn lock(row: &Row) -> Result<UniqueLock, Error> {
    Ok(UniqueLock {
        scope_hash: get::<String>(row, "scope_hash")?.trim_end().to_owned(),
        job_id: row::id(row, "job_id")?,
        expires_at: get(row, "expires_at")?,
        created_at: get(row, "created_at")?,
    })
}

#[async_trait]
impl ListStore for PostgresStorage {
    async fn jobs(&self, filter: &JobFilter) -> Result<Page, Error> {
        let json = || serde_json::to_string(&filter.metadata).expect("a map of strings is JSON");
        let metadata = (!filter.metadata.is_empty()).then(json);
        let params = [
            (&filter.status.map(|status| status.as_str()) as _, Type::TEXT),
            (&filter.queue.as_ref().map(|queue| queue.as_str()) as _, Type::TEXT),
            (&filter.job_type.as_ref().map(|job_type| job_type.as_str()) as _, Type::TEXT),
            (&filter.tenant as _, Type::TEXT),
            (&metadata as _, Type::TEXT),
            (&filter.search as _, Type::TEXT),
            (&filter.since as _, Type::TIMESTAMPTZ),
            (&filter.until as _, Type::TIMESTAMPTZ),
            (&filter.root.map(|id| id.as_uuid()) as _, Type::UUID),
            (&filter.before.map(|id| id.as_uuid()) as _, Type::UUID),
            (&i64::from(filter.limit) as _, Type::INT8),
        ];
        // Planned for the filters that are there: one plan for all of them would use no index.
        let mut session = self.session().await?;
        let rows = session.begin().await?.planned(JOBS, &params).await?;
        Ok(filter.page(rows.iter().map(row::job).collect::<Result<_, _>>()?))
    }

    async fn queues(&self) -> Result<Vec<QueueCounts>, Error> {
        let rows = self.session().await?.rows(QUEUES, &[]).await?;
        let mut queues = BTreeMap::new();
        for row in &rows {
            let queue: String = get(row, "queue")?;
            let count = u64::try_from(get::<i64>(row, "count")?).unwrap_or(0);
            let counts = queues.entry(queue.clone()).or_insert_with(|| QueueCounts::empty(queue));
            match get(row, "status")? {
                "pending" => {
                    counts.pending += count;
                    counts.oldest_due = get::<Option<Timestamp>>(row, "oldest")?;
                }
                "running" => counts.running = count,
                "waiting" => counts.waiting = count,
                "paused" => counts.paused = count,
                "dead" => counts.dead = count,
                _ => counts.is_paused = true,
            }
        }
        Ok(queues.into_values().collect())
    }

    async fn locks(&self, job: Option<JobId>, limit: u32) -> Result<Vec<UniqueLock>, Error> {
        let query = "select l.scope_hash, l.job_id, l.expires_at, l.created_at from ebbtide_jobs.unique_locks l
                      where $1::uuid is null or l.job_id = $1 order by l.expires_at, l.scope_hash limit $2";
        let params = [(&job.map(|id| id.as_uuid()) as _, Type::UUID), (&i64::from(limit) as _, Type::INT8)];
        self.session().await?.rows(query, &params).await?.iter().map(lock).collect()
    }

    async fn release_lock(&self, scope_hash: &str) -> Result<bool, Error> {
        let query = "delete from ebbtide_jobs.unique_locks l where l.scope_hash = $1 returning 1";
        Ok(!self.session().await?.rows(query, &[(&scope_hash, Type::BPCHAR)]).await?.is_empty())
    }
}
