//! What the next tick would take, and what holds the rest. It deletes nothing.

use super::policy::Retention;
use crate::error::Error;
use crate::job::TerminalStatus;
use crate::storage::{KindPlan, Storage};

/// A dry run. A kind whose window is off is `None`: it is kept for ever and was not looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Completed jobs.
    pub completed: Option<KindPlan>,
    /// Failed jobs.
    pub failed: Option<KindPlan>,
    /// Cancelled jobs.
    pub cancelled: Option<KindPlan>,
    /// Consumed signals that would go. Those of the jobs above go with their jobs and may be among them.
    pub consumed_signals: Option<u64>,
    /// Deduplication windows that have passed, which the sweep of its own would take.
    pub expired_locks: u64,
}

impl Plan {
    /// The jobs of one status.
    pub fn kind(&self, status: TerminalStatus) -> Option<&KindPlan> {
        match status {
            TerminalStatus::Completed => self.completed.as_ref(),
            TerminalStatus::Failed => self.failed.as_ref(),
            TerminalStatus::Cancelled => self.cancelled.as_ref(),
        }
    }
}

/// Counts what a tick of `policy` would delete and what it would keep, and why.
///
/// # Errors
/// [`Error::Unsupported`] if the storage cannot say beforehand; whatever the storage failed with.
pub async fn plan(storage: &dyn Storage, policy: &Retention) -> Result<Plan, Error> {
    let store = storage.retention_plan().ok_or(Error::Unsupported("retention plans"))?;
    let policy = policy.effective_on(storage);
    let mut kinds = [None; 3];
    for (status, kind) in TerminalStatus::ALL.into_iter().zip(&mut kinds) {
        if let Some(window) = policy.window(status) {
            *kind = Some(store.plan_terminal(status, window).await?);
        }
    }
    let consumed_signals = match policy.signal_window() {
        Some(window) => Some(store.plan_consumed(window).await?),
        None => None,
    };
    let [completed, failed, cancelled] = kinds;
    Ok(Plan { completed, failed, cancelled, consumed_signals, expired_locks: store.plan_expired().await? })
}
