//! Every failure the broker can report: SQLSTATE ─► [`Error`] ─► HTTP status, the one place for each.

use std::time::Duration;

use axum::http::StatusCode;
use tokio_postgres::error::SqlState;

/// A failure that a caller can act on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is wrong; the same request will fail again.
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },
    /// A field that the request must have.
    #[error("{0} is required")]
    Missing(&'static str),
    /// The body is not what the route takes.
    #[error("bad body: {0}")]
    BadBody(String),
    /// The request has no token that counts.
    #[error("{0}")]
    Unauthenticated(&'static str),
    /// The token's roles do not allow the request.
    #[error("Insufficient permissions")]
    Forbidden,
    /// The keys that tokens are checked with could not be fetched; later they may be.
    #[error("the keys that tokens are checked with could not be fetched")]
    KeysUnavailable,
    /// What the request names does not exist.
    #[error("{0}")]
    NotFound(String),
    /// What the request names is in a state that does not allow it.
    #[error("{0}")]
    Conflict(String),
    /// The request is larger than a limit.
    #[error("{0}")]
    TooLarge(String),
    /// The request body stopped coming for this long.
    #[error("the request body stopped coming for {} s", .0.as_secs_f64())]
    TooSlow(Duration),
    /// More is waiting to be stored than there is room for; later there will be.
    #[error("too many messages are waiting to be stored")]
    Busy,
    /// There is no room for the request at this moment; later there will be.
    #[error("{0}")]
    Overloaded(&'static str),
    /// No database connection could be had in time.
    #[error("pool")]
    Pool,
    /// A row lock was not granted within `lock_timeout`.
    #[error("a lock was not granted in time")]
    LockTimeout,
    /// The statement lost a race (a partition deleted under it, a deadlock); nothing was written, and
    /// the same request may succeed now.
    #[error("lost a race, retry: {0}")]
    Retryable(String),
    /// The statement did not end within its deadline and was cancelled.
    #[error("the database did not answer in time")]
    StatementTimeout,
    /// A row that a function wrote refers to one that is gone.
    #[error("the row it refers to is gone")]
    ForeignKey,
    /// A transaction pushed a transaction id that is already stored.
    #[error("{0}")]
    Duplicate(String),
    /// A transaction's acknowledgement was refused.
    #[error("{0}")]
    AckRejected(String),
    /// A transaction dead-letters messages whose payloads it was not given; the text lists them as JSON.
    #[error("dead letters are needed: {0}")]
    LettersNeeded(String),
    /// A required key/value operation did not apply, which undid its batch; the text says which and why, as JSON.
    #[error("a required operation did not apply: {0}")]
    KvUnmet(String),
    /// An operator has paused what the request needs; the text is the client's code for that.
    #[error("{0}: paused by an operator")]
    Paused(String),
    /// More was asked for than this server lets through.
    #[error("too many {what} a second; try again in {} s", seconds(*.wait))]
    RateLimited { what: &'static str, wait: Duration },
    /// A store has as many rows as it may; the code is the client's.
    #[error("{text}")]
    QuotaExceeded { code: &'static str, text: String },
    /// A timer lies further ahead than timers may.
    #[error("{0}")]
    HorizonExceeded(String),
    /// A claimed timer was taken over, moved or cancelled meanwhile; nothing was written.
    #[error("the claim of a timer was lost")]
    ClaimLost,
    /// The stored data contradicts its own format.
    #[error("corrupt data: {0}")]
    Corrupt(String),
    /// A payload is encrypted and does not open here. It is still stored.
    #[error("a payload cannot be read: {0}")]
    Sealed(String),
    /// The encryption of a queue is not as the caller thought; nothing was written.
    #[error("the encryption of a queue was switched meanwhile")]
    EncryptionChanged,
    /// The database is there and takes no writes: a standby, or one without room.
    #[error("the database takes no writes: {0}")]
    TakesNoWrites(String),
    /// The database is away, and what it would store cannot be kept on this server's disk either.
    #[error("{0}")]
    NotSpooled(String),
    /// The connection broke.
    #[error("the database connection broke")]
    Disconnected,
    /// Anything else the database answered.
    #[error("database: {}", describe(.0))]
    Db(tokio_postgres::Error),
}

/// The server's own words, without the client's wrapping, which says only "db error".
fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} ({})", db.message(), db.code().code()),
        None => error.to_string(),
    }
}

/// Whole ones, rounded up.
fn seconds(wait: Duration) -> u64 {
    wait.as_secs() + u64::from(wait.subsec_nanos() != 0)
}

impl Error {
    /// A field that is out of range, or not of its type.
    pub fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    /// The HTTP status that reports this failure.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Invalid { .. } | Self::Missing(_) | Self::BadBody(_) => StatusCode::BAD_REQUEST,
            Self::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Self::Forbidden | Self::HorizonExceeded(_) | Self::QuotaExceeded { .. } => StatusCode::FORBIDDEN,
            Self::KeysUnavailable | Self::Overloaded(_) | Self::NotSpooled(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Conflict(_) => StatusCode::CONFLICT,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TooSlow(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Busy | Self::RateLimited { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Duplicate(_) | Self::AckRejected(_) | Self::KvUnmet(_) => StatusCode::OK,
            Self::Paused(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Pool
            | Self::LockTimeout
            | Self::Retryable(_)
            | Self::StatementTimeout
            | Self::ForeignKey
            | Self::LettersNeeded(_)
            | Self::Corrupt(_)
            | Self::Sealed(_)
            | Self::EncryptionChanged
            | Self::TakesNoWrites(_)
            | Self::ClaimLost
            | Self::Disconnected
            | Self::Db(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// After how many seconds a client should try again, where that is known.
    pub fn retry_after(&self) -> Option<u64> {
        match self {
            Self::RateLimited { wait, .. } => Some(seconds(*wait)),
            error if matches!(error.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) => {
                Some(1)
            }
            _ => None,
        }
    }

    /// Whether the same request may succeed at once, since this one wrote nothing.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Retryable(_) | Self::LockTimeout | Self::ForeignKey | Self::EncryptionChanged)
    }

    /// Whether the database is away, so that what it would store is better kept until it is back. Unless there was no
    /// connection at all, nobody knows whether the statement was carried out.
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Pool | Self::Disconnected | Self::StatementTimeout | Self::TakesNoWrites(_))
    }

    /// Whether the database will refuse the same data for ever: data, a constraint or a limit of its own is against it.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Db(error) => error.code().is_some_and(|code| REFUSALS.contains(&&code.code()[..2])),
            Self::TooLarge(_) => true,
            _ => false,
        }
    }
}

/// Classes of SQLSTATE that are about the data: data exception, integrity constraint, program limit.
const REFUSALS: &[&str] = &["22", "23", "54"];

/// The engine's own codes: raised by functions in `queen`, matched here and nowhere else.
pub mod code {
    /// A partition or a dead letter vanished between its resolution and its lock.
    pub const PARTITION_VANISHED: &str = "QN001";
    /// An acknowledgement inside a transaction was refused.
    pub const ACK_REJECTED: &str = "QN002";
    /// A transaction pushed a stored transaction id.
    pub const DUPLICATE: &str = "QN003";
    /// A transaction needs the payloads of messages that it dead-letters.
    pub const LETTERS_NEEDED: &str = "QN004";
    /// A push is not encrypted as its queue wants it.
    pub const ENCRYPTION_CHANGED: &str = "QN005";
    /// A required key/value operation did not apply.
    pub const KV_UNMET: &str = "QN010";
    /// An operator has paused a feature.
    pub const PAUSED: &str = "QN011";
    /// A timer is not claimed by whoever fires it.
    pub const CLAIM_LOST: &str = "QN012";
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        let Some(db) = error.as_db_error() else {
            return if error.is_closed() || std::error::Error::source(&error).is_some_and(|s| s.is::<std::io::Error>()) {
                Self::Disconnected
            } else {
                Self::Db(error)
            };
        };
        let message = db.message().to_owned();
        match db.code() {
            state if state.code() == code::PARTITION_VANISHED => Self::Retryable(message),
            state if state.code() == code::ACK_REJECTED => Self::AckRejected(message),
            state if state.code() == code::DUPLICATE => Self::Duplicate(message),
            state if state.code() == code::LETTERS_NEEDED => {
                Self::LettersNeeded(db.detail().unwrap_or_default().to_owned())
            }
            state if state.code() == code::ENCRYPTION_CHANGED => Self::EncryptionChanged,
            state if state.code() == code::KV_UNMET => Self::KvUnmet(db.detail().unwrap_or_default().to_owned()),
            state if state.code() == code::PAUSED => Self::Paused(message),
            state if state.code() == code::CLAIM_LOST => Self::ClaimLost,
            &SqlState::T_R_DEADLOCK_DETECTED | &SqlState::T_R_SERIALIZATION_FAILURE => Self::Retryable(message),
            &SqlState::LOCK_NOT_AVAILABLE => Self::LockTimeout,
            &SqlState::FOREIGN_KEY_VIOLATION => Self::ForeignKey,
            &SqlState::QUERY_CANCELED => Self::StatementTimeout,
            &SqlState::READ_ONLY_SQL_TRANSACTION | &SqlState::DISK_FULL => Self::TakesNoWrites(message),
            &SqlState::ADMIN_SHUTDOWN | &SqlState::CRASH_SHUTDOWN | &SqlState::CANNOT_CONNECT_NOW => Self::Disconnected,
            _ => Self::Db(error),
        }
    }
}
