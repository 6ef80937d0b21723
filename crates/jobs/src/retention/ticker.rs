//! When a sweep ticks.

use std::time::Duration;

use ebbtide_sweep::{Pace, pause};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::limits::SWEEP_FIRST_TICK_MAX;

/// The starts of a sweep's ticks. A test brings its own.
pub trait Ticker: Send {
    /// Waits for the next tick; false once `cancel` is cancelled.
    fn next(&mut self, cancel: &CancellationToken) -> impl Future<Output = bool> + Send;
}

/// The first tick a random time after the start, at most a minute and at most one interval; then one every interval.
///
/// Random, so that workers started together do not all sweep at once. Soon, because a process that is restarted more
/// often than the interval would otherwise never sweep. A tick that overran is followed by one at once, and those
/// that were missed are not made up for.
#[derive(Debug)]
pub struct SweepTicker {
    first: Option<Duration>,
    pace: Pace,
}

impl SweepTicker {
    /// A ticker of this interval.
    ///
    /// # Panics
    /// If `interval` is zero; that of a policy never is.
    pub fn new(interval: Duration) -> Self {
        let most = interval.min(SWEEP_FIRST_TICK_MAX);
        Self { first: Some(random_up_to(most)), pace: Pace::new(interval) }
    }
}

impl Ticker for SweepTicker {
    async fn next(&mut self, cancel: &CancellationToken) -> bool {
        if let Some(wait) = self.first.take()
            && !pause(wait, cancel).await
        {
            return false;
        }
        self.pace.next(cancel).await.is_some()
    }
}

/// More than nothing, and at most `most`.
pub(super) fn random_up_to(most: Duration) -> Duration {
    let nanos = most.as_nanos().max(1);
    // The low half of a random UUID has 62 random bits.
    let random = u128::from(Uuid::new_v4().as_u64_pair().1 & (u64::MAX >> 2));
    let nanos = random % nanos + 1;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn the_first_tick_is_random_within_a_minute_and_an_interval() {
        for (interval, most) in [(3600, 60), (10, 10)] {
            let mut waits = Vec::new();
            for _ in 0..32 {
                let started = Instant::now();
                let mut ticker = SweepTicker::new(Duration::from_secs(interval));
                assert!(ticker.next(&CancellationToken::new()).await);
                waits.push(started.elapsed());
                let first = Instant::now();
                assert!(ticker.next(&CancellationToken::new()).await);
                assert!(first.elapsed().abs_diff(Duration::from_secs(interval)) <= Duration::from_millis(1));
            }
            // A paused clock goes in milliseconds.
            assert!(waits.iter().all(|wait| !wait.is_zero() && *wait <= Duration::from_millis(most * 1000 + 1)));
            waits.dedup();
            assert!(1 < waits.len(), "the wait is not random");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_ticker_does_not_tick() {
        let cancel = CancellationToken::new();
        cancel.cancel();
        assert!(!SweepTicker::new(Duration::from_secs(1)).next(&cancel).await);
    }
}
