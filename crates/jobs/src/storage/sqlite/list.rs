//! Lists of jobs, queues and deduplication windows.

use std::collections::BTreeMap;

use async_trait::async_trait;
use rusqlite::{Connection, Row, params};

use super::SqliteStorage;
use super::row::{self, get};
use super::threads::error;
use crate::error::Error;
use crate::job::JobId;
use crate::list::{JobFilter, ListStore, Page, QueueCounts, UniqueLock};
use crate::storage::fragment::live;

const JOBS: &str = concat!(
    "select ",
    row::columns!(),
    " from jobs j
      where (?1 is null or j.status = ?1) and (?2 is null or j.queue = ?2) and (?3 is null or j.type = ?3)
        and (?4 is null or j.tenant = ?4)
        and (?5 is null or (json_valid(j.metadata) and not exists (
            select 1 from json_each(?5) w
             where w.value is not (select m.value from json_each(j.metadata) m where m.key = w.key))))
        and (?6 is null or instr(j.type, ?6) > 0 or instr(j.queue, ?6) > 0 or instr(j.unique_key, ?6) > 0
             or instr(coalesce(j.last_error, ''), ?6) > 0)
        and (?7 is null or j.created_at >= ?7) and (?8 is null or j.created_at < ?8)
        and (?9 is null or j.root_job_id = ?9) and (?10 is null or j.id < ?10)
      order by j.id desc limit ?11"
);

const QUEUES: &str = concat!(
    "select queue, iif(status = 'retrying', 'pending', status) as state, count(*) as count,
            min(coalesce(run_at, created_at)) as oldest
       from jobs where status in ",
    live!(),
    " group by 1, 2
     union all
     select queue, 'dead', count(*), null from jobs where dead_lettered_at is not null and status = 'failed' group by 1
     union all
     select queue, 'stopped', 1, null from queue_states where paused"
);

fn jobs(db: &Connection, filter: &JobFilter) -> Result<Page, Error> {
    let json = || serde_json::to_string(&filter.metadata).expect("a map of strings is JSON");
    let params = params![
        filter.status.map(|status| status.as_str()),
        filter.queue.as_ref().map(|queue| queue.as_str()),
        filter.job_type.as_ref().map(|job_type| job_type.as_str()),
        filter.tenant,
        (!filter.metadata.is_empty()).then(json),
        filter.search,
        filter.since.map(|time| time.as_microsecond()),
        filter.until.map(|time| time.as_microsecond()),
        filter.root.map(|id| id.as_uuid()),
        filter.before.map(|id| id.as_uuid()),
        filter.limit,
    ];
    let mut query = db.prepare_cached(JOBS).map_err(error)?;
    let rows = query.query_map(params, |row| Ok(row::job(row))).map_err(error)?;
    Ok(filter.page(rows.map(|row| row.map_err(error)?).collect::<Result<_, Error>>()?))
}

fn queues(db: &Connection) -> Result<Vec<QueueCounts>, Error> {
    let mut query = db.prepare_cached(QUEUES).map_err(error)?;
    let mut rows = query.query([]).map_err(error)?;
    let mut queues = BTreeMap::new();
    while let Some(row) = rows.next().map_err(error)? {
        let queue: String = get(row, "queue")?;
        let count = u64::try_from(get::<i64>(row, "count")?).unwrap_or(0);
        let counts = queues.entry(queue.clone()).or_insert_with(|| QueueCounts::empty(queue));
        match get::<String>(row, "state")?.as_str() {
            "pending" => {
                counts.pending += count;
                counts.oldest_due = get::<Option<i64>>(row, "oldest")?.map(row::time).transpose()?;
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

fn lock(row: &Row<'_>) -> Result<UniqueLock, Error> {
    Ok(UniqueLock {
        scope_hash: get(row, "scope_hash")?,
        job_id: row::id(row, "job_id")?,
        expires_at: row::time(get(row, "expires_at")?)?,
        created_at: row::time(get(row, "created_at")?)?,
    })
}

fn locks(db: &Connection, job: Option<JobId>, limit: u32) -> Result<Vec<UniqueLock>, Error> {
    let query = "select scope_hash, job_id, expires_at, created_at from unique_locks
                  where ?1 is null or job_id = ?1 order by expires_at, scope_hash limit ?2";
    let mut query = db.prepare_cached(query).map_err(error)?;
    let rows = query.query_map(params![job.map(|id| id.as_uuid()), limit], |row| Ok(lock(row))).map_err(error)?;
    rows.map(|row| row.map_err(error)?).collect()
}

#[async_trait]
impl ListStore for SqliteStorage {
    async fn jobs(&self, filter: &JobFilter) -> Result<Page, Error> {
        let filter = filter.clone();
        self.readers.run(move |db| jobs(db, &filter)).await
    }

    async fn queues(&self) -> Result<Vec<QueueCounts>, Error> {
        self.readers.run(queues).await
    }

    async fn locks(&self, job: Option<JobId>, limit: u32) -> Result<Vec<UniqueLock>, Error> {
        self.readers.run(move |db| locks(db, job, limit)).await
    }

    async fn release_lock(&self, scope_hash: &str) -> Result<bool, Error> {
        let scope_hash = scope_hash.to_owned();
        self.writer
            .run(move |db| {
                let mut query = db.prepare_cached("delete from unique_locks where scope_hash = ?1").map_err(error)?;
                Ok(query.execute([scope_hash]).map_err(error)? != 0)
            })
            .await
    }
}
