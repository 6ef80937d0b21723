//! Which partitions a lease id stands for: remembered for this server's leases, searched for others.
//!
//! Cursors have no index by lease, so that every pop and ack updates them in place. A lease of
//! another server, or one that was forgotten, is found by reading all cursors; those searches are
//! gathered, one at a time and at most one a second, whatever is asked. What is remembered is only
//! a hint about where to look: whether a lease is live is always the database's word.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::db::Db;
use crate::db::lease::{Holding, log_lease_holders_v1};
use crate::error::Error;

/// Leases remembered. Older ones are forgotten first.
const LEASES_MAX: usize = 1 << 16;
/// Partitions of all leases remembered.
const PARTITIONS_MAX: usize = 1 << 18;
/// Lease ids that may wait for a search.
const ASKED_MAX: usize = 4096;
const SEARCH_EVERY: Duration = Duration::from_secs(1);

/// What is known of leases. Cheap to clone.
#[derive(Clone, Default)]
pub struct Leases {
    known: Arc<Mutex<Known>>,
    asked: Arc<Mutex<Asked>>,
}

#[derive(Default)]
struct Known {
    holdings: HashMap<String, Holding>,
    /// Oldest first; an id that is forgotten stays here until its turn.
    order: VecDeque<String>,
    partitions: usize,
}

#[derive(Default)]
struct Asked {
    waiting: HashMap<String, Vec<oneshot::Sender<Option<Holding>>>>,
    is_searching: bool,
    last_search: Option<Instant>,
}

impl Known {
    fn forget(&mut self, lease_id: &str) {
        if let Some(holding) = self.holdings.remove(lease_id) {
            self.partitions -= holding.partitions.len();
        }
    }
}

impl Leases {
    /// A lease was given out.
    pub(in crate::http) fn remember(&self, lease_id: &str, holding: &Holding) {
        let mut known = self.known();
        known.forget(lease_id);
        known.partitions += holding.partitions.len();
        known.holdings.insert(lease_id.to_owned(), holding.clone());
        known.order.push_back(lease_id.to_owned());
        while LEASES_MAX < known.order.len() || PARTITIONS_MAX < known.partitions {
            let Some(oldest) = known.order.pop_front() else { break };
            known.forget(&oldest);
        }
    }

    /// A lease ended.
    pub(in crate::http) fn forget(&self, lease_id: &str) {
        self.known().forget(lease_id);
    }

    /// The partitions of a lease, `None` if nobody holds it.
    pub(in crate::http) async fn find(&self, db: &Db, lease_id: &str) -> Result<Option<Holding>, Error> {
        if let Some(holding) = self.known().holdings.get(lease_id) {
            return Ok(Some(holding.clone()));
        }
        let (sender, receiver) = oneshot::channel();
        let must_start = {
            let mut asked = self.asked();
            if ASKED_MAX <= asked.waiting.len() {
                return Err(Error::Pool);
            }
            asked.waiting.entry(lease_id.to_owned()).or_default().push(sender);
            !std::mem::replace(&mut asked.is_searching, true)
        };
        if must_start {
            tokio::spawn(self.clone().search(db.clone()));
        }
        // A search that failed drops its senders.
        receiver.await.map_err(|_| Error::Pool)
    }

    /// Searches until nobody asks any more.
    async fn search(self, db: Db) {
        loop {
            let last = self.asked().last_search;
            if let Some(last) = last {
                sleep_until(last + SEARCH_EVERY).await;
            }
            let mut waiting = {
                let mut asked = self.asked();
                asked.last_search = Some(Instant::now());
                asked.is_searching = !asked.waiting.is_empty();
                std::mem::take(&mut asked.waiting)
            };
            if waiting.is_empty() {
                return;
            }
            let lease_ids: Vec<String> = waiting.keys().cloned().collect();
            let found = match db.conn().await {
                Ok(conn) => log_lease_holders_v1(&conn, &lease_ids).await,
                Err(error) => Err(error),
            };
            let Ok(found) = found else { continue };
            for (lease_id, holding) in found {
                self.remember(&lease_id, &holding);
                answer(waiting.remove(&lease_id).unwrap_or_default(), Some(&holding));
            }
            for senders in waiting.into_values() {
                answer(senders, None);
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn answer(senders: Vec<oneshot::Sender<Option<Holding>>>, holding: Option<&Holding>) {
    for sender in senders {
        // Whoever asked may have hung up.
        let _ = sender.send(holding.cloned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::PartitionId;
    use uuid::Uuid;

    fn holding(partitions: usize) -> Holding {
        Holding { group: "g".to_owned(), partitions: vec![PartitionId(Uuid::nil()); partitions] }
    }

    #[test]
    fn what_is_remembered_is_bounded_in_leases_and_partitions() {
        let leases = Leases::default();
        for n in 0..LEASES_MAX + 10 {
            leases.remember(&n.to_string(), &holding(1));
        }
        assert_eq!(leases.known().holdings.len(), LEASES_MAX);
        assert!(!leases.known().holdings.contains_key("0"), "the oldest went");
        for n in 0..300 {
            leases.remember(&format!("wide{n}"), &holding(1000));
        }
        assert!(leases.known().partitions <= PARTITIONS_MAX);
        assert!(leases.known().holdings.contains_key("wide299"));
    }

    #[test]
    fn a_forgotten_lease_leaves_nothing_behind() {
        let leases = Leases::default();
        for n in 0..2 * LEASES_MAX {
            let id = n.to_string();
            leases.remember(&id, &holding(3));
            leases.forget(&id);
        }
        assert_eq!(leases.known().partitions, 0);
        assert!(leases.known().order.len() <= LEASES_MAX);
    }
}
