//! One statement at a time on a connection of the pool, in a transaction, or in the caller's own transaction.

use std::sync::atomic::{AtomicBool, Ordering};

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

/// A connection of the pool. It goes back to the pool only if it is idle and sound.
pub(super) struct Session {
    object: Option<Object>,
    statements: Statements,
    is_unsound: AtomicBool,
}

impl Session {
    pub(super) fn new(object: Object, statements: Statements) -> Self {
        Self { object: Some(object), statements, is_unsound: AtomicBool::new(false) }
    }

    /// A transaction in which every statement sees what was committed before it, whatever the server's default is:
    /// a condition that is checked again under a lock must see what the lock's holder wrote.
    pub(super) async fn begin(&mut self) -> Result<Transaction<'_>, Error> {
        let object = self.object.as_mut().expect("taken only on drop");
        let builder = object.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
        let inner = watched(&self.is_unsound, builder.start()).await?;
        Ok(Transaction { inner, statements: self.statements, is_unsound: &self.is_unsound })
    }
}

impl Drop for Session {
    /// The next caller would wait for a statement that nobody waits for any more, or find the connection closed.
    fn drop(&mut self) {
        if self.is_unsound.load(Ordering::Relaxed)
            && let Some(object) = self.object.take()
        {
            drop(Object::take(object));
        }
    }
}

/// Runs `statement`. Its connection counts as unsound until the statement is answered, and after an answer that the
/// server gives when it ends the connection.
async fn watched<T>(
    is_unsound: &AtomicBool, statement: impl Future<Output = Result<T, tokio_postgres::Error>>,
) -> Result<T, Error> {
    is_unsound.store(true, Ordering::Relaxed);
    let answer = statement.await;
    let is_sound = match &answer {
        Ok(_) => true,
        Err(error) => {
            error.code().is_some_and(|code| !code.code().starts_with("57P") && !code.code().starts_with("08"))
        }
    };
    if is_sound {
        is_unsound.store(false, Ordering::Relaxed);
    }
    answer.map_err(error)
}

/// A transaction of our own; dropped without a commit it leaves nothing.
pub(super) struct Transaction<'a> {
    inner: deadpool_postgres::Transaction<'a>,
    statements: Statements,
    is_unsound: &'a AtomicBool,
}

impl Transaction<'_> {
    pub(super) async fn commit(self) -> Result<(), Error> {
        watched(self.is_unsound, self.inner.commit()).await
    }

    /// Runs a statement that is planned for these very parameters, as suits one that touches many rows.
    pub(super) async fn planned(&self, query: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        watched(self.is_unsound, self.inner.query_typed(query, params)).await
    }

    pub(super) async fn script(&self, text: &str) -> Result<(), Error> {
        watched(self.is_unsound, self.inner.batch_execute(text)).await
    }
}

/// Deadpool's client and transaction have the same methods and no common trait that keeps the statement cache.
macro_rules! run {
    ($on:expr, $statements:expr, $query:expr, $params:expr) => {
        async {
            match $statements {
                Statements::Unnamed => $on.query_typed($query, $params).await,
                Statements::Prepared => {
                    let types: Vec<Type> = $params.iter().map(|(_, ty)| ty.clone()).collect();
                    let statement = $on.prepare_typed_cached($query, &types).await?;
                    let values: Vec<&(dyn ToSql + Sync)> = $params.iter().map(|(value, _)| *value).collect();
                    $on.query(&statement, &values).await
                }
            }
        }
    };
}

impl Sql for Session {
    async fn rows(&self, query: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        let object = self.object.as_ref().expect("taken only on drop");
        watched(&self.is_unsound, run!(object, self.statements, query, params)).await
    }
}

impl Sql for Transaction<'_> {
    async fn rows(&self, query: &str, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        watched(self.is_unsound, run!(self.inner, self.statements, query, params)).await
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
