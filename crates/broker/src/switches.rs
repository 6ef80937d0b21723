//! Switches that every server of a database obeys: kept in the database, known here without asking it.

use std::sync::atomic::{AtomicBool, Ordering};

use tracing::info;

use crate::db::system::{system_switch_v1, system_switches_v1};
use crate::db::{Conn, Db};
use crate::error::Error;

/// What an operator can pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// Pushes are spooled instead of stored.
    PushMaintenance,
    /// Pops find nothing.
    PopMaintenance,
    /// Ephemeral queues refuse.
    EphemeralPaused,
}

const SWITCHES: [Switch; 3] = [Switch::PushMaintenance, Switch::PopMaintenance, Switch::EphemeralPaused];

impl Switch {
    fn key(self) -> &'static str {
        match self {
            Self::PushMaintenance => "maintenance_mode",
            Self::PopMaintenance => "pop_maintenance_mode",
            Self::EphemeralPaused => "ephemeral_paused",
        }
    }
}

/// The switches as this server last heard of them.
#[derive(Debug, Default)]
pub struct Switches([AtomicBool; SWITCHES.len()]);

impl Switches {
    pub fn is_on(&self, switch: Switch) -> bool {
        self.0[switch as usize].load(Ordering::Acquire)
    }

    fn learn(&self, switch: Switch, is_on: bool) {
        if self.0[switch as usize].swap(is_on, Ordering::AcqRel) != is_on {
            info!(target: "serve", switch = switch.key(), is_on, "switched");
        }
    }

    /// Turns a switch for all servers; the others hear of it.
    ///
    /// # Errors
    /// Whatever the database answers. Nothing is switched then.
    pub async fn turn(&self, db: &Db, switch: Switch, is_on: bool) -> Result<(), Error> {
        system_switch_v1(&db.conn().await?, switch.key(), is_on).await?;
        self.learn(switch, is_on);
        Ok(())
    }

    /// Asks the database.
    ///
    /// # Errors
    /// Whatever the database answers.
    pub async fn refresh(&self, conn: &Conn) -> Result<(), Error> {
        let on = system_switches_v1(conn).await?;
        SWITCHES.iter().for_each(|switch| self.learn(*switch, on.iter().any(|key| key == switch.key())));
        Ok(())
    }
}
