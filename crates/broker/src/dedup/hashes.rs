//! The hashes of one partition, as 40-bit fingerprints in runs that follow the offsets.

use hashbrown::HashTable;
use jiff::{SignedDuration, Timestamp};

use crate::id::{HASH_BYTES, Offset};

/// The first 40 bits of a hash. Two different hashes share them once in 2⁴⁰ pairs, which costs a
/// probe of the database and nothing else.
type Fingerprint = [u8; 5];

/// Fingerprints gathered in a hash table before they are sorted into a run.
const RECENT_MAX: usize = 2048;
/// No run, and no gathering, spans more of the window than this part: memory is given back in such steps.
const SPANS_PER_WINDOW: i32 = 8;

fn fingerprint(hash: &[u8]) -> Fingerprint {
    hash[..5].try_into().expect("a hash is longer than a fingerprint")
}

/// A table hash: the fingerprint is one already.
fn spread(fingerprint: Fingerprint) -> u64 {
    let [a, b, c, d, e] = fingerprint.map(u64::from);
    (e << 56 | d << 48 | c << 40 | b << 32 | a << 24) | (e << 16 | d << 8 | c)
}

/// Offsets `first..=end`, stamped from `oldest` to `newest`.
#[derive(Clone, Copy, Debug)]
struct Extent {
    first: Offset,
    end: Offset,
    oldest: Timestamp,
    newest: Timestamp,
}

impl Extent {
    fn joined(self, later: Self) -> Self {
        Self { end: later.end, newest: self.newest.max(later.newest), ..self }
    }

    fn span(self) -> SignedDuration {
        self.newest.duration_since(self.oldest)
    }
}

/// Sorted fingerprints: the first four bytes apart from the fifth, so that a search reads only the former.
#[derive(Debug)]
struct Run {
    extent: Extent,
    heads: Vec<u32>,
    tails: Vec<u8>,
}

impl Run {
    fn sorted(extent: Extent, mut fingerprints: Vec<Fingerprint>) -> Self {
        fingerprints.sort_unstable();
        let heads = fingerprints.iter().map(|&[a, b, c, d, _]| u32::from_be_bytes([a, b, c, d])).collect();
        let tails = fingerprints.iter().map(|f| f[4]).collect();
        Self { extent, heads, tails }
    }

    fn merged(a: &Self, b: &Self) -> Self {
        let len = a.heads.len() + b.heads.len();
        let (mut heads, mut tails) = (Vec::with_capacity(len), Vec::with_capacity(len));
        let (mut i, mut j) = (0, 0);
        while i < a.heads.len() || j < b.heads.len() {
            let take_a =
                j == b.heads.len() || (i < a.heads.len() && (a.heads[i], a.tails[i]) <= (b.heads[j], b.tails[j]));
            let (from, at) = if take_a { (a, &mut i) } else { (b, &mut j) };
            heads.push(from.heads[*at]);
            tails.push(from.tails[*at]);
            *at += 1;
        }
        Self { extent: a.extent.joined(b.extent), heads, tails }
    }

    fn contains(&self, [a, b, c, d, tail]: Fingerprint) -> bool {
        let head = u32::from_be_bytes([a, b, c, d]);
        let start = self.position(head);
        self.heads[start..].iter().zip(&self.tails[start..]).take_while(|(h, _)| **h == head).any(|(_, t)| *t == tail)
    }

    /// The first position that is not below `head`. Heads are spread evenly, so the guess is close.
    fn position(&self, head: u32) -> usize {
        let len = self.heads.len();
        let guess = usize::try_from((u64::from(head) * len as u64) >> 32).expect("below len");
        let mut step = 16;
        let (mut low, mut high) = (guess, guess);
        while low > 0 && self.heads[low - 1] >= head {
            low = low.saturating_sub(step);
            step *= 2;
        }
        while high < len && self.heads[high] < head {
            high = len.min(high + step);
            step *= 2;
        }
        low + self.heads[low..high].partition_point(|h| *h < head)
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() + self.heads.capacity() * 4 + self.tails.capacity()
    }
}

/// Every hash of one partition that may be inside the window, up to an offset, without a gap.
#[derive(Debug, Default)]
pub(super) struct Hashes {
    runs: Vec<Run>,
    recent: HashTable<Fingerprint>,
    recent_extent: Option<Extent>,
}

impl Hashes {
    /// Adds the hashes of offsets `first..`, all stamped `stamp`, behind those that are here.
    pub(super) fn append(&mut self, first: Offset, hashes: &[u8], stamp: Timestamp, window_seconds: i32) {
        let count = hashes.len() / HASH_BYTES;
        let end = first + Offset::try_from(count).expect("fits in memory") - 1;
        let added = Extent { first, end, oldest: stamp, newest: stamp };
        let extent = self.recent_extent.map_or(added, |extent| extent.joined(added));
        self.recent_extent = Some(extent);
        for hash in hashes.chunks_exact(HASH_BYTES) {
            let new = fingerprint(hash);
            self.recent.entry(spread(new), |f| *f == new, |f| spread(*f)).or_insert(new);
        }
        let span_max = SignedDuration::from_secs(window_seconds.into()) / SPANS_PER_WINDOW;
        if self.recent.len() >= RECENT_MAX || extent.span() > span_max {
            self.seal(span_max);
        }
    }

    fn seal(&mut self, span_max: SignedDuration) {
        let Some(extent) = self.recent_extent.take() else { return };
        let mut run = Run::sorted(extent, std::mem::take(&mut self.recent).into_iter().collect());
        // Runs of about the same size become one, so that a lookup asks few; but none so long in time
        // that its old half would be kept for its young half.
        while let Some(last) = self
            .runs
            .pop_if(|last| last.heads.len() <= 2 * run.heads.len() && last.extent.joined(run.extent).span() <= span_max)
        {
            run = Run::merged(&last, &run);
        }
        self.runs.push(run);
    }

    /// The lowest offset that one of `hashes` may be stored at; `None` means certainly none is.
    pub(super) fn lowest_possible(&self, hashes: &[u8]) -> Option<Offset> {
        let any_in = |contains: &dyn Fn(Fingerprint) -> bool| {
            hashes.chunks_exact(HASH_BYTES).any(|hash| contains(fingerprint(hash)))
        };
        if let Some(run) = self.runs.iter().find(|run| any_in(&|f| run.contains(f))) {
            return Some(run.extent.first);
        }
        let recent = self.recent_extent?;
        any_in(&|f| self.recent.find(spread(f), |g| *g == f).is_some()).then_some(recent.first)
    }

    /// Gives back what is older than `cutoff` as a whole.
    pub(super) fn expire(&mut self, cutoff: Timestamp) {
        let stale = self.runs.iter().take_while(|run| run.extent.newest < cutoff).count();
        self.runs.drain(..stale);
    }

    pub(super) fn bytes(&self) -> usize {
        self.runs.iter().map(Run::bytes).sum::<usize>() + self.recent.allocation_size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::hash;

    fn hashes(ids: std::ops::Range<i64>) -> Vec<u8> {
        ids.flat_map(|id| hash(&id.to_string())).collect()
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    #[test]
    fn everything_appended_is_found_and_nothing_else() {
        let mut index = Hashes::default();
        for batch in 0..300_i64 {
            index.append(batch * 100, &hashes(batch * 100..batch * 100 + 100), at(batch / 100), 3600);
        }
        for id in (0..30_000).step_by(7) {
            let lowest = index.lowest_possible(&hashes(id..id + 1)).expect("it is there");
            assert!(lowest <= id, "{id} is not below {lowest}");
        }
        let unseen = (30_000..130_000).filter(|id| index.lowest_possible(&hashes(*id..*id + 1)).is_some()).count();
        assert!(unseen <= 1, "{unseen} of 100,000 are false");
        assert!(index.runs.len() <= 6, "{} runs", index.runs.len());
        let bytes = index.bytes();
        assert!(bytes < 30_000 * 6 + 30_000, "{bytes} bytes");
    }

    #[test]
    fn what_expires_goes_run_by_run() {
        let mut index = Hashes::default();
        for second in 0..160_i64 {
            index.append(second, &hashes(second..second + 1), at(second), 80);
        }
        let full = index.bytes();
        index.expire(at(80));
        assert!(index.bytes() < full);
        for kept in 80..160 {
            assert!(index.lowest_possible(&hashes(kept..kept + 1)).is_some(), "{kept} is inside the window");
        }
        assert_eq!(index.lowest_possible(&hashes(0..50)), None, "a run is at most an eighth of the window long");
        index.expire(at(1_000));
        assert!(index.runs.is_empty());
    }

    #[test]
    fn equal_heads_are_told_apart_by_their_tails() {
        let extent = Extent { first: 0, end: 2, oldest: at(0), newest: at(0) };
        let run = Run::sorted(extent, vec![[1, 2, 3, 4, 9], [1, 2, 3, 4, 5], [0xFF; 5], [0; 5]]);
        for present in [[1, 2, 3, 4, 9], [1, 2, 3, 4, 5], [0xFF; 5], [0; 5]] {
            assert!(run.contains(present));
        }
        for absent in [[1, 2, 3, 4, 6], [1, 2, 3, 5, 5], [0xFF, 0xFF, 0xFF, 0xFF, 0], [0, 0, 0, 0, 1]] {
            assert!(!run.contains(absent));
        }
    }
}
