//! From claimed timers to stored messages: in one push if it can be, one by one where it cannot.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use metrics::counter;
use tracing::{debug, warn};
use uuid::Uuid;

use super::{Sweeper, payload};
use crate::db::Conn;
use crate::db::timers::{
    Batch, Claimed, Failure, Fired, log_timers_claim_v1, log_timers_failed_v1, log_timers_fire_v1,
};
use crate::error::Error;
use crate::segment::{Frame, Packer};

/// Timers of one claim.
const CLAIM_ROWS_MAX: i32 = 200;
/// Bytes of their payloads, once they are unpacked.
const CLAIM_BYTES_MAX: i64 = 8 << 20;
/// How long a claim lasts unless its timers are fired before.
const CLAIM_MS: i32 = 30_000;
/// Claims that one call takes on.
const CLAIMS_MAX: usize = 25;
/// Failures that make a dead letter.
const ATTEMPTS_MAX: i32 = 5;
/// After the first failure; each further one doubles it.
const PAUSE_FIRST_MS: i32 = 1000;
const PAUSE_LONGEST_MS: i32 = 60_000;
/// How long a push of many waits for the lock of a partition, and one of a single timer.
const LOCK_MS: i32 = 200;
const LOCK_ALONE_MS: i32 = 2000;
/// Pushes of one claim that are packed again because a queue's encryption was switched.
const REPACKS_MAX: usize = 3;

/// What one call did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub claimed: usize,
    /// Messages that are stored now.
    pub fired: usize,
    /// Messages whose transaction id was stored before.
    pub duplicates: usize,
    /// Timers that are tried again later.
    pub failed: usize,
    /// Timers that became dead letters.
    pub dead: usize,
}

/// A claimed timer with its payload as its queue wants it.
struct Ready {
    timer: Claimed,
    payload: Vec<u8>,
    is_sealed: bool,
}

/// One claim on its way.
struct Firing<'a> {
    sweeper: &'a Sweeper,
    conn: &'a Conn,
    token: Uuid,
    tally: &'a mut Tally,
}

impl Sweeper {
    /// Fires timers that are due, claim by claim, until none is left or many claims are done.
    ///
    /// # Errors
    /// If the database is away. What was claimed then is due again when the claim ends.
    pub async fn fire_due(&self) -> Result<Tally, Error> {
        let conn = self.db.conn().await?;
        let mut tally = Tally::default();
        for _ in 0..CLAIMS_MAX {
            let token = Uuid::now_v7();
            let claimed = log_timers_claim_v1(&conn, token, CLAIM_MS, CLAIM_ROWS_MAX, CLAIM_BYTES_MAX).await?;
            if claimed.is_empty() {
                break;
            }
            tally.claimed += claimed.len();
            Firing { sweeper: self, conn: &conn, token, tally: &mut tally }.fire(claimed).await?;
        }
        Ok(tally)
    }
}

impl Firing<'_> {
    async fn fire(&mut self, claimed: Vec<Claimed>) -> Result<(), Error> {
        let mut left = self.ready(claimed).await?;
        let mut repacks = 0;
        // Each round ends at least one timer, or is one of the few that pack again.
        while !left.is_empty() {
            let (now, later) = first_of_each(left);
            match push(self.sweeper, self.conn, self.token, &now, LOCK_MS).await {
                Ok(fired) => left = self.settle(now, &fired),
                Err(Error::EncryptionChanged) if repacks < REPACKS_MAX => {
                    repacks += 1;
                    now.iter().for_each(|ready| self.sweeper.sealing.forget(&ready.timer.queue));
                    left = self.ready(now.into_iter().map(|ready| ready.timer).collect()).await?;
                }
                Err(error) if error.is_away() => return Err(error), // the others would fare no better
                Err(error) => {
                    debug!(target: "timers", %error, timers = now.len(), "fired one by one");
                    left = Vec::new();
                    self.alone(now).await?;
                }
            }
            left.extend(later);
        }
        Ok(())
    }

    /// Payloads as the queues want them. A timer whose payload cannot be had has failed.
    async fn ready(&mut self, claimed: Vec<Claimed>) -> Result<Vec<Ready>, Error> {
        let sealing = &self.sweeper.sealing;
        let queues: BTreeSet<&str> = claimed.iter().map(|timer| timer.queue.as_str()).collect();
        let unknown: Vec<&str> = queues.into_iter().filter(|queue| sealing.wanted(queue).is_none()).collect();
        if !unknown.is_empty() {
            sealing.ask(self.conn, &unknown).await?;
        }
        let mut all = Vec::with_capacity(claimed.len());
        for timer in claimed {
            match converted(self.sweeper, &timer) {
                Ok((payload, is_sealed)) => all.push(Ready { timer, payload, is_sealed }),
                Err(error) => {
                    let stored = String::from_utf8(timer.payload.clone()).ok();
                    self.failed(&timer, stored.as_deref(), timer.encrypted, &error).await?;
                }
            }
        }
        Ok(all)
    }

    async fn alone(&mut self, all: Vec<Ready>) -> Result<(), Error> {
        for ready in all {
            match push(self.sweeper, self.conn, self.token, std::slice::from_ref(&ready), LOCK_ALONE_MS).await {
                Ok(fired) => drop(self.settle(vec![ready], &fired)),
                // Whoever has it now fires it.
                Err(Error::ClaimLost) => {}
                Err(error) if error.is_away() => return Err(error),
                Err(error) => {
                    let payload = std::str::from_utf8(&ready.payload).ok();
                    self.failed(&ready.timer, payload, ready.is_sealed, &error).await?;
                }
            }
        }
        Ok(())
    }

    /// Counts and tells what was fired; returns what is still to be.
    fn settle(&mut self, pushed: Vec<Ready>, fired: &Fired) -> Vec<Ready> {
        let stored: HashSet<Uuid> = fired.stored.iter().copied().collect();
        let duplicates: HashSet<Uuid> = fired.duplicates.iter().copied().collect();
        assert!(!stored.is_empty() || !duplicates.is_empty(), "a push ends at least one timer");
        self.tally.fired += stored.len();
        self.tally.duplicates += duplicates.len();
        counter!("ebbtide_timers_fired_total").increment(stored.len() as u64);
        counter!("ebbtide_timers_duplicates_total").increment(duplicates.len() as u64);
        let mut lanes = BTreeSet::new();
        let mut by_queue: BTreeMap<&str, u64> = BTreeMap::new();
        for Ready { timer, .. } in pushed.iter().filter(|ready| stored.contains(&ready.timer.message_id)) {
            lanes.insert((timer.queue.as_str(), timer.partition.as_str()));
            *by_queue.entry(&timer.queue).or_default() += 1;
        }
        lanes.into_iter().for_each(|(queue, partition)| self.sweeper.wake.pushed(queue, partition));
        by_queue.into_iter().for_each(|(queue, messages)| self.sweeper.telemetry.pushed(queue, messages));
        let is_left = |ready: &Ready| {
            let id = &ready.timer.message_id;
            !stored.contains(id) && !duplicates.contains(id)
        };
        pushed.into_iter().filter(is_left).collect()
    }

    async fn failed(
        &mut self, timer: &Claimed, payload: Option<&str>, encrypted: bool, error: &Error,
    ) -> Result<(), Error> {
        let text = error.to_string();
        // A partition that somebody holds for long is not the timer's fault.
        let counts = !error.is_retryable();
        let doubled =
            PAUSE_FIRST_MS.checked_shl(u32::try_from(timer.attempts).unwrap_or(0)).unwrap_or(PAUSE_LONGEST_MS);
        let pause_ms = doubled.clamp(PAUSE_FIRST_MS, PAUSE_LONGEST_MS);
        let failure = Failure { timer, error: &text, counts, attempts_max: ATTEMPTS_MAX, pause_ms, payload, encrypted };
        let outcome = log_timers_failed_v1(self.conn, self.token, &failure).await?;
        counter!("ebbtide_timers_failed_total").increment(1);
        match outcome.as_str() {
            "dead" => {
                self.tally.dead += 1;
                self.sweeper.telemetry.dead_lettered(1);
                warn!(target: "timers", queue = timer.queue, error = text, "a timer became a dead letter");
            }
            "paused" => {
                self.tally.failed += 1;
                debug!(target: "timers", queue = timer.queue, error = text, pause_ms, "a timer is tried again");
            }
            _ => {}
        }
        Ok(())
    }
}

/// The payload that goes into the segment, and whether it is sealed.
fn converted(sweeper: &Sweeper, timer: &Claimed) -> Result<(Vec<u8>, bool), Error> {
    let sealer = sweeper.sealing.sealer();
    if !sealer.has_key() && timer.encrypted {
        return Ok((timer.payload.clone(), true)); // as it is; whoever has the key reads it
    }
    let wanted = sweeper.sealing.wanted(&timer.queue).unwrap_or(false);
    if wanted && timer.encrypted {
        return Ok((timer.payload.clone(), true));
    }
    let plain = if timer.encrypted {
        sealer.open(timer.message_id, &timer.payload)?
    } else if timer.payload_zstd {
        payload::unpacked(&timer.payload)?
    } else {
        timer.payload.clone()
    };
    Ok(match sealer.seal(timer.message_id, &plain) {
        Some(sealed) if wanted => (sealed, true),
        _ => (plain, false),
    })
}

/// Those that may be pushed at once: of the same transaction id in a partition only one, so that its window decides
/// about the others.
fn first_of_each(all: Vec<Ready>) -> (Vec<Ready>, Vec<Ready>) {
    let mut seen: HashSet<(String, String, String)> = HashSet::new();
    all.into_iter()
        .partition(|Ready { timer, .. }| seen.insert((timer.queue.clone(), timer.partition.clone(), timer.txn.clone())))
}

async fn push(sweeper: &Sweeper, conn: &Conn, token: Uuid, all: &[Ready], lock_ms: i32) -> Result<Fired, Error> {
    let mut lanes: BTreeMap<(&str, &str), Vec<&Ready>> = BTreeMap::new();
    for ready in all {
        lanes.entry((&ready.timer.queue, &ready.timer.partition)).or_default().push(ready);
    }
    let mut packer = Packer::new(sweeper.zstd_level);
    let mut batch = Batch::default();
    let mut sealed = Vec::new();
    for (index, ((queue, partition), mut timers)) in lanes.into_iter().enumerate() {
        // Ids sort along a segment.
        timers.sort_by_key(|ready| ready.timer.message_id);
        let packed = packer.pack(timers.iter().map(|ready| frame(ready)))?;
        batch.queues.push(queue);
        batch.partitions.push(partition);
        batch.counts.push(packed.count);
        batch.hashes.push(packed.hashes);
        batch.blobs.push(packed.blob);
        sealed.push(timers[0].is_sealed);
        for ready in timers {
            batch.lanes.push(i32::try_from(index + 1).expect("at most a claim's"));
            batch.keys.push(&ready.timer.timer_key);
            batch.ids.push(ready.timer.message_id);
        }
    }
    batch.sealed = sweeper.sealing.sealer().has_key().then_some(sealed);
    log_timers_fire_v1(conn, token, &batch, lock_ms).await
}

fn frame(ready: &Ready) -> Frame<'_> {
    Frame {
        message_id: ready.timer.message_id,
        trace_id: None,
        transaction_id: &ready.timer.txn,
        producer: ready.timer.producer.as_deref(),
        is_encrypted: ready.is_sealed,
        payload: &ready.payload,
    }
}
