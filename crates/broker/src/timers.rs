//! Fires timers: every server claims what is due, pushes the messages, and deletes the timers with that push.
//!
//! A claim ends by itself, so a server that dies while it fires leaves its timers to the others. Since a timer is deleted
//! in the transaction that stores its message, none is fired twice.

mod alarm;
mod fire;
pub mod payload;

use std::sync::Arc;
use std::time::Duration;

use ebbtide_sweep::LineLimit;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::db::Db;
use crate::db::timers::log_timers_due_v1;
use crate::error::Error;
use crate::seal::Sealing;
use crate::telemetry::Telemetry;
use crate::wake::Wake;
pub use alarm::Alarm;
pub use fire::Tally;

/// Pause after which a server looks again while timers are due.
const SLEEP_MIN: Duration = Duration::from_millis(5);
/// The same when what is due is claimed by others.
const SLEEP_TAKEN: Duration = Duration::from_millis(50);
/// The longest pause while there are timers.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// The longest pause while there are none, or their firing is paused. Whoever schedules one here ends it.
const SLEEP_IDLE: Duration = Duration::from_secs(5);
const ERROR_GAP: Duration = Duration::from_secs(30);

/// Fires the timers that this server gets hold of.
pub struct Sweeper {
    pub db: Db,
    pub sealing: Arc<Sealing>,
    pub wake: Wake,
    pub telemetry: Arc<Telemetry>,
    pub alarm: Alarm,
    /// Of segments.
    pub zstd_level: i32,
}

impl Sweeper {
    /// Fires what comes due until `stop`; a push in flight ends first.
    pub async fn run(self, stop: CancellationToken) {
        let mut errors = LineLimit::new(ERROR_GAP);
        while !stop.is_cancelled() {
            let pause = match self.look().await {
                Ok(pause) => pause,
                Err(error) => {
                    if let Some(suppressed) = errors.admit() {
                        warn!(target: "timers", %error, suppressed, "timers were not looked at; the next look is in a second");
                    }
                    SLEEP_MAX
                }
            };
            self.alarm.wait(pause, &stop).await;
        }
    }

    /// Fires what is due, and says how long to wait for more.
    async fn look(&self) -> Result<Duration, Error> {
        let due = {
            let conn = self.db.conn().await?;
            log_timers_due_v1(&conn).await?
        };
        match due {
            None => Ok(SLEEP_IDLE),
            Some(Duration::ZERO) => {
                let tally = self.fire_due().await?;
                Ok(if tally.claimed == 0 { SLEEP_TAKEN } else { SLEEP_MIN })
            }
            Some(pause) => Ok(pause.clamp(SLEEP_MIN, SLEEP_MAX)),
        }
    }
}
