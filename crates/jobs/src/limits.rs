//! Every number of the library in one place, and the names that are checked when they are made.

use std::fmt;
use std::time::Duration;

use uuid::Uuid;

use crate::error::Error;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Stock window of completed jobs: 30 days.
pub const STOCK_COMPLETED_AFTER: Duration = DAY.saturating_mul(30);
/// Stock window of failed and cancelled jobs: 90 days.
pub const STOCK_FAILED_AFTER: Duration = DAY.saturating_mul(90);
/// Stock window of consumed signals: 7 days.
pub const STOCK_CONSUMED_SIGNALS_AFTER: Duration = DAY.saturating_mul(7);
/// The preset's window of completed jobs: 7 days.
pub const PRESET_COMPLETED_AFTER: Duration = DAY.saturating_mul(7);
/// The preset's window of failed and cancelled jobs: 30 days.
pub const PRESET_FAILED_AFTER: Duration = DAY.saturating_mul(30);
/// The preset's window of consumed signals: 7 days.
pub const PRESET_CONSUMED_SIGNALS_AFTER: Duration = DAY.saturating_mul(7);

/// Default time between two ticks of a sweep: 1 hour.
pub const SWEEP_INTERVAL: Duration = HOUR;
/// Shortest time between two ticks of a sweep: 100 ms.
pub const SWEEP_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Longest wait before the first tick of a sweep: 1 minute.
pub const SWEEP_FIRST_TICK_MAX: Duration = MINUTE;
/// Default number of rows that one pass of a sweep may choose.
pub const SWEEP_BATCH: u32 = 1000;
/// Largest number of rows that one pass of a sweep may choose.
pub const SWEEP_BATCH_MAX: u32 = 10_000;
/// Most ids in one deleting statement.
pub const DELETE_CHUNK: usize = 1000;
/// How long one pass should take: one that takes longer is made smaller.
pub const PASS_LENGTH_MAX: Duration = Duration::from_secs(1);
/// Attempts of one pass whose transaction lost against another one.
pub const PASS_ATTEMPTS: u32 = 5;
/// Wait before the second attempt of a pass; the third waits twice this, and so on.
pub const PASS_RETRY_STEP: Duration = Duration::from_millis(5);
/// A window longer than this reaches before the earliest time a database can name, and so keeps for ever.
pub const WINDOW_MAX: Duration = DAY.saturating_mul(365 * 6000);

/// Default lease of a claimed job: 45 minutes.
pub const LEASE: Duration = MINUTE.saturating_mul(45);
/// Default age without a sign of life after which a running job is reclaimed: 45 minutes.
pub const STALE_AGE: Duration = MINUTE.saturating_mul(45);
/// Default time between two looks for stale jobs: 5 minutes.
pub const REAPER_INTERVAL: Duration = MINUTE.saturating_mul(5);
/// Shortest time between two looks for stale jobs: 1 second.
pub const REAPER_INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Most jobs that one look reclaims in one transaction.
pub const REAPER_BATCH: u32 = 100;
/// Lost runs beyond the allowed ones after which the reaper dead-letters a job.
pub const REAPER_MARGIN: u32 = 3;
/// Longest time between two heartbeats: 2 minutes.
pub const HEARTBEAT_MAX: Duration = MINUTE.saturating_mul(2);
/// Shortest time between two heartbeats: 200 ms.
pub const HEARTBEAT_MIN: Duration = Duration::from_millis(200);
/// Default time between two ownership audits: 5 seconds.
pub const OWNERSHIP_AUDIT_INTERVAL: Duration = Duration::from_secs(5);

/// Default time between two polls of an idle queue: 100 ms.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Shortest time between two polls: 50 ms.
pub const POLL_INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Default number of jobs in one claim.
pub const CLAIM_BATCH: u32 = 50;
/// Largest number of jobs in one claim.
pub const CLAIM_BATCH_MAX: u32 = 1000;
/// Default number of jobs that a worker runs at once in one queue.
pub const CONCURRENCY: u32 = 10;
/// Largest number of jobs that a worker runs at once in one queue.
pub const CONCURRENCY_MAX: u32 = 1000;
/// Default time that a stopping worker waits for its handlers: 30 seconds.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time that a stopping worker grants handlers it has cancelled: 5 seconds.
pub const DRAIN_GRACE: Duration = Duration::from_secs(5);
/// Time that a checkpoint may take to be written after its job's own time is over: 5 seconds.
pub const CHECKPOINT_WRITE_BUDGET: Duration = Duration::from_secs(5);
/// Time between two looks for jobs whose wait is over: 5 seconds.
pub const RECOVERY_INTERVAL: Duration = Duration::from_secs(5);
/// How long one worker keeps the recovery to itself: 15 seconds.
pub const RECOVERY_LEASE: Duration = Duration::from_secs(15);
/// Age after which an unfinished fan-out counts as abandoned: 2 minutes.
pub const FAN_OUT_STALE_AGE: Duration = MINUTE.saturating_mul(2);
/// Time between two sweeps of expired concurrency slots: 1 hour.
pub const SLOT_SWEEP_INTERVAL: Duration = HOUR;

/// Time between two polls of an idle worker that is told of new jobs: 1 second.
pub const POLL_INTERVAL_TOLD: Duration = Duration::from_secs(1);
/// Default number of completions in one transaction.
pub const COMPLETION_BATCH: u32 = 100;
/// Largest number of completions in one transaction.
pub const COMPLETION_BATCH_MAX: u32 = 4096;
/// Longest time that a completion waits for others: 5 seconds.
pub const COMPLETION_DELAY_MAX: Duration = Duration::from_secs(5);
/// Waiting jobs that one look wakes at most in one transaction.
pub const RECOVERY_BATCH: u32 = 1000;
/// Longest time that a look at the storage's readiness waits: 5 seconds.
pub const READY_TIMEOUT: Duration = Duration::from_secs(5);

/// Shortest time between two looks at schedules: 100 ms.
pub const SCHEDULE_TICK: Duration = Duration::from_millis(100);
/// Longest time between two looks at schedules: 30 seconds.
pub const SCHEDULE_LOOK_MAX: Duration = Duration::from_secs(30);
/// Longest wait before a schedule that could not be fired is tried again: 30 seconds.
pub const SCHEDULE_RETRY_MAX: Duration = Duration::from_secs(30);

/// Default number of retries after the first run.
pub const RETRIES: u32 = 2;
/// Most retries after the first run; more is clamped.
pub const RETRIES_MAX: u32 = 100;
/// First wait of the default backoff: 1 second.
pub const BACKOFF_BASE: Duration = Duration::from_secs(1);
/// Longest wait of the default backoff: 1 minute.
pub const BACKOFF_MAX: Duration = MINUTE;

/// Longest type, queue, tenant, key, signal and worker name, in characters.
pub const NAME_CHARS_MAX: usize = 255;
/// Largest arguments of a job: 1 MiB of JSON.
pub const ARGS_BYTES_MAX: usize = 1 << 20;
/// Largest result of a job: 1 MiB.
pub const RESULT_BYTES_MAX: usize = 1 << 20;
/// Largest payload of a signal: 1 MiB.
pub const SIGNAL_PAYLOAD_BYTES_MAX: usize = 1 << 20;
/// Largest metadata of a job, keys and values together as JSON: 64 KiB.
pub const METADATA_BYTES_MAX: usize = 64 << 10;
/// Longest stored error text, in characters.
pub const ERROR_CHARS_MAX: usize = 4096;
/// Most jobs in one enqueued batch.
pub const ENQUEUE_BATCH_MAX: usize = 10_000;
/// Default page of the dead-letter listing.
pub const DEAD_LETTERS_PAGE: u32 = 50;
/// Largest page of the dead-letter listing.
pub const DEAD_LETTERS_PAGE_MAX: u32 = 1000;
/// Default page of the job listing.
pub const JOBS_PAGE: u32 = 50;
/// Largest page of the job listing.
pub const JOBS_PAGE_MAX: u32 = 100;
/// Longest text that a list of jobs searches for, in bytes.
pub const SEARCH_BYTES_MAX: usize = 256;
/// Most ids in one bulk call.
pub const BULK_IDS_MAX: usize = 1000;
/// Rows that one step of a purge deletes at most.
pub const PURGE_BATCH: u32 = 1000;
/// Events that a slow subscriber may lag behind.
pub const EVENT_BUFFER: usize = 100;
/// How long the statistics of a minute are kept: 31 days.
pub const STATS_RETENTION: Duration = DAY.saturating_mul(31);
/// Deepest workflow that an operation on a whole subtree follows.
pub const SUBTREE_DEPTH_MAX: u32 = 256;

/// Microseconds of a retention age; `None` when the rule is off: a zero age, or one that reaches before all time.
///
/// Less than a microsecond counts as one, so that a window that was set is never taken for "off".
pub(crate) fn age_micros(age: Duration) -> Option<i64> {
    if age.is_zero() || WINDOW_MAX < age {
        return None;
    }
    Some(saturating_micros(age).max(1))
}

/// Microseconds of a wait or a lease, saturating far beyond the life of any database.
pub(crate) fn saturating_micros(duration: Duration) -> i64 {
    let most = WINDOW_MAX.as_micros();
    i64::try_from(duration.as_micros().min(most)).expect("the longest window is far below 2^63 microseconds")
}

/// Batch size as sweeps use it: 0 means the default, more than the largest means the largest.
pub(crate) const fn clamp_batch(rows: u32) -> u32 {
    match rows {
        0 => SWEEP_BATCH,
        rows if SWEEP_BATCH_MAX < rows => SWEEP_BATCH_MAX,
        rows => rows,
    }
}

/// Interval as sweeps use it: 0 means the default, less than the shortest means the shortest.
pub(crate) fn clamp_interval(interval: Duration) -> Duration {
    if interval.is_zero() { SWEEP_INTERVAL } else { interval.max(SWEEP_INTERVAL_MIN) }
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $field:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// Checks `name`: a letter, then letters, digits, `_`, `.` and `-`; at most 255 characters.
            ///
            /// # Errors
            /// [`Error::Invalid`] if it is anything else.
            pub fn new(name: impl Into<String>) -> Result<Self, Error> {
                let name = name.into();
                if !is_name(&name) {
                    return Err(Error::invalid(
                        $field,
                        "starts with a letter and goes on with letters, digits, '_', '.' and '-', at most 255 characters",
                    ));
                }
                Ok(Self(name))
            }

            /// A name as the database holds it: another program may have written one that this library refuses.
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            pub(crate) fn from_storage(name: String) -> Self {
                Self(name)
            }

            /// A name that another program may have written with plain SQL: any text of at most 255 characters without a
            /// NUL. Nothing is enqueued under it by this library.
            ///
            /// # Errors
            /// [`Error::Invalid`] if it is anything else.
            pub fn existing(name: impl Into<String>) -> Result<Self, Error> {
                let name = name.into();
                check_text($field, &name)?;
                Ok(Self(name))
            }

            /// The name.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;

            fn from_str(name: &str) -> Result<Self, Error> {
                Self::new(name)
            }
        }
    };
}

name!(
    /// The name of a kind of job, under which its handler is found.
    JobType, "type"
);
name!(
    /// The name of a queue.
    QueueName, "queue"
);

impl QueueName {
    /// The queue of a job that names none: `default`.
    pub fn default_queue() -> Self {
        Self("default".to_owned())
    }
}

fn is_name(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|first| first.is_ascii_alphabetic())
        && chars.all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
        && name.len() <= NAME_CHARS_MAX
}

/// Who claims jobs: unique per run of a worker, since a job's owner is recognised by it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WorkerId(String);

impl WorkerId {
    /// An id that nobody else has.
    pub fn random() -> Self {
        Self(Uuid::new_v4().to_string())
    }

    /// An id of the caller's own making, such as the name of a host.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is empty, longer than 255 characters, or holds a NUL.
    pub fn new(id: impl Into<String>) -> Result<Self, Error> {
        let id = id.into();
        check_text("worker", &id)?;
        if id.is_empty() {
            return Err(Error::invalid("worker", "is not empty"));
        }
        Ok(Self(id))
    }

    /// The id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Text that every storage can hold and compare: no NUL, at most 255 characters.
pub(crate) fn check_text(field: &'static str, text: &str) -> Result<(), Error> {
    if NAME_CHARS_MAX < text.chars().count() {
        return Err(Error::invalid(field, "is at most 255 characters long"));
    }
    if text.contains('\0') {
        return Err(Error::invalid(field, "holds no NUL character"));
    }
    Ok(())
}

/// An error text fit to be stored: without control characters and obvious secrets, at most 4096 characters.
pub fn sanitize_error(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(ERROR_CHARS_MAX * 2).collect();
    redact(&clean).chars().take(ERROR_CHARS_MAX).collect()
}

const SECRET_KEYS: [&str; 7] = ["password", "passwd", "secret", "token", "api_key", "apikey", "authorization"];

/// Blanks the password of a URL and the value behind a key that names a secret.
fn redact(text: &str) -> String {
    text.split(' ').map(redact_word).collect::<Vec<_>>().join(" ")
}

fn redact_word(word: &str) -> String {
    if let Some((scheme, rest)) = word.split_once("://")
        && let Some((credentials, host)) = rest.split_once('@')
        && let Some((user, _)) = credentials.split_once(':')
    {
        return format!("{scheme}://{user}:***@{host}");
    }
    if let Some(at) = word.find(['=', ':']) {
        let key = word[..at].to_ascii_lowercase();
        if at + 1 < word.len() && SECRET_KEYS.iter().any(|secret| key.ends_with(secret)) {
            return format!("{}***", &word[..=at]);
        }
    }
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_start_with_a_letter_and_stay_short() {
        for good in ["a", "Mail", "send_mail", "v1.resize-2", &"x".repeat(255)] {
            assert_eq!(JobType::new(good).unwrap().as_str(), good);
            assert_eq!(QueueName::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "1a", "_a", ".a", "-a", "a b", "a/b", "é", "a\0", &"x".repeat(256)] {
            assert!(JobType::new(bad).is_err(), "{bad:?}");
            assert!(QueueName::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn batch_is_clamped() {
        let table = [(0, 1000), (1, 1), (999, 999), (10_000, 10_000), (10_001, 10_000), (u32::MAX, 10_000)];
        for (given, used) in table {
            assert_eq!(clamp_batch(given), used, "{given}");
        }
    }

    #[test]
    fn interval_is_clamped() {
        assert_eq!(clamp_interval(Duration::ZERO), HOUR);
        assert_eq!(clamp_interval(Duration::from_nanos(1)), Duration::from_millis(100));
        assert_eq!(clamp_interval(Duration::from_millis(100)), Duration::from_millis(100));
        assert_eq!(clamp_interval(DAY), DAY);
    }

    #[test]
    fn an_age_that_reaches_before_all_time_means_never() {
        assert_eq!(age_micros(Duration::ZERO), None);
        assert_eq!(age_micros(Duration::MAX), None);
        assert_eq!(age_micros(WINDOW_MAX + Duration::from_nanos(1)), None);
        assert_eq!(age_micros(Duration::from_nanos(1)), Some(1));
        assert_eq!(age_micros(Duration::from_secs(1)), Some(1_000_000));
    }

    #[test]
    fn error_text_loses_controls_and_secrets_and_length() {
        assert_eq!(sanitize_error("a\n\0b\u{1b}[0m"), "a  b [0m");
        assert_eq!(sanitize_error("postgres://bob:hunter2@db/x refused"), "postgres://bob:***@db/x refused");
        assert_eq!(sanitize_error("bad password=hunter2 given"), "bad password=*** given");
        assert_eq!(sanitize_error("at 12:30 step=2"), "at 12:30 step=2");
        assert_eq!(sanitize_error(&"é".repeat(5000)).chars().count(), 4096);
    }
}
