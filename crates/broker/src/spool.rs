//! Pushes while the database is away: kept on this server's disk, and replayed in order when it is back.
//!
//! A push goes to the database unless the database is away, push maintenance is on, or earlier pushes of its queue are
//! still on the disk. One that fails because the database went away is spooled under the ids that it was tried with:
//! should it have been stored after all, the replay finds its transaction ids and stores it no second time.

mod disk;
mod record;
mod replay;
mod state;
mod store;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::{counter, gauge};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::timeout;
use tracing::{info, warn};
use uuid::Uuid;

use crate::bundle::{Answer, Bundler, Failure, Group, Outcome};
use crate::db::Db;
use crate::error::Error;
use crate::seal::Sealer;
use crate::telemetry::Telemetry;
use disk::{Disk, thread_ended};
use state::State;

/// A push that takes longer than this makes the server look whether the database still answers.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a push waits for earlier ones of its queue to be replayed, before it is spooled behind them.
const CATCH_UP_WAIT: Duration = Duration::from_secs(5);
/// Pushes that may wait so at once.
const CATCHING_UP_MAX: usize = 1000;

/// Where pushes are spooled.
#[derive(Clone, Debug)]
pub struct Settings {
    pub folder: PathBuf,
    /// Make the folder at the start, and refuse to start without it. Else it is made when it is needed.
    pub make_at_once: bool,
    /// Bytes on disk, at most.
    pub bytes_max: u64,
    /// Messages after which another file is begun.
    pub messages_per_file: usize,
    /// Messages that are replayed at once.
    pub batch_messages: usize,
    /// The first pause between two looks for a database that is away; each further one is twice as long, up to 5 s.
    pub pause_first: Duration,
}

/// A place between two records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    file: u64,
    byte: u64,
}

/// How the spool is.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Messages that wait to be replayed.
    pub pending: usize,
    /// Messages that the database refused for good; they are in a file of their own.
    pub failed: usize,
    pub bytes: u64,
    /// 0 without a spool.
    pub bytes_max: u64,
    /// The database answered when it was last needed.
    pub is_database_there: bool,
    pub is_paused: bool,
    /// Why the replay does not get on, although the database answers.
    pub held: Option<String>,
}

/// Takes pushes, whatever becomes of the database. Cheap to clone.
#[derive(Clone)]
pub struct Spool {
    shared: Arc<Shared>,
}

struct Shared {
    bundler: Bundler,
    db: Db,
    sealer: Sealer,
    telemetry: Arc<Telemetry>,
    /// `None` for a server that spools nothing.
    disk: Option<(Disk, Settings)>,
    state: Mutex<State>,
    /// A copy of [`State::is_engaged`], which is all that a push looks at most of the time.
    is_engaged: AtomicBool,
    /// There is something for the replay to do.
    work: Notify,
    /// Counts what was replayed.
    progress: watch::Sender<u64>,
    catching_up: Semaphore,
}

impl Spool {
    /// A server that spools nothing: a push fails while the database is away.
    pub fn none(bundler: Bundler, db: Db, telemetry: Arc<Telemetry>) -> Self {
        Self::new(bundler, db, Sealer::default(), telemetry, None, State::default())
    }

    /// Opens the folder and finds what an earlier server left in it.
    ///
    /// # Errors
    /// If the folder cannot be used.
    pub fn open(
        settings: Settings, bundler: Bundler, db: Db, sealer: Sealer, telemetry: Arc<Telemetry>,
    ) -> std::io::Result<Self> {
        let (disk, found) = Disk::open(settings.clone(), sealer.clone())?;
        let mut state = State::default();
        state.failed = found.failed;
        found.records.iter().for_each(|(queue, messages)| state.add(queue, *messages));
        if state.has_backlog() {
            info!(target: "spool", messages = state.messages, folder = %settings.folder.display(), "pushes of an earlier server are to be replayed");
        }
        if 0 < state.failed {
            warn!(target: "spool", messages = state.failed, folder = %settings.folder.display(), "failed.jsonl holds messages that the database refused");
        }
        Ok(Self::new(bundler, db, sealer, telemetry, Some((disk, settings)), state))
    }

    fn new(
        bundler: Bundler, db: Db, sealer: Sealer, telemetry: Arc<Telemetry>, disk: Option<(Disk, Settings)>,
        state: State,
    ) -> Self {
        let is_engaged = AtomicBool::new(state.is_engaged());
        let shared = Shared {
            bundler,
            db,
            sealer,
            telemetry,
            disk,
            state: Mutex::new(state),
            is_engaged,
            work: Notify::new(),
            progress: watch::Sender::new(0),
            catching_up: Semaphore::new(CATCHING_UP_MAX),
        };
        Self { shared: Arc::new(shared) }
    }

    pub fn status(&self) -> Status {
        let state = self.shared.state();
        let (bytes, bytes_max) =
            self.shared.disk.as_ref().map_or((0, 0), |(disk, settings)| (disk.bytes(), settings.bytes_max));
        Status {
            pending: state.messages,
            failed: state.failed,
            bytes,
            bytes_max,
            is_database_there: !state.is_away,
            is_paused: state.is_paused,
            held: state.held.clone(),
        }
    }

    /// While paused, every push is spooled and nothing is replayed.
    pub fn pause(&self, is_paused: bool) {
        self.shared.change(|state| state.is_paused = is_paused);
        self.shared.work.notify_one();
    }

    /// Says whether the database is there, as far as whoever opens it knows.
    pub fn expect(&self, is_there: bool) {
        self.shared.change(|state| state.is_away = !is_there);
        self.shared.work.notify_one();
    }

    /// Stores `groups`, or spools them, and answers in their order.
    ///
    /// # Errors
    /// [`Error::Busy`] if there is no room for so many waiting messages; nothing was stored then.
    pub async fn push(&self, groups: Vec<Group>) -> Result<Vec<Answer>, Error> {
        let shared = &self.shared;
        let mut answers: Vec<Option<Answer>> = groups.iter().map(|_| None).collect();
        let (mut direct, mut spooled) = (Vec::new(), Vec::new());
        if shared.is_engaged.load(Ordering::Acquire) {
            shared.catch_up(&groups).await;
            let state = shared.state();
            let must_spool = |group: &Group| state.is_away || state.is_paused || state.is_behind(group.name.queue());
            (spooled, direct) = groups.into_iter().enumerate().partition(|(_, group)| must_spool(group));
        } else {
            direct.extend(groups.into_iter().enumerate());
        }
        let (places, direct): (Vec<usize>, Vec<Group>) = direct.into_iter().unzip();
        for (place, answer) in places.into_iter().zip(shared.push_direct(direct).await?) {
            match answer {
                Err(Failure { error, group: Some(group) }) if shared.disk.is_some() && error.is_away() => {
                    shared.suspect();
                    spooled.push((place, group));
                }
                answer => answers[place] = Some(answer),
            }
        }
        let (places, spooled): (Vec<usize>, Vec<Group>) = spooled.into_iter().unzip();
        for (place, answer) in places.into_iter().zip(shared.spool(spooled).await) {
            answers[place] = Some(answer);
        }
        Ok(answers.into_iter().map(|answer| answer.expect("each group went one way")).collect())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state();
        let result = change(&mut state);
        self.is_engaged.store(state.is_engaged(), Ordering::Release);
        gauge!("ebbtide_spool_messages").set(state.messages as f64);
        gauge!("ebbtide_spool_failed_messages").set(state.failed as f64);
        result
    }

    /// Somebody has trouble with the database: the replay looks into it.
    fn suspect(&self) {
        self.change(|state| state.is_suspect = true);
        self.work.notify_one();
    }

    async fn push_direct(&self, groups: Vec<Group>) -> Result<Vec<Answer>, Error> {
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        let mut pushing = std::pin::pin!(self.bundler.push(groups));
        if let Ok(answers) = timeout(PATIENCE, &mut pushing).await {
            return answers;
        }
        // It may only be a slow lock. If the database hangs, at least the next pushes need not wait for it.
        self.suspect();
        pushing.await
    }

    /// Waits until no earlier push of the same queues is on the disk, if that may be soon: else producers could outrun
    /// the replay for ever.
    async fn catch_up(&self, groups: &[Group]) {
        let Ok(_turn) = self.catching_up.try_acquire() else { return };
        let mut progress = self.progress.subscribe();
        let caught_up = async {
            loop {
                let is_behind = {
                    let state = self.state();
                    let may_be_soon = !state.is_away && !state.is_paused && state.held.is_none();
                    may_be_soon && groups.iter().any(|group| state.is_behind(group.name.queue()))
                };
                if !is_behind || progress.changed().await.is_err() {
                    return;
                }
            }
        };
        // Past its time the push is spooled behind the others.
        let _ = timeout(CATCH_UP_WAIT, caught_up).await;
    }

    /// Keeps `groups` on the disk and answers in their order. It goes on if the caller goes away: what is on the disk must
    /// be counted.
    async fn spool(self: &Arc<Self>, groups: Vec<Group>) -> Vec<Answer> {
        if groups.is_empty() {
            return Vec::new();
        }
        let count = groups.len();
        let shared = self.clone();
        let written = tokio::spawn(async move { shared.append(groups).await }).await;
        match written.unwrap_or_else(|_| Err(thread_ended())) {
            Ok(ids) => ids.into_iter().map(|ids| Ok(ids.into_iter().map(Outcome::Buffered).collect())).collect(),
            Err(error) => {
                let error = Arc::new(error);
                (0..count).map(|_| Err(Failure { error: error.clone(), group: None })).collect()
            }
        }
    }

    /// The queues count as behind from before the first byte is written until the last one is replayed.
    async fn append(&self, groups: Vec<Group>) -> Result<Vec<Vec<Uuid>>, Error> {
        let Some((disk, _)) = &self.disk else {
            return Err(Error::NotSpooled("push maintenance is on, and this server has no spool".to_owned()));
        };
        let sizes: Vec<(String, usize)> =
            groups.iter().map(|group| (group.name.queue().to_owned(), group.messages.len())).collect();
        self.change(|state| sizes.iter().for_each(|(queue, messages)| state.add(queue, *messages)));
        let written = match disk.append(groups) {
            Ok(answer) => answer.await.unwrap_or_else(|_| Err(thread_ended())),
            Err(error) => Err(error),
        };
        if written.is_ok() {
            let messages: usize = sizes.iter().map(|(_, messages)| messages).sum();
            counter!("ebbtide_spool_messages_total").increment(messages as u64);
            self.work.notify_one();
        } else {
            self.change(|state| sizes.iter().for_each(|(queue, messages)| state.remove(queue, *messages)));
        }
        written
    }
}
