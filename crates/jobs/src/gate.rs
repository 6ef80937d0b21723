//! Limits that a whole fleet shares: how many jobs at once, and how many in a span of time.

use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use crate::error::Error;
use crate::job::Job;
use crate::limits::{NAME_CHARS_MAX, check_text};

type Key = Arc<dyn Fn(&Job) -> Option<String> + Send + Sync>;

/// Longest span in which the jobs of a rate are counted.
const SPAN_SECONDS_MAX: u32 = 3600;

/// At most so many jobs at once, on all workers together that have the same cap.
#[derive(Clone)]
#[must_use = "a cap does nothing until a worker has it"]
pub struct Cap {
    name: String,
    pub(crate) limit: u32,
    key: Option<Key>,
}

/// At most so many jobs a second, on all workers together that have the same limit.
#[derive(Clone)]
#[must_use = "a limit does nothing until a worker has it"]
pub struct RateLimit {
    name: String,
    per_second: f64,
    key: Option<Key>,
}

impl Cap {
    /// At most `jobs` at once, at least 1, under this name.
    pub fn new(name: impl Into<String>, jobs: u32) -> Self {
        Self { name: name.into(), limit: jobs.max(1), key: None }
    }

    /// Counts the jobs of each key by themselves. A job without a key is not limited. Default: all jobs of the worker
    /// count together.
    pub fn key(mut self, key: impl Fn(&Job) -> Option<String> + Send + Sync + 'static) -> Self {
        self.key = Some(Arc::new(key));
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        check_name("concurrency cap", &self.name)
    }

    /// The name under which a job is counted; `None` if it is not.
    pub(crate) fn slot(&self, job: &Job) -> Option<String> {
        effective(&self.name, self.key.as_ref(), job)
    }
}

impl RateLimit {
    /// At most `per_second` jobs a second, under this name. Jobs are counted in spans that begin at fixed times of the
    /// database's clock: of one second or, for a rate that is no whole number, of as many as make it one.
    pub fn new(name: impl Into<String>, per_second: f64) -> Self {
        Self { name: name.into(), per_second, key: None }
    }

    /// Counts the jobs of each key by themselves. A job without a key is not limited. Every key has rows of its own,
    /// which are deleted when it is used again: keys should be few.
    pub fn key(mut self, key: impl Fn(&Job) -> Option<String> + Send + Sync + 'static) -> Self {
        self.key = Some(Arc::new(key));
        self
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        check_name("rate limit", &self.name)?;
        if !(self.per_second.is_finite() && 0.0 < self.per_second && self.per_second <= 1e9) {
            return Err(Error::invalid("rate limit", "is above 0 and at most a thousand million a second"));
        }
        Ok(())
    }

    pub(crate) fn is_keyed(&self) -> bool {
        self.key.is_some()
    }

    pub(crate) fn name_for(&self, job: &Job) -> Option<String> {
        effective(&self.name, self.key.as_ref(), job)
    }

    /// So many jobs in a span of so many seconds.
    pub(crate) fn span(&self) -> (i64, u32) {
        let in_span = |seconds: u32| self.per_second * f64::from(seconds);
        let is_whole = |count: f64| 1.0 <= count.round() && (count - count.round()).abs() < 1e-6 * count.max(1.0);
        let seconds = (1..=SPAN_SECONDS_MAX).find(|seconds| is_whole(in_span(*seconds))).unwrap_or(SPAN_SECONDS_MAX);
        let count = in_span(seconds);
        let count = if is_whole(count) { count.round() } else { count.ceil() };
        #[allow(clippy::cast_possible_truncation, reason = "a rate is at most 1e9, and a span an hour")]
        let count = count as i64;
        (count.max(1), seconds)
    }
}

fn check_name(field: &'static str, name: &str) -> Result<(), Error> {
    check_text(field, name)?;
    if name.is_empty() { Err(Error::invalid(field, "is not empty")) } else { Ok(()) }
}

fn effective(name: &str, key: Option<&Key>, job: &Job) -> Option<String> {
    let Some(key) = key else { return Some(name.to_owned()) };
    let full = format!("{name}:{}", key(job)?);
    // A name that no row can hold is replaced by one that stands for it.
    if full.len() <= NAME_CHARS_MAX && !full.contains('\0') {
        return Some(full);
    }
    let digest = Sha256::digest(full.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(format!("hash:{hex}"))
}

/// Who holds a slot: the claim, so that a later one of the same worker is told apart.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn slot_owner(claim: &crate::job::Claim) -> String {
    let owner = format!("{} {}", claim.token.0.simple(), claim.worker.as_str());
    owner.chars().take(NAME_CHARS_MAX).collect()
}

/// What became of a request to a rate limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rated {
    /// Counted, in the span that began at this second since 1970.
    Granted {
        /// The span.
        span: i64,
    },
    /// The span is full; the next one begins after this.
    Full {
        /// The wait.
        wait: Duration,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_long_enough_for_the_rate() {
        for (rate, span) in [
            (1.0, (1, 1)),
            (250.0, (250, 1)),
            (0.5, (1, 2)),
            (1.5, (3, 2)),
            (0.1, (1, 10)),
            (1.0 / 3.0, (1, 3)),
            (1.0 / 3600.0, (1, 3600)),
            (0.000_001, (1, 3600)),
        ] {
            assert_eq!(RateLimit::new("r", rate).span(), span, "{rate}");
        }
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(RateLimit::new("r", rate).check().is_err(), "{rate}");
        }
        assert!(Cap::new("", 1).check().is_err());
    }
}
