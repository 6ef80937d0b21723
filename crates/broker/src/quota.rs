//! How much the stores beside the queues may hold, and how often they may be asked.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use metrics::counter;

use crate::db::Conn;
use crate::db::space::{Usage, usage};
use crate::error::Error;

/// Seconds' worth of a rate that may come at once after a pause.
const BURST_SECONDS: f64 = 2.0;
/// The largest batch of one request passes however low the rate is.
const BURST_MIN: f64 = 256.0;

/// 0 is no limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Rows beyond which values are only read, replaced and deleted.
    pub kv_rows: u64,
    /// Rows beyond which timers only fire and are cancelled.
    pub timer_rows: u64,
    /// Operations of this server, a second.
    pub kv_reads: u64,
    pub kv_writes: u64,
    pub timer_writes: u64,
    /// Messages pushed to ephemeral queues of this server, a second.
    pub ephemeral_messages: u64,
}

/// Holds requests to [`Limits`]. How many rows there are comes from the database's statistics every few seconds: a
/// bound that costs nothing, and that a burst may overrun.
#[derive(Debug)]
pub struct Quotas {
    limits: Limits,
    kv_rows: AtomicU64,
    timer_rows: AtomicU64,
    kv_reads: Rate,
    kv_writes: Rate,
    timer_writes: Rate,
    ephemeral_messages: Rate,
}

/// What a request asks of the key/value store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvDemand {
    pub reads: u64,
    pub writes: u64,
    /// Whether a write may make a row.
    pub adds: bool,
}

impl Quotas {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            kv_rows: AtomicU64::new(0),
            timer_rows: AtomicU64::new(0),
            kv_reads: Rate::new(limits.kv_reads),
            kv_writes: Rate::new(limits.kv_writes),
            timer_writes: Rate::new(limits.timer_writes),
            ephemeral_messages: Rate::new(limits.ephemeral_messages),
        }
    }

    /// # Errors
    /// [`Error::RateLimited`] or [`Error::QuotaExceeded`].
    pub fn admit_kv(&self, demand: KvDemand) -> Result<(), Error> {
        if demand.adds {
            room("kv_quota_exceeded", "QUEEN_KV_MAX_ROWS", &self.kv_rows, self.limits.kv_rows)?;
        }
        self.kv_reads.take("kv_reads", demand.reads)?;
        self.kv_writes.take("kv_writes", demand.writes)
    }

    /// # Errors
    /// As [`Quotas::admit_kv`].
    pub fn admit_timers(&self, schedules: u64) -> Result<(), Error> {
        if 0 < schedules {
            room("timers_quota_exceeded", "QUEEN_TIMERS_MAX_ROWS", &self.timer_rows, self.limits.timer_rows)?;
        }
        self.timer_writes.take("timer_writes", schedules)
    }

    /// # Errors
    /// [`Error::RateLimited`].
    pub fn admit_ephemeral(&self, messages: u64) -> Result<(), Error> {
        self.ephemeral_messages.take("ephemeral_messages", messages)
    }

    /// Learns how many rows there are.
    ///
    /// # Errors
    /// Whatever the database answers; what was known stays.
    pub async fn refresh(&self, conn: &Conn) -> Result<(), Error> {
        if self.limits.kv_rows == 0 && self.limits.timer_rows == 0 {
            return Ok(());
        }
        let Usage { kv_rows, timer_rows, .. } = usage(conn).await?;
        self.kv_rows.store(kv_rows, Ordering::Relaxed);
        self.timer_rows.store(timer_rows, Ordering::Relaxed);
        Ok(())
    }
}

fn room(code: &'static str, setting: &'static str, rows: &AtomicU64, rows_max: u64) -> Result<(), Error> {
    let rows = rows.load(Ordering::Relaxed);
    if rows_max == 0 || rows < rows_max {
        return Ok(());
    }
    counter!("ebbtide_quota_refusals_total", "what" => code).increment(1);
    Err(Error::QuotaExceeded { code, text: format!("there are {rows} rows and {setting} is {rows_max}: delete some") })
}

/// A token bucket: so many a second, and those of [`BURST_SECONDS`] at once.
#[derive(Debug)]
struct Rate {
    per_second: f64,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    filled_at: Instant,
}

impl Rate {
    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn new(per_second: u64) -> Self {
        let per_second = per_second as f64;
        Self { per_second, bucket: Mutex::new(Bucket { tokens: burst(per_second), filled_at: Instant::now() }) }
    }

    /// Takes `count` tokens, or none and says when there will be enough.
    #[allow(clippy::cast_precision_loss, reason = "a number of operations")]
    fn take(&self, what: &'static str, count: u64) -> Result<(), Error> {
        if self.per_second == 0.0 || count == 0 {
            return Ok(());
        }
        self.take_at(what, count as f64, Instant::now())
    }

    fn take_at(&self, what: &'static str, count: f64, now: Instant) -> Result<(), Error> {
        let burst = burst(self.per_second);
        // More than fits is taken for all that fits.
        let count = count.min(burst);
        let mut bucket = self.bucket.lock().expect("no holder panics");
        let passed = now.saturating_duration_since(bucket.filled_at).as_secs_f64();
        bucket.tokens = (bucket.tokens + passed * self.per_second).min(burst);
        bucket.filled_at = bucket.filled_at.max(now);
        if count <= bucket.tokens {
            bucket.tokens -= count;
            return Ok(());
        }
        counter!("ebbtide_quota_refusals_total", "what" => what).increment(1);
        let wait = Duration::from_secs_f64((count - bucket.tokens) / self.per_second);
        Err(Error::RateLimited { what, wait })
    }
}

fn burst(per_second: f64) -> f64 {
    (per_second * BURST_SECONDS).max(BURST_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(result: Result<(), Error>) -> Option<u64> {
        match result {
            Ok(()) => None,
            Err(Error::RateLimited { wait, .. }) => Some(wait.as_secs()),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_rate_lets_a_burst_through_and_then_so_many_a_second() {
        let rate = Rate::new(1000);
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(waits(rate.take_at("x", 2000.0, start)), None, "the burst");
        assert_eq!(waits(rate.take_at("x", 2000.0, start)), Some(2), "and when there is another one");
        assert_eq!(waits(rate.take_at("x", 1000.0, after(1))), None);
        assert_eq!(waits(rate.take_at("x", 2000.0, after(1))), Some(2), "a refusal takes nothing");
        assert_eq!(waits(rate.take_at("x", 1e9, after(100))), None, "more than a burst counts as one");
        assert_eq!(waits(rate.take_at("x", 1000.0, after(100))), Some(1));
    }

    #[test]
    fn a_whole_batch_passes_a_low_rate() {
        let rate = Rate::new(1);
        let start = Instant::now();
        assert_eq!(waits(rate.take_at("x", 256.0, start)), None);
        assert_eq!(waits(rate.take_at("x", 1.0, start)), Some(1));
    }

    #[test]
    fn nothing_is_limited_by_default() {
        let quotas = Quotas::new(Limits::default());
        quotas.kv_rows.store(u64::MAX, Ordering::Relaxed);
        for _ in 0..10 {
            let demand = KvDemand { reads: u64::MAX, writes: u64::MAX, adds: true };
            assert!(quotas.admit_kv(demand).is_ok() && quotas.admit_timers(u64::MAX).is_ok());
        }
    }

    #[test]
    fn a_full_store_takes_nothing_new_and_gives_and_deletes() {
        let quotas = Quotas::new(Limits { kv_rows: 10, timer_rows: 10, ..Limits::default() });
        let adds = KvDemand { writes: 1, adds: true, ..KvDemand::default() };
        quotas.kv_rows.store(9, Ordering::Relaxed);
        assert!(quotas.admit_kv(adds).is_ok(), "one less");
        quotas.kv_rows.store(10, Ordering::Relaxed);
        quotas.timer_rows.store(10, Ordering::Relaxed);
        assert!(matches!(quotas.admit_kv(adds), Err(Error::QuotaExceeded { code: "kv_quota_exceeded", .. })));
        assert!(quotas.admit_kv(KvDemand { adds: false, reads: 1, ..adds }).is_ok());
        assert!(matches!(quotas.admit_timers(1), Err(Error::QuotaExceeded { code: "timers_quota_exceeded", .. })));
        assert!(quotas.admit_timers(0).is_ok(), "cancelling");
    }
}
