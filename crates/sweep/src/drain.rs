//! Repeats one bounded step until there is nothing left for it to delete.

use tokio_util::sync::CancellationToken;

/// What one step did: the answer of one transaction.
///
/// Who reads the answer decides what an unreadable one means; [`StepOutcome::NOTHING`] ends the drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepOutcome {
    /// Rows this step deleted for good, at most one batch.
    pub deleted: u64,
    /// Whether the step saw that nothing is left for another one.
    pub done: bool,
}

impl StepOutcome {
    /// Nothing deleted and nothing left.
    pub const NOTHING: Self = Self { deleted: 0, done: true };
}

/// What [`drain`] did before it ended, and why it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a failed step is reported only here"]
pub struct Drained<E> {
    /// Rows deleted by the steps that answered, those before a failed one included.
    pub deleted: u64,
    /// Steps that answered, the one that found nothing included.
    pub steps: u64,
    /// Why no further step was started.
    pub end: End<E>,
}

/// Why [`drain`] started no further step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End<E> {
    /// A step was done, or deleted nothing.
    Done,
    /// The token was cancelled; more may be left.
    Cancelled,
    /// A step failed. Whether that step committed is unknown.
    Failed(E),
}

impl<E> Drained<E> {
    /// The rows deleted, for a caller that ends at the first failure.
    ///
    /// # Errors
    /// The error of the failed step; the count of what went before it is lost.
    pub fn into_result(self) -> Result<u64, E> {
        match self.end {
            End::Done | End::Cancelled => Ok(self.deleted),
            End::Failed(error) => Err(error),
        }
    }
}

/// Runs `step` again and again, each run one bounded transaction, until it is done.
///
/// It ends as well when a step deletes nothing, whatever that step says of being done, so that a step
/// which breaks its contract cannot loop for ever; when a step fails; and when `cancel` is cancelled.
/// The token is read between steps, the first included: a step in flight always runs to its end.
pub async fn drain<E, F, Fut>(cancel: &CancellationToken, mut step: F) -> Drained<E>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<StepOutcome, E>>,
{
    let mut deleted: u64 = 0;
    let mut steps: u64 = 0;
    let end = loop {
        if cancel.is_cancelled() {
            break End::Cancelled;
        }
        let outcome = match step().await {
            Ok(outcome) => outcome,
            Err(error) => break End::Failed(error),
        };
        steps += 1;
        deleted = deleted.saturating_add(outcome.deleted);
        if outcome.done || outcome.deleted == 0 {
            break End::Done;
        }
    };
    Drained { deleted, steps, end }
}
