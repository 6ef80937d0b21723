//! Elects the one process that may run a cycle.

#[cfg(feature = "postgres")]
pub(crate) mod advisory;

use tracing::{debug, warn};

/// What became of a cycle at the gate.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the outcome of the cycle is in here"]
pub enum Led<T> {
    /// Another process leads; the cycle was not started.
    Skipped,
    /// This process led, and the cycle ended with this.
    Ran(T),
}

/// A gate that one process at a time may pass.
///
/// A leader is a session that holds the lock, and a session has one owner. [`LeaderGate::try_lead`]
/// moves it out of the gate, and only a release that saw the lock go may put it back for the next
/// cycle. Whatever ends a cycle in another way (a panic, a dropped future, a release that failed) drops
/// the session, and dropping it must end it together with its lock.
pub trait LeaderGate: Send {
    /// The owner of the lock. Dropping it closes it, however the cycle came to its end.
    type Session: Send;
    /// What a cycle works with: a handle on the session, useless once the session is closed.
    type Client: Send;
    /// Why nobody could be elected.
    type Error: std::error::Error + Send + 'static;

    /// Takes the lock without waiting for it. `None` means that another session holds it.
    fn try_lead(&mut self) -> impl Future<Output = Result<Option<Self::Session>, Self::Error>> + Send;

    /// The handle that the cycle is given.
    fn client(session: &Self::Session) -> Self::Client;

    /// Gives the lock up. False means that the session did not hold it any more.
    fn release(&mut self, session: Self::Session) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// Runs `cycle` as the leader, or skips it when another process leads.
    ///
    /// The cycle may borrow: `gate.as_leader(|client| cycle(client, &cancel, &mut cleanup_clock)).await`.
    /// Every statement of the cycle belongs on the client that it is given, and the client must not
    /// outlive it: then to lose the lock is to lose the steps. What the cycle returns, its own error
    /// included, comes back in [`Led::Ran`]. A failed release is one warning and leaves it untouched.
    ///
    /// # Errors
    /// The gate's error if the election failed; `cycle` was not started then.
    fn as_leader<T, F, Fut>(&mut self, cycle: F) -> impl Future<Output = Result<Led<T>, Self::Error>> + Send
    where
        T: Send,
        F: FnOnce(Self::Client) -> Fut + Send,
        Fut: Future<Output = T> + Send,
    {
        async move {
            let Some(session) = self.try_lead().await? else {
                debug!(target: "retention", "another session leads, cycle skipped");
                return Ok(Led::Skipped);
            };
            let outcome = cycle(Self::client(&session)).await;
            match self.release(session).await {
                Ok(true) => {}
                Ok(false) => warn!(target: "retention", "leader lock was not held at release"),
                Err(error) => {
                    let error: &(dyn std::error::Error + 'static) = &error;
                    warn!(target: "retention", error, "leader lock not released");
                }
            }
            Ok(Led::Ran(outcome))
        }
    }
}
