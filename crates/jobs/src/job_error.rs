//! How a handler says that it failed, and whether another run may help.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use crate::error::Error;

type Source = Box<dyn StdError + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Retryable,
    NoRetry,
    RetryAfter(Duration),
    /// The job waits. Only the library makes one.
    Suspended,
    /// The claim is over. Only the library makes one.
    Lost,
}

/// A failed run or step. Made with `?` from any error, it is retried while the job has retries left.
///
/// It also carries a suspension out of a handler: a wait for a signal, a time or children answers with an error for
/// which [`JobError::is_suspended`] is true, and which has to be passed on. A handler that swallows it ends all the
/// same: its claim is over.
pub struct JobError {
    kind: Kind,
    text: String,
    key: Option<String>,
    source: Option<Source>,
}

impl JobError {
    fn of(kind: Kind, source: impl Into<Source>) -> Self {
        let source = source.into();
        Self { kind, text: source.to_string(), key: None, source: Some(source) }
    }

    /// A failure after which the job runs again while it has retries left.
    pub fn new(error: impl Into<Source>) -> Self {
        Self::of(Kind::Retryable, error)
    }

    /// A failure after which the job does not run again: it is dead-lettered at once. Of a step it is recorded, and
    /// every replay answers with it.
    pub fn no_retry(error: impl Into<Source>) -> Self {
        Self::of(Kind::NoRetry, error)
    }

    /// A failure after which the job runs again once `delay` has passed on the database's clock, while it has retries
    /// left. The delay is taken as it is, without the limit that back-off policies have.
    pub fn retry_after(delay: Duration, error: impl Into<Source>) -> Self {
        Self::of(Kind::RetryAfter(delay), error)
    }

    /// As [`JobError::no_retry`], with a key by which it is recognised, after a replay as well.
    pub fn sentinel(key: impl Into<String>, error: impl Into<Source>) -> Self {
        Self { key: Some(key.into()), ..Self::no_retry(error) }
    }

    pub(crate) fn suspended() -> Self {
        Self { kind: Kind::Suspended, text: "the job waits".to_owned(), key: None, source: None }
    }

    pub(crate) fn lost() -> Self {
        Self { kind: Kind::Lost, text: "the claim on the job is over".to_owned(), key: None, source: None }
    }

    /// A failure as a record holds it.
    pub(crate) fn replayed(text: String, key: Option<String>) -> Self {
        Self { kind: Kind::NoRetry, text, key, source: None }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// The key of a [`JobError::sentinel`].
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Whether this is no failure: the job waits, and its handler has to return.
    pub fn is_suspended(&self) -> bool {
        self.kind == Kind::Suspended
    }

    /// Whether another run may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self.kind, Kind::Retryable | Kind::RetryAfter(_))
    }

    /// The error that it was made of, if it is of this type. One that was replayed from a record is made of none.
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        self.source.as_ref()?.downcast_ref()
    }
}

// No `std::error::Error`: it would clash with the conversion from every error, as in other catch-all types.
impl<E: StdError + Send + Sync + 'static> From<E> for JobError {
    fn from(error: E) -> Self {
        let source: Source = Box::new(error);
        match source.downcast_ref::<Error>() {
            Some(Error::JobNotOwned(_)) => Self::lost(),
            Some(error) if error.is_final() => Self::of(Kind::NoRetry, source),
            _ => Self::of(Kind::Retryable, source),
        }
    }
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobError").field("kind", &self.kind).field("text", &self.text).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_error_is_retried_unless_it_says_otherwise() {
        let io = || std::io::Error::other("down");
        assert!(JobError::from(io()).is_retryable());
        assert!(JobError::from(io()).downcast_ref::<std::io::Error>().is_some());
        assert!(!JobError::no_retry(io()).is_retryable());
        assert_eq!(JobError::retry_after(Duration::from_secs(9), "x").kind(), Kind::RetryAfter(Duration::from_secs(9)));
        let known = JobError::sentinel("card_declined", "no funds");
        assert_eq!((known.key(), known.kind()), (Some("card_declined"), Kind::NoRetry));
        assert!(JobError::suspended().is_suspended() && !JobError::suspended().is_retryable());
        let lost = Error::JobNotOwned(crate::JobId::new());
        assert_eq!(JobError::from(lost).kind(), Kind::Lost);
    }
}
