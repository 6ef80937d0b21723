//! Rules 1 and 2 of the retention step, case by case.

use jiff::Timestamp;

use crate::support::partition::{DAY, Log, Partition, SECOND, US, at};

const CUTOFF: Option<Timestamp> = Some(Timestamp::constant(1_767_225_600, 0));

/// Five segments of two messages each, all old.
async fn five(log: &Log) -> Partition<'_> {
    let bases = (0..5).map(|k| (2 * k, 2 * k + 1, (k - 10) * SECOND)).collect::<Vec<_>>();
    log.partition().await.segments(&bases).await
}

fn typed(frames: i32, name: &str) -> (i32, String) {
    (frames, name.to_owned())
}

#[tokio::test]
async fn rule_1_keeps_segments_at_or_after_the_cutoff() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, -US), (1, 1, 0), (2, 2, US)]).await;
    assert_eq!(p.step(None, None, 10).await, (0, Some(0), true), "off");
    assert_eq!(p.step(CUTOFF, None, 10).await, (1, Some(1), true));
    assert_eq!(p.live().await, [1, 2]);
    assert_eq!(p.step(CUTOFF, None, 10).await, (0, Some(1), true), "nothing to do");
}

#[tokio::test]
async fn rule_2_keeps_segments_at_or_after_the_cutoff() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, -US), (1, 1, 0), (2, 2, US)]).await.cursor("g", 2).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (1, Some(1), true));
    assert_eq!(p.live().await, [1, 2]);
    assert_eq!(p.step(None, CUTOFF, 10).await, (0, Some(1), true), "nothing to do");
}

#[tokio::test]
async fn a_partition_that_is_gone_is_done() {
    let log = Log::start().await;
    let p = log.partition().await;
    log.execute("delete from queen.log_partitions").await;
    assert_eq!(p.step(CUTOFF, CUTOFF, 10).await, (0, None, true));
}

#[tokio::test]
async fn a_step_touches_no_other_partition_and_no_other_table() {
    let log = Log::start().await;
    let p = five(&log).await.txns(&[(0, 9, -DAY)]).await.cursor("g", 9).await;
    let other = five(&log).await;
    assert_eq!(p.step(CUTOFF, CUTOFF, 10).await.0, 5);
    assert_eq!(other.live().await, [0, 2, 4, 6, 8]);
    assert_eq!(p.hashes().await, [0]);
    assert_eq!((p.number("last_offset").await, p.number("txns_start").await), (9, 0));
}

#[tokio::test]
async fn the_audit_names_queue_and_tenant() {
    let log = Log::start().await;
    let p = five(&log).await;
    p.step(CUTOFF, None, 10).await;
    let matching = "select count(*) from queen.retention_history h
        join queen.log_partitions p on p.id = h.partition_id
        join queen.queues q on q.id = p.queue_id
        where h.queue_id = q.id and h.tenant_id = q.tenant_id";
    assert_eq!(log.count(matching).await, 1);
}

#[tokio::test]
async fn r1_without_cutoffs_nothing_goes() {
    let log = Log::start().await;
    let p = five(&log).await.cursor("g", 9).await;
    assert_eq!(p.step(None, None, 10).await, (0, Some(0), true));
    assert_eq!(p.live().await, [0, 2, 4, 6, 8]);
    assert_eq!(p.history().await, []);
}

#[tokio::test]
async fn r2_without_segments_the_watermark_stays() {
    let log = Log::start().await;
    let p = log.partition().await.set("log_start = $2", 5).await.set("last_offset = $2", 4).await.cursor("g", 4).await;
    assert_eq!(p.step(CUTOFF, CUTOFF, 10).await, (0, Some(5), true));
    assert_eq!(p.number("log_start").await, 5);
    assert_eq!(p.history().await, []);
}

#[tokio::test]
async fn r3_a_stale_log_goes_whole() {
    let log = Log::start().await;
    let p = five(&log).await;
    assert_eq!(p.step(CUTOFF, None, 4).await, (4, Some(8), false));
    assert_eq!(p.step(CUTOFF, None, 4).await, (1, Some(10), true));
    assert_eq!(p.number("log_start").await, p.number("last_offset").await + 1);
    assert!(p.live().await.is_empty());
    assert_eq!(p.history().await, [typed(8, "retention"), typed(2, "retention")]);
}

#[tokio::test]
async fn r4_what_nobody_consumes_rule_2_keeps() {
    let log = Log::start().await;
    let p = five(&log).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (0, Some(0), true));
    assert_eq!(p.live().await, [0, 2, 4, 6, 8]);
}

#[tokio::test]
async fn r5_the_slowest_group_pins_rule_2() {
    let log = Log::start().await;
    let p = five(&log).await.cursor("fast", 9).await.cursor("abandoned", 3).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (2, Some(4), true));
    assert_eq!(p.step(None, CUTOFF, 10).await, (0, Some(4), true), "pinned");
    p.cursor("abandoned", 9).await.cursor("__QUEUE_MODE__", -1).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (0, Some(4), true), "a stray pop without a group pins it, too");
    log.execute("delete from queen.log_consumers where consumer_group = '__QUEUE_MODE__'").await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (3, Some(10), true));
}

#[tokio::test]
async fn r6_a_cap_inside_the_first_segment_deletes_nothing() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 9, -DAY), (10, 19, -DAY)]).await.cursor("g", 4).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (0, Some(0), true));
    assert_eq!(p.live().await, [0, 10]);
}

#[tokio::test]
async fn r7_a_cap_inside_a_later_segment_keeps_that_segment_whole() {
    let log = Log::start().await;
    let segments = [(0, 4, -DAY), (5, 9, -DAY), (10, 14, -DAY)];
    let p = log.partition().await.segments(&segments).await.cursor("g", 7).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (1, Some(5), true));
    assert_eq!(p.live().await, [5, 10]);
    assert_eq!(p.history().await, [typed(5, "completed_retention")]);
    // A batch that ends right before the covered segment must not promise more.
    let p = log.partition().await.segments(&segments).await.cursor("g", 7).await;
    assert_eq!(p.step(None, CUTOFF, 1).await, (1, Some(5), true));
}

#[tokio::test]
async fn r8_the_larger_boundary_wins() {
    let log = Log::start().await;
    let segments = [(0, 0, -3 * DAY), (1, 1, -2 * DAY), (2, 2, -DAY), (3, 3, 0)];
    let unread = log.partition().await.segments(&segments).await.cursor("g", -1).await;
    assert_eq!(unread.step(Some(at(-DAY)), CUTOFF, 10).await, (2, Some(2), true), "unread data older than rule 1");
    assert_eq!(unread.history().await, [typed(2, "retention")]);
    let read = log.partition().await.segments(&segments).await.cursor("g", 3).await;
    assert_eq!(read.step(Some(at(-DAY)), CUTOFF, 10).await, (3, Some(3), true));
    assert_eq!(read.history().await, [typed(3, "completed_retention")]);
    assert_eq!(read.live().await, [3]);
}

#[tokio::test]
async fn r9_a_longer_rule_2_never_moves_the_boundary() {
    let log = Log::start().await;
    let segments = [(0, 0, -3 * DAY), (1, 1, -2 * DAY), (2, 2, -DAY), (3, 3, 0)];
    for completed in [at(-2 * DAY), at(0)] {
        let p = log.partition().await.segments(&segments).await.cursor("g", 3).await;
        assert_eq!(p.step(CUTOFF, Some(completed), 10).await, (3, Some(3), true));
        assert_eq!(p.history().await, [typed(3, "retention")], "ties are rule 1's");
    }
}

#[tokio::test]
async fn r10_the_next_call_resumes_at_the_watermark() {
    let log = Log::start().await;
    let p = five(&log).await.cursor("g", 9).await;
    assert_eq!(p.step(None, CUTOFF, 2).await, (2, Some(4), false));
    assert_eq!(p.number("log_start").await, 4);
    assert_eq!(p.step(None, CUTOFF, 2).await, (2, Some(8), false));
    assert_eq!(p.step(None, CUTOFF, 2).await, (1, Some(10), true));
}

#[tokio::test]
async fn r11_a_batch_as_large_as_the_backlog_is_done_at_once() {
    let log = Log::start().await;
    let p = five(&log).await;
    assert_eq!(p.step(CUTOFF, None, 5).await, (5, Some(10), true));
    let p = five(&log).await.segments(&[(10, 11, 0)]).await;
    assert_eq!(p.step(CUTOFF, None, 5).await, (5, Some(10), true), "with a fresh segment behind it");
    assert_eq!(p.live().await, [10]);
    let p = five(&log).await;
    assert_eq!(p.step(CUTOFF, None, 4).await, (4, Some(8), false), "one more than the batch");
    assert_eq!(p.step(CUTOFF, None, 4).await, (1, Some(10), true));
}

#[tokio::test]
async fn r12_an_explicit_type_is_recorded_whichever_rule_moved() {
    let log = Log::start().await;
    let p = five(&log).await.cursor("g", 9).await;
    let query = "select queen.log_retention_step_v1($1, null, $2, 10, 'by hand')";
    log.sql.query_one(query, &[&p.id, &CUTOFF]).await.expect("step");
    assert_eq!(p.history().await, [typed(10, "by hand")]);
}

#[tokio::test]
async fn r13_a_lease_does_not_hold_rule_1() {
    let log = Log::start().await;
    let p = five(&log).await.txns(&[(0, 1, -DAY)]).await.cursor("g", -1).await;
    log.execute(
        "update queen.log_consumers set batch_end = 3, worker_id = 'w', lease_expires_at = now() + interval '1 hour'",
    )
    .await;
    assert_eq!(p.step(CUTOFF, None, 1).await, (1, Some(2), false));
    assert_eq!(log.count("select batch_end from queen.log_consumers").await, 3, "the lease is left alone");
    assert_eq!(p.hashes().await, [0], "its hashes still resolve");
}

#[tokio::test]
async fn r14_stamps_in_the_future_keep() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, 3650 * DAY), (1, 1, -DAY), (2, 2, -DAY)]).await;
    assert_eq!(p.step(CUTOFF, None, 10).await, (0, Some(0), true), "the walk ends at the first fresh segment");
    assert_eq!(p.live().await, [0, 1, 2]);
}

#[tokio::test]
async fn r15_no_batch_size_means_one() {
    let log = Log::start().await;
    let p = five(&log).await;
    assert_eq!(p.step(CUTOFF, None, 0).await, (1, Some(2), false));
    assert_eq!(p.step(CUTOFF, None, i32::MIN).await, (1, Some(4), false));
    let query = "select (queen.log_retention_step_v1($1, $2, null, null)->>'deleted')::int";
    let deleted: i32 = log.sql.query_one(query, &[&p.id, &CUTOFF]).await.expect("step").get(0);
    assert_eq!(deleted, 1);
    assert_eq!(p.step(CUTOFF, None, i32::MAX).await, (2, Some(10), true), "the largest batch does not overflow");
}

#[tokio::test]
async fn r16_frames_saturate_in_the_audit() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 3_000_000_000, -DAY), (3_000_000_001, 6_000_000_000, -DAY)]).await;
    assert_eq!(p.step(CUTOFF, None, 10).await, (2, Some(6_000_000_001), true));
    assert_eq!(p.history().await, [typed(i32::MAX, "retention")]);
}

#[tokio::test]
async fn r17_a_cursor_beyond_the_log_is_bounded_by_time() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, -DAY), (1, 1, 0)]).await.cursor("g", 1_000_000).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (1, Some(1), true));
    assert_eq!(p.live().await, [1]);
}

#[tokio::test]
async fn r20_a_hole_in_the_log_is_not_counted() {
    let log = Log::start().await;
    let p = five(&log).await;
    log.execute("delete from queen.log_segments where base_offset in (2, 4)").await;
    assert_eq!(p.step(CUTOFF, None, 10).await, (3, Some(10), true));
    assert_eq!(p.history().await, [typed(6, "retention")]);
}

#[tokio::test]
async fn r21_a_group_that_starts_at_the_end_counts_as_having_read() {
    let log = Log::start().await;
    let p = five(&log).await;
    assert_eq!(p.step(None, CUTOFF, 10).await.0, 0);
    p.cursor("new", p.number("last_offset").await).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (5, Some(10), true));
}

#[tokio::test]
async fn r22_a_group_without_a_cursor_here_is_not_waited_for() {
    let log = Log::start().await;
    let p = five(&log).await.cursor("a", 9).await;
    let elsewhere = five(&log).await.cursor("b", -1).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (5, Some(10), true));
    assert_eq!(elsewhere.step(None, CUTOFF, 10).await, (0, Some(0), true));
}

#[tokio::test]
async fn r23_a_backward_seek_is_honoured_from_then_on() {
    let log = Log::start().await;
    let p = five(&log).await.cursor("g", 3).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (2, Some(4), true));
    p.segments(&[(10, 11, -SECOND)]).await.cursor("g", 11).await.cursor("g", 5).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (1, Some(6), true));
    p.cursor("g", -1).await;
    assert_eq!(p.step(None, CUTOFF, 10).await, (0, Some(6), true), "what went does not come back");
    assert_eq!(p.live().await, [6, 8, 10]);
}

#[tokio::test]
async fn the_exact_boundary_is_that_of_the_contract() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(4, 5, -US), (6, 7, 0), (8, 9, US)]).await;
    for (from, cutoff, expected) in [
        (0_i64, CUTOFF, 6_i64),
        (6, CUTOFF, 6),
        (7, CUTOFF, 8),
        (4, Some(at(2 * US)), 10),
        (9, CUTOFF, 9),
        (42, CUTOFF, 42),
        (4, None, 4),
    ] {
        for query in [
            "select queen.log_retention_boundary_v1($1, $2, $3)",
            "select queen.log_retention_boundary_windowed_v1($1, $2, $3, 1000)",
        ] {
            let found: i64 = log.sql.query_one(query, &[&p.id, &from, &cutoff]).await.expect("boundary").get(0);
            assert_eq!(found, expected, "from {from}, {query}");
        }
    }
}

#[tokio::test]
async fn a_window_sees_no_further_than_its_horizon() {
    let log = Log::start().await;
    let p = five(&log).await.segments(&[(10, 11, 0)]).await;
    let query = "select queen.log_retention_boundary_windowed_v1($1, 2, $2, $3)";
    for (horizon, expected) in [(1_i64, 4), (2, 6), (4, 10), (5, 10), (i64::from(i32::MAX) + 1, 10), (0, 4)] {
        let found: i64 = log.sql.query_one(query, &[&p.id, &CUTOFF, &horizon]).await.expect("boundary").get(0);
        assert_eq!(found, expected, "{horizon} segments in sight");
    }
}
