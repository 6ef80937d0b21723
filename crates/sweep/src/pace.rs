//! Says when: cycles at a steady pace, slower phases among them, and log lines that may repeat.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Runs `tick` at once and then every `interval`, until `cancel` is cancelled.
///
/// The tick is given the instant at which it starts, and is never cut short: it should watch the same
/// token. A tick that must keep state between cycles is easier to write as a loop over [`Pace`].
///
/// # Panics
/// If `interval` is zero.
pub async fn run_every<F, Fut>(interval: Duration, cancel: &CancellationToken, mut tick: F)
where
    F: FnMut(Instant) -> Fut,
    Fut: Future<Output = ()>,
{
    let mut pace = Pace::new(interval);
    while let Some(started) = pace.next(cancel).await {
        tick(started).await;
    }
}

/// The starts of cycles, one `interval` apart, measured from start to start.
///
/// A cycle that overruns delays the next one and nothing else: the next starts at once, and the starts
/// that were missed are not made up for.
#[derive(Debug)]
pub struct Pace {
    interval: Duration,
    last: Option<Instant>,
}

impl Pace {
    /// A pace whose first cycle starts at once.
    ///
    /// # Panics
    /// If `interval` is zero: such a loop would never rest.
    pub fn new(interval: Duration) -> Self {
        assert!(!interval.is_zero(), "a pace needs an interval above zero");
        Self { interval, last: None }
    }

    /// Lets the next cycle start at once: the one that ended could not take on all that was due.
    pub fn hurry(&mut self) {
        self.last = None;
    }

    /// Waits for the next cycle and returns its start; `None` once `cancel` is cancelled.
    pub async fn next(&mut self, cancel: &CancellationToken) -> Option<Instant> {
        let rest = match self.last {
            Some(last) => self.interval.saturating_sub(last.elapsed()),
            None => Duration::ZERO,
        };
        if !pause(rest, cancel).await {
            return None;
        }
        let started = Instant::now();
        self.last = Some(started);
        Some(started)
    }
}

/// Waits for `duration`. Answers false, at once, when `cancel` is cancelled before the time is over.
#[allow(clippy::disallowed_methods, reason = "the one place that waits for time to pass")]
pub async fn pause(duration: Duration, cancel: &CancellationToken) -> bool {
    tokio::select! {
        biased;
        () = cancel.cancelled() => false,
        () = tokio::time::sleep(duration) => true,
    }
}

/// The clock of a phase that is due less often than every cycle.
///
/// It starts expired, so that the first cycle runs the phase. Only [`Every::restart`] moves it: a cycle
/// that was skipped, or that never reached the phase, leaves it due.
#[derive(Debug)]
pub struct Every {
    interval: Duration,
    last: Option<Instant>,
}

impl Every {
    /// A clock that is due at once, and then `interval` after each restart.
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: None }
    }

    /// Whether the phase is due in the cycle that started at `cycle`.
    pub fn is_due(&self, cycle: Instant) -> bool {
        match self.last {
            Some(last) => self.interval <= cycle.saturating_duration_since(last),
            None => true,
        }
    }

    /// Says that the phase ran in the cycle that started at `cycle`, from which the interval counts.
    pub fn restart(&mut self, cycle: Instant) {
        self.last = Some(cycle);
    }
}

/// Lets one log line through per gap, and counts those it holds back.
///
/// ```
/// # use std::time::Duration;
/// # let mut limit = ebbtide_sweep::LineLimit::new(Duration::from_secs(30));
/// # let error = "connection closed";
/// if let Some(suppressed) = limit.admit() {
///     tracing::error!(target: "retention", error, suppressed, "cycle failed");
/// }
/// ```
#[derive(Debug)]
pub struct LineLimit {
    gap: Duration,
    last: Option<Instant>,
    suppressed: u64,
}

impl LineLimit {
    /// A limit of one line per `gap`; the first line passes.
    pub fn new(gap: Duration) -> Self {
        Self { gap, last: None, suppressed: 0 }
    }

    /// `Some` when the line may be written, with the number of lines held back since the one before it.
    pub fn admit(&mut self) -> Option<u64> {
        let now = Instant::now();
        let is_open = self.last.is_none_or(|last| self.gap <= now.saturating_duration_since(last));
        if !is_open {
            self.suppressed = self.suppressed.saturating_add(1);
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}
