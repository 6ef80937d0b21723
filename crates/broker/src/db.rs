//! Connections to PostgreSQL: where it is, how it is reached, and the one way a statement runs.

pub mod ack;
pub mod analytics;
pub mod bench;
pub mod configure;
pub mod consumer_groups;
pub mod dead_letter_admin;
pub mod dead_letters;
pub mod due;
pub mod kv;
pub mod lease;
pub mod messages;
pub mod metrics;
pub mod migrate;
pub mod pop;
pub mod push;
pub mod resources;
pub mod retention;
pub mod space;
pub mod stats;
pub mod status;
pub mod streams;
pub mod system;
pub mod timers;
mod tls;
pub mod traces;
pub mod transaction;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Timeouts};
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};
use tokio_postgres_rustls::MakeRustlsConnect;
use tracing::{debug, warn};

use crate::error::Error;
pub use tls::TlsSettings;

/// Where a database is and how to reach it.
#[derive(Clone)]
pub struct Target {
    /// Host, port, user, database. The password is in here: never log it whole.
    pub config: tokio_postgres::Config,
    pub tls: TlsSettings,
}

/// How statements are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statements {
    /// Prepared once per connection. The fastest; needs a session of its own.
    Prepared,
    /// Sent whole each time; safe behind a pooler that shares sessions between transactions.
    Unnamed,
}

/// A parameter and its SQL type; the type is what lets an unnamed statement skip a round trip.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

impl Target {
    /// Opens one connection outside any pool and drives it in a task of its own.
    ///
    /// # Errors
    /// [`Error::Disconnected`] or [`Error::Db`] if the server does not take it.
    pub async fn connect(&self, application_name: &str) -> Result<Client, Error> {
        let mut config = self.config.clone();
        config.application_name(application_name);
        let (client, connection) = config.connect(self.connector()).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(target: "db", %error, "connection ended");
            }
        });
        Ok(client)
    }

    pub(crate) fn connector(&self) -> MakeRustlsConnect {
        MakeRustlsConnect::new(self.tls.client_config())
    }
}

/// The pool that serves requests. Cheap to clone.
#[derive(Clone)]
pub struct Db {
    pool: Pool,
    connector: MakeRustlsConnect,
    statements: Statements,
    statement_timeout: Duration,
    is_open: Arc<AtomicBool>,
}

/// Connections that the pool leaves free for the leader gate, its watch and its vacuum, LISTEN, migrations
/// and an operator.
const CONNECTIONS_RESERVED: i64 = 7;

impl Db {
    /// A pool as [`Db::closed`] makes it, and opened at once.
    ///
    /// # Errors
    /// If the database cannot be reached.
    pub async fn open(
        target: &Target, size: usize, statements: Statements, statement_timeout: Duration,
    ) -> Result<Self, Error> {
        let db = Self::closed(target, size, statements, statement_timeout);
        db.cap(target).await?;
        db.let_in();
        Ok(db)
    }

    /// A pool of at most `size` connections that gives none out before [`Db::let_in`].
    pub fn closed(target: &Target, size: usize, statements: Statements, statement_timeout: Duration) -> Self {
        let mut config = target.config.clone();
        config.application_name("ebbtide");
        if statements == Statements::Prepared {
            // A transaction pooler refuses start-up options; the functions do not depend on these,
            // they keep an operator's unusual defaults out of the session.
            config.options(with_session_options(config.get_options()));
        }
        let manager =
            Manager::from_config(config, target.connector(), ManagerConfig { recycling_method: RecyclingMethod::Fast });
        let wait = Some(statement_timeout);
        let pool = Pool::builder(manager)
            .max_size(size)
            .runtime(deadpool_postgres::Runtime::Tokio1)
            .timeouts(Timeouts { wait, create: wait, recycle: wait })
            .build()
            .expect("a runtime is given with the timeouts");
        Self { pool, connector: target.connector(), statements, statement_timeout, is_open: Arc::default() }
    }

    /// Makes the pool smaller if the database has fewer connections to give, which is logged.
    ///
    /// # Errors
    /// If the database cannot be reached.
    pub async fn cap(&self, target: &Target) -> Result<(), Error> {
        let size = capped_size(target, self.status().max_size).await?;
        self.pool.resize(size);
        Ok(())
    }

    /// Gives out connections from now on: the schema is there.
    pub fn let_in(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// A connection from the pool, waiting at most the statement time-out for one.
    ///
    /// # Errors
    /// [`Error::Pool`] if none could be had.
    pub async fn conn(&self) -> Result<Conn, Error> {
        if !self.is_open.load(Ordering::Acquire) {
            return Err(Error::Pool);
        }
        self.early_conn().await
    }

    /// A connection for what has to be done before others may have one.
    ///
    /// # Errors
    /// As [`Db::conn`].
    pub async fn early_conn(&self) -> Result<Conn, Error> {
        match self.pool.get().await {
            Ok(object) => Ok(Conn {
                object: Some(object),
                connector: self.connector.clone(),
                statements: self.statements,
                deadline: self.statement_timeout,
                in_flight: AtomicBool::new(false),
                is_broken: AtomicBool::new(false),
            }),
            Err(error) => {
                debug!(target: "db", %error, "no connection");
                Err(Error::Pool)
            }
        }
    }

    /// Whether the database carries out a statement.
    pub async fn answers(&self) -> bool {
        match self.conn().await {
            Ok(conn) => conn.rows("select 1", &[]).await.is_ok(),
            Err(_) => false,
        }
    }

    /// Connections: the most there can be, how many exist, how many are idle, how many callers wait.
    pub fn status(&self) -> deadpool_postgres::Status {
        self.pool.status()
    }
}

fn with_session_options(given: Option<&str>) -> String {
    let ours = "-c timezone=UTC -c default_transaction_isolation=read\\ committed";
    given.map_or_else(|| ours.to_owned(), |given| format!("{given} {ours}"))
}

async fn capped_size(target: &Target, wanted: usize) -> Result<usize, Error> {
    let client = target.connect("ebbtide-start").await?;
    let query = "select current_setting('max_connections')::bigint
        - current_setting('superuser_reserved_connections')::bigint
        - (select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid())";
    let free: i64 = client.query_typed(query, &[]).await?[0].get(0);
    let most = usize::try_from((free - CONNECTIONS_RESERVED).max(1)).expect("at least 1");
    if most < wanted {
        warn!(target: "db", wanted, size = most, "pool capped by the connections the database has free");
    }
    Ok(wanted.min(most))
}

/// One statement at a time on something that speaks SQL.
pub trait Sql {
    /// Runs `query` and returns its rows.
    ///
    /// # Errors
    /// Whatever the database answered, as an [`Error`].
    fn rows(&self, query: &'static str, params: &[Param<'_>]) -> impl Future<Output = Result<Vec<Row>, Error>> + Send;

    /// Runs `query`, which returns exactly one row.
    ///
    /// # Errors
    /// As [`Sql::rows`].
    fn row(&self, query: &'static str, params: &[Param<'_>]) -> impl Future<Output = Result<Row, Error>> + Send
    where
        Self: Sync,
    {
        async move {
            let mut rows = self.rows(query, params).await?;
            Ok(rows.pop().expect("the query returns one row"))
        }
    }
}

impl Sql for Client {
    async fn rows(&self, query: &'static str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        Ok(self.query_typed(query, params).await?)
    }
}

/// A pooled connection. It goes back to the pool only if nothing is still running on it.
pub struct Conn {
    object: Option<Object>,
    connector: MakeRustlsConnect,
    statements: Statements,
    deadline: Duration,
    in_flight: AtomicBool,
    /// The backend said that it ends, which it may say before its end is seen.
    is_broken: AtomicBool,
}

impl Conn {
    fn client(&self) -> &deadpool_postgres::ClientWrapper {
        self.object.as_ref().expect("taken only on drop")
    }

    async fn run(&self, query: &'static str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        match self.statements {
            Statements::Unnamed => Ok(self.client().query_typed(query, params).await?),
            Statements::Prepared => {
                let types: Vec<Type> = params.iter().map(|(_, ty)| ty.clone()).collect();
                let statement = self.client().prepare_typed_cached(query, &types).await?;
                let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(value, _)| *value).collect();
                Ok(self.client().query(&statement, &values).await?)
            }
        }
    }
}

impl Sql for Conn {
    /// Past the statement time-out the backend is told to cancel, so that it lets go of its locks.
    async fn rows(&self, query: &'static str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        self.in_flight.store(true, Ordering::Relaxed);
        let Ok(result) = timeout(self.deadline, self.run(query, params)).await else {
            return Err(Error::StatementTimeout); // still in flight: drop cancels and discards
        };
        self.in_flight.store(false, Ordering::Relaxed);
        if matches!(result, Err(Error::Disconnected)) {
            self.is_broken.store(true, Ordering::Relaxed);
        }
        result
    }
}

impl Drop for Conn {
    /// A statement that nobody waits for any more is cancelled in the backend and its connection
    /// discarded: back in the pool it would make the next caller wait, and keep its locks meanwhile.
    fn drop(&mut self) {
        let is_in_flight = self.in_flight.load(Ordering::Relaxed);
        if !is_in_flight && !self.is_broken.load(Ordering::Relaxed) {
            return;
        }
        let Some(object) = self.object.take() else { return };
        if !is_in_flight {
            drop(Object::take(object));
            return;
        }
        let token = object.cancel_token();
        let connector = self.connector.clone();
        drop(Object::take(object));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let deadline = self.deadline;
            runtime.spawn(async move {
                match timeout(deadline, token.cancel_query(connector)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => warn!(target: "db", %error, "could not cancel a statement"),
                    Err(_) => warn!(target: "db", "could not cancel a statement in time"),
                }
            });
        }
    }
}
