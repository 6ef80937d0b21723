//! What the index may claim, and when it must claim nothing.

use uuid::Uuid;

use super::*;
use crate::segment::{HASH_BYTES, hash};

const WINDOW: i32 = 3600;

fn name(partition: &str) -> PartitionName {
    PartitionName::new("q", partition)
}

fn id(n: u128) -> PartitionId {
    PartitionId(Uuid::from_u128(n))
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).expect("in range")
}

fn hashes(ids: std::ops::Range<i64>) -> Vec<u8> {
    ids.flat_map(|id| hash(&id.to_string())).collect()
}

fn row(base_offset: Offset, hashes: Vec<u8>, second: i64) -> SidecarRow {
    SidecarRow { base_offset, created_at: at(second), hashes }
}

#[test]
fn a_new_partition_is_vouched_for_from_its_first_message() {
    let index = Index::new(1 << 20);
    let p = name("1");
    assert_eq!(index.hint(&p, &hash("a")), Hint { partition_id: None, verified: -1, window_seconds: 0 });
    assert_eq!(index.record(&p, id(1), WINDOW, Some((0, &hashes(0..100), at(0)))), None);
    let hint = Hint { partition_id: Some(id(1)), verified: 99, window_seconds: WINDOW };
    assert_eq!(index.hint(&p, &hashes(100..200)), hint);
    assert_eq!(index.hint(&p, &hashes(50..51)).verified, -1, "what may be stored is probed for");
}

#[test]
fn a_gap_stops_the_index_until_it_is_loaded() {
    let index = Index::new(1 << 20);
    let p = name("1");
    index.record(&p, id(1), WINDOW, Some((0, &hashes(0..10), at(0))));
    assert_eq!(index.record(&p, id(1), WINDOW, Some((20, &hashes(20..30), at(1)))), None, "a small gap is left");
    assert_eq!(index.hint(&p, &hashes(90..91)).verified, 9);
    let load = index.record(&p, id(1), WINDOW, Some((2000, &hashes(30..40), at(2)))).expect("a wide gap is loaded");
    assert_eq!(load, Load { partition_id: id(1), from: Some(10), window_seconds: WINDOW });
    assert_eq!(index.record(&p, id(1), WINDOW, Some((2010, &hashes(40..50), at(2)))), None, "once");
    let rows = [row(10, hashes(10..20), 0), row(20, hashes(20..30), 1), row(2000, hashes(30..40), 2)];
    assert!(index.fill(load, &rows));
    assert_eq!(index.hint(&p, &hashes(90..91)).verified, 2019, "with what was pushed during the load");
    assert!(index.hint(&p, &hashes(45..46)).verified < 2010);
    assert!(index.hint(&p, &hashes(15..16)).verified < 15);
}

#[test]
fn a_cold_partition_is_loaded_from_its_window() {
    let index = Index::new(1 << 20);
    let p = name("1");
    let load = index.record(&p, id(1), WINDOW, Some((500, &hashes(0..1), at(9)))).expect("nothing is known of it");
    assert_eq!(load.from, None);
    assert_eq!(index.hint(&p, &hashes(5..6)).verified, -1);
    index.loaded(load, true);
    assert_eq!(index.record(&p, id(1), WINDOW, Some((501, &hashes(1..2), at(9)))), None, "too large is remembered");
}

#[test]
fn a_longer_window_starts_over_and_a_shorter_one_does_not() {
    let index = Index::new(1 << 20);
    let p = name("1");
    index.record(&p, id(1), 60, Some((0, &hashes(0..1), at(0))));
    index.record(&p, id(1), 30, Some((1, &hashes(1..2), at(0))));
    assert_eq!(index.hint(&p, &hashes(9..10)), Hint { partition_id: Some(id(1)), verified: 1, window_seconds: 30 });
    assert!(index.record(&p, id(1), 60, Some((2, &hashes(2..3), at(0)))).is_some());
    assert_eq!(index.hint(&p, &hashes(9..10)).verified, -1);
}

#[test]
fn a_name_that_means_another_partition_brings_nothing_along() {
    let index = Index::new(1 << 20);
    let p = name("1");
    index.record(&p, id(1), WINDOW, Some((0, &hashes(0..50), at(0))));
    index.record(&p, id(2), WINDOW, Some((0, &hashes(7..8), at(1))));
    let hint = Hint { partition_id: Some(id(2)), verified: 0, window_seconds: WINDOW };
    assert_eq!(index.hint(&p, &hashes(0..5)), hint);
}

#[test]
fn without_a_window_or_a_budget_nothing_is_kept_but_names() {
    for (index, window) in [(Index::new(0), WINDOW), (Index::new(1 << 20), 0)] {
        index.record(&name("1"), id(1), window, Some((0, &hashes(0..50), at(0))));
        let hint = Hint { partition_id: Some(id(1)), verified: -1, window_seconds: 0 };
        assert_eq!(index.hint(&name("1"), &hashes(90..91)), hint);
        assert_eq!(index.bytes(), 0);
    }
}

#[test]
fn over_its_limit_it_forgets_whole_partitions_the_longest_unused_first() {
    let bytes_max = 200_000;
    let index = Index::new(bytes_max);
    let mut rounds = 0;
    while rounds < 100 {
        for partition in 0..10_u128 {
            let base = rounds * 100;
            let hint = index.hint(&name(&partition.to_string()), &hashes(base..base + 100));
            let unknown = rounds > 0 && hint.verified == -1;
            if !unknown {
                assert_eq!(hint.verified, base - 1, "all of it or nothing");
            }
            let stored = hashes(base..base + 100);
            let written = Some((base, stored.as_slice(), at(0)));
            if let Some(load) = index.record(&name(&partition.to_string()), id(partition + 1), WINDOW, written) {
                index.loaded(load, true);
            }
            assert!(index.bytes() <= bytes_max);
        }
        rounds += 1;
    }
    let known = (0..10).filter(|p: &i32| index.hint(&name(&p.to_string()), &hashes(0..0)).verified > 0).count();
    assert!((1..10).contains(&known), "{known} of 10 are known");
}

/// A tenth of what a minute of 150,000 messages a second on 200 partitions leaves behind, in a tenth of 64 MiB.
#[test]
fn nine_hundred_thousand_hashes_fit_in_6_mib() {
    let index = Index::new((64 << 20) / 10);
    let mut random = 1_u128;
    let mut batch = vec![0_u8; 100 * HASH_BYTES];
    for round in 0..450_i64 {
        for partition in 0..20_u128 {
            for hash in batch.chunks_exact_mut(HASH_BYTES) {
                random = random.wrapping_mul(0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645).wrapping_add(1);
                hash.copy_from_slice(&random.to_be_bytes());
            }
            let stamp = at(round * 60 / 450);
            let name = name(&partition.to_string());
            assert_eq!(index.hint(&name, &batch).verified, round * 100 - 1, "nothing is forgotten, nothing is false");
            index.record(&name, id(partition + 1), WINDOW, Some((round * 100, &batch, stamp)));
        }
    }
    assert!(index.bytes() < 6 << 20, "{} bytes", index.bytes());
}
