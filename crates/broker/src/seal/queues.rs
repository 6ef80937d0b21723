//! Which queues want their payloads sealed: asked once, and again when the database says that it has changed.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;

use super::Sealer;
use crate::db::Sql;
use crate::db::push::log_queue_encryption_v1;
use crate::error::Error;

/// Queues remembered at most. Beyond, all are forgotten and asked for again.
const QUEUES_MAX: usize = 100_000;

/// The sealer of a server, and what it knows of the queues. It may be wrong: whoever pushes says how it packed, and is
/// refused with [`Error::EncryptionChanged`] where the queue wants it otherwise.
#[derive(Debug)]
pub struct Sealing {
    sealer: Sealer,
    queues: Mutex<HashMap<String, bool>>,
}

impl Sealing {
    pub fn new(sealer: Sealer) -> Self {
        Self { sealer, queues: Mutex::default() }
    }

    pub fn sealer(&self) -> &Sealer {
        &self.sealer
    }

    /// Whether messages for `queue` are sealed; `None` until [`Sealing::ask`]. Without a key none is.
    pub fn wanted(&self, queue: &str) -> Option<bool> {
        if !self.sealer.has_key() {
            return Some(false);
        }
        self.queues().get(queue).copied()
    }

    /// Asks the database for `queues`.
    ///
    /// # Errors
    /// Whatever the database answers.
    pub async fn ask(&self, db: &(impl Sql + Sync), queues: &[&str]) -> Result<(), Error> {
        let wanted = log_queue_encryption_v1(db, queues).await?;
        let mut known = self.queues();
        if QUEUES_MAX < known.len() + queues.len() {
            known.clear();
        }
        known.extend(queues.iter().map(|queue| (*queue).to_owned()).zip(wanted));
        Ok(())
    }

    pub fn forget(&self, queue: &str) {
        self.queues().remove(queue);
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<String, bool>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
