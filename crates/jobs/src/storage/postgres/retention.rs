//! Passes of retention and of the window sweep: choose under lock, check again, delete.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::PostgresStorage;
use super::row::{self, get};
use super::session::{Sql as _, Transaction};
use crate::error::Error;
use crate::job::TerminalStatus;
use crate::limits::{DELETE_CHUNK, age_micros};
use crate::storage::fragment::{
    live_child, live_descendant, live_window, old_enough, pending_fan_out, protected, uncollected,
};
use crate::storage::{KindPlan, RetentionPlanStore, RetentionStore, SignalRetentionStore, UniqueLockStore};

/// What a pass runs to choose jobs: status, cutoff, limit. Public so that its plan can be looked at.
pub const RETENTION_CHOICE: &str = concat!(
    "select j.id from ebbtide_jobs.jobs j where ",
    old_enough!("$1", "$2"),
    " and not ",
    protected!("ebbtide_jobs.", "statement_timestamp()", "ebbtide_jobs.jobs c", "ebbtide_jobs.jobs c"),
    " order by j.completed_at, j.id limit $3 for update of j skip locked"
);

// A later statement than the choice, so that it sees what was committed before the rows were locked. All or nothing
// goes by one list of jobs, whose every condition is checked again.
const DELETE: &str = concat!(
    "with doomed as materialized (
        select j.id from ebbtide_jobs.jobs j where j.id = any($3) and ",
    old_enough!("$1", "$2"),
    " and not ",
    protected!("ebbtide_jobs.", "statement_timestamp()", "ebbtide_jobs.jobs c", "ebbtide_jobs.jobs c"),
    "),
    fan_outs as (delete from ebbtide_jobs.fan_outs x using doomed where x.parent_job_id = doomed.id),
    checkpoints as (delete from ebbtide_jobs.checkpoints x using doomed where x.job_id = doomed.id),
    signals as (delete from ebbtide_jobs.signals x using doomed where x.job_id = doomed.id),
    windows as (delete from ebbtide_jobs.unique_locks x using doomed where x.job_id = doomed.id),
    gone as (delete from ebbtide_jobs.jobs x using doomed where x.id = doomed.id returning 1)
    select count(*) as count from gone"
);

/// Dead rows below this many are left to autovacuum.
const VACUUM_DEAD_MIN: i64 = 2000;

async fn cutoff(transaction: &Transaction<'_>, age_us: i64) -> Result<Timestamp, Error> {
    let query = "select statement_timestamp() - $1 * interval '1 microsecond' as cutoff";
    let rows = transaction.planned(query, &[(&age_us, Type::INT8)]).await?;
    get(row::only(&rows)?, "cutoff")
}

async fn delete_terminal(
    transaction: &Transaction<'_>, status: TerminalStatus, cutoff: Timestamp, limit: u32,
) -> Result<u64, Error> {
    let status = status.as_str();
    let choice = [(&status as _, Type::TEXT), (&cutoff as _, Type::TIMESTAMPTZ), (&i64::from(limit) as _, Type::INT8)];
    let chosen = transaction.planned(RETENTION_CHOICE, &choice).await?;
    let ids = chosen.iter().map(|row| get(row, "id")).collect::<Result<Vec<Uuid>, _>>()?;
    let mut deleted = 0;
    for chunk in ids.chunks(DELETE_CHUNK) {
        let params = [(&status as _, Type::TEXT), (&cutoff as _, Type::TIMESTAMPTZ), (&chunk as _, Type::UUID_ARRAY)];
        deleted += count(&transaction.planned(DELETE, &params).await?)?;
    }
    Ok(deleted)
}

fn count(rows: &[tokio_postgres::Row]) -> Result<u64, Error> {
    let count: i64 = get(row::only(rows)?, "count")?;
    Ok(u64::try_from(count).expect("a count is not negative"))
}

#[async_trait]
impl RetentionStore for PostgresStorage {
    async fn delete_terminal_older_than(
        &self, status: TerminalStatus, age: Duration, limit: u32,
    ) -> Result<u64, Error> {
        let (Some(age_us), 1..) = (age_micros(age), limit) else { return Ok(0) };
        let mut session = self.session().await?;
        let transaction = session.begin().await?;
        let cutoff = cutoff(&transaction, age_us).await?;
        let deleted = delete_terminal(&transaction, status, cutoff, limit).await?;
        transaction.commit().await?;
        Ok(deleted)
    }

    async fn delete_terminal_before(
        &self, status: TerminalStatus, cutoff: Timestamp, limit: u32,
    ) -> Result<u64, Error> {
        let mut session = self.session().await?;
        let transaction = session.begin().await?;
        let deleted = delete_terminal(&transaction, status, cutoff, limit).await?;
        transaction.commit().await?;
        Ok(deleted)
    }

    /// Vacuums the tables in which the dead rows are more than a fifth of the live ones, soon after they went and not
    /// when autovacuum comes by. It never cuts a file short: that takes a lock which every enqueue waits for.
    async fn reclaim(&self) -> Result<(), Error> {
        let session = self.session().await?;
        // Or the counts of what was just deleted come some seconds late.
        session.rows("select pg_stat_force_next_flush()", &[]).await?;
        let query = "select c.relname::text as name
                       from pg_class c
                      cross join lateral (values (c.oid), (nullif(c.reltoastrelid, 0))) r (oid)
                      where c.relnamespace = 'ebbtide_jobs'::regnamespace and c.relkind = 'r'
                        and pg_stat_get_dead_tuples(r.oid) > greatest($1, 0.2 * pg_stat_get_live_tuples(r.oid))
                      group by c.relname order by c.relname";
        for row in &session.rows(query, &[(&VACUUM_DEAD_MIN, Type::INT8)]).await? {
            let name: String = get(row, "name")?;
            // Another worker that vacuums does the same work.
            let vacuum = format!("vacuum (truncate false, skip_locked) ebbtide_jobs.\"{name}\"");
            session.rows(&vacuum, &[]).await?;
        }
        Ok(())
    }
}

async fn delete_consumed(transaction: &Transaction<'_>, cutoff: Timestamp, limit: u32) -> Result<u64, Error> {
    let query = "select s.id from ebbtide_jobs.signals s where s.consumed_at is not null and s.consumed_at < $1
                  order by s.consumed_at, s.id limit $2 for update skip locked";
    let params = [(&cutoff as _, Type::TIMESTAMPTZ), (&i64::from(limit) as _, Type::INT8)];
    let chosen = transaction.planned(query, &params).await?;
    let ids = chosen.iter().map(|row| get(row, "id")).collect::<Result<Vec<Uuid>, _>>()?;
    let mut deleted = 0;
    for chunk in ids.chunks(DELETE_CHUNK) {
        let query = "with gone as (
                         delete from ebbtide_jobs.signals s
                          where s.id = any($2) and s.consumed_at is not null and s.consumed_at < $1 returning 1)
                     select count(*) as count from gone";
        let params = [(&cutoff as _, Type::TIMESTAMPTZ), (&chunk as _, Type::UUID_ARRAY)];
        deleted += count(&transaction.planned(query, &params).await?)?;
    }
    Ok(deleted)
}

#[async_trait]
impl SignalRetentionStore for PostgresStorage {
    async fn delete_consumed_older_than(&self, age: Duration, limit: u32) -> Result<u64, Error> {
        let (Some(age_us), 1..) = (age_micros(age), limit) else { return Ok(0) };
        let mut session = self.session().await?;
        let transaction = session.begin().await?;
        let cutoff = cutoff(&transaction, age_us).await?;
        let deleted = delete_consumed(&transaction, cutoff, limit).await?;
        transaction.commit().await?;
        Ok(deleted)
    }

    async fn delete_consumed_before(&self, cutoff: Timestamp, limit: u32) -> Result<u64, Error> {
        let mut session = self.session().await?;
        let transaction = session.begin().await?;
        let deleted = delete_consumed(&transaction, cutoff, limit).await?;
        transaction.commit().await?;
        Ok(deleted)
    }
}

#[async_trait]
impl UniqueLockStore for PostgresStorage {
    async fn delete_expired(&self, limit: u32) -> Result<u64, Error> {
        let mut session = self.session().await?;
        let transaction = session.begin().await?;
        let query = "select l.scope_hash from ebbtide_jobs.unique_locks l where l.expires_at <= statement_timestamp()
                      order by l.expires_at, l.scope_hash limit $1 for update skip locked";
        let chosen = transaction.planned(query, &[(&i64::from(limit), Type::INT8)]).await?;
        let scopes = chosen.iter().map(|row| get(row, "scope_hash")).collect::<Result<Vec<String>, _>>()?;
        let mut deleted = 0;
        for chunk in scopes.chunks(DELETE_CHUNK) {
            let query = "with gone as (
                             delete from ebbtide_jobs.unique_locks l
                              where l.scope_hash = any($1) and l.expires_at <= statement_timestamp() returning 1)
                         select count(*) as count from gone";
            deleted += count(&transaction.planned(query, &[(&chunk, Type::BPCHAR_ARRAY)]).await?)?;
        }
        transaction.commit().await?;
        Ok(deleted)
    }
}

const PLAN: &str = concat!(
    "select count(*) filter (where not is_kept) as due, count(*) filter (where is_kept) as kept,
            count(*) filter (where live_child) as live_child,
            count(*) filter (where live_descendant) as live_descendant,
            count(*) filter (where pending_fan_out) as pending_fan_out,
            count(*) filter (where uncollected) as uncollected,
            count(*) filter (where live_window) as live_window, max(held_until) as held_until
       from (
        select live_child or live_descendant or pending_fan_out or uncollected or live_window as is_kept, p.*,
               (select max(l.expires_at) from ebbtide_jobs.unique_locks l where live_window and l.job_id = p.id)
                   as held_until
          from (
            select j.id, ",
    live_child!("ebbtide_jobs.jobs c"),
    " as live_child, ",
    live_descendant!("ebbtide_jobs.jobs c"),
    " as live_descendant, ",
    pending_fan_out!("ebbtide_jobs."),
    " as pending_fan_out, ",
    uncollected!("ebbtide_jobs."),
    " as uncollected, ",
    live_window!("ebbtide_jobs.", "statement_timestamp()"),
    " as live_window
              from ebbtide_jobs.jobs j, (select statement_timestamp() - $2 * interval '1 microsecond' as cutoff) c
             where ",
    old_enough!("$1", "c.cutoff"),
    " offset 0) p) q"
);

#[async_trait]
impl RetentionPlanStore for PostgresStorage {
    async fn plan_terminal(&self, status: TerminalStatus, age: Duration) -> Result<KindPlan, Error> {
        let Some(age_us) = age_micros(age) else { return Ok(KindPlan::default()) };
        let params = [(&status.as_str() as _, Type::TEXT), (&age_us as _, Type::INT8)];
        let rows = self.session().await?.rows(PLAN, &params).await?;
        let plan = row::only(&rows)?;
        let number = |column: &str| get::<i64>(plan, column).map(|count| u64::try_from(count).unwrap_or(0));
        Ok(KindPlan {
            due: number("due")?,
            kept: number("kept")?,
            by: [
                number("live_child")?,
                number("live_descendant")?,
                number("pending_fan_out")?,
                number("uncollected")?,
                number("live_window")?,
            ],
            held_until: get(plan, "held_until")?,
        })
    }

    async fn plan_consumed(&self, age: Duration) -> Result<u64, Error> {
        let Some(age_us) = age_micros(age) else { return Ok(0) };
        let query = "select count(*) as count from ebbtide_jobs.signals s
                      where s.consumed_at is not null
                        and s.consumed_at < statement_timestamp() - $1 * interval '1 microsecond'";
        count(&self.session().await?.rows(query, &[(&age_us, Type::INT8)]).await?)
    }

    async fn plan_expired(&self) -> Result<u64, Error> {
        let query = "select count(*) as count from ebbtide_jobs.unique_locks l
                      where l.expires_at <= statement_timestamp()";
        count(&self.session().await?.rows(query, &[]).await?)
    }
}
