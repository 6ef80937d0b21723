//! Claims that outlive their client: whoever drops one unanswered gives it back.

use std::sync::Arc;

use metrics::{counter, histogram};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::super::App;
use super::super::retry::retried;
use super::command::{Pop, Source};
use crate::db::Conn;
use crate::db::lease::{Holding, log_release_lease_v1};
use crate::db::pop::{Delivery, Popped, log_pop_discover_v2, log_pop_partition_v2, log_pop_queue_v2};
use crate::error::Error;

/// What a claim delivers. Until [`Leased::delivered`] is called, dropping it releases the lease.
pub(super) struct Leased {
    pub(super) deliveries: Vec<Delivery>,
    pub(super) conflation: Conflation,
    release: Option<Release>,
}

/// What an answer says about conflation, messages or not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conflation {
    /// The group is given only the newest message of each partition.
    is_effective: bool,
    /// The request wanted something else.
    is_conflict: bool,
}

impl Conflation {
    pub(super) fn is_said(self) -> bool {
        self.is_effective || self.is_conflict
    }

    /// Its part of the answer, behind another one.
    pub(super) fn text(self) -> &'static str {
        match (self.is_effective, self.is_conflict) {
            (true, true) => r#","conflation":true,"conflationConflict":true"#,
            (true, false) => r#","conflation":true"#,
            (false, true) => r#","conflationConflict":true"#,
            (false, false) => "",
        }
    }
}

struct Release {
    app: Arc<App>,
    pop: Arc<Pop>,
    holding: Holding,
    /// Queue and partition names, for the pops that wait for them.
    places: Vec<(String, String)>,
}

impl Leased {
    fn new(app: &Arc<App>, pop: &Arc<Pop>, popped: Popped) -> Self {
        let Popped { deliveries, is_conflated, is_conflict } = popped;
        let conflation = Conflation { is_effective: is_conflated, is_conflict };
        let mut holding = Holding { group: pop.claim.group.clone(), partitions: Vec::new() };
        let mut places = Vec::new();
        for delivery in &deliveries {
            if holding.partitions.last() != Some(&delivery.partition_id) {
                holding.partitions.push(delivery.partition_id);
                places.push((delivery.queue.clone(), delivery.partition.clone()));
            }
        }
        let is_leased = !pop.claim.auto_ack && !deliveries.is_empty();
        if is_leased {
            app.leases.remember(&pop.claim.worker, &holding);
        }
        let release = is_leased.then(|| Release { app: app.clone(), pop: pop.clone(), holding, places });
        Self { deliveries, conflation, release }
    }

    /// From how many partitions.
    pub(super) fn partitions(&self) -> usize {
        self.deliveries.chunk_by(|one, next| one.partition_id == next.partition_id).count()
    }

    /// The client has it: what happens to it now is the client's word, or the lease's end.
    pub(super) fn delivered(&mut self) {
        self.release = None;
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        let Some(release) = self.release.take() else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(release.run());
        }
    }
}

impl Release {
    /// What fails here heals itself when the lease expires.
    async fn run(self) {
        counter!("ebbtide_pop_released_total").increment(1);
        let worker = &self.pop.claim.worker;
        self.app.leases.forget(worker);
        let released = match self.app.db.conn().await {
            Ok(conn) => log_release_lease_v1(&conn, worker, &self.holding).await,
            Err(error) => Err(error),
        };
        match released {
            Ok(partitions) => debug!(target: "http", partitions, "nobody took the answer; lease released"),
            Err(error) => warn!(target: "http", %error, "could not release a lease that nobody took"),
        }
        for (queue, partition) in &self.places {
            self.app.wake.released(queue, partition, &self.holding.group);
        }
    }
}

/// Claims in a task of its own: a client that hangs up must not cut a transaction in half, whose
/// outcome would be unknown. If nobody waits for the result, it is dropped, and so released.
pub(super) async fn claim(app: &Arc<App>, pop: &Arc<Pop>) -> Result<Leased, Error> {
    let (mut sender, receiver) = oneshot::channel();
    let (app, pop) = (app.clone(), pop.clone());
    tokio::spawn(async move {
        let conn = tokio::select! {
            conn = app.db.conn() => conn,
            () = sender.closed() => return,
        };
        let result = match conn {
            Ok(conn) => run(&conn, &pop).await.map(|popped| Leased::new(&app, &pop, popped)),
            Err(error) => Err(error),
        };
        drop(sender.send(result));
    });
    receiver.await.expect("the task always answers while somebody waits")
}

async fn run(conn: &Conn, pop: &Pop) -> Result<Popped, Error> {
    let started = Instant::now();
    let result = retried(|| once(conn, pop)).await;
    histogram!("ebbtide_pop_claim_seconds").record(started.elapsed().as_secs_f64());
    result
}

async fn once(conn: &Conn, pop: &Pop) -> Result<Popped, Error> {
    match &pop.source {
        Source::Queue(queue) => log_pop_queue_v2(conn, queue, &pop.claim).await,
        Source::Partition { queue, partition } => log_pop_partition_v2(conn, queue, partition, &pop.claim).await,
        Source::Matching { namespace, task } => log_pop_discover_v2(conn, namespace, task, &pop.claim).await,
    }
}
