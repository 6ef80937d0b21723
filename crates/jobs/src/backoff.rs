//! How long a failed job waits before it runs again, and how often a call to the storage is repeated.

use std::time::Duration;

use uuid::Uuid;

use crate::job_error::JobError;
use crate::limits::{BACKOFF_BASE, BACKOFF_MAX};

/// Decides how long a job waits before its next run. Closures of the same shape are policies as well.
pub trait Backoff: Send + Sync + 'static {
    /// The wait after the run of number `attempt`, the first being 1, failed with `error`. The worker limits it, and
    /// the database adds it to its own clock.
    fn delay(&self, attempt: u32, error: &JobError) -> Duration;
}

impl<F: Fn(u32, &JobError) -> Duration + Send + Sync + 'static> Backoff for F {
    fn delay(&self, attempt: u32, error: &JobError) -> Duration {
        self(attempt, error)
    }
}

/// Waits that double: by default 1 second after the first run, at most a minute, each up to a tenth longer or
/// shorter, so that jobs that failed together do not come back together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExponentialBackoff {
    base: Duration,
    factor: f64,
    most: Duration,
    jitter: f64,
}

impl Default for ExponentialBackoff {
    fn default() -> Self {
        Self { base: BACKOFF_BASE, factor: 2.0, most: BACKOFF_MAX, jitter: 0.1 }
    }
}

impl ExponentialBackoff {
    /// The wait after the first run. Default: 1 second.
    #[must_use]
    pub fn base(mut self, base: Duration) -> Self {
        self.base = base;
        self
    }

    /// By how much each wait is longer than the one before; at least 1. Default: 2.
    #[must_use]
    pub fn factor(mut self, factor: f64) -> Self {
        self.factor = if factor.is_finite() { factor.max(1.0) } else { 2.0 };
        self
    }

    /// The longest wait. Default: 1 minute.
    #[must_use]
    pub fn most(mut self, most: Duration) -> Self {
        self.most = most;
        self
    }

    /// By which part of itself a wait varies, between 0 and 1. Default: 0.1.
    #[must_use]
    pub fn jitter(mut self, part: f64) -> Self {
        self.jitter = if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.1 };
        self
    }

    pub(crate) fn nth(&self, n: u32) -> Duration {
        let exponent = i32::try_from(n.min(1000)).expect("at most 1000");
        let plain = (self.base.as_secs_f64() * self.factor.powi(exponent)).min(self.most.as_secs_f64());
        let varied = plain * (1.0 + self.jitter * (2.0 * random_part() - 1.0));
        Duration::try_from_secs_f64(varied).unwrap_or(self.most)
    }
}

impl Backoff for ExponentialBackoff {
    fn delay(&self, attempt: u32, _error: &JobError) -> Duration {
        self.nth(attempt.saturating_sub(1))
    }
}

/// Between 0 and 1.
fn random_part() -> f64 {
    // The low half of a random UUID has 62 random bits; a double holds 53.
    let random = Uuid::new_v4().as_u64_pair().1 & ((1 << 53) - 1);
    #[allow(clippy::cast_precision_loss, reason = "53 bits are held exactly")]
    let part = random as f64 / (1u64 << 53) as f64;
    part
}

/// How often and how fast a call to the storage is repeated that failed for a reason which may pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryConfig {
    pub(crate) attempts: u32,
    pub(crate) backoff: ExponentialBackoff,
}

impl RetryConfig {
    /// Of writes about a job: 5 attempts, 100 ms apart and then twice as long each time, at most 5 seconds.
    pub fn storage() -> Self {
        let backoff = ExponentialBackoff::default().base(Duration::from_millis(100)).most(Duration::from_secs(5));
        Self { attempts: 5, backoff }
    }

    /// Of claims: 3 attempts, 500 ms apart and then twice as long each time, at most 10 seconds.
    pub fn dequeue() -> Self {
        let backoff = ExponentialBackoff::default().base(Duration::from_millis(500)).most(Duration::from_secs(10));
        Self { attempts: 3, backoff: backoff.jitter(0.2) }
    }

    /// No repetition.
    pub fn none() -> Self {
        Self { attempts: 1, ..Self::storage() }
    }

    /// As [`RetryConfig::storage`], with so many attempts; 0 means 1, and more than 100 means 100.
    pub fn attempts(attempts: u32) -> Self {
        Self { attempts: attempts.clamp(1, 100), ..Self::storage() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_minute_and_vary_by_a_tenth() {
        let policy = ExponentialBackoff::default();
        let error = JobError::new("x");
        for (attempt, plain) in [(1, 1.0), (2, 2.0), (4, 8.0), (7, 60.0), (100, 60.0), (u32::MAX, 60.0)] {
            let delay = policy.delay(attempt, &error).as_secs_f64();
            assert!((delay - plain).abs() <= plain * 0.1 + 1e-9, "{attempt}: {delay}");
        }
        let waits: Vec<_> = (0..8).map(|_| policy.delay(1, &error)).collect();
        assert!(waits.iter().any(|wait| *wait != waits[0]), "the waits do not vary");
        assert_eq!(policy.jitter(0.0).delay(3, &error), Duration::from_secs(4));
    }

    #[test]
    fn attempts_below_one_mean_one() {
        assert_eq!(RetryConfig::attempts(0).attempts, 1);
        assert_eq!((RetryConfig::storage().attempts, RetryConfig::dequeue().attempts), (5, 3));
    }
}
