//! Gives the space of deleted rows back to new ones, soon after they went and not when autovacuum comes by.

use std::time::Duration;

use metrics::{counter, histogram};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::db::Target;
use crate::db::space;
use crate::error::Error;

/// Dead rows below this many are left to autovacuum.
const DEAD_MIN: i64 = 2_000;
/// A table is vacuumed when its dead rows are more than this share of its live ones: it stays within that of its
/// size, and no pass over its indexes is made for a handful of rows.
const DEAD_SHARE: f64 = 0.2;
/// Between the starts of two vacuums.
const GAP: Duration = Duration::from_secs(5);
/// The same while an old snapshot keeps every dead row where it is.
const GAP_HELD: Duration = Duration::from_secs(60);

/// The vacuums of a leader, one at a time, beside its cycles.
pub(super) struct Vacuums {
    target: Target,
    running: Option<JoinHandle<()>>,
    started: Option<Instant>,
}

impl Vacuums {
    pub(super) fn new(target: Target) -> Self {
        Self { target, running: None, started: None }
    }

    /// Starts a vacuum of whatever needs one, unless one is under way or just was.
    pub(super) fn start(&mut self, is_horizon_held: bool, cancel: &CancellationToken) {
        let gap = if is_horizon_held { GAP_HELD } else { GAP };
        let is_early = self.started.is_some_and(|at| at.elapsed() < gap);
        if is_early || self.running.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        self.started = Some(Instant::now());
        let (target, cancel) = (self.target.clone(), cancel.clone());
        self.running = Some(tokio::spawn(async move {
            if let Err(error) = vacuum(&target, &cancel).await {
                warn!(target: "retention", %error, "vacuum failed; autovacuum will come by");
            }
        }));
    }

    /// Waits for the vacuum that is under way; a cancelled one ends soon.
    pub(super) async fn finish(&mut self) {
        if let Some(task) = self.running.take() {
            let _ = task.await;
        }
    }
}

/// Vacuums the tables that need it.
pub(super) async fn vacuum(target: &Target, cancel: &CancellationToken) -> Result<(), Error> {
    let client = target.connect("ebbtide-vacuum").await?;
    for table in space::to_vacuum(&client, DEAD_MIN, DEAD_SHARE).await? {
        let started = Instant::now();
        let token = client.cancel_token();
        tokio::select! {
            done = space::vacuum(&client, table) => done?,
            () = cancel.cancelled() => {
                // The backend would go on without its client.
                let _ = token.cancel_query(target.connector()).await;
                return Ok(());
            }
        }
        let elapsed = started.elapsed();
        counter!("ebbtide_retention_vacuums_total", "table" => table).increment(1);
        histogram!("ebbtide_retention_vacuum_seconds").record(elapsed.as_secs_f64());
        debug!(target: "retention", table, elapsed_ms = elapsed.as_millis(), "vacuumed");
    }
    Ok(())
}
