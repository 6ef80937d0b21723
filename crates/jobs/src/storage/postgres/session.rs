//! One statement at a time on a connection of the pool, in a transaction, or in the caller's own transaction.

use deadpool_postgres::{Object, PoolError};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{IsolationLevel, Row};

use super::Statements;
use crate::error::Error;

/// A parameter and its SQL type; the type lets an unnamed statement skip a round trip.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// Something that speaks SQL.
pub(super) trait Sql: Sync {
    fn rows(&self, query: &str, params: &[Param<'_>]) -> impl Future<Output = Result<Vec<Row>, Error>> + Send;
}

/// A connection of the pool.
pub(super) struct Session {
    object: Object,
    statements: Statements,
}

impl Session {
    pub(super) fn new(object: Object, statements: Statements) -> Self {
        Self { object, statements }
    }

    /// A transaction in which every statement sees what was committed before it, whatever the server's default is:
    /// a condition that is checked again under a lock must see what the lock's holder wrote.
    pub(super) async fn begin(&mut self) -> Result<Transaction<'_>, Error> {
        let statements = self.statements;
        let builder = self.object.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
        Ok(Transaction { inner: builder.start().await.map_err(error)?, statements })
    }
}

/// A transaction of our own; dropped without a commit it leaves nothing.
pub(super) struct Transaction<'a> {
    inner: deadpool_postgres::Transaction<'a>,
    statements: Statements,
}

impl Transaction<'_> {
    pub(super) async fn commit(self) -> Result<(), Error> {
        self.inner.commit().await.map_err(error)
    }

    /// Runs a statement that is planned for these very parameters, as suits one that touches many rows.
    pub(super) async fn planned(&self, query: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        self.inner.query_typed(query, params).await.map_err(error)
    }

    pub(super) async fn script(&self, text: &str) -> Result<(), Error> {
        self.inner.batch_execute(text).await.map_err(error)
    }
}

/// Deadpool's client and transaction have the same methods and no common trait that keeps the statement cache.
macro_rules! run {
    ($on:expr, $statements:expr, $query:expr, $params:expr) => {
        match $statements {
            Statements::Unnamed => $on.query_typed($query, $params).await.map_err(error),
            Statements::Prepared => {
                let types: Vec<Type> = $params.iter().map(|(_, ty)| ty.clone()).collect();
                let statement = $on.prepare_typed_cached($query, &types).await.map_err(error)?;
                let values: Vec<&(dyn ToSql + Sync)> = $params.iter().map(|(value, _)| *value).collect();
                $on.query(&statement, &values).await.map_err(error)
            }
        }
    };
}

impl Sql for Session {
    async fn rows(&self, query: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        run!(self.object, self.statements, query, params)
    }
}

impl Sql for Transaction<'_> {
    async fn rows(&self, query: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        run!(self.inner, self.statements, query, params)
    }
}

impl Sql for tokio_postgres::Transaction<'_> {
    async fn rows(&self, query: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        self.query_typed(query, params).await.map_err(error)
    }
}

pub(super) fn error(error: tokio_postgres::Error) -> Error {
    let lost = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED, SqlState::LOCK_NOT_AVAILABLE];
    if error.code().is_some_and(|code| lost.contains(code)) {
        return Error::Busy(Box::new(error));
    }
    // A job took the unique key between a look and a write: the next look names it.
    if error.as_db_error().is_some_and(|error| error.constraint() == Some("jobs_unique_live")) {
        return Error::Busy(Box::new(error));
    }
    Error::storage(error)
}

pub(super) fn pool_error(error: PoolError) -> Error {
    Error::storage(error)
}
