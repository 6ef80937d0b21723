//! The windows, and how often and how much at once.

use std::fmt;
use std::time::Duration;

use crate::job::TerminalStatus;
use crate::limits::{
    PRESET_COMPLETED_AFTER, PRESET_CONSUMED_SIGNALS_AFTER, PRESET_FAILED_AFTER, STOCK_COMPLETED_AFTER,
    STOCK_CONSUMED_SIGNALS_AFTER, STOCK_FAILED_AFTER, SWEEP_BATCH, SWEEP_INTERVAL, clamp_batch, clamp_interval,
};
use crate::storage::Storage;

/// How long finished jobs and consumed signals are kept.
///
/// **By default a worker deletes history.** One that is built without any retention setting uses
/// [`Retention::stock`]: completed jobs go 30 days after they completed, failed and cancelled ones after 90 days,
/// consumed signals after 7 days. A deleted row is gone for good, with its checkpoints and signals; nobody is asked,
/// and nothing brings it back. Choose windows that are longer than whatever you still need old rows for: looking at
/// them, auditing, debugging, requeueing by hand. [`Retention::disabled`] turns all of it off.
///
/// A policy is whole: it replaces the one before it, whichever was given last counts, and **a window that a policy
/// leaves out is off**, which keeps that kind for ever. There is no `Default`, because three policies could be
/// called that and each deletes something else.
///
/// ```
/// use std::time::Duration;
/// use ebbtide_jobs::Retention;
/// const DAY: Duration = Duration::from_secs(24 * 60 * 60);
///
/// // Consumed signals are kept for ever: this policy has no window for them.
/// let policy = Retention::custom().completed_after(DAY * 7).failed_after(DAY * 30);
/// ```
///
/// Signals that nobody has consumed are never deleted by their age; they go with their finished job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a policy does nothing until a worker has it"]
pub struct Retention {
    pub(super) completed_after: Option<Duration>,
    pub(super) failed_after: Option<Duration>,
    pub(super) consumed_signals_after: Option<Duration>,
    pub(super) interval: Duration,
    pub(super) batch_size: u32,
    pub(super) delete_checkpoints: bool,
}

impl Retention {
    /// The policy of a worker that was given none: completed 30 days, failed and cancelled 90, consumed signals 7.
    pub fn stock() -> Self {
        Self::custom()
            .completed_after(STOCK_COMPLETED_AFTER)
            .failed_after(STOCK_FAILED_AFTER)
            .consumed_signals_after(STOCK_CONSUMED_SIGNALS_AFTER)
    }

    /// A tighter policy for those who want one: completed 7 days, failed and cancelled 30, consumed signals 7. It is
    /// *not* what a worker uses by itself.
    pub fn default_preset() -> Self {
        Self::custom()
            .completed_after(PRESET_COMPLETED_AFTER)
            .failed_after(PRESET_FAILED_AFTER)
            .consumed_signals_after(PRESET_CONSUMED_SIGNALS_AFTER)
    }

    /// A policy without any window, to which the wanted ones are added. As it is, it deletes nothing.
    pub fn custom() -> Self {
        Self {
            completed_after: None,
            failed_after: None,
            consumed_signals_after: None,
            interval: SWEEP_INTERVAL,
            batch_size: SWEEP_BATCH,
            delete_checkpoints: false,
        }
    }

    /// Nothing is deleted without being asked for, not even checkpoints. The sweep of passed deduplication windows
    /// goes on: it has a switch of its own, [`UniqueLockSweep::disabled`].
    pub fn disabled() -> Self {
        Self::custom()
    }

    /// Deletes completed jobs this long after they completed. Zero keeps them for ever.
    pub fn completed_after(mut self, window: Duration) -> Self {
        self.completed_after = (!window.is_zero()).then_some(window);
        self
    }

    /// Deletes failed *and cancelled* jobs this long after they ended. Zero keeps them for ever.
    pub fn failed_after(mut self, window: Duration) -> Self {
        self.failed_after = (!window.is_zero()).then_some(window);
        self
    }

    /// Deletes signals this long after they were consumed. Zero keeps them as long as their job.
    pub fn consumed_signals_after(mut self, window: Duration) -> Self {
        self.consumed_signals_after = (!window.is_zero()).then_some(window);
        self
    }

    /// Keeps completed jobs for ever: a window of zero, in words.
    pub fn keep_completed_forever(self) -> Self {
        self.completed_after(Duration::ZERO)
    }

    /// Keeps failed and cancelled jobs for ever: a window of zero, in words.
    pub fn keep_failed_forever(self) -> Self {
        self.failed_after(Duration::ZERO)
    }

    /// Keeps consumed signals as long as their job: a window of zero, in words.
    pub fn keep_consumed_signals_forever(self) -> Self {
        self.consumed_signals_after(Duration::ZERO)
    }

    /// Time between two ticks. Default: 1 hour, which zero means as well; at least 100 ms.
    ///
    /// A shorter one deletes rows sooner after they are past their window, and scans more often.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = clamp_interval(interval);
        self
    }

    /// Most rows in one transaction. Default: 1000, which zero means as well; at most 10,000.
    ///
    /// A larger one makes fewer round trips and holds its locks longer. It does not delete more: a tick goes on until
    /// nothing past its window is left.
    pub fn batch_size(mut self, rows: u32) -> Self {
        self.batch_size = clamp_batch(rows);
        self
    }

    /// Deletes a job's checkpoints in the transaction that completes it, from here on. Default: they stay until the
    /// job's row goes, so that the steps of a finished workflow can be looked at.
    ///
    /// Failed and cancelled jobs keep theirs. It is no window: a policy with this alone deletes no rows.
    pub fn delete_checkpoints_on_complete(mut self) -> Self {
        self.delete_checkpoints = true;
        self
    }

    /// The policy as it is carried out, with every limit applied. Printing it shows what the start-up line says.
    pub fn effective(&self) -> Self {
        let positive = |window: Option<Duration>| window.filter(|window| !window.is_zero());
        Self {
            completed_after: positive(self.completed_after),
            failed_after: positive(self.failed_after),
            consumed_signals_after: positive(self.consumed_signals_after),
            interval: clamp_interval(self.interval),
            batch_size: clamp_batch(self.batch_size),
            delete_checkpoints: self.delete_checkpoints,
        }
    }

    /// What is left of the policy on a storage that may not be able to carry all of it out.
    pub(super) fn effective_on(&self, storage: &dyn Storage) -> Self {
        let mut policy = self.effective();
        if storage.retention().is_none() {
            policy.completed_after = None;
            policy.failed_after = None;
        }
        if storage.signal_retention().is_none() {
            policy.consumed_signals_after = None;
        }
        policy
    }

    /// Whether any window is on.
    pub fn is_enabled(&self) -> bool {
        self.completed_after.is_some() || self.failed_after.is_some() || self.consumed_signals_after.is_some()
    }

    /// The window of jobs that ended in this way; `None` keeps them for ever.
    pub fn window(&self, status: TerminalStatus) -> Option<Duration> {
        match status {
            TerminalStatus::Completed => self.completed_after,
            TerminalStatus::Failed | TerminalStatus::Cancelled => self.failed_after,
        }
    }

    /// The window of consumed signals; `None` keeps them as long as their job.
    pub fn signal_window(&self) -> Option<Duration> {
        self.consumed_signals_after
    }

    /// Time between two ticks.
    pub fn tick_interval(&self) -> Duration {
        self.interval
    }

    /// Most rows in one transaction.
    pub fn rows_max(&self) -> u32 {
        self.batch_size
    }

    /// Whether completions delete checkpoints.
    pub fn deletes_checkpoints_on_complete(&self) -> bool {
        self.delete_checkpoints
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let window = |window: Option<Duration>| Span(window.unwrap_or(Duration::ZERO));
        write!(
            f,
            "completed_after={} failed_after={} consumed_signals_after={} interval={} batch_size={} \
             delete_checkpoints_on_complete={}",
            window(self.completed_after),
            window(self.failed_after),
            window(self.consumed_signals_after),
            Span(self.interval),
            self.batch_size,
            self.delete_checkpoints
        )
    }
}

/// The sweep of deduplication windows that have passed.
///
/// On by default, every hour, and independent of [`Retention`]. Without it their table only grows: a passed window
/// is free for the next enqueue whether or not its row is still there. A window that has not passed is never touched.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a policy does nothing until a worker has it"]
pub struct UniqueLockSweep {
    pub(super) interval: Duration,
    pub(super) batch_size: u32,
    pub(super) is_enabled: bool,
}

impl UniqueLockSweep {
    /// The sweep of a worker that was told nothing: every hour, 1000 rows at once.
    pub fn stock() -> Self {
        Self { interval: SWEEP_INTERVAL, batch_size: SWEEP_BATCH, is_enabled: true }
    }

    /// Sweeps at this interval; zero means 1 hour, less than 100 ms means 100 ms.
    pub fn every(interval: Duration) -> Self {
        Self::stock().interval(interval)
    }

    /// No sweep: rows of passed windows stay until somebody else deletes them.
    pub fn disabled() -> Self {
        Self { is_enabled: false, ..Self::stock() }
    }

    /// Time between two ticks. Default: 1 hour, which zero means as well; at least 100 ms.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = clamp_interval(interval);
        self
    }

    /// Most rows in one transaction. Default: 1000, which zero means as well; at most 10,000.
    pub fn batch_size(mut self, rows: u32) -> Self {
        self.batch_size = clamp_batch(rows);
        self
    }

    /// The sweep as it is carried out, with every limit applied.
    pub fn effective(&self) -> Self {
        Self {
            interval: clamp_interval(self.interval),
            batch_size: clamp_batch(self.batch_size),
            is_enabled: self.is_enabled,
        }
    }

    /// Whether anything is swept.
    pub fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    /// Time between two ticks.
    pub fn tick_interval(&self) -> Duration {
        self.interval
    }

    /// Most rows in one transaction.
    pub fn rows_max(&self) -> u32 {
        self.batch_size
    }
}

/// A duration as the start-up line writes it: `720h0m0s`, `1m30s`, `500ms`, `0s`. Hours never become days.
pub(super) struct Span(pub(super) Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = (self.0.as_secs(), self.0.subsec_nanos());
        if seconds == 0 {
            return match nanos {
                0 => f.write_str("0s"),
                1..1_000 => write!(f, "{nanos}ns"),
                1_000..1_000_000 => write!(f, "{}µs", decimal(nanos / 1_000, nanos % 1_000, 3)),
                _ => write!(f, "{}ms", decimal(nanos / 1_000_000, nanos % 1_000_000, 6)),
            };
        }
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        if 0 < hours {
            write!(f, "{hours}h")?;
        }
        if 0 < hours || 0 < minutes {
            write!(f, "{minutes}m")?;
        }
        write!(f, "{}s", decimal(u32::try_from(seconds % 60).expect("below 60"), nanos, 9))
    }
}

/// A whole part and a fraction of so many digits, without the zeros at its end.
fn decimal(whole: u32, fraction: u32, digits: usize) -> String {
    let text = format!("{whole}.{fraction:0digits$}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    #[test]
    fn the_stock_windows_are_30_90_and_7_days() {
        assert_eq!(
            Retention::stock().to_string(),
            "completed_after=720h0m0s failed_after=2160h0m0s consumed_signals_after=168h0m0s interval=1h0m0s \
             batch_size=1000 delete_checkpoints_on_complete=false"
        );
    }

    #[test]
    fn the_preset_is_tighter_and_otherwise_ordinary() {
        let preset = Retention::default_preset();
        assert_eq!(preset.window(TerminalStatus::Completed), Some(DAY * 7));
        assert_eq!(preset.window(TerminalStatus::Failed), Some(DAY * 30));
        assert_eq!(preset.window(TerminalStatus::Cancelled), Some(DAY * 30));
        assert_eq!(preset.signal_window(), Some(DAY * 7));
        assert_eq!((preset.tick_interval(), preset.rows_max()), (SWEEP_INTERVAL, 1000));
        assert!(!preset.deletes_checkpoints_on_complete());
    }

    #[test]
    fn a_window_that_is_left_out_is_off() {
        let policy = Retention::custom().completed_after(DAY * 7).failed_after(DAY * 30);
        assert_eq!(policy.signal_window(), None);
        assert!(policy.is_enabled());
        assert!(!Retention::custom().is_enabled());
    }

    #[test]
    fn zero_keeps_for_ever() {
        let policy = Retention::stock().keep_completed_forever().failed_after(Duration::ZERO);
        assert_eq!(TerminalStatus::ALL.map(|status| policy.window(status)), [None; 3]);
        assert!(policy.is_enabled(), "the signals' window is still on");
        assert!(!policy.keep_consumed_signals_forever().is_enabled());
    }

    #[test]
    fn disabled_resets_the_deletion_of_checkpoints_too() {
        assert_eq!(Retention::disabled(), Retention::custom());
        assert!(!Retention::disabled().deletes_checkpoints_on_complete());
        let alone = Retention::custom().delete_checkpoints_on_complete();
        assert!(alone.deletes_checkpoints_on_complete() && !alone.is_enabled());
    }

    #[test]
    fn numbers_are_clamped_when_set_and_again_when_used() {
        for (given, used) in [(0, 1000), (1, 1), (999, 999), (10_000, 10_000), (10_001, 10_000), (u32::MAX, 10_000)] {
            assert_eq!(Retention::stock().batch_size(given).rows_max(), used);
            assert_eq!(UniqueLockSweep::stock().batch_size(given).rows_max(), used);
            let policy = Retention { batch_size: given, ..Retention::stock() };
            assert_eq!(policy.effective().rows_max(), used, "past the setter");
            let sweep = UniqueLockSweep { batch_size: given, ..UniqueLockSweep::stock() };
            assert_eq!(sweep.effective().rows_max(), used, "past the setter");
        }
        let hour = Duration::from_secs(3600);
        for (given, used) in [(0, hour), (1, Duration::from_millis(100)), (5000, Duration::from_secs(5))] {
            let given = Duration::from_millis(given);
            assert_eq!(Retention::stock().interval(given).tick_interval(), used);
            assert_eq!(UniqueLockSweep::every(given).tick_interval(), used);
            let policy = Retention { interval: given, ..Retention::stock() };
            assert_eq!(policy.effective().tick_interval(), used, "past the setter");
        }
    }

    #[test]
    fn spans_read_as_hours_minutes_seconds() {
        let ms = Duration::from_millis;
        for (span, text) in [
            (ms(0), "0s"),
            (ms(500), "500ms"),
            (ms(1500), "1.5s"),
            (ms(90_000), "1m30s"),
            (ms(5_400_000), "1h30m0s"),
            (DAY * 30, "720h0m0s"),
            (Duration::from_nanos(7), "7ns"),
            (Duration::from_micros(1), "1µs"),
            (Duration::from_nanos(1_500), "1.5µs"),
            (Duration::from_nanos(3_600_000_000_001), "1h0m0.000000001s"),
        ] {
            assert_eq!(Span(span).to_string(), text);
        }
    }
}
