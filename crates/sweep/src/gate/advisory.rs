//! Elects the leader with a PostgreSQL session advisory lock on a connection of its own.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::{Client, SimpleQueryMessage};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::LeaderGate;

/// Bounds each wait of the gate itself: opening a session, taking the lock, giving it up.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// How often a new session is looked at for a pooler; each round takes five short statements.
const PROOF_ROUNDS: u32 = 4;

/// A fresh connection to the database, and the task that drives its socket.
pub type Connected = (Client, JoinHandle<()>);

/// Why the caller's connector could not connect.
pub type ConnectError = Box<dyn std::error::Error + Send + Sync>;

type Connecting = Pin<Box<dyn Future<Output = Result<Connected, ConnectError>> + Send>>;

/// Why [`AdvisoryGate`] could elect nobody.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// The connector failed.
    #[error("cannot connect for the leader lock")]
    Connect(#[source] ConnectError),
    /// The connection has no session of its own, so a session lock on it would mean nothing.
    #[error(
        "the leader's connection goes through a transaction-mode pooler: \
         set EBBTIDE_DIRECT_DATABASE_URL to an address that reaches the database directly"
    )]
    Pooled,
    /// A statement of the gate failed, mostly because the connection broke.
    #[error("a statement for the leader lock failed")]
    Database(#[from] tokio_postgres::Error),
    /// The database let one of the gate's waits of ten seconds run out.
    #[error("the database did not answer within {waited} s while {0}", waited = WAIT_MAX.as_secs())]
    Unanswered(&'static str),
}

/// A [`LeaderGate`] on `pg_try_advisory_lock`.
///
/// The gate opens its connection at the first election and keeps it for the cycles that follow, which
/// run on it. A connection is trusted with the lock only after it has proved that it has a backend to
/// itself; a transaction-mode pooler does not pass. `synchronous_commit` is off on it: a step that a crash
/// of the server loses is done again, and nothing that acknowledges a client may run there. Time zone
/// is UTC, isolation is read committed, `application_name` is `ebbtide-sweep` and the lock's id.
pub struct AdvisoryGate {
    lock_id: i64,
    connect: Box<dyn Fn() -> Connecting + Send + Sync>,
    idle: Option<AdvisorySession>,
}

impl AdvisoryGate {
    /// A gate on the advisory lock `lock_id` of the database that `connect` reaches.
    ///
    /// Processes that share the work share the id. `connect` is called twice for each session, since the
    /// proof takes a second connection for a moment, and both must lead to the same address, past any pooler.
    pub fn new<F, Fut>(lock_id: i64, connect: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Connected, ConnectError>> + Send + 'static,
    {
        Self { lock_id, connect: Box::new(move || Box::pin(connect())), idle: None }
    }

    async fn open(&self) -> Result<AdvisorySession, GateError> {
        let session = self.connect().await?;
        let witness = self.connect().await?;
        prove_own_session(&session.client, &witness.client).await?;
        // Only after the proof: through a pooler these would stick to a stranger's backend.
        session.client.batch_execute(&session_settings(self.lock_id)).await?;
        Ok(session)
    }

    async fn connect(&self) -> Result<AdvisorySession, GateError> {
        let (client, driver) = (self.connect)().await.map_err(GateError::Connect)?;
        Ok(AdvisorySession { client: Arc::new(client), _driver: AbortOnDropHandle::new(driver) })
    }
}

impl std::fmt::Debug for AdvisoryGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdvisoryGate")
            .field("lock_id", &self.lock_id)
            .field("is_connected", &self.idle.is_some())
            .finish_non_exhaustive()
    }
}

/// The session of an [`AdvisoryGate`]; dropping it cuts the connection.
pub struct AdvisorySession {
    client: Arc<Client>,
    // Dropping the client alone would leave the socket open until a step in flight has answered,
    // and as long as a clone of the client is alive.
    _driver: AbortOnDropHandle<()>,
}

impl LeaderGate for AdvisoryGate {
    type Session = AdvisorySession;
    type Client = Arc<Client>;
    type Error = GateError;

    async fn try_lead(&mut self) -> Result<Option<AdvisorySession>, GateError> {
        let idle = self.idle.take().filter(|s| !s.client.is_closed());
        let session = match idle {
            Some(session) => session,
            None => within("opening a session", self.open()).await?,
        };
        let lock = format!("select pg_try_advisory_lock({})", self.lock_id);
        if is_true(within("taking the lock", scalar(&session.client, &lock)).await?) {
            return Ok(Some(session));
        }
        self.idle = Some(session);
        Ok(None)
    }

    fn client(session: &AdvisorySession) -> Arc<Client> {
        Arc::clone(&session.client)
    }

    async fn release(&mut self, session: AdvisorySession) -> Result<bool, GateError> {
        let unlock = format!("select pg_advisory_unlock({})", self.lock_id);
        let is_released = is_true(within("giving the lock up", scalar(&session.client, &unlock)).await?);
        if 1 < Arc::strong_count(&session.client) {
            warn!(target: "retention", "client outlived its cycle, connection closed");
        } else if is_released {
            self.idle = Some(session);
        }
        Ok(is_released)
    }
}

/// Fails unless `client` keeps one backend to itself.
///
/// A pooler hands the backend that fell idle last to whoever asks next, or the one that has been idle
/// longest. The first gives the client's backend to the witness; the second gives the client another one at its
/// next statement, or, having only one, gives that to the witness. Other traffic blurs either picture,
/// hence the rounds. Plain text statements: a pooler would trip over prepared ones and hide the reason.
async fn prove_own_session(client: &Client, witness: &Client) -> Result<(), GateError> {
    let own = backend_pid(client).await?;
    for _ in 0..PROOF_ROUNDS {
        let still_own = backend_pid(client).await?;
        witness.batch_execute("begin").await?;
        let other = backend_pid(witness).await?;
        // Before the next statement: with a single backend it would wait for the witness to commit.
        if own.is_none() || own != still_own || own == other {
            return Err(GateError::Pooled);
        }
        if own != backend_pid(client).await? {
            return Err(GateError::Pooled);
        }
        witness.batch_execute("commit").await?;
    }
    Ok(())
}

async fn backend_pid(client: &Client) -> Result<Option<String>, GateError> {
    scalar(client, "select pg_backend_pid()").await
}

/// What a session needs besides the lock.
///
/// The last four let the server notice within half a minute that a leader has vanished, and within a
/// second when it closed its socket while a step waits; by default the lock could outlive the host by hours.
/// The check is refused where the server's kernel cannot do it, and is then done without.
fn session_settings(lock_id: i64) -> String {
    format!(
        "set application_name = 'ebbtide-sweep {lock_id}';
         set timezone = 'UTC';
         set default_transaction_isolation = 'read committed';
         set synchronous_commit = off;
         set tcp_keepalives_idle = 10;
         set tcp_keepalives_interval = 5;
         set tcp_keepalives_count = 3;
         do $$ begin
             perform set_config('client_connection_check_interval', '1s', false);
         exception when invalid_parameter_value then null;
         end $$"
    )
}

/// The first column of the first row, as text.
async fn scalar(client: &Client, query: &str) -> Result<Option<String>, GateError> {
    let messages = client.simple_query(query).await?;
    let row = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    Ok(row.and_then(|row| row.get(0)).map(str::to_owned))
}

fn is_true(answer: Option<String>) -> bool {
    answer.as_deref() == Some("t")
}

async fn within<T>(doing: &'static str, work: impl Future<Output = Result<T, GateError>>) -> Result<T, GateError> {
    timeout(WAIT_MAX, work).await.unwrap_or(Err(GateError::Unanswered(doing)))
}
