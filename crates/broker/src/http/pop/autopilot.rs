//! From how many partitions a pop takes when its client leaves that to the server.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::command::Source;

/// Groups that something is known of at a time; others are given the width that everybody begins with.
const TARGETS_MAX: usize = 10_000;
/// Partitions that are taken to be ready while nobody knows.
const READY_LEAST: i32 = 4;
/// The widest pop.
const WIDTH_MAX: i32 = 64;

/// What a consumer group takes from.
type Target = (Source, String);

/// What this server has learned from earlier pops.
#[derive(Default)]
pub(in crate::http) struct Autopilot {
    targets: Mutex<HashMap<Target, State>>,
}

struct State {
    /// Partitions that are probably ready.
    ready: i32,
    /// Pops that are under way or wait.
    pollers: i32,
}

/// One pop that lets the server choose. Dropped, it leaves its share to the others.
pub(super) struct Flight<'a> {
    autopilot: &'a Autopilot,
    target: Target,
    pub(super) width: i32,
}

impl Autopilot {
    /// The pops of a group share what is ready between them.
    pub(super) fn board(&self, source: &Source, group: &str) -> Flight<'_> {
        let target = (source.clone(), group.to_owned());
        let mut targets = self.targets();
        if TARGETS_MAX <= targets.len() && !targets.contains_key(&target) {
            targets.retain(|_, state| 0 < state.pollers);
        }
        let width = if targets.len() < TARGETS_MAX || targets.contains_key(&target) {
            let state = targets.entry(target.clone()).or_insert(State { ready: READY_LEAST, pollers: 0 });
            state.pollers += 1;
            (state.ready + state.pollers - 1) / state.pollers
        } else {
            READY_LEAST
        };
        drop(targets);
        Flight { autopilot: self, target, width: width.clamp(1, WIDTH_MAX) }
    }

    fn targets(&self) -> MutexGuard<'_, HashMap<Target, State>> {
        // Each change is complete in itself, so a panic elsewhere leaves nothing half done.
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight<'_> {
    /// The pop found messages in `claimed` partitions. As many as it might have taken means that there are
    /// probably more.
    pub(super) fn found(&self, claimed: usize) {
        let claimed = i32::try_from(claimed).unwrap_or(WIDTH_MAX);
        if let Some(state) = self.autopilot.targets().get_mut(&self.target) {
            let seen = claimed.saturating_mul(state.pollers);
            let ready = if self.width <= claimed { seen.saturating_mul(2).max(state.ready) } else { seen };
            state.ready = ready.clamp(READY_LEAST, WIDTH_MAX * state.pollers.max(1));
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.autopilot.targets().get_mut(&self.target) {
            state.pollers = (state.pollers - 1).max(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Source {
        Source::Queue("q".to_owned())
    }

    #[test]
    fn one_poller_takes_all_that_is_ready_and_looks_for_more() {
        let autopilot = Autopilot::default();
        for expected in [4, 8, 16, 32, 64, 64] {
            let flight = autopilot.board(&queue(), "g");
            assert_eq!(flight.width, expected);
            flight.found(usize::try_from(expected).expect("positive"));
        }
        autopilot.board(&queue(), "g").found(10);
        assert_eq!(autopilot.board(&queue(), "g").width, 10);
        autopilot.board(&queue(), "g").found(0);
        assert_eq!(autopilot.board(&queue(), "g").width, 4);
        assert_eq!(autopilot.board(&queue(), "another").width, 4);
    }

    #[test]
    fn pollers_share_what_is_ready() {
        let autopilot = Autopilot::default();
        autopilot.board(&queue(), "g").found(4);
        let flights: Vec<_> = (0..4).map(|_| autopilot.board(&queue(), "g")).collect();
        assert_eq!(flights.iter().map(|flight| flight.width).collect::<Vec<_>>(), [8, 4, 3, 2]);
        drop(flights);
        assert_eq!(autopilot.board(&queue(), "g").width, 8);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let autopilot = Autopilot::default();
        let held: Vec<_> = (0..TARGETS_MAX).map(|n| autopilot.board(&queue(), &n.to_string())).collect();
        assert_eq!(autopilot.board(&queue(), "one more").width, 4);
        assert_eq!(autopilot.targets().len(), TARGETS_MAX);
        drop(held);
        autopilot.board(&queue(), "one more").found(9);
        assert_eq!(autopilot.targets().len(), 1);
    }
}
