//! The controls of the jobs benchmark: the same rows written straight into a table with the same indexes.

use tokio::time::Instant;
use uuid::Uuid;

use super::{BATCH, CALLERS, rate};
use crate::cli::bench::Database;
use crate::db::bench::jobs::JobSession;

async fn session(database: &Database) -> anyhow::Result<JobSession> {
    Ok(JobSession::new(database.target.connect("ebbtide-bench-control").await?).await?)
}

/// Inserts in batches, and then takes the rows through their two further states; the rates of both.
pub(super) async fn batches(database: &Database, jobs: u64) -> anyhow::Result<(f64, f64)> {
    let session = session(database).await?;
    let ids: Vec<Uuid> = std::iter::repeat_with(Uuid::now_v7).take(usize::try_from(jobs)?).collect();
    let chunks = || ids.chunks(usize::try_from(BATCH).expect("it fits"));
    let started = Instant::now();
    for chunk in chunks() {
        session.insert(chunk).await?;
    }
    let inserted = rate(jobs, started);
    let started = Instant::now();
    for chunk in chunks() {
        session.pass(chunk).await?;
    }
    Ok((inserted, rate(jobs, started)))
}

/// Inserts one row a commit, from as many callers as enqueue one job a time.
pub(super) async fn singly(database: &Database, jobs: u64) -> anyhow::Result<f64> {
    let mut sessions = Vec::new();
    for _ in 0..CALLERS {
        sessions.push(session(database).await?);
    }
    let started = Instant::now();
    let callers = sessions.into_iter().map(|session| {
        tokio::spawn(async move {
            for _ in 0..jobs / CALLERS {
                session.insert_one(Uuid::now_v7()).await?;
            }
            anyhow::Ok(())
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await??;
    }
    Ok(rate(jobs, started))
}
