//! Starting many children at once, and joining them again: what is asked for, and what came of it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use crate::enqueue::NewJob;
use crate::error::Error;
use crate::job::{Claim, JobId, JobStatus};
use crate::limits::{ENQUEUE_BATCH_MAX, JobType, QueueName, RETRIES_MAX};

/// The name under which a parent waits for its children: no signal can have it.
pub const WAITS_FOR_CHILDREN: &str = "_fanout";
/// The name of a fan-out's record among the steps of a run.
pub const FAN_OUT_CHECKPOINT: &str = "fanout";

/// The identity of a fan-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FanOutId(pub(crate) Uuid);

impl FanOutId {
    /// The UUID.
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl FanOutId {
    /// The fan-out that a run's record names.
    pub(crate) fn of_record(result: Option<&[u8]>) -> Result<Self, Error> {
        let text = result.and_then(|text| std::str::from_utf8(text).ok());
        text.and_then(|text| text.parse().ok()).ok_or_else(|| Error::Corrupt("a fan-out's record".to_owned()))
    }
}

impl fmt::Display for FanOutId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for FanOutId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Uuid::parse_str(text).map(Self).map_err(|_| Error::invalid("fan-out id", "is a UUID"))
    }
}

/// When a fan-out is decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FanOutStrategy {
    /// Failed with the first child that fails or is cancelled, completed with the last.
    FailFast,
    /// Completed when all children have finished, however they did.
    CollectAll,
    /// Failed as soon as this share of the children, rounded up, can no longer complete; otherwise completed when
    /// all have finished. The share is between 0 and 1.
    Threshold(f64),
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl FanOutStrategy {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::FailFast => "fail_fast",
            Self::CollectAll => "collect_all",
            Self::Threshold(_) => "threshold",
        }
    }

    pub(crate) const fn threshold(self) -> f64 {
        match self {
            Self::Threshold(share) => share,
            Self::FailFast | Self::CollectAll => 1.0,
        }
    }
}

/// How children are started and joined. What is set here goes for every child.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "it does nothing until children are started with it"]
pub struct FanOut {
    pub(crate) strategy: FanOutStrategy,
    queue: Option<QueueName>,
    priority: Option<i32>,
    retries: Option<u32>,
    timeout: Option<Duration>,
    pub(crate) decided_within: Option<Duration>,
    pub(crate) cancel_on_fail: bool,
}

impl FanOut {
    fn new(strategy: FanOutStrategy) -> Self {
        Self {
            strategy,
            queue: None,
            priority: None,
            retries: None,
            timeout: None,
            decided_within: None,
            cancel_on_fail: false,
        }
    }

    /// Fails with the first child that fails or is cancelled.
    pub fn fail_fast() -> Self {
        Self::new(FanOutStrategy::FailFast)
    }

    /// Waits for all children, however they finish.
    pub fn collect_all() -> Self {
        Self::new(FanOutStrategy::CollectAll)
    }

    /// Needs this share of the children to complete, rounded up: of 10 children, 0.75 needs 8.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless it lies between 0 and 1.
    pub fn threshold(share: f64) -> Result<Self, Error> {
        if !(0.0..=1.0).contains(&share) {
            return Err(Error::invalid("threshold", "lies between 0 and 1"));
        }
        Ok(Self::new(FanOutStrategy::Threshold(share)))
    }

    /// The queue of the children. Default: each child's own.
    pub fn queue(mut self, queue: QueueName) -> Self {
        self.queue = Some(queue);
        self
    }

    /// The priority of the children. Default: each child's own.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Retries of the children after their first run; more than 100 means 100. Default: each child's own.
    pub fn retries(mut self, retries: u32) -> Self {
        self.retries = Some(retries.min(RETRIES_MAX));
        self
    }

    /// Limit of one run of a child; zero means none. Default: each child's own.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Fails if it is not decided this long after its start, within the granularity of the recovery, 5 seconds.
    /// Default: it waits for ever.
    pub fn decided_within(mut self, wait: Duration) -> Self {
        self.decided_within = (!wait.is_zero()).then_some(wait);
        self
    }

    /// Cancels the children that have not finished once it fails, those that run on other workers too. Default: they
    /// go on.
    pub fn cancel_on_parent_failure(mut self) -> Self {
        self.cancel_on_fail = true;
        self
    }

    /// The strategy.
    pub fn strategy(&self) -> FanOutStrategy {
        self.strategy
    }

    /// Whether the remaining children are cancelled once it fails.
    pub fn cancels_on_failure(&self) -> bool {
        self.cancel_on_fail
    }

    /// The queue in which a child runs.
    pub(crate) fn queue_of<'a>(&'a self, child: &'a NewJob) -> &'a QueueName {
        self.queue.as_ref().unwrap_or(child.queue())
    }

    /// Makes these jobs its children: gives them what is set here, and the unique key of a child.
    pub(crate) fn adopt(&self, id: FanOutId, children: &[NewJob]) -> Result<Vec<NewJob>, Error> {
        if children.is_empty() || ENQUEUE_BATCH_MAX < children.len() {
            return Err(Error::invalid("children", "are between 1 and 10000"));
        }
        if let Some(index) = children.iter().position(NewJob::is_windowed) {
            return Err(Error::BatchWindowedDedup { index });
        }
        let adopt = |(index, child): (usize, &NewJob)| {
            let mut child = child.clone();
            child.unique_key = format!("fanout-{id}-{index}");
            if let Some(queue) = &self.queue {
                child.queue = queue.clone();
            }
            child.priority = self.priority.unwrap_or(child.priority);
            child.max_retries = self.retries.unwrap_or(child.max_retries);
            if let Some(timeout) = self.timeout {
                child.timeout = (!timeout.is_zero()).then_some(timeout);
            }
            child
        };
        Ok(children.iter().enumerate().map(adopt).collect())
    }
}

/// How far a fan-out is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FanOutStatus {
    /// Children are still needed.
    Pending,
    /// Decided: enough children completed.
    Completed,
    /// Decided: too many children did not complete, or its time ran out.
    Failed,
    /// Its parent was cancelled.
    Cancelled,
}

impl FanOutStatus {
    /// Its name in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn from_storage(name: &str) -> Result<Self, Error> {
        let all = [Self::Pending, Self::Completed, Self::Failed, Self::Cancelled];
        let found = all.into_iter().find(|status| status.as_str() == name);
        found.ok_or_else(|| Error::Corrupt(format!("status {name} of a fan-out")))
    }
}

/// A child as its parent finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChildOutcome {
    /// Its place among the children, from 0.
    pub index: u32,
    /// The job.
    pub id: JobId,
    /// The name of its handler.
    pub job_type: JobType,
    /// What it is doing, or how it finished.
    pub status: JobStatus,
    /// What it returned, as stored.
    pub result: Option<Vec<u8>>,
    /// Its last error.
    pub error: Option<String>,
}

/// A decided fan-out with its children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FanOutOutcome {
    /// How it was decided.
    pub status: FanOutStatus,
    /// How many children were started.
    pub total: u32,
    /// The children that are there, by index. Fewer than `total` if somebody deleted some by hand.
    pub children: Vec<ChildOutcome>,
}

impl FanOutOutcome {
    /// The first child that is not there.
    pub fn missing(&self) -> Option<u32> {
        (0..self.total).find(|index| !self.children.iter().any(|child| child.index == *index))
    }
}

/// What became of a join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joined {
    /// It is decided.
    Decided(FanOutOutcome),
    /// It is not: the job waits, and the claim is over.
    Suspended,
}

/// What a lost process, or a writer that is none of ours, may have left behind. Each is looked for by itself, so that
/// one that fails keeps no other from its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FanOutScan {
    /// Pending fan-outs all of whose children are counted: they are decided.
    Counted,
    /// Pending fan-outs whose time has run out: they fail.
    TimedOut,
    /// Pending fan-outs of a live parent with fewer children than were started, past the stale age: they fail.
    Incomplete,
    /// Pending fan-outs without any child whose parent has finished, past the stale age: they are cancelled.
    Abandoned,
    /// Unfinished children of failed fan-outs that asked for them to be cancelled.
    Losers,
    /// Parents that wait for children although all is decided: they are woken.
    Joinable,
}

impl FanOutScan {
    /// All of them, in the order in which they are of use to each other.
    pub const ALL: [Self; 6] =
        [Self::Counted, Self::TimedOut, Self::Incomplete, Self::Abandoned, Self::Losers, Self::Joinable];

    /// Its name in logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counted => "counted",
            Self::TimedOut => "timed_out",
            Self::Incomplete => "incomplete",
            Self::Abandoned => "abandoned",
            Self::Losers => "losers",
            Self::Joinable => "joinable",
        }
    }
}

/// What one look did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settled {
    /// Fan-outs decided, parents woken or, of [`FanOutScan::Losers`], fan-outs whose children were cancelled.
    pub rows: u64,
    /// The queues of the parents that were woken, each once.
    pub woken: Vec<QueueName>,
}

/// The capability to start children and to join them.
///
/// A child is counted by the statement that finishes it, whoever does: its worker, the reaper or an operator. What
/// decides a fan-out wakes its parent, unless that is paused.
#[async_trait]
pub trait FanOutStore: Send + Sync {
    /// Starts the children, records that under `call_index`, and suspends the parent, in one transaction. Children
    /// inherit tenant and labels that they do not have themselves.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over, [`Error::Invalid`] without children or with more than 10,000,
    /// [`Error::BatchWindowedDedup`] if one has a deduplication window; nothing is written then.
    async fn start(
        &self, claim: &Claim, call_index: i32, fan_out: &FanOut, children: &[NewJob],
    ) -> Result<FanOutId, Error>;

    /// The outcome of a fan-out of the claimed job, or suspends it until there is one.
    ///
    /// # Errors
    /// [`Error::JobNotOwned`] if the claim is over, [`Error::FanOutNotFound`].
    async fn join(&self, claim: &Claim, id: FanOutId) -> Result<Joined, Error>;

    /// Repairs at most `limit` rows of one kind. `stale_age` is how old a fan-out must be to count as left behind.
    ///
    /// # Errors
    /// If the storage failed; nothing is repaired then.
    async fn settle(&self, scan: FanOutScan, stale_age: Duration, limit: u32) -> Result<Settled, Error>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enqueue::EnqueueOptions;

    fn child() -> NewJob {
        NewJob::new("t", &1, EnqueueOptions::new().priority(3).retries(7)).unwrap()
    }

    #[test]
    fn what_is_set_goes_for_every_child_and_the_rest_is_its_own() {
        let id = FanOutId(Uuid::now_v7());
        let plain = FanOut::fail_fast().adopt(id, &[child(), child()]).unwrap();
        assert_eq!((plain[1].priority, plain[1].max_retries), (3, 7));
        assert_eq!(plain[1].unique_key, format!("fanout-{id}-1"));
        let queue = QueueName::new("q").unwrap();
        let set = FanOut::collect_all().queue(queue.clone()).priority(9).retries(0).timeout(Duration::from_secs(1));
        let set = set.adopt(id, &[child()]).unwrap();
        assert_eq!((&set[0].queue, set[0].priority, set[0].max_retries), (&queue, 9, 0));
        assert_eq!(set[0].timeout, Some(Duration::from_secs(1)));
    }

    #[test]
    fn children_are_bounded_and_shares_are_shares() {
        let id = FanOutId(Uuid::now_v7());
        assert!(FanOut::fail_fast().adopt(id, &[]).is_err());
        let windowed = NewJob::new("t", &1, EnqueueOptions::new().unique_for(Duration::from_secs(1))).unwrap();
        let refused = FanOut::fail_fast().adopt(id, &[child(), windowed]);
        assert!(matches!(refused, Err(Error::BatchWindowedDedup { index: 1 })));
        for share in [-0.1, 1.1, f64::NAN] {
            assert!(FanOut::threshold(share).is_err(), "{share}");
        }
        assert!(FanOut::threshold(0.0).is_ok() && FanOut::threshold(1.0).is_ok());
    }
}
