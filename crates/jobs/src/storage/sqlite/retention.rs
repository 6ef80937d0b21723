//! Passes of retention and of the window sweep, each one command of the writing thread.

use std::rc::Rc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use rusqlite::types::Value;
use rusqlite::{Connection, ToSql, params};

use super::SqliteStorage;
use super::row;
use super::threads::error;
use crate::error::Error;
use crate::job::TerminalStatus;
use crate::limits::{DELETE_CHUNK, age_micros};
use crate::storage::fragment::{
    live_child, live_descendant, live_window, old_enough, pending_fan_out, protected, uncollected,
};
use crate::storage::{KindPlan, RetentionPlanStore, RetentionStore, SignalRetentionStore, UniqueLockStore};

/// What a pass runs to choose jobs: status, cutoff, now, limit. Public so that its plan can be looked at.
pub const RETENTION_CHOICE: &str = concat!(
    "select j.id from jobs j indexed by jobs_retention where ",
    old_enough!("?1", "?2"),
    " and not ",
    protected!("", "?3", "jobs c indexed by jobs_live_parent", "jobs c indexed by jobs_live_root"),
    " order by j.completed_at, j.id limit ?4"
);

// The plus signs keep these conditions from choosing an index: the rows are found by their ids.
const DELETE_JOBS: &str = concat!(
    "delete from jobs as j
      where j.id in (select value from rarray(?4)) and +j.status = ?1 and +j.completed_at < ?2 and not ",
    protected!("", "?3", "jobs c indexed by jobs_live_parent", "jobs c indexed by jobs_live_root")
);

/// What hangs off a job, in the order in which it goes.
const DELETE_SIDE_ROWS: [&str; 4] = [
    "delete from fan_outs where parent_job_id in (select value from rarray(?1))",
    "delete from checkpoints where job_id in (select value from rarray(?1))",
    "delete from signals where job_id in (select value from rarray(?1))",
    "delete from unique_locks where job_id in (select value from rarray(?1))",
];

fn choose(db: &Connection, query: &str, params: &[&dyn ToSql]) -> Result<Vec<Value>, Error> {
    let mut query = db.prepare_cached(query).map_err(error)?;
    let chosen = query.query_map(params, |row| row.get(0)).map_err(error)?;
    chosen.map(|id| id.map_err(error)).collect()
}

fn execute(db: &Connection, query: &str, params: &[&dyn ToSql]) -> Result<u64, Error> {
    let written = db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(written as u64)
}

fn count(db: &Connection, query: &str, params: &[&dyn ToSql]) -> Result<u64, Error> {
    let mut query = db.prepare_cached(query).map_err(error)?;
    let count: i64 = query.query_row(params, |row| row.get(0)).map_err(error)?;
    Ok(natural(count))
}

fn natural(count: i64) -> u64 {
    u64::try_from(count).expect("a count is not negative")
}

/// Nobody else writes between the choice and the deletes; the conditions are checked again all the same, with the
/// same moment as now, so that what is chosen is what goes.
fn delete_terminal(db: &Connection, status: TerminalStatus, cutoff: i64, limit: u32) -> Result<u64, Error> {
    let (status, now) = (status.as_str(), row::now(db)?);
    let ids = choose(db, RETENTION_CHOICE, params![status, cutoff, now, limit])?;
    let mut deleted = 0;
    for chunk in ids.chunks(DELETE_CHUNK) {
        let list = Rc::new(chunk.to_vec());
        for query in DELETE_SIDE_ROWS {
            execute(db, query, params![list])?;
        }
        deleted += execute(db, DELETE_JOBS, params![status, cutoff, now, list])?;
    }
    if deleted != ids.len() as u64 {
        // The savepoint takes the side rows back.
        return Err(Error::Corrupt("a chosen job was not deleted in the same transaction".to_owned()));
    }
    Ok(deleted)
}

fn delete_consumed(db: &Connection, cutoff: i64, limit: u32) -> Result<u64, Error> {
    let query = "select id from signals where consumed_at is not null and consumed_at < ?1
                  order by consumed_at, id limit ?2";
    let ids = choose(db, query, params![cutoff, limit])?;
    let mut deleted = 0;
    for chunk in ids.chunks(DELETE_CHUNK) {
        let query = "delete from signals
                      where id in (select value from rarray(?2)) and consumed_at is not null and consumed_at < ?1";
        deleted += execute(db, query, params![cutoff, Rc::new(chunk.to_vec())])?;
    }
    Ok(deleted)
}

fn delete_expired(db: &Connection, limit: u32) -> Result<u64, Error> {
    let now = row::now(db)?;
    let query = "select scope_hash from unique_locks where expires_at <= ?1 order by expires_at, scope_hash limit ?2";
    let scopes = choose(db, query, params![now, limit])?;
    let mut deleted = 0;
    for chunk in scopes.chunks(DELETE_CHUNK) {
        let query = "delete from unique_locks where scope_hash in (select value from rarray(?2)) and expires_at <= ?1";
        deleted += execute(db, query, params![now, Rc::new(chunk.to_vec())])?;
    }
    Ok(deleted)
}

#[async_trait]
impl RetentionStore for SqliteStorage {
    async fn delete_terminal_older_than(
        &self, status: TerminalStatus, age: Duration, limit: u32,
    ) -> Result<u64, Error> {
        let (Some(age_us), 1..) = (age_micros(age), limit) else { return Ok(0) };
        self.writer.run(move |db| delete_terminal(db, status, row::now(db)?.saturating_sub(age_us), limit)).await
    }

    async fn delete_terminal_before(
        &self, status: TerminalStatus, cutoff: Timestamp, limit: u32,
    ) -> Result<u64, Error> {
        self.writer.run(move |db| delete_terminal(db, status, cutoff.as_microsecond(), limit)).await
    }
}

#[async_trait]
impl SignalRetentionStore for SqliteStorage {
    async fn delete_consumed_older_than(&self, age: Duration, limit: u32) -> Result<u64, Error> {
        let (Some(age_us), 1..) = (age_micros(age), limit) else { return Ok(0) };
        self.writer.run(move |db| delete_consumed(db, row::now(db)?.saturating_sub(age_us), limit)).await
    }

    async fn delete_consumed_before(&self, cutoff: Timestamp, limit: u32) -> Result<u64, Error> {
        self.writer.run(move |db| delete_consumed(db, cutoff.as_microsecond(), limit)).await
    }
}

#[async_trait]
impl UniqueLockStore for SqliteStorage {
    async fn delete_expired(&self, limit: u32) -> Result<u64, Error> {
        self.writer.run(move |db| delete_expired(db, limit)).await
    }
}

const PLAN: &str = concat!(
    "select count(*) filter (where not is_kept), count(*) filter (where is_kept),
            count(*) filter (where live_child), count(*) filter (where live_descendant),
            count(*) filter (where pending_fan_out), count(*) filter (where uncollected),
            count(*) filter (where live_window), max(held_until)
       from (
        select live_child or live_descendant or pending_fan_out or uncollected or live_window as is_kept, p.*,
               (select max(l.expires_at) from unique_locks l where live_window and l.job_id = p.id) as held_until
          from (
            select j.id, ",
    live_child!("jobs c indexed by jobs_live_parent"),
    " as live_child, ",
    live_descendant!("jobs c indexed by jobs_live_root"),
    " as live_descendant, ",
    pending_fan_out!(""),
    " as pending_fan_out, ",
    uncollected!(""),
    " as uncollected, ",
    live_window!("", "?3"),
    " as live_window
              from jobs j indexed by jobs_retention where ",
    old_enough!("?1", "?2"),
    ") p) q"
);

fn plan_terminal(db: &Connection, status: TerminalStatus, age_us: i64) -> Result<KindPlan, Error> {
    let now = row::now(db)?;
    let mut query = db.prepare_cached(PLAN).map_err(error)?;
    let plan = query.query_row(params![status.as_str(), now.saturating_sub(age_us), now], |row| {
        let mut counts = [0; 7];
        for (column, count) in counts.iter_mut().enumerate() {
            *count = natural(row.get(column)?);
        }
        Ok((counts, row.get::<_, Option<i64>>(7)?))
    });
    let ([due, kept, by @ ..], held_until) = plan.map_err(error)?;
    Ok(KindPlan { due, kept, by, held_until: held_until.map(row::time).transpose()? })
}

#[async_trait]
impl RetentionPlanStore for SqliteStorage {
    async fn plan_terminal(&self, status: TerminalStatus, age: Duration) -> Result<KindPlan, Error> {
        let Some(age_us) = age_micros(age) else { return Ok(KindPlan::default()) };
        self.readers.run(move |db| plan_terminal(db, status, age_us)).await
    }

    async fn plan_consumed(&self, age: Duration) -> Result<u64, Error> {
        let Some(age_us) = age_micros(age) else { return Ok(0) };
        let query = "select count(*) from signals where consumed_at is not null and consumed_at < ?1";
        self.readers.run(move |db| count(db, query, params![row::now(db)?.saturating_sub(age_us)])).await
    }

    async fn plan_expired(&self) -> Result<u64, Error> {
        let query = "select count(*) from unique_locks where expires_at <= ?1";
        self.readers.run(move |db| count(db, query, params![row::now(db)?])).await
    }
}
