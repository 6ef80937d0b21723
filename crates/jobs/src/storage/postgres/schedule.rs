//! Schedules: a row each, whose cursor only one worker can move past a time.

use async_trait::async_trait;
use jiff::Timestamp;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::row::{self, get};
use super::session::Sql as _;
use super::{PostgresStorage, enqueue};
use crate::enqueue::{Enqueued, NewJob};
use crate::error::Error;
use crate::schedule::{Fire, ScheduleState, ScheduleStore, ScheduledJob};

macro_rules! columns {
    () => {
        "s.name, s.rule, s.job_type, s.queue, s.last_fire_at, s.last_fired_at, s.next_fire_at, s.paused"
    };
}

fn state(row: &Row) -> Result<ScheduleState, Error> {
    Ok(ScheduleState {
        name: get(row, "name")?,
        rule: get(row, "rule")?,
        job_type: get(row, "job_type")?,
        queue: get(row, "queue")?,
        last_fire_at: get(row, "last_fire_at")?,
        last_fired_at: get(row, "last_fired_at")?,
        next_fire_at: get(row, "next_fire_at")?,
        is_paused: get(row, "paused")?,
    })
}

// A row without times was made known by a release that wrote none, and keeps its cursor.
const REGISTER: &str = concat!(
    "insert into ebbtide_jobs.scheduled_fires as s (name, last_fire_at, rule, job_type, queue)
     values ($1, clock_timestamp(), $2, $3, $4)
     on conflict (name) do update
        set last_fire_at = case when s.rule in ('', excluded.rule) then s.last_fire_at else excluded.last_fire_at end,
            rule = excluded.rule, job_type = excluded.job_type, queue = excluded.queue
     returning ",
    columns!()
);

const TAKE: &str = "update ebbtide_jobs.scheduled_fires s set last_fire_at = $2, next_fire_at = $3
     where s.name = $1 and s.last_fire_at < $2 and not s.paused and $2 <= clock_timestamp() returning 1";

#[async_trait]
impl ScheduleStore for PostgresStorage {
    async fn register(&self, job: &ScheduledJob) -> Result<ScheduleState, Error> {
        let rule = job.schedule.to_string();
        let params = [
            (&job.name as _, Type::TEXT),
            (&rule as _, Type::TEXT),
            (&job.job.job_type.as_str() as _, Type::TEXT),
            (&job.job.queue.as_str() as _, Type::TEXT),
        ];
        let session = self.session().await?;
        let rows = session.rows(REGISTER, &params).await?;
        let mut state = state(row::only(&rows)?)?;
        state.next_fire_at = job.schedule.next_after(state.last_fire_at);
        let query = "update ebbtide_jobs.scheduled_fires s set next_fire_at = $2
                      where s.name = $1 and s.last_fire_at = $3";
        let params = [
            (&job.name as _, Type::TEXT),
            (&state.next_fire_at as _, Type::TIMESTAMPTZ),
            (&state.last_fire_at as _, Type::TIMESTAMPTZ),
        ];
        session.rows(query, &params).await?;
        Ok(state)
    }

    async fn fire(&self, name: &str, at: Timestamp, next: Option<Timestamp>, job: &NewJob) -> Result<Fire, Error> {
        let mut session = self.session().await?;
        let transaction = session.begin().await?;
        let params = [(&name as _, Type::TEXT), (&at as _, Type::TIMESTAMPTZ), (&next as _, Type::TIMESTAMPTZ)];
        if transaction.rows(TAKE, &params).await?.is_empty() {
            return Ok(Fire::NotTaken);
        }
        let fire = match enqueue::enqueue(&transaction, job).await {
            Ok(Enqueued::New(id)) => Fire::Fired(id),
            Ok(Enqueued::Duplicate(holder)) | Err(Error::DuplicateJob { holder }) => Fire::Skipped(holder),
            Err(error) => return Err(error),
        };
        if matches!(fire, Fire::Fired(_)) {
            let query = "update ebbtide_jobs.scheduled_fires s set last_fired_at = $2 where s.name = $1";
            transaction.rows(query, &params[..2]).await?;
        }
        transaction.commit().await?;
        Ok(fire)
    }

    async fn list(&self) -> Result<Vec<ScheduleState>, Error> {
        let query = concat!("select ", columns!(), " from ebbtide_jobs.scheduled_fires s order by s.name");
        self.session().await?.rows(query, &[]).await?.iter().map(state).collect()
    }

    async fn set_paused(&self, name: &str, is_paused: bool) -> Result<bool, Error> {
        let query = "update ebbtide_jobs.scheduled_fires s
                        set last_fire_at = case when s.paused and not $2 then greatest(s.last_fire_at, clock_timestamp())
                                                else s.last_fire_at end,
                            paused = $2
                      where s.name = $1 returning 1";
        let rows = self.session().await?.rows(query, &[(&name, Type::TEXT), (&is_paused, Type::BOOL)]).await?;
        Ok(!rows.is_empty())
    }

    async fn delete(&self, name: &str) -> Result<bool, Error> {
        let query = "delete from ebbtide_jobs.scheduled_fires s where s.name = $1 returning 1";
        Ok(!self.session().await?.rows(query, &[(&name, Type::TEXT)]).await?.is_empty())
    }
}
