//! Once more after a lost race: who loses one has written nothing.

use tracing::debug;

use crate::error::Error;

/// Attempts of one statement, the first included.
const TRIES_MAX: usize = 5;

/// Runs `attempt` until it loses no race, at most five times.
///
/// # Errors
/// That of the last attempt.
pub(super) async fn retried<T, F, Fut>(mut attempt: F) -> Result<T, Error>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, Error>>,
{
    let mut tries = 1;
    loop {
        match attempt().await {
            Err(error) if error.is_retryable() && tries < TRIES_MAX => {
                debug!(target: "http", %error, tries, "lost a race");
                tries += 1;
            }
            result => return result,
        }
    }
}
