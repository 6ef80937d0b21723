//! What sessions of the lock tests write, as the server's calls do.

use serde_json::{Value, json};
use tokio_postgres::Client;
use uuid::Uuid;

use super::Outcome;

/// A hash that no other message has, as a sidecar stores it.
fn hash() -> Vec<u8> {
    Uuid::new_v4().as_bytes().to_vec()
}

/// One message to each of the partitions of a queue, in the order given, in one call.
pub(super) async fn push(client: &Client, queue: &str, partitions: &[String]) -> Outcome {
    let count = partitions.len();
    let hashes: Vec<Vec<u8>> = (0..count).map(|_| hash()).collect();
    let query = "select queen.log_push_multi_v1($1, $2, $3, $4, $5, $6)";
    let row = client
        .query_one(
            query,
            &[
                &vec![queue; count],
                &partitions,
                &vec![1; count],
                &hashes,
                &vec![-1_i64; count],
                &vec![b"blob".to_vec(); count],
            ],
        )
        .await?;
    Ok(row.get(0))
}

/// The same as a transaction.
pub(super) async fn transact(client: &Client, queue: &str, partitions: &[String]) -> Outcome {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let pushes: Vec<Value> = partitions
        .iter()
        .map(|partition| {
            json!({"queue": queue, "partition": partition, "count": 1, "hashes": hex(&hash()), "blob": "00",
                "transactionIds": ["t"]})
        })
        .collect();
    let row = client.query_one("select queen.log_transaction_wire_v1($1)", &[&json!({"pushes": pushes})]).await?;
    Ok(row.get(0))
}

/// A cycle of a stream that takes its messages from the first of the partitions, acknowledges them if they are
/// leased, and pushes to all.
pub(super) async fn cycle(client: &Client, queue: &str, partitions: &[String]) -> Outcome {
    let source = "select p.id, c.worker_id from queen.log_partitions p join queen.queues q on q.id = p.queue_id
        left join queen.log_consumers c on c.partition_id = p.id and c.consumer_group = 'g'
        where q.name = $1 and p.name = $2";
    let Some(source) = client.query_opt(source, &[&queue, &partitions[0]]).await? else {
        return push(client, queue, partitions).await;
    };
    let (source, worker): (Uuid, Option<String>) = (source.get(0), source.get(1));
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let pushes: Vec<Value> = partitions
        .iter()
        .map(|partition| json!({"queue": queue, "partition": partition, "count": 1, "hashes": hex(&hash()), "blob": "00"}))
        .collect();
    let request = json!({"queryId": QUERY, "partitionId": source, "group": "g", "release": false,
        "upserts": [{"key": "00", "value": "1"}, {"key": "1f", "value": "2"}], "deletes": ["02"], "pushes": pushes,
        "ack": worker.map(|worker| json!({"worker": worker, "completed": true, "count": 0}))});
    Ok(client.query_one("select queen.log_streams_cycle_v1($1)", &[&request]).await?.get(0))
}

/// The stream query of [`cycle`].
pub(super) const QUERY: Uuid = Uuid::from_u128(5);
