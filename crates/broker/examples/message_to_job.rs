//! Messages become jobs, each once: the message's transaction id is the job's idempotency key. Start `ebbtide serve`, then
//! `cargo run -p ebbtide --example message_to_job [-- postgres://… | sqlite://file]`
//!
//! The server is looked for at `http://127.0.0.1:6632`, or where `EBBTIDE_URL` says.

use std::time::Duration;

use ebbtide_jobs::{Ctx, Queue, Worker, connect};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Message {
    transaction_id: String,
    partition_id: String,
    lease_id: String,
    data: Value,
}

#[derive(Deserialize)]
struct Popped {
    messages: Vec<Message>,
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let broker = std::env::var("EBBTIDE_URL").unwrap_or("http://127.0.0.1:6632".to_owned());
    let folder = std::env::temp_dir().join(format!("message-to-job-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let address = format!("sqlite://{}/jobs.db", folder.display());
    let queue = Queue::builder(connect(&std::env::args().nth(1).unwrap_or(address))?).build();
    queue.migrate().await?;
    queue.register("ship", |_: Ctx, order: Value| async move {
        println!("shipping {order}");
        Ok(())
    })?;

    let http = reqwest::Client::new();
    let order = json!({"queue": "orders", "payload": {"total": 12.5}, "transactionId": format!("order-{}", std::process::id())});
    http.post(format!("{broker}/api/v1/push")).json(&json!({"items": [order]})).send().await?.error_for_status()?;

    // The first round dies, so to say, between the enqueue and the acknowledgement: the message comes again.
    for is_acknowledged in [false, true] {
        let pop = format!(
            "{broker}/api/v1/pop/queue/orders?consumerGroup=jobs&subscriptionMode=all&leaseSeconds=1&wait=true"
        );
        let popped = http.get(pop).send().await?.error_for_status()?;
        let Popped { messages } = popped.json().await?;
        for message in messages {
            let job = queue.enqueue("ship", &message.data).idempotency_key(&message.transaction_id, DAY);
            let enqueued = job.send().await?;
            println!(
                "{} {}",
                message.transaction_id,
                if enqueued.is_new() { "is a new job" } else { "is a job already" }
            );
            if is_acknowledged {
                let ack = json!({
                    "transactionId": message.transaction_id, "partitionId": message.partition_id,
                    "leaseId": message.lease_id, "consumerGroup": "jobs", "status": "completed",
                });
                http.post(format!("{broker}/api/v1/ack")).json(&ack).send().await?.error_for_status()?;
            }
        }
    }

    let shutdown = CancellationToken::new();
    let stops = shutdown.clone();
    queue.hooks().on_complete(move |_| stops.cancel());
    Worker::builder(&queue).build()?.run(shutdown).await?;
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
