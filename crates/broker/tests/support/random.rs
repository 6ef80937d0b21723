//! Random numbers that a printed seed brings back.

use uuid::Uuid;

/// Set to a number, every seeded test repeats that run.
pub const SEED: &str = "EBBTIDE_TEST_SEED";

/// SplitMix64: small, and the same on every machine.
pub struct Random(u64);

impl Random {
    /// A generator whose seed is in the test's output.
    pub fn seeded() -> Self {
        let given = std::env::var(SEED).ok().map(|text| text.parse().expect("a number"));
        let seed = given.unwrap_or_else(|| Uuid::new_v4().as_u64_pair().0);
        println!("{SEED}={seed}");
        Self(seed)
    }

    pub fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `bound` - 1.
    pub fn below(&mut self, bound: i64) -> i64 {
        let bound = u64::try_from(bound.max(1)).expect("positive");
        i64::try_from(self.next() % bound).expect("below an i64")
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            let other = usize::try_from(self.below(i64::try_from(at).expect("few") + 1)).expect("an index");
            items.swap(at, other);
        }
    }
}
