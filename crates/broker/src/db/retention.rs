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
use uuid::Uuid;

use super::Sql;
use crate::error::Error;
use crate::id::{PartitionId, QueueId};

/// Every queue with its cutoffs from one clock; a NULL cutoff switches its rule off.
macro_rules! policy {
    () => {
        "with policy as materialized (
    select qq.id, clock.as_of,
           case when qq.retention_enabled and qq.retention_seconds > 0
                then clock.as_of - make_interval(secs => qq.retention_seconds) end as all_cutoff,
           case when qq.retention_enabled and qq.completed_retention_seconds > 0
                then clock.as_of - make_interval(secs => qq.completed_retention_seconds) end as completed_cutoff,
           clock.as_of - make_interval(secs =>
               greatest(qq.dedup_window_seconds, qq.completed_retention_seconds, 900)) as txns_cutoff,
           case when qq.max_wait_time_seconds > 0
                then clock.as_of - make_interval(secs => qq.max_wait_time_seconds) end as max_wait_cutoff
      from queen.queues qq
     cross join (select coalesce($1 /* p_as_of */, now()) as as_of) clock
)"
    };
}

/// When something in a queue comes due at the earliest, for the queues of which that is not known.
///
/// $2 to $4 are what is known: the queue, the policy for which it holds, and until when nothing is due. A row
/// comes due when its cutoff passes its stamp. What is pushed from now on is younger than any cutoff, but for
/// a push that has taken its stamp and not committed: no statement is under way for longer than a minute.
/// Nothing is known for longer than five minutes, whatever was done to the stamps by hand.
pub const QUIET: &str = concat!(
    policy!(),
    ",
awake as materialized (
    select qq.*
      from (select policy.*, hashtextextended(concat_ws(',', as_of - all_cutoff, '/', as_of - completed_cutoff, '/',
                   as_of - txns_cutoff, '/', as_of - max_wait_cutoff), 0) as version from policy) qq
      left join unnest($2::uuid[], $3::bigint[], $4::timestamptz[]) k (id, version, until) on k.id = qq.id
     where k.id is null or k.version <> qq.version or k.until <= qq.as_of
)
select qq.id, qq.version,
       nullif(least(live.oldest + (qq.as_of - greatest(qq.all_cutoff, qq.completed_cutoff, qq.max_wait_cutoff)),
                    held.oldest + (qq.as_of - greatest(qq.all_cutoff, qq.max_wait_cutoff)),
                    txn.oldest + (qq.as_of - qq.txns_cutoff),
                    qq.as_of - interval '1 minute' + (qq.as_of
                        - greatest(qq.all_cutoff, qq.completed_cutoff, qq.max_wait_cutoff, qq.txns_cutoff)),
                    qq.as_of + interval '5 minutes'), '-infinity') as until,
       coalesce(live.oldest < greatest(qq.all_cutoff, qq.completed_cutoff, qq.max_wait_cutoff), false) as live_due,
       coalesce(held.oldest < greatest(qq.all_cutoff, qq.max_wait_cutoff), false) as held_due,
       coalesce(txn.oldest < qq.txns_cutoff, false) as txns_due
  from awake qq
  left join lateral (
        select p.oldest_live_at as oldest from queen.log_partitions p
         where p.queue_id = qq.id and p.oldest_live_at is not null and p.held_next is null
         order by p.queue_id, p.oldest_live_at limit 1) live on true
  left join lateral (
        select p.oldest_live_at as oldest from queen.log_partitions p
         where p.queue_id = qq.id and p.held_next is not null
         order by p.queue_id, p.oldest_live_at limit 1) held on true
  left join lateral (
        select p.oldest_txn_at as oldest from queen.log_partitions p
         where p.queue_id = qq.id and p.oldest_txn_at is not null
         order by p.queue_id, p.oldest_txn_at limit 1) txn on true"
);

/// What a cycle has to do: the partitions that are due, in ascending order.
///
/// The first six columns are the plan. The others say which rules have something to do, by the stamps that
/// pushes and steps keep: asking for them costs what is due and one probe for each of the queues $5 (segments), $6
/// (held ones) and $7 (the sidecar). $2 says behind which queue to begin, so that one long backlog starves no other.
pub const WORK_LIST: &str = concat!(
    policy!(),
    ",
stale as materialized (
    select w.* from (select * from policy where id = any($5::uuid[] || $6::uuid[] || $7::uuid[]) order by (id <= $2), id) qq
     cross join lateral (
        (select p.id, p.queue_id, p.oldest_live_at, p.oldest_txn_at, p.held_next from queen.log_partitions p
          where qq.id = any($5) and p.queue_id = qq.id and p.held_next is null
            and p.oldest_live_at < greatest(qq.all_cutoff, qq.completed_cutoff, qq.max_wait_cutoff)
            and p.id <> all($3)
          order by p.queue_id, p.oldest_live_at limit $4)
        union all
        (select p.id, p.queue_id, p.oldest_live_at, p.oldest_txn_at, p.held_next from queen.log_partitions p
          where qq.id = any($6) and p.queue_id = qq.id and p.held_next is not null
            and p.oldest_live_at < greatest(qq.all_cutoff, qq.max_wait_cutoff)
            and p.id <> all($3)
          order by p.queue_id, p.oldest_live_at limit $4)
        union all
        (select p.id, p.queue_id, p.oldest_live_at, p.oldest_txn_at, p.held_next from queen.log_partitions p
          where qq.id = any($7) and p.queue_id = qq.id and p.oldest_txn_at < qq.txns_cutoff
            and p.id <> all($3)
          order by p.queue_id, p.oldest_txn_at limit $4)
     ) w
     limit $4
),
reopened as materialized (
    (select p.id, p.queue_id, p.oldest_live_at, p.oldest_txn_at, p.held_next from queen.log_partitions p
      where p.recheck_at <= (select as_of from policy limit 1) and p.id <> all($3)
      order by p.recheck_at limit $4)
    union
    select p.id, p.queue_id, p.oldest_live_at, p.oldest_txn_at, p.held_next
      from (select e.partition_id from queen.due_events e limit $4) e
      join queen.log_partitions p on p.id = e.partition_id
     where p.id <> all($3)
)
select d.id, d.queue_id, qq.all_cutoff, qq.completed_cutoff, qq.txns_cutoff, qq.max_wait_cutoff,
       d.is_reopened or coalesce(d.oldest_live_at < qq.all_cutoff, false)
           or coalesce(d.held_next is null and d.oldest_live_at < qq.completed_cutoff, false) as rules_due,
       coalesce(d.oldest_txn_at < qq.txns_cutoff, false) as txns_due,
       coalesce(d.oldest_live_at < qq.max_wait_cutoff, false) as max_wait_due,
       d.is_reopened, (select count(*) from stale) >= $4 as is_full
  from (select distinct on (f.id) f.*
          from (select s.*, false as is_reopened from stale s
                union all select r.*, true from reopened r) f
         order by f.id, f.is_reopened desc) d
  join policy qq on d.queue_id = qq.id
 order by d.id"
);

/// A partition in the plan of a cycle.
#[derive(Clone, Debug)]
pub struct Work {
    pub partition_id: PartitionId,
    pub queue_id: QueueId,
    pub all_cutoff: Option<Timestamp>,
    pub completed_cutoff: Option<Timestamp>,
    pub txns_cutoff: Timestamp,
    pub max_wait_cutoff: Option<Timestamp>,
    /// Whether rule 1 or rule 2 may have something to delete.
    pub rules_due: bool,
    pub txns_due: bool,
    pub max_wait_due: bool,
    /// Whether it is here because a hold may have ended, too, and not by its queue's turn alone.
    pub is_reopened: bool,
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
            rules_due: row.get(6),
            txns_due: row.get(7),
            max_wait_due: row.get(8),
            is_reopened: row.get(9),
        }
    }
}

/// The plan of one cycle.
#[derive(Clone, Debug, Default)]
pub struct WorkList {
    pub works: Vec<Work>,
    /// Whether more may be due than fits; the rest has its turn in the next cycle.
    pub is_full: bool,
}

/// Until when nothing of a queue comes due, as long as its policy stays what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quiet {
    /// Names the policy.
    pub version: i64,
    pub until: Timestamp,
}

/// What there is to know of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learnt {
    pub queue_id: QueueId,
    /// [`Timestamp::MIN`] where nothing is known.
    pub quiet: Quiet,
    /// Whether segments, held ones, or sidecar rows are due.
    pub live_due: bool,
    pub held_due: bool,
    pub txns_due: bool,
}

/// Queues by what is due in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Awake {
    pub live: Vec<QueueId>,
    pub held: Vec<QueueId>,
    pub txns: Vec<QueueId>,
}

/// The queues of which `known` does not say that nothing is due: for each when something is, at the earliest.
///
/// # Errors
/// Whatever the database answered.
pub async fn quiet(
    db: &(impl Sql + Sync), as_of: Option<Timestamp>, known: impl Iterator<Item = (QueueId, Quiet)>,
) -> Result<Vec<Learnt>, Error> {
    let (mut ids, mut versions, mut untils) = (Vec::new(), Vec::new(), Vec::new());
    for (id, Quiet { version, until }) in known {
        ids.push(id.0);
        versions.push(version);
        untils.push(until);
    }
    let params = [
        (&as_of as _, Type::TIMESTAMPTZ),
        (&ids as _, Type::UUID_ARRAY),
        (&versions as _, Type::INT8_ARRAY),
        (&untils as _, Type::TIMESTAMPTZ_ARRAY),
    ];
    let rows = db.rows(QUIET, &params).await?;
    Ok(rows
        .iter()
        .map(|row| {
            let until: Option<Timestamp> = row.get(2);
            Learnt {
                queue_id: QueueId(row.get(0)),
                quiet: Quiet { version: row.get(1), until: until.unwrap_or(Timestamp::MIN) },
                live_due: row.get(3),
                held_due: row.get(4),
                txns_due: row.get(5),
            }
        })
        .collect())
}

/// What is due in the queues `awake`, at most `due_max` partitions and as many again that are to be looked at whatever their
/// stamps say, beginning behind the queue `behind` and leaving out `except`.
///
/// # Errors
/// Whatever the database answered.
pub async fn work_list(
    db: &(impl Sql + Sync), as_of: Option<Timestamp>, awake: &Awake, behind: QueueId, except: &[PartitionId],
    due_max: i32,
) -> Result<WorkList, Error> {
    let ids = |queues: &[QueueId]| queues.iter().map(|id| id.0).collect::<Vec<Uuid>>();
    let (live, held, txns) = (ids(&awake.live), ids(&awake.held), ids(&awake.txns));
    let except: Vec<Uuid> = except.iter().map(|id| id.0).collect();
    let due_max = i64::from(due_max);
    let params = [
        (&as_of as _, Type::TIMESTAMPTZ),
        (&behind.0 as _, Type::UUID),
        (&except as _, Type::UUID_ARRAY),
        (&due_max as _, Type::INT8),
        (&live as _, Type::UUID_ARRAY),
        (&held as _, Type::UUID_ARRAY),
        (&txns as _, Type::UUID_ARRAY),
    ];
    let rows = db.rows(WORK_LIST, &params).await?;
    Ok(WorkList {
        works: rows.iter().map(Work::from_row).collect(),
        is_full: rows.first().is_some_and(|row| row.get(10)),
    })
}

/// Readies the session for one cycle. Returns the cycle's clock, which is `as_of` or the database's now, and the
/// backend that serves the session.
///
/// A step must not wait for ever for one partition that somebody holds, nor run for ever.
///
/// # Errors
/// Whatever the database answered.
pub async fn open_cycle(
    db: &(impl Sql + Sync), as_of: Option<Timestamp>, lock_ms: u64, statement_ms: u64,
) -> Result<(Timestamp, i32), Error> {
    // The session is retention's own. Whatever the statistics say, its statements are index probes.
    let query = "select coalesce($1, now()), set_config('lock_timeout', $2, false), \
                 set_config('statement_timeout', $3, false), set_config('enable_seqscan', 'off', false), \
                 set_config('enable_bitmapscan', 'off', false), set_config('jit', 'off', false), \
                 pg_backend_pid()";
    let (lock_ms, statement_ms) = (lock_ms.to_string(), statement_ms.to_string());
    let params = [(&as_of as _, Type::TIMESTAMPTZ), (&lock_ms as _, Type::TEXT), (&statement_ms as _, Type::TEXT)];
    let row = db.row(query, &params).await?;
    Ok((row.get(0), row.get(6)))
}

/// What one step took from the front of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortened {
    pub outcome: StepOutcome,
    /// Offsets that went before a group had read them, added up over the groups.
    pub skipped: u64,
}

/// `queen.log_retention_step_v1`
///
/// # Errors
/// Whatever the database answered.
pub async fn log_retention_step_v1(
    db: &(impl Sql + Sync), pid: PartitionId, all: Option<Timestamp>, completed: Option<Timestamp>, rows_max: i32,
) -> Result<Shortened, Error> {
    let query = "select queen.log_retention_step_v1($1, $2, $3, $4)";
    let params = [
        (&pid.0 as _, Type::UUID),
        (&all as _, Type::TIMESTAMPTZ),
        (&completed as _, Type::TIMESTAMPTZ),
        (&rows_max as _, Type::INT4),
    ];
    Ok(shortened("log_retention_step_v1", &db.row(query, &params).await?))
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
) -> Result<Shortened, Error> {
    let query = "select queen.log_evict_max_wait_step_v1($1, $2, $3)";
    let params = [(&pid.0 as _, Type::UUID), (&cutoff as _, Type::TIMESTAMPTZ), (&rows_max as _, Type::INT4)];
    Ok(shortened("log_evict_max_wait_step_v1", &db.row(query, &params).await?))
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

fn shortened(function: &'static str, row: &Row) -> Shortened {
    let answer = row.try_get::<_, Option<Value>>(0).ok().flatten();
    let skipped = answer.and_then(|answer| answer.get("skipped")?.as_u64()).unwrap_or(0);
    Shortened { outcome: outcome(function, row), skipped }
}

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
        for (query, tables) in [
            (WORK_LIST, [("queues", 1), ("log_partitions", 5), ("due_events", 1)]),
            (QUIET, [("queues", 1), ("log_partitions", 3), ("due_events", 0)]),
        ] {
            assert_eq!(query.matches("p.queue_id = qq.id").count(), 3);
            assert!(query.contains("coalesce($1 /* p_as_of */, now())"));
            for bridge in ["name", "tenant", "metadata", "using (", "natural join"] {
                assert!(!query.contains(bridge), "{bridge} in the work list");
            }
            for (table, times) in tables {
                assert_eq!(query.matches(&format!("queen.{table} ")).count(), times, "{table}");
            }
            let all: usize = tables.iter().map(|(_, times)| times).sum();
            assert_eq!(query.matches("queen.").count(), all, "and it reads nothing else");
        }
        assert_eq!(WORK_LIST.matches("join policy qq on d.queue_id = qq.id").count(), 1);
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
