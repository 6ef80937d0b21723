//! What a cycle did, phase by phase: deleted, kept and why, how long it took, what failed first.

use std::time::Duration;

use tokio::time::Instant;

use crate::drain::{Drained, End};

/// The phases of one cycle in the order in which they ended.
#[derive(Debug, Clone)]
pub struct Report<E> {
    started: Instant,
    elapsed: Duration,
    phases: Vec<PhaseReport<E>>,
}

impl<E> Report<E> {
    /// An empty report; its cycle starts here.
    pub fn start() -> Self {
        Self { started: Instant::now(), elapsed: Duration::ZERO, phases: Vec::new() }
    }

    /// Ends `phase`, stamps how long it took, and adds it.
    ///
    /// # Panics
    /// If the report has a phase of that name already.
    pub fn push(&mut self, mut phase: PhaseReport<E>) {
        assert!(self.phase(phase.name).is_none(), "a cycle has each phase once: {}", phase.name);
        phase.elapsed = phase.started.elapsed();
        self.elapsed = self.started.elapsed();
        self.phases.push(phase);
    }

    /// Every phase that ended.
    pub fn phases(&self) -> &[PhaseReport<E>] {
        &self.phases
    }

    /// The phase of that name; `None` if it did not run.
    pub fn phase(&self, name: &str) -> Option<&PhaseReport<E>> {
        self.phases.iter().find(|phase| phase.name == name)
    }

    /// Rows deleted by the phase of that name; 0 if it did not run.
    pub fn deleted(&self, name: &str) -> u64 {
        self.phase(name).map_or(0, |phase| phase.deleted)
    }

    /// From the start of the cycle to the end of its last phase.
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// Whether the cycle is worth a line at info: a phase that is not minor deleted something.
    pub fn anything_went(&self) -> bool {
        self.phases.iter().any(|phase| !phase.is_minor && 0 < phase.deleted)
    }

    /// The first error of a phase that is not minor; `Some` means that the cycle failed.
    pub fn first_error(&self) -> Option<&E> {
        self.phases.iter().filter(|phase| !phase.is_minor).find_map(|phase| phase.first_error.as_ref())
    }
}

/// What one kind of work did in one cycle.
#[derive(Debug, Clone)]
pub struct PhaseReport<E> {
    /// The name under which the phase is logged.
    pub name: &'static str,
    /// Whether the phase neither makes a cycle worth telling nor fails it.
    pub is_minor: bool,
    /// Rows deleted. Saturates.
    pub deleted: u64,
    /// Steps that answered.
    pub steps: u64,
    /// Steps that failed; each ended one drain.
    pub failures: u64,
    /// Whether cancellation cut the phase short, so that more may be left.
    pub is_cancelled: bool,
    /// What was kept, as reason and count, in the order in which the reasons turned up.
    pub kept: Vec<(&'static str, u64)>,
    /// The first failure; later ones are only counted.
    pub first_error: Option<E>,
    /// From the start of the phase to its [`Report::push`]; zero until then.
    pub elapsed: Duration,
    started: Instant,
}

impl<E> PhaseReport<E> {
    /// Starts a phase.
    pub fn start(name: &'static str) -> Self {
        Self {
            name,
            is_minor: false,
            deleted: 0,
            steps: 0,
            failures: 0,
            is_cancelled: false,
            kept: Vec::new(),
            first_error: None,
            elapsed: Duration::ZERO,
            started: Instant::now(),
        }
    }

    /// Starts a minor phase: housekeeping that nobody needs to hear of.
    pub fn start_minor(name: &'static str) -> Self {
        Self { is_minor: true, ..Self::start(name) }
    }

    /// Adds what a drain did. A failure is remembered, and does not keep the next drain from running.
    pub fn record(&mut self, drained: Drained<E>) {
        self.deleted = self.deleted.saturating_add(drained.deleted);
        self.steps = self.steps.saturating_add(drained.steps);
        match drained.end {
            End::Done => {}
            End::Cancelled => self.is_cancelled = true,
            End::Failed(error) => self.fail(error),
        }
    }

    /// Adds a failure outside a drain, such as a plan that could not be read.
    pub fn fail(&mut self, error: E) {
        self.failures = self.failures.saturating_add(1);
        self.first_error.get_or_insert(error);
    }

    /// Adds `count` to what was kept for the reason `why`.
    pub fn keep(&mut self, why: &'static str, count: u64) {
        match self.kept.iter_mut().find(|(reason, _)| *reason == why) {
            Some((_, kept)) => *kept = kept.saturating_add(count),
            None => self.kept.push((why, count)),
        }
    }
}
