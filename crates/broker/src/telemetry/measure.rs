//! Counts what queues hold and measures what they retain, step by step, into `queen.stats`.

use std::time::Duration;

use ebbtide_sweep::{LineLimit, pause};
use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::db::Db;
use crate::db::stats::{Counted, stats_count_v1};
use crate::error::Error;
use crate::id::DEFAULT_TENANT;

/// Partitions of one step: a transaction that locks none of them.
const PARTITIONS_PER_STEP: i32 = 1000;
/// Steps of one turn, so that a turn ends however fast queues are made.
const STEPS_MAX: usize = 100_000;
/// How often what is due is looked for; an interval that is shorter is its own.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
const ERROR_GAP: Duration = Duration::from_secs(60);

/// Measures each queue once in `interval`, until `cancel` is cancelled. Servers of a database share the work.
pub async fn measure_until(db: Db, interval: Duration, cancel: CancellationToken) {
    let mut errors = LineLimit::new(ERROR_GAP);
    while pause(LOOK_INTERVAL.min(interval), &cancel).await {
        if let Err(error) = turn(&db, interval, &cancel).await
            && let Some(suppressed) = errors.admit()
        {
            warn!(target: "telemetry", %error, suppressed, "queues not measured; tried again");
        }
    }
}

async fn turn(db: &Db, interval: Duration, cancel: &CancellationToken) -> Result<(), Error> {
    for _ in 0..STEPS_MAX {
        if cancel.is_cancelled() || step(db, None, interval.as_secs_f64(), false).await?.is_none_or(|step| step.done) {
            break;
        }
    }
    Ok(())
}

/// Measures every queue anew, for `most` at the longest. Whether all were done, and how many.
///
/// # Errors
/// Whatever the database answered; what was measured stays.
pub async fn measured_all(db: &Db, most: Duration) -> Result<(bool, i64), Error> {
    let started = Instant::now();
    let (mut before, mut queues): (Option<Timestamp>, i64) = (None, 0);
    for _ in 0..STEPS_MAX {
        if let Some(step) = step(db, before, 0.0, true).await? {
            before = Some(step.before);
            queues += step.queues;
            if step.done {
                return Ok((true, queues));
            }
        }
        if most <= started.elapsed() {
            break;
        }
    }
    Ok((false, queues))
}

/// `None` where the queue was deleted meanwhile.
async fn step(db: &Db, before: Option<Timestamp>, age_seconds: f64, waits: bool) -> Result<Option<Counted>, Error> {
    let conn = db.conn().await?;
    match stats_count_v1(&conn, before, age_seconds, PARTITIONS_PER_STEP, waits, DEFAULT_TENANT).await {
        Ok(counted) => Ok(Some(counted)),
        Err(Error::ForeignKey) => Ok(None),
        Err(error) => Err(error),
    }
}
