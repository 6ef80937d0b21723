//! What a server must know of the others' doing: switches and declarations, asked for when there was word of a change.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::App;
use super::ephemeral::options;
use crate::db::Conn;
use crate::db::system::ephemeral_declared_v1;
use crate::error::Error;
use crate::id::DEFAULT_TENANT;
use crate::switches::Switch;

/// Word may be lost, with a connection or behind a pooler; then it takes this long.
const ASK_INTERVAL: Duration = Duration::from_secs(10);
const DECLARED_MAX: i32 = 10_000;

impl App {
    /// Asks the database for what it should know.
    ///
    /// # Errors
    /// Whatever the database answers.
    pub async fn refresh(&self) -> Result<(), Error> {
        self.refresh_on(&self.db.conn().await?).await
    }

    /// The same on a connection of the caller, who may have the only one.
    ///
    /// # Errors
    /// Whatever the database answers.
    pub async fn refresh_on(&self, conn: &Conn) -> Result<(), Error> {
        self.switches.refresh(conn).await?;
        self.obey();
        let declared = ephemeral_declared_v1(conn, DEFAULT_TENANT, DECLARED_MAX).await?;
        let declared: Vec<_> = declared.into_iter().map(|queue| (queue.name.clone(), options::of(&queue))).collect();
        self.ephemeral.declare_all(&declared);
        self.quotas.refresh(conn).await
    }

    fn obey(&self) {
        self.spool.pause(self.switches.is_on(Switch::PushMaintenance));
    }

    pub(super) async fn turn(&self, switch: Switch, is_on: bool) -> Result<(), Error> {
        self.switches.turn(&self.db, switch, is_on).await?;
        self.obey();
        self.wake.switched();
        Ok(())
    }

    /// Keeps up with the other servers until `stop`.
    pub async fn keep_current(self: Arc<Self>, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let _ = stop.run_until_cancelled(timeout(ASK_INTERVAL, self.wake.told())).await;
            if stop.is_cancelled() {
                return;
            }
            if let Err(error) = self.refresh().await {
                debug!(target: "http", %error, "the switches could not be asked for");
            }
        }
    }
}
