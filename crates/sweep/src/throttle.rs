//! Shares the database with whoever else works in it: how much of the time steps may run, and why no more.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::pace::pause;

/// The least share of the time that steps get: deletion slows down and never stops.
const DUTY_MIN: f64 = 0.02;
/// One sample under pressure leaves this much of the duty.
const PRESSED: f64 = 0.6;
/// One sample without pressure adds this much of the duty, and a little so that it gets off the floor.
const RELIEVED: f64 = 1.25;
const RELIEVED_PLUS: f64 = 0.01;
/// Pauses shorter than this are saved up: a timer cannot keep them.
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// The longest that one step is paid for.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What was seen of the database while steps ran.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Whether anybody else was at work. Alone, steps may run all the time.
    pub is_shared: bool,
    /// What suffers from the steps, or will; empty if nothing does.
    pub reasons: Vec<&'static str>,
}

/// How long each reason held steps back, in the order in which the reasons turned up.
pub type HeldBack = Vec<(&'static str, Duration)>;

/// The share of the time in which steps may run.
///
/// Whoever runs a step waits for [`Throttle::ready`] before it and says with [`Throttle::took`] how long it was; a
/// watcher says with [`Throttle::press`] what the steps do to the database. Under pressure the share falls to a
/// fiftieth, never to nothing, and without it grows back within some samples: to all of the time where nobody else
/// works, to the configured share where somebody does.
#[derive(Debug)]
pub struct Throttle {
    shared_duty: f64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    duty: f64,
    reasons: Vec<&'static str>,
    /// When the next step may start.
    free_at: Option<Instant>,
    /// When the last step ended: a step that was sent before began only then.
    last_end: Option<Instant>,
    held_back: HeldBack,
}

impl Throttle {
    /// A throttle that leaves steps the share `shared_duty` of the time while others work, above 0 and at most 1.
    ///
    /// # Panics
    /// If `shared_duty` is no such share.
    pub fn new(shared_duty: f64) -> Self {
        assert!(0.0 < shared_duty && shared_duty <= 1.0, "a share of the time");
        let state =
            State { duty: shared_duty, reasons: Vec::new(), free_at: None, last_end: None, held_back: Vec::new() };
        Self { shared_duty, state: Mutex::new(state) }
    }

    /// The share of the time that steps get at this moment.
    pub fn duty(&self) -> f64 {
        self.state().duty
    }

    /// Waits until the next step may start. False when `cancel` is cancelled before.
    pub async fn ready(&self, cancel: &CancellationToken) -> bool {
        let wait = {
            let state = self.state();
            state.free_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
        };
        if wait < PAUSE_MIN {
            return !cancel.is_cancelled();
        }
        pause(wait, cancel).await
    }

    /// Takes in a step that was sent at `sent` and has just ended, and returns how long it ran. Steps of one session
    /// run one after the other, however many were sent together.
    pub fn took(&self, sent: Instant) -> Duration {
        let now = Instant::now();
        let mut state = self.state();
        let began = state.last_end.map_or(sent, |end| end.max(sent));
        let ran = now.saturating_duration_since(began);
        state.last_end = Some(now);
        let rest = ran.mul_f64(1.0 / state.duty - 1.0).min(PAUSE_MAX);
        let from = state.free_at.map_or(now, |at| at.max(now));
        state.free_at = Some(from + rest);
        let reasons = std::mem::take(&mut state.reasons);
        for reason in &reasons {
            match state.held_back.iter_mut().find(|(known, _)| known == reason) {
                Some((_, held)) => *held += rest,
                None => state.held_back.push((reason, rest)),
            }
        }
        state.reasons = reasons;
        ran
    }

    /// Takes in one sample, and returns whether its reasons are others than before.
    pub fn press(&self, pressure: Pressure) -> bool {
        let Pressure { is_shared, reasons } = pressure;
        let ceiling = if is_shared { self.shared_duty } else { 1.0 };
        let mut state = self.state();
        state.duty = if reasons.is_empty() {
            (state.duty * RELIEVED + RELIEVED_PLUS).min(ceiling)
        } else {
            (state.duty * PRESSED).clamp(DUTY_MIN.min(ceiling), ceiling)
        };
        let has_changed = state.reasons != reasons;
        state.reasons = reasons;
        has_changed
    }

    /// What held steps back since the last call.
    pub fn held_back(&self) -> HeldBack {
        std::mem::take(&mut self.state().held_back)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(20);

    /// The share of the time that steps of one length got.
    async fn share(throttle: &Throttle, steps: u32) -> f64 {
        let cancel = CancellationToken::new();
        let start = Instant::now();
        for _ in 0..steps {
            assert!(throttle.ready(&cancel).await);
            let sent = Instant::now();
            assert!(pause(STEP, &cancel).await);
            assert_eq!(throttle.took(sent), STEP);
        }
        assert!(throttle.ready(&cancel).await);
        (STEP * steps).as_secs_f64() / start.elapsed().as_secs_f64()
    }

    fn press(throttle: &Throttle, is_shared: bool, reasons: &[&'static str]) -> bool {
        throttle.press(Pressure { is_shared, reasons: reasons.to_vec() })
    }

    #[tokio::test(start_paused = true)]
    async fn steps_get_their_share_of_the_time() {
        let throttle = Throttle::new(0.5);
        assert!((share(&throttle, 10).await - 0.5).abs() < 0.05);
        for _ in 0..10 {
            press(&throttle, false, &[]);
        }
        assert!((share(&throttle, 10).await - 1.0).abs() < 0.05, "alone they may have all of it");
        press(&throttle, true, &[]);
        assert!((share(&throttle, 10).await - 0.5).abs() < 0.05);
    }

    #[tokio::test(start_paused = true)]
    async fn pressure_slows_down_and_never_stops() {
        let throttle = Throttle::new(0.5);
        for _ in 0..100 {
            press(&throttle, true, &["replication lag"]);
        }
        assert!((throttle.duty() - DUTY_MIN).abs() < f64::EPSILON);
        assert!(share(&throttle, 3).await > 0.9 * DUTY_MIN);
        let mut samples = 0;
        while throttle.duty() < 0.5 {
            press(&throttle, true, &[]);
            samples += 1;
        }
        assert!(samples < 20, "it catches up within {samples} samples");
    }

    #[tokio::test(start_paused = true)]
    async fn it_says_what_held_it_back() {
        let throttle = Throttle::new(0.5);
        assert!(press(&throttle, true, &["commit latency", "replication lag"]), "new reasons");
        assert!(!press(&throttle, true, &["commit latency", "replication lag"]), "the same");
        share(&throttle, 1).await;
        assert!(press(&throttle, true, &["commit latency"]));
        share(&throttle, 1).await;
        let held = throttle.held_back();
        let of = |reason| held.iter().find(|(known, _)| *known == reason).map(|(_, held)| *held);
        assert!(of("replication lag") < of("commit latency"), "{held:?}");
        assert!(STEP <= of("replication lag").expect("held"), "{held:?}");
        assert_eq!(throttle.held_back(), [], "told once");
    }

    #[tokio::test(start_paused = true)]
    async fn steps_sent_together_are_timed_one_by_one() {
        let throttle = Throttle::new(1.0);
        let cancel = CancellationToken::new();
        let sent = Instant::now();
        for _ in 0..3 {
            assert!(pause(STEP, &cancel).await);
            assert_eq!(throttle.took(sent), STEP, "not the time that it stood in line");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_wait_ends_at_once() {
        let throttle = Throttle::new(0.01);
        let cancel = CancellationToken::new();
        let sent = Instant::now();
        assert!(pause(STEP, &cancel).await);
        throttle.took(sent);
        cancel.cancel();
        let before = Instant::now();
        assert!(!throttle.ready(&cancel).await);
        assert_eq!(before.elapsed(), Duration::ZERO);
    }
}
