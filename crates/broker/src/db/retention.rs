//! Twins of `sql/procedures/retention.sql` and `cleanup.sql`, the work list, and the purge of `system_metrics`.

pub mod kept;

use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use ebbtide_sweep::{LineLimit, StepOutcome};
use jiff::Timestamp;
use serde_json::Value;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use tracing::warn;

use super::Sql;
use crate::error::Error;
use crate::id::{PartitionId, QueueId};

/// Partitions read by one page of the work list.
pub const PAGE_ROWS: i32 = 1000;

/// One page of the partitions of a cycle in ascending order, with every cutoff from one clock.
///
/// The first six columns are the plan; a NULL cutoff switches its rule off. The columns after them
/// look at the oldest row only, which tells whether a step has anything to do: stamps never fall along
/// a log, so a fresh first row has no stale row behind it. They are asked for by $4 and $5.
const WORK_LIST: &str = "\
select w.partition_id, w.queue_id, w.all_cutoff, w.completed_cutoff, w.txns_cutoff, w.max_wait_cutoff,
       coalesce(head.created_at < w.all_cutoff, false) as all_due,
       coalesce(head.created_at < w.completed_cutoff, false) as completed_old,
       coalesce(head.end_offset <= (select min(c.committed) from queen.log_consumers c
                                     where c.partition_id = w.partition_id
                                       and head.created_at < w.completed_cutoff), false) as completed_read,
       coalesce(head.created_at < w.max_wait_cutoff, false) as max_wait_due,
       coalesce(txn.created_at < w.txns_cutoff, false) as txns_due
  from (select p.id as partition_id, p.queue_id, p.log_start, p.txns_start,
               case when qq.retention_enabled and qq.retention_seconds > 0
                    then clock.as_of - make_interval(secs => qq.retention_seconds) end as all_cutoff,
               case when qq.retention_enabled and qq.completed_retention_seconds > 0
                    then clock.as_of - make_interval(secs => qq.completed_retention_seconds) end as completed_cutoff,
               clock.as_of - make_interval(secs =>
                   greatest(qq.dedup_window_seconds, qq.completed_retention_seconds, 900)) as txns_cutoff,
               case when qq.max_wait_time_seconds > 0
                    then clock.as_of - make_interval(secs => qq.max_wait_time_seconds) end as max_wait_cutoff
          from queen.log_partitions p
          join queen.queues qq on p.queue_id = qq.id
         cross join (select coalesce($1 /* p_as_of */, now()) as as_of) clock
         where p.id >= $2
         order by p.id
         limit $3) w
  left join lateral (
        select s.created_at, s.end_offset
          from queen.log_segments s
         where $4 and coalesce(w.all_cutoff, w.completed_cutoff, w.max_wait_cutoff) is not null
           and s.partition_id = w.partition_id and s.base_offset >= w.log_start
         order by s.base_offset
         limit 1) head on true
  left join lateral (
        select t.created_at
          from queen.log_txns t
         where $5 and t.partition_id = w.partition_id and t.base_offset >= w.txns_start
         order by t.base_offset
         limit 1) txn on true
 order by w.partition_id";

/// Which oldest rows a page of the work list looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    Segments,
    Sidecar,
}

/// A partition in the plan of a cycle.
#[derive(Clone, Debug)]
pub struct Work {
    pub partition_id: PartitionId,
    pub queue_id: QueueId,
    pub all_cutoff: Option<Timestamp>,
    pub completed_cutoff: Option<Timestamp>,
    pub txns_cutoff: Timestamp,
    pub max_wait_cutoff: Option<Timestamp>,
    /// Whether rule 1 gives up the first segment.
    pub all_due: bool,
    /// Whether the first segment is old enough for rule 2.
    pub completed_old: bool,
    /// Whether every cursor has passed that old first segment, too.
    pub completed_read: bool,
    pub max_wait_due: bool,
    pub txns_due: bool,
}

impl Work {
    fn from_row(row: &Row) -> Self {
        Self {
            partition_id: PartitionId(row.get(0)),
            queue_id: QueueId(row.get(1)),
            all_cutoff: row.get(2),
            completed_cutoff: row.get(3),
            txns_cutoff: row.get(4),
            max_wait_cutoff: row.get(5),
            all_due: row.get(6),
            completed_old: row.get(7),
            completed_read: row.get(8),
            max_wait_due: row.get(9),
            txns_due: row.get(10),
        }
    }
}

/// The partitions from `from` on, at most `rows_max` of them; fewer mean that the list has ended.
///
/// # Errors
/// Whatever the database answered.
pub async fn work_list(
    db: &(impl Sql + Sync), as_of: Option<Timestamp>, from: PartitionId, rows_max: i32, probe: Probe,
) -> Result<Vec<Work>, Error> {
    let (segments, sidecar) = (probe == Probe::Segments, probe == Probe::Sidecar);
    let rows_max = i64::from(rows_max);
    let params = [
        (&as_of as _, Type::TIMESTAMPTZ),
        (&from.0 as _, Type::UUID),
        (&rows_max as _, Type::INT8),
        (&segments as _, Type::BOOL),
        (&sidecar as _, Type::BOOL),
    ];
    let rows = db.rows(WORK_LIST, &params).await?;
    Ok(rows.iter().map(Work::from_row).collect())
}

/// Readies the session for one cycle and returns the cycle's clock: `as_of`, or the database's now.
///
/// A step must not wait for ever for one partition that somebody holds, nor run for ever.
///
/// # Errors
/// Whatever the database answered.
pub async fn open_cycle(
    db: &(impl Sql + Sync), as_of: Option<Timestamp>, lock_ms: u64, statement_ms: u64,
) -> Result<Timestamp, Error> {
    let query = "select coalesce($1, now()), set_config('lock_timeout', $2, false), \
                 set_config('statement_timeout', $3, false)";
    let (lock_ms, statement_ms) = (lock_ms.to_string(), statement_ms.to_string());
    let params = [(&as_of as _, Type::TIMESTAMPTZ), (&lock_ms as _, Type::TEXT), (&statement_ms as _, Type::TEXT)];
    Ok(db.row(query, &params).await?.get(0))
}

/// `queen.log_retention_step_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_retention_step_v1(
    db: &(impl Sql + Sync), pid: PartitionId, all: Option<Timestamp>, completed: Option<Timestamp>, rows_max: i32,
) -> Result<StepOutcome, Error> {
    let query = "select queen.log_retention_step_v1($1, $2, $3, $4)";
    let params = [
        (&pid.0 as _, Type::UUID),
        (&all as _, Type::TIMESTAMPTZ),
        (&completed as _, Type::TIMESTAMPTZ),
        (&rows_max as _, Type::INT4),
    ];
    Ok(outcome("log_retention_step_v1", &db.row(query, &params).await?))
}

/// `queen.log_txns_purge_step_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_txns_purge_step_v1(
    db: &(impl Sql + Sync), pid: PartitionId, cutoff: Option<Timestamp>, rows_max: i32,
) -> Result<StepOutcome, Error> {
    let query = "select queen.log_txns_purge_step_v1($1, $2, $3)";
    let params = [(&pid.0 as _, Type::UUID), (&cutoff as _, Type::TIMESTAMPTZ), (&rows_max as _, Type::INT4)];
    Ok(outcome("log_txns_purge_step_v1", &db.row(query, &params).await?))
}

/// `queen.log_evict_max_wait_step_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_evict_max_wait_step_v1(
    db: &(impl Sql + Sync), pid: PartitionId, cutoff: Option<Timestamp>, rows_max: i32,
) -> Result<StepOutcome, Error> {
    let query = "select queen.log_evict_max_wait_step_v1($1, $2, $3)";
    let params = [(&pid.0 as _, Type::UUID), (&cutoff as _, Type::TIMESTAMPTZ), (&rows_max as _, Type::INT4)];
    Ok(outcome("log_evict_max_wait_step_v1", &db.row(query, &params).await?))
}

/// `queen.log_partition_cleanup_step_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_partition_cleanup_step_v1(
    db: &(impl Sql + Sync), cutoff: Option<Timestamp>, rows_max: i32,
) -> Result<StepOutcome, Error> {
    let query = "select queen.log_partition_cleanup_step_v1($1, $2)";
    let params = [(&cutoff as _, Type::TIMESTAMPTZ), (&rows_max as _, Type::INT4)];
    Ok(outcome("log_partition_cleanup_step_v1", &db.row(query, &params).await?))
}

/// The time `days` before the cycle's clock, by the server's calendar.
///
/// # Errors
/// Whatever the database answered.
pub async fn days_before(db: &(impl Sql + Sync), as_of: Timestamp, days: i32) -> Result<Timestamp, Error> {
    let params = [(&as_of as _, Type::TIMESTAMPTZ), (&days as _, Type::INT4)];
    Ok(db.row("select $1 - make_interval(days => $2)", &params).await?.get(0))
}

/// What one call of the metrics purge deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetricsPurged {
    pub workers: u64,
    pub lag: u64,
    pub parked: u64,
    pub history: u64,
    pub done: bool,
}

/// `queen.cleanup_worker_metrics_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn cleanup_worker_metrics_v1(
    db: &(impl Sql + Sync), days: i32, rows_max: i32,
) -> Result<MetricsPurged, Error> {
    let query = "select queen.cleanup_worker_metrics_v1($1, $2)";
    let row = db.row(query, &[(&days as _, Type::INT4), (&rows_max as _, Type::INT4)]).await?;
    let answer = row.try_get::<_, Option<Value>>(0).ok().flatten().unwrap_or_default();
    let count = |key: &str| answer.get(key).and_then(Value::as_u64).unwrap_or(0);
    Ok(MetricsPurged {
        workers: count("deletedMetrics"),
        lag: count("deletedLagMetrics"),
        parked: count("deletedParkedReplica"),
        history: count("deletedRetentionHistory"),
        done: answer.get("done").and_then(Value::as_bool).unwrap_or(true),
    })
}

/// Deletes a batch of `system_metrics` older than `days`.
///
/// # Errors
/// Whatever the database answered.
pub async fn purge_system_metrics(db: &(impl Sql + Sync), days: i32, rows_max: i32) -> Result<StepOutcome, Error> {
    // As an array, because `in (select ... limit)` may be planned as a join that runs its limit again and again.
    let query = "with gone as (
            delete from queen.system_metrics
             where ctid = any (array(
                 select ctid from queen.system_metrics
                  where \"timestamp\" < now() - make_interval(days => $1)
                  order by \"timestamp\"
                  limit $2))
            returning 1)
        select count(*) from gone";
    let batch = i64::from(rows_max.max(1));
    let row = db.row(query, &[(&days as _, Type::INT4), (&batch as _, Type::INT8)]).await?;
    let deleted = u64::try_from(row.get::<_, i64>(0)).expect("a count is not negative");
    Ok(StepOutcome { deleted, done: deleted < batch.unsigned_abs() })
}

/// A function that was replaced answers so for every partition of every cycle.
static UNREADABLE: LazyLock<Mutex<LineLimit>> = LazyLock::new(|| Mutex::new(LineLimit::new(Duration::from_secs(60))));

/// A step whose answer makes no sense ends its drain: it may have deleted, but nothing says that another would.
fn outcome(function: &'static str, row: &Row) -> StepOutcome {
    let answer = row.try_get::<_, Option<Value>>(0).ok().flatten();
    answer.as_ref().and_then(read_outcome).unwrap_or_else(|| {
        let suppressed = UNREADABLE.lock().expect("no holder panics").admit();
        if let Some(suppressed) = suppressed {
            warn!(target: "retention", function, ?answer, suppressed, "the answer of a step makes no sense");
        }
        StepOutcome::NOTHING
    })
}

fn read_outcome(answer: &Value) -> Option<StepOutcome> {
    let deleted = answer.get("deleted")?.as_u64()?;
    let done = answer.get("done")?.as_bool()?;
    Some(StepOutcome { deleted, done })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_list_joins_by_id_and_never_by_name() {
        assert!(WORK_LIST.contains("join queen.queues qq on p.queue_id = qq.id"));
        assert!(WORK_LIST.contains("coalesce($1 /* p_as_of */, now())"));
        for bridge in ["name", "tenant", "metadata", "using (", "natural join"] {
            assert!(!WORK_LIST.contains(bridge), "{bridge} in the work list");
        }
        let tables = ["queues", "log_partitions", "log_segments", "log_consumers", "log_txns"];
        assert_eq!(WORK_LIST.matches("queen.").count(), tables.len());
        for table in tables {
            assert!(WORK_LIST.contains(&format!("queen.{table} ")), "{table}");
        }
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_none() {
        let read = |text: &str| read_outcome(&serde_json::from_str(text).expect("is JSON"));
        assert_eq!(read(r#"{"deleted":3,"done":false}"#), Some(StepOutcome { deleted: 3, done: false }));
        for text in ["null", "[]", "{}", r#"{"deleted":3}"#, r#"{"done":true}"#, r#"{"deleted":-1,"done":true}"#] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
