//! Long polling: look, park, look again when woken or when the timer says so.

use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, gauge};
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::debug;

use super::super::{App, PopWait};
use super::command::{Pop, Source};
use super::leased::{Conflation, Leased, claim};
use crate::error::Error;
use crate::switches::Switch;

/// Least time between two looks of a discovery pop: every push wakes it, also those to queues that
/// it does not match.
const DISCOVERY_PAUSE: Duration = Duration::from_millis(20);

/// How a pop ended.
pub(super) enum Waited {
    Found(Leased),
    /// Still the answer may have to say how the group is given messages.
    Nothing(Option<Conflation>),
    /// As many pops as may be are parked already.
    Full,
}

/// Looks once, or until there is something or the time is over. While parked it is nothing but this
/// future: it holds no connection, and a client that hangs up drops it.
pub(super) async fn pop(app: &Arc<App>, pop: &Arc<Pop>) -> Result<Waited, Error> {
    let is_paused = || app.switches.is_on(Switch::PopMaintenance);
    let Some(wait) = pop.wait else {
        if is_paused() {
            return Ok(Waited::Nothing(None));
        }
        let leased = claim(app, pop).await?;
        let nothing = Waited::Nothing(Some(leased.conflation));
        return Ok(if leased.deliveries.is_empty() { nothing } else { Waited::Found(leased) });
    };
    let deadline = Instant::now() + wait;
    let Some(mut waiter) = app.wake.wait(pop.source.interest(), &pop.claim.group) else { return Ok(Waited::Full) };
    let _parked = Parked::count();
    let (mut misses, mut conflation) = (0, None);
    loop {
        let looked = Instant::now();
        let claimed = if is_paused() { Ok(None) } else { claim(app, pop).await.map(Some) };
        match claimed {
            Ok(Some(leased)) if !leased.deliveries.is_empty() => return Ok(Waited::Found(leased)),
            Ok(Some(leased)) => conflation = Some(leased.conflation),
            Ok(None) => {}
            // Whoever waits outlasts a fail-over. The pauses grow, so that nobody hammers a database that comes up.
            Err(error) if error.is_away() && Instant::now() < deadline => {
                counter!("ebbtide_pops_without_database_total").increment(1);
                debug!(target: "http", %error, "a waiting pop finds no database");
            }
            Err(error) => return Err(error),
        }
        if app.wake.is_closed() {
            return Ok(Waited::Nothing(conflation));
        }
        let next_look = (Instant::now() + pause(&app.settings.pop_wait, misses)).min(deadline);
        let woken = timeout_at(next_look, waiter.woken()).await.is_ok();
        if deadline <= Instant::now() {
            return Ok(Waited::Nothing(conflation));
        }
        misses = if woken { 0 } else { misses + 1 };
        if woken && matches!(pop.source, Source::Matching { .. }) {
            sleep_until((looked + DISCOVERY_PAUSE).min(deadline)).await;
        }
    }
}

/// The pause after `misses` looks in a row that nobody's push caused.
fn pause(settings: &PopWait, misses: u32) -> Duration {
    let grown = misses.saturating_sub(settings.threshold.saturating_sub(1));
    let factor = settings.multiplier.max(1.0).powi(i32::try_from(grown.min(64)).expect("at most 64"));
    let seconds = settings.initial.as_secs_f64() * factor;
    Duration::try_from_secs_f64(seconds)
        .unwrap_or(Duration::MAX)
        .min(settings.longest)
        .max(settings.initial.min(settings.longest))
}

/// One of the waiting pops, in the gauge.
struct Parked;

impl Parked {
    fn count() -> Self {
        gauge!("ebbtide_pops_parked").increment(1.0);
        Self
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        gauge!("ebbtide_pops_parked").decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_after_the_threshold_up_to_the_longest() {
        let settings = PopWait {
            initial: Duration::from_millis(100),
            threshold: 3,
            multiplier: 2.0,
            longest: Duration::from_secs(1),
        };
        let ms: Vec<u128> = (0..8).map(|misses| pause(&settings, misses).as_millis()).collect();
        assert_eq!(ms, [100, 100, 100, 200, 400, 800, 1000, 1000]);
        assert_eq!(pause(&settings, u32::MAX), Duration::from_secs(1));
    }
}
