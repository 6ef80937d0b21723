//! Administration among consumers and producers: nobody deadlocks, and what is left makes sense.

use futures_util::future::join_all;
use serde_json::json;

use super::support::Broker;
use super::support::random::Random;

const ROUNDS: usize = 25;

/// One caller's rounds of random requests; the server fails none of them.
async fn caller(b: &Broker, mut random: Random) {
    for _ in 0..ROUNDS {
        let partition = random.below(6);
        let group = ["g", "h"][usize::try_from(random.below(2)).expect("an index")];
        let admin = format!("/api/v1/consumer-groups/{group}");
        let (status, body) = match random.below(9) {
            0 => b.post(&format!("{admin}/queues/q/seek"), json!({"toEnd": true})).await,
            1 => b.post(&format!("{admin}/queues/q/seek"), json!({"timestamp": "2020-01-01T00:00:00Z"})).await,
            2 => b.delete(&admin).await,
            3 => b.delete(&format!("{admin}/queues/q?deleteMetadata=false")).await,
            4 => {
                b.post(&format!("{admin}/subscription"), json!({"subscriptionTimestamp": "2020-01-01T00:00:00Z"})).await
            }
            5 => b.delete("/api/v1/queues/q/clear").await,
            6 => {
                let items: Vec<_> = (0..6)
                    .map(|n| json!({"queue": "q", "partition": format!("p{}", (n + partition) % 6), "payload": n}))
                    .collect();
                b.post("/api/v1/push", json!({"items": items})).await
            }
            7 => b.pop(&format!("queue/q?consumerGroup={group}&subscriptionMode=all&partitions=6&autoAck=true")).await,
            _ => {
                b.pop(&format!("queue/q?consumerGroup={group}&subscriptionMode=all&partitions=6&leaseSeconds=1")).await
            }
        };
        assert!(status < 300, "{status} {body}");
    }
}

#[tokio::test]
async fn seeks_deletes_and_clearings_among_pops_and_pushes_fail_nobody() {
    let b = Broker::start().await;
    for n in 0..6 {
        b.store("q", &format!("p{n}"), 1).await;
    }
    let mut random = Random::seeded();
    join_all((0..8).map(|_| caller(&b, Random::from_seed(random.next())))).await;
    let wrong = "select count(*) from queen.log_partitions p left join queen.log_consumers c on c.partition_id = p.id
        where p.log_start <> coalesce((select min(s.base_offset) from queen.log_segments s where s.partition_id = p.id),
                                      p.last_offset + 1)
           or p.last_offset < c.committed or c.batch_end <= c.committed";
    assert_eq!(super::count(&b, wrong).await, 0);
}
