//! Wakes a server's sweeper for a timer that was scheduled here and is due before its next look.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

/// Cheap to clone. Losing a ring costs time and no timer.
#[derive(Clone, Default)]
pub struct Alarm(Arc<Shared>);

#[derive(Default)]
struct Shared {
    earliest: Mutex<Option<Instant>>,
    rung: Notify,
}

impl Alarm {
    /// Has the sweeper look after `delay`, if it would not look before.
    pub fn ring_in(&self, delay: Duration) {
        // Further ahead the sweeper has looked by itself.
        let Some(at) = Instant::now().checked_add(delay) else { return };
        let mut earliest = self.earliest();
        if earliest.is_none_or(|earliest| at < earliest) {
            *earliest = Some(at);
            self.0.rung.notify_one();
        }
    }

    /// Waits for `pause`, for a ring, or for `stop`.
    pub async fn wait(&self, pause: Duration, stop: &CancellationToken) {
        let deadline = Instant::now() + pause;
        loop {
            let rings_at = *self.earliest();
            let until = rings_at.map_or(deadline, |at| at.min(deadline));
            if until <= Instant::now() || stop.is_cancelled() {
                break;
            }
            let ring = stop.run_until_cancelled(self.0.rung.notified());
            let _ = timeout_at(until, ring).await;
        }
        let mut earliest = self.earliest();
        if earliest.is_some_and(|at| at <= Instant::now()) {
            *earliest = None;
        }
    }

    fn earliest(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.earliest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn the_earliest_ring_ends_the_wait() {
        let (alarm, stop) = (Alarm::default(), CancellationToken::new());
        let started = Instant::now();
        alarm.ring_in(HOUR / 2);
        alarm.ring_in(HOUR / 4);
        alarm.ring_in(HOUR / 3);
        alarm.wait(HOUR, &stop).await;
        assert_eq!(started.elapsed().as_secs(), HOUR.as_secs() / 4);
        alarm.wait(HOUR, &stop).await;
        assert_eq!(started.elapsed().as_secs(), HOUR.as_secs() / 4 * 5, "each ring counts once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_ring_reaches_who_waits_already() {
        let (alarm, stop) = (Alarm::default(), CancellationToken::new());
        let started = Instant::now();
        tokio::join!(alarm.wait(HOUR, &stop), async { alarm.ring_in(HOUR / 2) });
        assert_eq!(started.elapsed().as_secs(), HOUR.as_secs() / 2);
        tokio::join!(alarm.wait(HOUR, &stop), async { stop.cancel() });
        assert_eq!(started.elapsed().as_secs(), HOUR.as_secs() / 2);
    }
}
