//! The sidecar purge.

use jiff::Timestamp;

use crate::support::partition::{DAY, Log, US};

const CUTOFF: Option<Timestamp> = Some(Timestamp::constant(1_767_225_600, 0));

#[tokio::test]
async fn purge_keeps_rows_at_or_after_the_cutoff() {
    let log = Log::start().await;
    let p = log.partition().await.txns(&[(0, 0, -US), (1, 1, 0), (2, 2, US)]).await;
    assert_eq!(p.purge(None, 10).await, (0, Some(0), true), "no cutoff, no purge");
    assert_eq!(p.purge(CUTOFF, 10).await, (1, Some(1), true));
    assert_eq!(p.hashes().await, [1, 2]);
    assert_eq!(p.purge(CUTOFF, 10).await, (0, Some(1), true), "nothing to do");
    assert_eq!(p.number("txns_start").await, 1);
}

#[tokio::test]
async fn one_row_more_than_the_batch_takes_two_steps() {
    let log = Log::start().await;
    let rows: Vec<_> = (0..4).map(|k| (3 * k, 3 * k + 2, -DAY + k)).collect();
    let p = log.partition().await.txns(&rows).await;
    assert_eq!(p.purge(CUTOFF, 3).await, (3, Some(9), false));
    assert_eq!(p.hashes().await, [9]);
    assert_eq!(p.purge(CUTOFF, 3).await, (1, Some(12), true));
    let p = log.partition().await.txns(&rows).await.txns(&[(12, 12, 0)]).await;
    assert_eq!(p.purge(CUTOFF, 4).await, (4, Some(12), true), "exactly the batch");
    assert_eq!(p.hashes().await, [12]);
}

#[tokio::test]
async fn no_batch_size_means_one() {
    let log = Log::start().await;
    let p = log.partition().await.txns(&[(0, 0, -DAY), (1, 1, -DAY), (2, 2, -DAY), (3, 3, -DAY)]).await;
    assert_eq!(p.purge(CUTOFF, 0).await, (1, Some(1), false));
    assert_eq!(p.purge(CUTOFF, -5).await, (1, Some(2), false));
    assert_eq!(p.purge(CUTOFF, i32::MAX).await, (2, Some(4), true));
}

#[tokio::test]
async fn a_partition_that_is_gone_is_done() {
    let log = Log::start().await;
    let p = log.partition().await;
    log.execute("delete from queen.log_partitions").await;
    assert_eq!(p.purge(CUTOFF, 10).await, (0, None, true));
    assert_eq!(p.purge(None, 10).await, (0, None, true));
}

#[tokio::test]
async fn segments_and_sidecar_keep_their_own_watermarks() {
    let log = Log::start().await;
    let p = log.partition().await.segments(&[(0, 0, -DAY), (1, 1, 0)]).await.txns(&[(0, 0, -DAY), (1, 1, -DAY)]).await;
    assert_eq!(p.purge(CUTOFF, 10).await, (2, Some(2), true));
    assert_eq!((p.live().await, p.number("log_start").await), (vec![0, 1], 0));
    assert_eq!(p.history().await, [], "hashes are no messages");
    assert_eq!(p.step(CUTOFF, None, 10).await, (1, Some(1), true));
    assert_eq!(p.number("txns_start").await, 2);
}
