//! One thread that writes, and a few connections that read.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, vtab};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::error::Error;

/// Commands that one transaction takes at most: a commit costs a flush, and shares it among them.
const COMMANDS_MAX: usize = 64;
/// Commands that may wait for the writer before callers wait to hand theirs over.
const QUEUE_MAX: usize = 1024;
/// Connections that read at the same time.
const READERS_MAX: usize = 4;
/// How long a statement waits for another process to let go of the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// What the writer is asked to do. It runs inside a savepoint, and its answer leaves only after the commit.
trait Command: Send {
    fn run(&mut self, db: &mut Connection);
    fn answer(self: Box<Self>, committed: Result<(), &Error>);
}

struct Asked<F, T> {
    work: Option<F>,
    done: Option<Result<T, Error>>,
    reply: oneshot::Sender<Result<T, Error>>,
}

impl<F, T> Command for Asked<F, T>
where
    F: FnOnce(&Connection) -> Result<T, Error> + Send,
    T: Send,
{
    fn run(&mut self, db: &mut Connection) {
        let work = self.work.take().expect("a command runs once");
        self.done = Some(in_savepoint(db, work));
    }

    fn answer(self: Box<Self>, committed: Result<(), &Error>) {
        let answer = match (committed, self.done) {
            (Ok(()), Some(done)) => done,
            (Ok(()), None) => Err(Error::storage("the command was not run")),
            // What the command did is undone, whatever it thinks of itself.
            (Err(error), _) => Err(same(error)),
        };
        // A caller that has gone away needs no answer.
        let _ = self.reply.send(answer);
    }
}

fn in_savepoint<T>(db: &mut Connection, work: impl FnOnce(&Connection) -> Result<T, Error>) -> Result<T, Error> {
    let savepoint = db.savepoint().map_err(error)?;
    // Dropped without a commit it is rolled back.
    let done = work(&savepoint)?;
    savepoint.commit().map_err(error)?;
    Ok(done)
}

/// The handle of the writing thread, which ends when the last handle is dropped.
#[derive(Clone)]
pub(super) struct Writer {
    commands: mpsc::Sender<Box<dyn Command>>,
}

impl Writer {
    pub(super) fn start(path: &Path) -> Result<Self, Error> {
        let mut db = connect(path, OpenFlags::default())?;
        db.pragma_update(None, "journal_mode", "wal").map_err(error)?;
        // A commit that was answered survives a power cut.
        db.pragma_update(None, "synchronous", "full").map_err(error)?;
        let (commands, mut waiting) = mpsc::channel(QUEUE_MAX);
        let thread = std::thread::Builder::new().name("ebbtide-jobs-sqlite".to_owned());
        thread.spawn(move || while write(&mut db, &mut waiting) {}).map_err(Error::storage)?;
        Ok(Self { commands })
    }

    /// Runs `work` in a write transaction. Once taken by the writer it runs to its end, whether or not the caller
    /// still waits.
    pub(super) async fn run<T, F>(&self, work: F) -> Result<T, Error>
    where
        F: FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
        T: Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let command = Box::new(Asked { work: Some(work), done: None, reply });
        let gone = || Error::storage("the writing thread has ended");
        self.commands.send(command).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

/// One transaction with the commands that are waiting. False when nobody can send another one.
fn write(db: &mut Connection, waiting: &mut mpsc::Receiver<Box<dyn Command>>) -> bool {
    let Some(first) = waiting.blocking_recv() else { return false };
    if let Err(failed) = db.execute_batch("begin immediate").map_err(error) {
        first.answer(Err(&failed));
        return true;
    }
    let mut commands = vec![first];
    while commands.len() < COMMANDS_MAX
        && let Ok(next) = waiting.try_recv()
    {
        commands.push(next);
    }
    for command in &mut commands {
        command.run(db);
    }
    let committed = db.execute_batch("commit").map_err(error);
    if committed.is_err() && !db.is_autocommit() {
        // Nothing was committed; should this fail as well, the next begin says so.
        let _ = db.execute_batch("rollback");
    }
    for command in commands {
        command.answer(committed.as_ref().map(|_| ()));
    }
    true
}

/// Connections that only read, opened as they are needed.
#[derive(Clone)]
pub(super) struct Readers {
    path: PathBuf,
    idle: Arc<Mutex<Vec<Connection>>>,
    permits: Arc<Semaphore>,
}

impl Readers {
    pub(super) fn new(path: &Path) -> Self {
        let permits = Arc::new(Semaphore::new(READERS_MAX));
        Self { path: path.to_owned(), idle: Arc::default(), permits }
    }

    /// Runs `work`, which sees the file as it was at its first statement if it opens a transaction.
    pub(super) async fn run<T, F>(&self, work: F) -> Result<T, Error>
    where
        F: FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
        T: Send + 'static,
    {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let readers = self.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let idle = readers.idle.lock().expect("nothing panics under this lock").pop();
            let db = idle.map_or_else(|| connect(&readers.path, read_only()), Ok)?;
            let done = work(&db);
            readers.idle.lock().expect("nothing panics under this lock").push(db);
            done
        });
        reading.await.map_err(Error::storage)?
    }
}

fn read_only() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

fn connect(path: &Path, flags: OpenFlags) -> Result<Connection, Error> {
    let db = Connection::open_with_flags(path, flags).map_err(error)?;
    db.busy_timeout(BUSY_TIMEOUT).map_err(error)?;
    db.pragma_update(None, "foreign_keys", true).map_err(error)?;
    db.set_prepared_statement_cache_capacity(128);
    vtab::array::load_module(&db).map_err(error)?;
    Ok(db)
}

pub(super) fn error(error: rusqlite::Error) -> Error {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Error::Busy(Box::new(error)),
        _ => Error::storage(error),
    }
}

fn same(error: &Error) -> Error {
    let text = error.to_string();
    if error.is_busy() { Error::Busy(text.into()) } else { Error::storage(text) }
}
