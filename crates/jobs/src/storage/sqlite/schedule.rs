//! Schedules: a row each, whose cursor only one worker can move past a time.

use async_trait::async_trait;
use jiff::Timestamp;
use rusqlite::{Connection, Row, ToSql, params};

use super::row::{self, get};
use super::threads::error;
use super::{SqliteStorage, enqueue};
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::schedule::{Fire, ScheduleState, ScheduleStore, ScheduledJob};

macro_rules! columns {
    () => {
        "name, rule, job_type, queue, last_fire_at, last_fired_at, next_fire_at, paused"
    };
}

fn state(row: &Row<'_>) -> Result<ScheduleState, Error> {
    let some_time = |column| get::<Option<i64>>(row, column)?.map(row::time).transpose();
    Ok(ScheduleState {
        name: get(row, "name")?,
        rule: get(row, "rule")?,
        job_type: get(row, "job_type")?,
        queue: get(row, "queue")?,
        last_fire_at: row::time(get(row, "last_fire_at")?)?,
        last_fired_at: some_time("last_fired_at")?,
        next_fire_at: some_time("next_fire_at")?,
        is_paused: get(row, "paused")?,
    })
}

fn execute(db: &Connection, query: &str, params: &[&dyn ToSql]) -> Result<bool, Error> {
    let written = db.prepare_cached(query).and_then(|mut query| query.execute(params)).map_err(error)?;
    Ok(written != 0)
}

fn register(db: &Connection, job: &ScheduledJob) -> Result<ScheduleState, Error> {
    // A row without times was made known by a release that wrote none, and keeps its cursor.
    let query = concat!(
        "insert into scheduled_fires (name, last_fire_at, rule, job_type, queue) values (?1, ?2, ?3, ?4, ?5)
         on conflict (name) do update
            set last_fire_at = iif(rule in ('', excluded.rule), last_fire_at, excluded.last_fire_at),
                rule = excluded.rule, job_type = excluded.job_type, queue = excluded.queue
         returning ",
        columns!()
    );
    let mut query = db.prepare_cached(query).map_err(error)?;
    let (job_type, queue) = (job.job.job_type.as_str(), job.job.queue.as_str());
    let params = params![job.name, row::now(db)?, job.schedule.to_string(), job_type, queue];
    let mut state = query.query_row(params, |row| Ok(state(row))).map_err(error)??;
    state.next_fire_at = job.schedule.next_after(state.last_fire_at);
    let next = state.next_fire_at.map(|next| next.as_microsecond());
    execute(db, "update scheduled_fires set next_fire_at = ?2 where name = ?1", params![job.name, next])?;
    Ok(state)
}

fn fire(db: &Connection, name: &str, at: Timestamp, next: Option<Timestamp>, job: &NewJob) -> Result<Fire, Error> {
    let (at, next) = (at.as_microsecond(), next.map(|next| next.as_microsecond()));
    let query = "update scheduled_fires set last_fire_at = ?2, next_fire_at = ?3
                  where name = ?1 and last_fire_at < ?2 and not paused and ?2 <= ?4";
    if !execute(db, query, params![name, at, next, row::now(db)?])? {
        return Ok(Fire::NotTaken);
    }
    match enqueue::enqueue(db, job) {
        Ok(Enqueued::New(id)) => {
            execute(db, "update scheduled_fires set last_fired_at = ?2 where name = ?1", params![name, at])?;
            Ok(Fire::Fired(id))
        }
        Ok(Enqueued::Duplicate(holder)) | Err(Error::DuplicateJob { holder }) => Ok(Fire::Skipped(holder)),
        Err(error) => Err(error),
    }
}

fn list(db: &Connection) -> Result<Vec<ScheduleState>, Error> {
    let query = concat!("select ", columns!(), " from scheduled_fires order by name");
    let mut query = db.prepare_cached(query).map_err(error)?;
    let rows = query.query_map([], |row| Ok(state(row))).map_err(error)?;
    rows.map(|row| row.map_err(error)?).collect()
}

#[async_trait]
impl ScheduleStore for SqliteStorage {
    async fn register(&self, job: &ScheduledJob) -> Result<ScheduleState, Error> {
        let job = job.clone();
        self.writer.run(move |db| register(db, &job)).await
    }

    async fn fire(&self, name: &str, at: Timestamp, next: Option<Timestamp>, job: &NewJob) -> Result<Fire, Error> {
        let (name, job) = (name.to_owned(), job.clone());
        self.writer.run(move |db| fire(db, &name, at, next, &job)).await
    }

    async fn list(&self) -> Result<Vec<ScheduleState>, Error> {
        self.readers.run(list).await
    }

    async fn set_paused(&self, name: &str, is_paused: bool) -> Result<bool, Error> {
        let name = name.to_owned();
        let query = "update scheduled_fires
                        set last_fire_at = iif(paused and not ?2, max(last_fire_at, ?3), last_fire_at), paused = ?2
                      where name = ?1";
        self.writer.run(move |db| execute(db, query, params![name, is_paused, row::now(db)?])).await
    }

    async fn delete(&self, name: &str) -> Result<bool, Error> {
        let name = name.to_owned();
        self.writer.run(move |db| execute(db, "delete from scheduled_fires where name = ?1", params![name])).await
    }
}
