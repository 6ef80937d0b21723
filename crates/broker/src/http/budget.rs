//! Memory for request bodies: so much for all of them together.

use std::sync::Arc;

use bytes::Bytes;
use metrics::counter;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::Error;

/// The beginning of each body is not counted, so that small requests get through when large ones take everything.
const FREE_BYTES: usize = 16 << 10;
/// The unit in which the rest is counted.
const PERMIT_BYTES: usize = 1024;

/// What is left for bodies.
pub struct Budget(Arc<Semaphore>);

/// What one body takes.
#[derive(Default)]
pub(super) struct Share(Option<OwnedSemaphorePermit>);

/// A body that gives its share back when the last piece of it is gone.
struct Counted {
    bytes: Bytes,
    _share: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Budget {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes / PERMIT_BYTES)))
    }

    /// Lets `share` grow to a body of `bytes`.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if other bodies have taken the rest. Waiting for them could wait for ever: each of them may
    /// be waiting too.
    pub(super) fn grow(&self, share: &mut Share, bytes: usize) -> Result<(), Error> {
        let wanted = bytes.saturating_sub(FREE_BYTES).div_ceil(PERMIT_BYTES);
        let missing = wanted.saturating_sub(share.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if missing == 0 {
            return Ok(());
        }
        let missing = u32::try_from(missing).expect("a body is at most a gibibyte");
        let Ok(more) = self.0.clone().try_acquire_many_owned(missing) else {
            counter!("ebbtide_bodies_refused_total").increment(1);
            return Err(Error::Overloaded("too many large requests are being read (EBBTIDE_BODIES_BYTES_MAX)"));
        };
        match &mut share.0 {
            Some(held) => held.merge(more),
            None => share.0 = Some(more),
        }
        Ok(())
    }
}

impl Share {
    /// `bytes`, whose every slice keeps the share taken.
    pub(super) fn of(self, bytes: Bytes) -> Bytes {
        match self.0 {
            Some(share) => Bytes::from_owner(Counted { bytes, _share: share }),
            None => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_given_back_with_the_last_piece_of_its_body() {
        let budget = Budget::new(100 << 10);
        let left = || budget.0.available_permits();
        let mut share = Share::default();
        budget.grow(&mut share, FREE_BYTES).expect("counts for nothing");
        assert_eq!(left(), 100);
        budget.grow(&mut share, FREE_BYTES + 1).expect("room");
        budget.grow(&mut share, FREE_BYTES + (60 << 10)).expect("room");
        assert_eq!(left(), 40);
        let mut other = Share::default();
        assert!(matches!(budget.grow(&mut other, FREE_BYTES + (41 << 10)), Err(Error::Overloaded(_))));
        assert_eq!(left(), 40, "what is refused takes nothing");
        let body = share.of(Bytes::from(vec![1; 70_000]));
        let piece = body.slice(5..10);
        drop(body);
        assert_eq!((piece.len(), left()), (5, 40));
        drop(piece);
        assert_eq!(left(), 100);
    }
}
