//! The loop that fires schedules.

use std::sync::Arc;
use std::time::Duration;

use ebbtide_sweep::{LineLimit, pause};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{Fire, ScheduledJob};
use crate::error::Error;
use crate::job::JobId;
use crate::limits::{QueueName, SCHEDULE_LOOK_MAX, SCHEDULE_RETRY_MAX, SCHEDULE_TICK};
use crate::storage::Storage;

const LINE_GAP: Duration = Duration::from_secs(30);

/// A time that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// The schedule.
    pub name: String,
    /// The time.
    pub at: Timestamp,
    /// The queue of its jobs.
    pub queue: QueueName,
    /// What became of it.
    pub fire: Fire,
}

/// Fires the schedules of one worker. Any number of workers may carry the same ones.
pub struct Scheduler {
    storage: Arc<dyn Storage>,
    entries: Vec<Entry>,
}

struct Entry {
    job: ScheduledJob,
    /// The last time that is known to be taken; none until the storage has been asked.
    cursor: Option<Timestamp>,
    /// The wait after the latest failure.
    retry: Option<Duration>,
}

impl Scheduler {
    /// The scheduler of these jobs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the storage has no schedules, [`Error::Invalid`] if two have the same name.
    pub fn new(storage: Arc<dyn Storage>, jobs: Vec<ScheduledJob>) -> Result<Self, Error> {
        if storage.schedules().is_none() {
            return Err(Error::Unsupported("schedules"));
        }
        let is_twice = |(index, job): (usize, &ScheduledJob)| jobs[..index].iter().any(|other| other.name == job.name);
        if jobs.iter().enumerate().any(is_twice) {
            return Err(Error::invalid("schedule", "is named once"));
        }
        let entries = jobs.into_iter().map(|job| Entry { job, cursor: None, retry: None }).collect();
        Ok(Self { storage, entries })
    }

    /// Fires what is due by the storage's clock. Answers the times that were taken here, and how long to wait before
    /// the next look; with it the first error, which kept no other schedule from its turn.
    pub async fn tick(&mut self) -> (Vec<Scheduled>, Duration, Option<Error>) {
        let mut taken = Vec::new();
        let mut wait = SCHEDULE_LOOK_MAX;
        let mut failed = None;
        let now = match self.storage.now().await {
            Ok(now) => now,
            Err(error) => return (taken, SCHEDULE_TICK * 10, Some(error)),
        };
        for entry in &mut self.entries {
            match entry.tick(&*self.storage, now).await {
                Ok((scheduled, next)) => {
                    entry.retry = None;
                    taken.extend(scheduled);
                    let until = next.map_or(SCHEDULE_LOOK_MAX, |next| {
                        Duration::try_from(next.duration_since(now)).unwrap_or(Duration::ZERO)
                    });
                    wait = wait.min(until);
                }
                Err(error) => {
                    let retry = entry.retry.map_or(SCHEDULE_TICK, |retry| (retry * 2).min(SCHEDULE_RETRY_MAX));
                    entry.retry = Some(retry);
                    wait = wait.min(retry);
                    failed.get_or_insert(error);
                }
            }
        }
        (taken, wait.max(SCHEDULE_TICK), failed)
    }

    /// Ticks until `cancel` is cancelled, and hands over each time that was taken here. An idle one asks the storage
    /// for the time twice a minute.
    pub async fn run(&mut self, cancel: &CancellationToken, mut on_taken: impl FnMut(&Scheduled)) {
        if self.entries.is_empty() {
            return;
        }
        let mut lines = LineLimit::new(LINE_GAP);
        loop {
            let (taken, wait, failed) = self.tick().await;
            for scheduled in &taken {
                debug!(target: "jobs", schedule = scheduled.name, at = %scheduled.at, fire = ?scheduled.fire, "fired");
                on_taken(scheduled);
            }
            if let Some(error) = failed
                && let Some(suppressed) = lines.admit()
            {
                warn!(target: "jobs", %error, suppressed, "schedules could not be fired; they are tried again");
            }
            if !pause(wait, cancel).await {
                return;
            }
        }
    }
}

impl Entry {
    /// Takes the latest time that is due, if there is one. Answers the next one.
    async fn tick(
        &mut self, storage: &dyn Storage, now: Timestamp,
    ) -> Result<(Option<Scheduled>, Option<Timestamp>), Error> {
        let store = storage.schedules().ok_or(Error::Unsupported("schedules"))?;
        let cursor = match self.cursor {
            Some(cursor) => cursor,
            None => store.register(&self.job).await?.last_fire_at,
        };
        self.cursor = Some(cursor);
        let ScheduledJob { name, schedule, job } = &self.job;
        let Some(at) = schedule.due(cursor, now) else { return Ok((None, schedule.next_after(cursor))) };
        let mut job = job.clone();
        job.id = JobId::new();
        let queue = job.queue.clone();
        let next = schedule.next_after(at);
        let fire = store.fire(name, at, next, &job).await?;
        // Whoever took it: it will not be fired again.
        self.cursor = Some(at);
        let scheduled = (fire != Fire::NotTaken).then(|| Scheduled { name: name.clone(), at, queue, fire });
        Ok((scheduled, next))
    }
}
