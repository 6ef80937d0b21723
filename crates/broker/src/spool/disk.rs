//! The thread that owns the spool's folder: what waits is written together and made durable once.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ebbtide_sweep::LineLimit;
use metrics::gauge;
use tokio::sync::{mpsc, oneshot};
use tracing::error;
use uuid::Uuid;

use super::store::{Found, Store, Stored};
use super::{Place, Settings, record};
use crate::bundle::Group;
use crate::error::Error;
use crate::seal::Sealer;

/// Requests that wait for the thread. More are told to come back.
const WAITING_MAX: usize = 4096;
/// Requests that are made durable by one sync.
const TOGETHER_MAX: usize = 256;
/// Bytes of one write. A request alone may be larger.
const TOGETHER_BYTES_MAX: usize = 8 << 20;

const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// The ids of the messages of each group.
type Ids = Vec<Vec<Uuid>>;
type Reply<T> = oneshot::Sender<Result<T, Error>>;

enum Command {
    Append { groups: Vec<Group>, reply: Reply<Ids> },
    Next { messages_max: usize, reply: Reply<Vec<Stored>> },
    Advance { place: Place, refused: Vec<u8>, reply: Reply<()> },
}

/// A handle on the thread. Cheap to clone; the thread ends with the last one.
#[derive(Clone)]
pub(super) struct Disk {
    commands: mpsc::Sender<Command>,
    bytes: Arc<AtomicU64>,
}

impl Disk {
    /// Opens the folder. One that is not there is made now or, unless it was asked for by name, when it is needed.
    ///
    /// # Errors
    /// If the folder cannot be used.
    pub(super) fn open(settings: Settings, sealer: Sealer) -> io::Result<(Self, Found)> {
        let mut found = Found::default();
        let mut home = Home::Absent;
        if settings.make_at_once || settings.folder.exists() {
            let (store, what) = Store::open(&settings)?;
            (home, found) = (Home::Open(store), what);
        }
        let (commands, waiting) = mpsc::channel(WAITING_MAX);
        let bytes = Arc::new(AtomicU64::new(home.bytes()));
        let mut thread =
            Thread { settings, sealer, home, bytes: bytes.clone(), lines: Mutex::new(LineLimit::new(LINE_INTERVAL)) };
        std::thread::Builder::new().name("spool".to_owned()).spawn(move || thread.run(waiting))?;
        Ok((Self { commands, bytes }, found))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Hands in what is to be written; what is handed in first is written first. Never waits.
    pub(super) fn append(&self, groups: Vec<Group>) -> Result<oneshot::Receiver<Result<Ids, Error>>, Error> {
        let (reply, answer) = oneshot::channel();
        self.commands.try_send(Command::Append { groups, reply }).map_err(|_| Error::Busy)?;
        Ok(answer)
    }

    pub(super) async fn next(&self, messages_max: usize) -> Result<Vec<Stored>, Error> {
        let (reply, answer) = oneshot::channel();
        self.call(Command::Next { messages_max, reply }, answer).await
    }

    pub(super) async fn advance(&self, place: Place, refused: Vec<u8>) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.call(Command::Advance { place, refused, reply }, answer).await
    }

    async fn call<T>(&self, command: Command, answer: oneshot::Receiver<Result<T, Error>>) -> Result<T, Error> {
        self.commands.send(command).await.map_err(|_| thread_ended())?;
        answer.await.unwrap_or_else(|_| Err(thread_ended()))
    }
}

pub(super) fn thread_ended() -> Error {
    Error::NotSpooled("the spool's thread has ended; the log says why".to_owned())
}

enum Home {
    /// Nothing was ever spooled here.
    Absent,
    Open(Store),
}

impl Home {
    fn bytes(&self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Open(store) => store.bytes(),
        }
    }
}

struct Thread {
    settings: Settings,
    sealer: Sealer,
    home: Home,
    bytes: Arc<AtomicU64>,
    /// While something is wrong with the disk, every push may say so.
    lines: Mutex<LineLimit>,
}

/// Requests that are written together.
#[derive(Default)]
struct Together {
    bytes: Vec<u8>,
    messages: usize,
    replies: Vec<(Reply<Ids>, Ids)>,
}

impl Thread {
    fn run(&mut self, mut waiting: mpsc::Receiver<Command>) {
        while let Some(first) = waiting.blocking_recv() {
            let mut together = Together::default();
            let mut others = Vec::new();
            let mut command = Some(first);
            for _ in 0..TOGETHER_MAX {
                match command.take() {
                    Some(Command::Append { groups, reply }) => self.add(&mut together, groups, reply),
                    Some(other) => others.push(other),
                    None => break,
                }
                if TOGETHER_BYTES_MAX <= together.bytes.len() {
                    break;
                }
                command = waiting.try_recv().ok();
            }
            // The bound may have been reached with one in hand.
            others.extend(command);
            self.write(together);
            for other in others {
                self.carry_out(other);
            }
            self.bytes.store(self.home.bytes(), Ordering::Relaxed);
            gauge!("ebbtide_spool_bytes").set(self.home.bytes() as f64);
        }
    }

    fn store(&mut self) -> Result<&mut Store, Error> {
        if matches!(self.home, Home::Absent) {
            // Whatever it finds there was put there after the start, and is replayed as well.
            let (store, _) = Store::open(&self.settings).map_err(|error| self.failed("open", &error))?;
            self.home = Home::Open(store);
        }
        match &mut self.home {
            Home::Open(store) => Ok(store),
            Home::Absent => unreachable!("opened above"),
        }
    }

    fn failed(&self, what: &str, error: &io::Error) -> Error {
        self.say(&format!("could not {what}: {error}"));
        Error::NotSpooled(format!("the spool (FILE_BUFFER_DIR) could not {what}: {error}"))
    }

    fn say(&self, reason: &str) {
        if let Some(suppressed) = self.lines.lock().unwrap_or_else(PoisonError::into_inner).admit() {
            error!(target: "spool", folder = %self.settings.folder.display(), reason, suppressed, "pushes cannot be spooled");
        }
    }

    fn add(&mut self, together: &mut Together, mut groups: Vec<Group>, reply: Reply<Ids>) {
        let start = together.bytes.len();
        let sealer = self.sealer.clone();
        groups.iter_mut().for_each(|group| record::put(&mut together.bytes, group, &sealer));
        let bytes = together.bytes.len();
        let bytes_max = self.settings.bytes_max;
        match self.store().map(|store| store.has_room(bytes)) {
            Ok(true) => {
                let ids_of = |group: &Group| {
                    group.messages.iter().map(|message| message.id.expect("a record gives each an id")).collect()
                };
                together.messages += groups.iter().map(|group| group.messages.len()).sum::<usize>();
                together.replies.push((reply, groups.iter().map(ids_of).collect()));
            }
            Ok(false) => {
                together.bytes.truncate(start);
                let full =
                    format!("the spool is full: it holds at most {bytes_max} bytes (EBBTIDE_FILE_BUFFER_MAX_BYTES)");
                self.say(&full);
                let _ = reply.send(Err(Error::NotSpooled(full)));
            }
            Err(error) => {
                together.bytes.truncate(start);
                let _ = reply.send(Err(error));
            }
        }
    }

    fn write(&mut self, together: Together) {
        let Together { bytes, messages, replies } = together;
        if replies.is_empty() {
            return;
        }
        let written = self.store().map(|store| store.append(&bytes, messages));
        let error = match written {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(self.failed("write", &error).to_string()),
            Err(error) => Some(error.to_string()),
        };
        for (reply, ids) in replies {
            // Nobody may be waiting any more; what is written is written.
            let _ = reply.send(error.clone().map_or(Ok(ids), |text| Err(Error::NotSpooled(text))));
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Append { groups, reply } => {
                let mut alone = Together::default();
                self.add(&mut alone, groups, reply);
                self.write(alone);
            }
            Command::Next { messages_max, reply } => {
                let read = match &self.home {
                    Home::Absent => Ok(Vec::new()),
                    Home::Open(store) => store.next(messages_max),
                };
                let _ = reply.send(read.map_err(|error| self.failed("read", &error)));
            }
            Command::Advance { place, refused, reply } => {
                let advanced = match &mut self.home {
                    Home::Absent => Ok(()),
                    Home::Open(store) => store.advance(place, &refused),
                };
                let _ = reply.send(advanced.map_err(|error| self.failed("note what is replayed", &error)));
            }
        }
    }
}
