//! Concurrent pushes ─► one commit, which splits when a lock is slow.
//!
//! A push hands in groups, one for each partition that it names. Groups wait by partition; a lane takes
//! what is ready, packs one segment a partition, and commits them all in one call. While it does, the
//! next ones gather: the busier the server, the larger the bundle, and an idle server waits for nothing.
//! No partition is ever in two flushes at once, so groups keep their order.

mod flush;
mod load;
mod queue;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;
use uuid::Uuid;

use crate::db::Db;
use crate::dedup::Index;
use crate::error::Error;
use crate::id::PartitionName;
use crate::seal::Sealing;
use crate::segment::Packer;
use flush::Flush;
use queue::{Queue, Waiting};

/// Bytes of messages that may wait to be committed. A push beyond them waits itself.
const WAITING_BYTES_MAX: usize = 32 << 20;
/// The unit in which those bytes are counted.
const PERMIT_BYTES: usize = 1024;
/// How long a push waits for room before it is refused.
const ROOM_WAIT: Duration = Duration::from_secs(10);
/// A flush that takes longer than this no longer keeps another lane from starting.
const FLUSH_PATIENCE: Duration = Duration::from_millis(10);
/// Partitions that may each wait for a slow lock, on a connection of their own.
const PATIENT_MAX: usize = 16;

/// How pushes are committed.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bundles in flight at once.
    pub lanes: usize,
    /// zstd level of segments, 1 to 19.
    pub zstd_level: i32,
    /// Memory of the index of recent transaction ids; 0 for none.
    pub dedup_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { lanes: 8, zstd_level: 3, dedup_bytes_max: 64 << 20 }
    }
}

/// One message to be stored.
#[derive(Clone, Debug)]
pub struct Message {
    /// Minted when it is packed for the first time, and kept from then on: a message whose fate is unknown is tried
    /// again under the same id.
    pub id: Option<Uuid>,
    /// Checked already; `None` takes the message id.
    pub transaction_id: Option<String>,
    pub trace_id: Option<Uuid>,
    /// Who pushed it, by its token.
    pub producer: Option<Arc<str>>,
    /// JSON, byte for byte.
    pub payload: Bytes,
}

/// Messages of one request for one partition: stored together or not at all, in this order. No
/// transaction id occurs twice in it.
#[derive(Clone, Debug)]
pub struct Group {
    pub name: PartitionName,
    pub messages: Vec<Message>,
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Stored under this message id.
    Queued(Uuid),
    /// Its transaction id is stored already, by the message of this id; all-zero if retention has deleted it.
    Duplicate(Uuid),
    /// On this server's disk under this message id, to be stored later.
    Buffered(Uuid),
}

/// One outcome a message, or why the whole group was not stored.
pub type Answer = Result<Vec<Outcome>, Failure>;

/// A group that was not stored, or may have been: the connection may have broken after the commit.
#[derive(Clone, Debug)]
pub struct Failure {
    /// A bundle's failure is shared by its groups.
    pub error: Arc<Error>,
    /// What was handed in, with the ids under which it was tried. `None` if it is lost.
    pub group: Option<Group>,
}

/// The committer of one server. Cheap to clone.
#[derive(Clone)]
pub struct Bundler {
    shared: Arc<Shared>,
}

type OnStored = dyn Fn(&PartitionName) + Send + Sync;

struct Shared {
    db: Db,
    on_stored: Box<OnStored>,
    index: Index,
    sealing: Arc<Sealing>,
    limits: Limits,
    queue: Mutex<Queue>,
    room: Arc<Semaphore>,
    patient: OnceLock<Semaphore>,
    loads: Semaphore,
    packers: Mutex<Vec<Packer>>,
}

impl Bundler {
    /// `on_stored` is told of each partition that has new messages, after their commit.
    pub fn new(
        db: Db, limits: Limits, sealing: Arc<Sealing>, on_stored: impl Fn(&PartitionName) + Send + Sync + 'static,
    ) -> Self {
        let shared = Shared {
            db,
            on_stored: Box::new(on_stored),
            index: Index::new(limits.dedup_bytes_max),
            sealing,
            limits,
            queue: Mutex::default(),
            room: Arc::new(Semaphore::new(WAITING_BYTES_MAX / PERMIT_BYTES)),
            patient: OnceLock::new(),
            loads: Semaphore::new(1),
            packers: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Stores `groups`, each in its own partition, and answers in their order. What was handed in is
    /// stored even if the caller goes away.
    ///
    /// # Errors
    /// [`Error::Busy`] if there is no room for so many waiting messages; nothing was stored then.
    pub async fn push(&self, groups: Vec<Group>) -> Result<Vec<Answer>, Error> {
        let bytes: usize = groups.iter().map(Group::bytes).sum();
        let permits = (bytes / PERMIT_BYTES).clamp(1, WAITING_BYTES_MAX / PERMIT_BYTES);
        let permits = u32::try_from(permits).expect("clamped");
        let room = timeout(ROOM_WAIT, self.shared.room.clone().acquire_many_owned(permits));
        let Ok(room) = room.await else { return Err(Error::Busy) };
        let room = Arc::new(room.expect("never closed"));
        let replies = self.enqueue(groups, &room);
        drop(room);
        let mut answers = Vec::with_capacity(replies.len());
        for reply in replies {
            answers.push(reply.await.unwrap_or_else(|_| Err(Failure::lost())));
        }
        Ok(answers)
    }

    fn enqueue(&self, groups: Vec<Group>, room: &Arc<OwnedSemaphorePermit>) -> Vec<oneshot::Receiver<Answer>> {
        let mut queue = self.shared.queue();
        let replies = groups
            .into_iter()
            .map(|group| {
                let (reply, receiver) = oneshot::channel();
                let bytes = group.bytes();
                queue.add(group.name, Waiting { messages: group.messages, bytes, reply, _room: room.clone() });
                receiver
            })
            .collect();
        self.shared.start_lanes(&mut queue);
        replies
    }
}

impl Failure {
    fn lost() -> Self {
        Self { error: Arc::new(Error::Retryable("the flush was lost".to_owned())), group: None }
    }
}

impl Group {
    pub(crate) fn bytes(&self) -> usize {
        self.messages.iter().map(|m| m.payload.len() + m.transaction_id.as_ref().map_or(36, String::len) + 64).sum()
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_lanes(self: &Arc<Self>, queue: &mut Queue) {
        while queue.wants_lane(self.limits.lanes) {
            queue.busy += 1;
            tokio::spawn(lane(Lane(self.clone())));
        }
    }

    /// A share of the pool, whose size is known when the database has answered.
    fn patient(&self) -> &Semaphore {
        self.patient.get_or_init(|| Semaphore::new((self.db.status().max_size / 4).clamp(1, PATIENT_MAX)))
    }

    fn packer(&self) -> Packer {
        let pooled = self.packers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        pooled.unwrap_or_else(|| Packer::new(self.limits.zstd_level))
    }

    fn keep_packer(&self, packer: Packer) {
        self.packers.lock().unwrap_or_else(PoisonError::into_inner).push(packer);
    }
}

/// A busy lane; also after a panic it is one no more.
struct Lane(Arc<Shared>);

impl Drop for Lane {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        queue.busy -= 1;
        self.0.start_lanes(&mut queue);
    }
}

/// While it lives, its lane does not count: another may start.
struct Slow<'a>(&'a Arc<Shared>);

impl<'a> Slow<'a> {
    fn begin(shared: &'a Arc<Shared>) -> Self {
        let mut queue = shared.queue();
        queue.slow += 1;
        shared.start_lanes(&mut queue);
        Self(shared)
    }
}

impl Drop for Slow<'_> {
    fn drop(&mut self) {
        self.0.queue().slow -= 1;
    }
}

async fn lane(lane: Lane) {
    let shared = &lane.0;
    let mut packer = shared.packer();
    loop {
        let taken = shared.queue().take();
        if taken.is_empty() {
            break;
        }
        let flush = Flush::new(shared, taken);
        let mut flushing = std::pin::pin!(flush.run(&mut packer));
        if timeout(FLUSH_PATIENCE, &mut flushing).await.is_err() {
            let _slow = Slow::begin(shared);
            flushing.await;
        }
    }
    shared.keep_packer(packer);
}
