//! What keeps the duplicate probe cheap: an index of recent transaction-id hashes, partition by partition.
//!
//! The database decides what is a duplicate. The index only tells it where not to look: a hash that is
//! not in here is certainly not stored in that partition, inside its window, up to the offset that the
//! index vouches for. So it is contiguous, it forgets whole partitions and never a part of one, and it
//! goes by partition id: a queue that was deleted and made again is another one.

mod hashes;

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use jiff::{SignedDuration, Timestamp};

use crate::id::{HASH_BYTES, Offset, PartitionId, PartitionName};
use hashes::Hashes;

/// Partition names remembered at most. Beyond, all are forgotten and learned again.
const NAMES_MAX: usize = 200_000;
/// A push this far behind what the index vouches for asks for a load; closer, the probe is cheap.
const GAP_MESSAGES: Offset = 1024;
/// Bytes of hashes kept beyond a gap, for each partition that is being loaded.
const AHEAD_BYTES_MAX: usize = 64 << 10;
/// Counted for each partition on top of its hashes: the entry, and the slack of the map.
const PARTITION_BYTES: usize = 2 * (size_of::<PartitionId>() + size_of::<Partition>());

/// What the index can say of one push before it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The partition, if its name is known. Wrong if it was deleted: the database checks.
    pub partition_id: Option<PartitionId>,
    /// None of the hashes asked for is stored up to here; -1 says nothing.
    pub verified: Offset,
    /// The window for which that is so, in seconds.
    pub window_seconds: i32,
}

/// A partition whose sidecar is worth reading into the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub partition_id: PartitionId,
    /// Where to begin; `None` is the beginning of the window.
    pub from: Option<Offset>,
    pub window_seconds: i32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Loading {
    No,
    UnderWay,
    /// The window holds more than is worth reading.
    GivenUp,
}

struct Partition {
    hashes: Hashes,
    /// Every hash inside the window up to here is in; `None` until the first load.
    verified: Option<Offset>,
    /// Our own pushes beyond a gap: a load that ends just before them need not chase them.
    ahead: VecDeque<SidecarRow>,
    window_seconds: i32,
    loading: Loading,
    used: u64,
    bytes: usize,
}

#[derive(Default)]
struct State {
    names: HashMap<PartitionName, PartitionId>,
    partitions: HashMap<PartitionId, Partition>,
    bytes: usize,
    tick: u64,
}

/// The index of one server. Every method is short and waits for nothing but the others.
pub struct Index {
    state: Mutex<State>,
    bytes_max: usize,
}

impl Index {
    /// Holds at most `bytes_max`; with 0 it only remembers the names of partitions.
    pub fn new(bytes_max: usize) -> Self {
        Self { state: Mutex::default(), bytes_max }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known before `hashes` are pushed to `name`.
    pub fn hint(&self, name: &PartitionName, hashes: &[u8]) -> Hint {
        let mut state = self.state();
        let partition_id = state.names.get(name).copied();
        let nothing = Hint { partition_id, verified: -1, window_seconds: 0 };
        state.tick += 1;
        let tick = state.tick;
        let Some(partition) = partition_id.and_then(|id| state.partitions.get_mut(&id)) else { return nothing };
        partition.used = tick;
        let Some(verified) = partition.verified else { return nothing };
        let verified = partition.hashes.lowest_possible(hashes).map_or(verified, |lowest| lowest - 1);
        Hint { partition_id, verified, window_seconds: partition.window_seconds }
    }

    /// Learns that `name` is `id`, whose window is `window_seconds`; if `written` that `hashes` were
    /// stored there at an offset and a time. Says whether the partition should be loaded.
    pub fn record(
        &self, name: &PartitionName, id: PartitionId, window_seconds: i32, written: Option<(Offset, &[u8], Timestamp)>,
    ) -> Option<Load> {
        let mut guard = self.state();
        let state = &mut *guard;
        state.learn(name, id);
        if self.bytes_max == 0 || window_seconds <= 0 {
            state.forget(id);
            return None;
        }
        let (base, hashes, stamp) = written?;
        if state.partitions.get(&id).is_some_and(|partition| partition.window_seconds < window_seconds) {
            // What expired under the shorter window may count under the longer one.
            state.forget(id);
        }
        state.tick += 1;
        let tick = state.tick;
        let partition = state.partitions.entry(id).or_insert_with(|| Partition::new(base, window_seconds, tick));
        state.bytes -= partition.bytes;
        partition.window_seconds = window_seconds;
        let is_next = partition.verified.is_some_and(|verified| verified + 1 == base);
        if is_next {
            partition.append(base, hashes, stamp);
        } else {
            partition.keep_ahead(SidecarRow { base_offset: base, created_at: stamp, hashes: hashes.to_vec() });
        }
        partition.bytes = partition.bytes();
        state.bytes += partition.bytes;
        let load = if is_next { None } else { partition.load(id, base) };
        state.shrink(self.bytes_max);
        load.filter(|_| self.has_room(state)).inspect(|load| state.begin_load(load.partition_id))
    }

    /// Adds rows of the sidecar, read for `load` in offset order. Says whether the partition is still wanted.
    pub fn fill(&self, load: Load, rows: &[SidecarRow]) -> bool {
        let mut guard = self.state();
        let state = &mut *guard;
        let Some(partition) = state.partitions.get_mut(&load.partition_id) else { return false };
        if partition.window_seconds != load.window_seconds {
            partition.loading = Loading::No;
            return false;
        }
        state.bytes -= partition.bytes;
        for row in rows {
            // A hole before a row was purged, or was outside the window: neither counts any more.
            if partition.verified.is_none_or(|verified| row.base_offset > verified) {
                partition.append(row.base_offset, &row.hashes, row.created_at);
            }
        }
        partition.catch_up();
        partition.bytes = partition.bytes();
        state.bytes += partition.bytes;
        state.shrink(self.bytes_max);
        self.has_room(state) && state.partitions.contains_key(&load.partition_id)
    }

    /// Ends a load. One that was too large is not tried again while the partition is remembered.
    pub fn loaded(&self, load: Load, is_too_large: bool) {
        let mut state = self.state();
        if let Some(partition) = state.partitions.get_mut(&load.partition_id) {
            partition.loading = if is_too_large { Loading::GivenUp } else { Loading::No };
        }
    }

    /// Loading into a full index would only push out what others use.
    fn has_room(&self, state: &State) -> bool {
        state.bytes < self.bytes_max - self.bytes_max / 8
    }

    /// Bytes held, as counted against the limit.
    pub fn bytes(&self) -> usize {
        self.state().bytes
    }
}

/// A row of `queen.log_txns`.
pub struct SidecarRow {
    pub base_offset: Offset,
    pub created_at: Timestamp,
    pub hashes: Vec<u8>,
}

impl Partition {
    fn new(base: Offset, window_seconds: i32, used: u64) -> Self {
        // A partition whose first message this is has nothing that could be missing.
        let verified = (base == 0).then_some(-1);
        Self {
            hashes: Hashes::default(),
            verified,
            ahead: VecDeque::new(),
            window_seconds,
            loading: Loading::No,
            used,
            bytes: 0,
        }
    }

    fn bytes(&self) -> usize {
        let ahead = self.ahead.iter().map(|row| size_of::<SidecarRow>() + row.hashes.capacity()).sum::<usize>();
        PARTITION_BYTES + self.hashes.bytes() + ahead
    }

    fn keep_ahead(&mut self, row: SidecarRow) {
        if self.loading != Loading::UnderWay {
            return;
        }
        self.ahead.push_back(row);
        while self.ahead.iter().map(|row| row.hashes.len()).sum::<usize>() > AHEAD_BYTES_MAX {
            self.ahead.pop_front();
        }
    }

    fn catch_up(&mut self) {
        while let Some(row) =
            self.ahead.pop_front_if(|row| self.verified.is_some_and(|verified| row.base_offset <= verified + 1))
        {
            if self.verified.is_some_and(|verified| row.base_offset == verified + 1) {
                self.append(row.base_offset, &row.hashes, row.created_at);
            }
        }
    }

    fn append(&mut self, base: Offset, hashes: &[u8], stamp: Timestamp) {
        let count = hashes.len() / HASH_BYTES;
        self.hashes.append(base, hashes, stamp, self.window_seconds);
        self.verified = Some(base + Offset::try_from(count).expect("fits in memory") - 1);
        let window = SignedDuration::from_secs(self.window_seconds.into());
        if let Ok(cutoff) = stamp.checked_sub(window) {
            self.hashes.expire(cutoff);
        }
    }

    /// A push at `base` left a gap behind what is vouched for.
    fn load(&mut self, id: PartitionId, base: Offset) -> Option<Load> {
        let is_far = self.verified.is_none_or(|verified| base - verified > GAP_MESSAGES);
        let wanted = is_far && self.loading == Loading::No;
        let from = self.verified.map(|verified| verified + 1);
        wanted.then_some(Load { partition_id: id, from, window_seconds: self.window_seconds })
    }
}

impl State {
    fn learn(&mut self, name: &PartitionName, id: PartitionId) {
        match self.names.get_mut(name) {
            Some(known) if *known == id => {}
            Some(known) => {
                let old = std::mem::replace(known, id);
                self.forget(old);
            }
            None => {
                if self.names.len() >= NAMES_MAX {
                    self.names.clear();
                    self.partitions.clear();
                    self.bytes = 0;
                }
                self.names.insert(name.clone(), id);
            }
        }
    }

    fn forget(&mut self, id: PartitionId) {
        if let Some(partition) = self.partitions.remove(&id) {
            self.bytes -= partition.bytes;
        }
    }

    fn begin_load(&mut self, id: PartitionId) {
        if let Some(partition) = self.partitions.get_mut(&id) {
            partition.loading = Loading::UnderWay;
        }
    }

    /// Over the limit, forgets the partitions that were longest not used until a sixteenth is free.
    fn shrink(&mut self, bytes_max: usize) {
        if self.bytes <= bytes_max {
            return;
        }
        let mut by_use: Vec<(u64, PartitionId)> = self.partitions.iter().map(|(id, p)| (p.used, *id)).collect();
        by_use.sort_unstable();
        for (_, id) in by_use {
            if self.bytes <= bytes_max - bytes_max / 16 {
                break;
            }
            self.forget(id);
        }
    }
}

#[cfg(test)]
mod tests;
