//! What a claimed job has to pass before its handler is called: the worker's own rate, the caps, and the rates of the
//! fleet.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ebbtide_sweep::Pace;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::engine::Engine;
use super::heartbeat_period;
use crate::error::Error;
use crate::gate::{Cap, RateLimit, Rated};
use crate::job::{Claim, Job};
use crate::limits::{QueueName, SLOT_SWEEP_INTERVAL, SWEEP_BATCH};
use crate::storage::GateStore;

/// How long a job waits that found a cap full.
const CAP_WAIT: Duration = Duration::from_millis(200);
/// Batches of one sweep; what is left then is for the next one.
const ROUNDS_MAX: u32 = 100;

/// Why a job was put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounce {
    reason: &'static str,
    delay: Duration,
}

/// A rate of one worker: so many tokens a second, and so many saved up.
pub(super) struct Bucket {
    pub(super) queue: QueueName,
    per_second: f64,
    burst: f64,
    level: Mutex<(f64, Instant)>,
}

impl Bucket {
    pub(super) fn new(queue: QueueName, per_second: f64, burst: u32) -> Self {
        let burst = f64::from(burst.max(1));
        Self { queue, per_second, burst, level: Mutex::new((burst, Instant::now())) }
    }

    /// Takes a token; otherwise says how long until there is one.
    fn take(&self) -> Result<(), Duration> {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let tokens = (level.0 + now.duration_since(level.1).as_secs_f64() * self.per_second).min(self.burst);
        if 1.0 <= tokens {
            *level = (tokens - 1.0, now);
            return Ok(());
        }
        *level = (tokens, now);
        Err(Duration::try_from_secs_f64((1.0 - tokens) / self.per_second).unwrap_or(Duration::MAX))
    }

    fn refund(&self) {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        level.0 = (level.0 + 1.0).min(self.burst);
    }
}

#[derive(Default)]
pub(super) struct Gates {
    pub(super) buckets: Vec<Bucket>,
    pub(super) caps: Vec<Cap>,
    pub(super) rates: Vec<RateLimit>,
    /// A rate without keys is full until then: claiming would only put back.
    pub(super) full_until: Mutex<Option<Instant>>,
}

impl Gates {
    pub(super) fn need_storage(&self) -> bool {
        !self.caps.is_empty() || !self.rates.is_empty()
    }

    /// How long nothing needs to be claimed.
    pub(super) fn rest(&self) -> Option<Duration> {
        let mut full_until = self.full_until.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = full_until.map(|until| until.saturating_duration_since(Instant::now()))?;
        if rest.is_zero() {
            *full_until = None;
            return None;
        }
        metrics::counter!("jobs.dequeue.suppressed_ticks").increment(1);
        Some(rest)
    }
}

/// The slots of a run, let go of when it is dropped.
pub(super) struct Admission {
    engine: Arc<Engine>,
    claim: Option<Claim>,
}

impl Drop for Admission {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        let engine = self.engine.clone();
        self.engine.afterwards.spawn(async move {
            let Some(store) = engine.queue.storage().gates() else { return };
            if let Err(error) = store.free_slots(&claim).await {
                warn!(target: "jobs", job_id = %claim.job_id, %error, "a slot was not freed; it ends by itself");
            }
        });
    }
}

impl Engine {
    /// How long a slot lasts without a heartbeat: as the claim does, and for three heartbeats at least.
    pub(super) fn slot_ttl(&self) -> Duration {
        self.config.lease.max(heartbeat_period(self.config.stale_age) * 3)
    }

    /// Lets a claimed job pass every gate. One that is refused takes back what it took at the gates before.
    pub(super) async fn admit(
        self: &Arc<Self>, job: &Job, claim: &Claim, stop: &CancellationToken,
    ) -> Result<Admission, Bounce> {
        let mut admission = Admission { engine: self.clone(), claim: None };
        let bucket = self.gates.buckets.iter().find(|bucket| bucket.queue == job.queue);
        if let Some(bucket) = bucket
            && let Err(delay) = bucket.take()
        {
            return Err(Bounce { reason: "queue_rate", delay });
        }
        if !self.gates.need_storage() {
            return Ok(admission);
        }
        let passed = self.pass_fleet(job, claim, stop, &mut admission).await;
        if passed.is_err()
            && let Some(bucket) = bucket
        {
            bucket.refund();
        }
        passed.map(|()| admission)
    }

    async fn pass_fleet(
        &self, job: &Job, claim: &Claim, stop: &CancellationToken, admission: &mut Admission,
    ) -> Result<(), Bounce> {
        // A worker whose storage has no gates does not start.
        let Some(store) = self.queue.storage().gates() else { return Ok(()) };
        for cap in &self.gates.caps {
            let Some(name) = cap.slot(job) else { continue };
            admission.claim = Some(claim.clone());
            match store.take_slot(&name, cap.limit, claim, self.slot_ttl()).await {
                Ok(true) => {}
                Ok(false) => return Err(Bounce { reason: "concurrency", delay: CAP_WAIT }),
                Err(error) => return Err(unasked(&error, "concurrency")),
            }
        }
        if stop.is_cancelled() {
            return Err(Bounce { reason: "shutdown", delay: Duration::ZERO });
        }
        let mut taken = Vec::new();
        for rate in &self.gates.rates {
            let Some(name) = rate.name_for(job) else { continue };
            let (limit, seconds) = rate.span();
            let bounce = match store.take_rate(&name, limit, seconds).await {
                Ok(Rated::Granted { span }) => {
                    taken.push((name, span));
                    continue;
                }
                Ok(Rated::Full { wait }) => {
                    if !rate.is_keyed() {
                        let mut full = self.gates.full_until.lock().unwrap_or_else(PoisonError::into_inner);
                        *full = Some(Instant::now() + wait);
                    }
                    Bounce { reason: "fleet_rate", delay: wait }
                }
                Err(error) => unasked(&error, "fleet_rate"),
            };
            refund(store, &taken).await;
            return Err(bounce);
        }
        Ok(())
    }

    /// Gives a refused job back.
    pub(super) async fn bounce(&self, claim: &Claim, bounce: Bounce) {
        metrics::counter!("jobs.dequeue.released", "reason" => bounce.reason).increment(1);
        // What is next in the queue may be refused as well: no hurry.
        self.lanes.iter().for_each(|lane| lane.has_more.store(false, Ordering::Relaxed));
        let put_back = match self.queue.storage().gates() {
            Some(store) => store.put_back(claim, bounce.delay).await,
            None => Err(Error::Unsupported("fleet limits")),
        };
        if put_back.is_err() {
            // As good, but for the wait.
            self.release(claim).await;
        }
    }
}

async fn refund(store: &dyn GateStore, taken: &[(String, i64)]) {
    for (name, span) in taken {
        if let Err(error) = store.refund_rate(name, *span).await {
            warn!(target: "jobs", %error, limit = name, "a rate was not refunded; its span ends by itself");
        }
    }
}

/// A limit that cannot be asked lets nobody pass: it may protect somebody who cannot take more.
fn unasked(error: &Error, reason: &'static str) -> Bounce {
    warn!(target: "jobs", %error, reason, "a fleet limit could not be asked; the job waits");
    Bounce { reason, delay: CAP_WAIT * 5 }
}

/// Deletes slots that dead workers left, once an hour.
pub(super) async fn sweep_slots(engine: Arc<Engine>, end: CancellationToken) {
    let Some(store) = engine.queue.storage().gates() else { return };
    let mut pace = Pace::new(SLOT_SWEEP_INTERVAL);
    while pace.next(&end).await.is_some() {
        for _ in 0..ROUNDS_MAX {
            match store.sweep_slots(SWEEP_BATCH).await {
                Ok(deleted) if u64::from(SWEEP_BATCH) <= deleted && !end.is_cancelled() => {}
                Ok(_) => break,
                Err(error) => {
                    warn!(target: "jobs", %error, "slots past their time were not all deleted");
                    break;
                }
            }
        }
    }
}
