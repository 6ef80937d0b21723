//! A leader gate in memory: a lock, sessions that hold it, and releases that can be told to go wrong.

use std::future::{Ready, pending, ready};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use ebbtide_sweep::LeaderGate;

/// How the next releases answer.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Unlock {
    Works,
    NotHeld,
    Fails,
    Hangs,
}

struct Facts {
    holder: Option<u32>,
    opened: u32,
    open: u32,
    unlocks: u32,
    unlock: Unlock,
    is_refused: bool,
}

/// What a test sees of the lock and of the sessions.
#[derive(Clone)]
pub(crate) struct State(Arc<Mutex<Facts>>);

pub(crate) struct Fake {
    state: State,
    idle: Option<Session>,
}

/// Closes itself and lets go of the lock when dropped, as a database session does.
pub(crate) struct Session {
    id: u32,
    state: State,
}

pub(crate) struct Client {
    id: u32,
    state: State,
}

impl Fake {
    pub(crate) fn gate() -> (Self, State) {
        let state = State(Arc::new(Mutex::new(Facts {
            holder: None,
            opened: 0,
            open: 0,
            unlocks: 0,
            unlock: Unlock::Works,
            is_refused: false,
        })));
        let gate = Self { state: state.clone(), idle: None };
        (gate, state)
    }
}

impl State {
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap()
    }

    pub(crate) fn is_locked(&self) -> bool {
        self.facts().holder.is_some()
    }

    /// Sessions opened so far.
    pub(crate) fn opened(&self) -> u32 {
        self.facts().opened
    }

    /// Sessions that are still open.
    pub(crate) fn open(&self) -> u32 {
        self.facts().open
    }

    /// Releases that took the lock off.
    pub(crate) fn unlocks(&self) -> u32 {
        self.facts().unlocks
    }

    pub(crate) fn lock_elsewhere(&self) {
        self.facts().holder = Some(u32::MAX);
    }

    pub(crate) fn refuse_connections(&self) {
        self.facts().is_refused = true;
    }

    pub(crate) fn answer_unlock(&self, unlock: Unlock) {
        self.facts().unlock = unlock;
    }

    fn open_session(&self) -> Result<Session, io::Error> {
        let mut facts = self.facts();
        if facts.is_refused {
            return Err(io::Error::other("connection refused"));
        }
        facts.opened += 1;
        facts.open += 1;
        Ok(Session { id: facts.opened, state: self.clone() })
    }
}

impl Client {
    /// Whether the session behind it is open and leads.
    pub(crate) fn is_open(&self) -> bool {
        self.state.facts().holder == Some(self.id)
    }

    pub(crate) fn step<T>(&self, answer: T) -> Ready<T> {
        assert!(self.is_open(), "a step outside its session");
        ready(answer)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut facts = self.state.facts();
        facts.open -= 1;
        if facts.holder == Some(self.id) {
            facts.holder = None;
        }
    }
}

impl LeaderGate for Fake {
    type Session = Session;
    type Client = Client;
    type Error = io::Error;

    async fn try_lead(&mut self) -> Result<Option<Session>, io::Error> {
        let session = match self.idle.take() {
            Some(session) => session,
            None => self.state.open_session()?,
        };
        let is_free = self.state.facts().holder.is_none();
        if !is_free {
            self.idle = Some(session);
            return Ok(None);
        }
        self.state.facts().holder = Some(session.id);
        Ok(Some(session))
    }

    fn client(session: &Session) -> Client {
        Client { id: session.id, state: session.state.clone() }
    }

    async fn release(&mut self, session: Session) -> Result<bool, io::Error> {
        let unlock = self.state.facts().unlock;
        match unlock {
            Unlock::NotHeld => return Ok(false),
            Unlock::Fails => return Err(io::Error::other("connection reset")),
            Unlock::Hangs => pending().await,
            Unlock::Works => {}
        }
        let mut facts = self.state.facts();
        facts.holder = None;
        facts.unlocks += 1;
        drop(facts);
        self.idle = Some(session);
        Ok(true)
    }
}
