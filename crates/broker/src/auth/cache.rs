//! Tokens whose signature was checked already: a public-key signature costs as much to check as a small request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;

use super::Verified;

/// Memory of the tokens that are remembered. Beyond, all are forgotten; only valid ones ever get in.
const BYTES_MAX: usize = 8 << 20;
/// Counted for each on top of its text.
const ENTRY_BYTES: usize = 256;

struct Entry {
    verified: Arc<Verified>,
    /// Of the keys that it was checked with.
    generation: u64,
}

#[derive(Default)]
struct State {
    entries: HashMap<Box<str>, Entry>,
    bytes: usize,
}

#[derive(Default)]
pub(super) struct Cache(Mutex<State>);

impl Cache {
    /// What was found out about `token`, if that was with the keys of `generation`.
    pub(super) fn get(&self, token: &str, generation: u64) -> Option<Arc<Verified>> {
        let state = self.state();
        let entry = state.entries.get(token).filter(|entry| entry.generation == generation)?;
        Some(entry.verified.clone())
    }

    pub(super) fn put(&self, token: &str, generation: u64, verified: Arc<Verified>) {
        let mut state = self.state();
        let bytes = token.len() + ENTRY_BYTES;
        if BYTES_MAX < state.bytes + bytes {
            *state = State::default();
        }
        if state.entries.insert(token.into(), Entry { verified, generation }).is_none() {
            state.bytes += bytes;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_remembered_for_the_keys_it_was_checked_with() {
        let cache = Cache::default();
        cache.put("a", 1, Arc::default());
        assert!(cache.get("a", 1).is_some());
        assert!(cache.get("a", 2).is_none(), "its key may be gone");
        assert!(cache.get("b", 1).is_none());
    }

    #[test]
    fn its_memory_is_bounded() {
        let cache = Cache::default();
        for n in 0..3 * BYTES_MAX / 1024 {
            cache.put(&format!("{n:01024}"), 1, Arc::default());
            assert!(cache.state().bytes <= BYTES_MAX);
        }
        let state = cache.state();
        assert_eq!(state.bytes, state.entries.len() * (1024 + ENTRY_BYTES));
    }
}
