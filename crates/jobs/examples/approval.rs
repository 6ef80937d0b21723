//! A job that waits for somebody's word, and occupies no worker meanwhile:
//! `cargo run -p ebbtide-jobs --all-features --example approval [-- postgres://… | sqlite://file]`

use std::time::Duration;

use ebbtide_jobs::{Ctx, JobError, Queue, Worker, connect};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

#[derive(Serialize, Deserialize)]
struct Decision {
    by: String,
    is_approved: bool,
}

async fn payout(ctx: Ctx, amount: u64) -> Result<String, JobError> {
    println!("{amount} waits for approval");
    let week = Duration::from_secs(7 * 24 * 60 * 60);
    match ctx.wait_signal_timeout::<Decision>("decision", week).await? {
        Some(Decision { by, is_approved: true }) => Ok(format!("{amount} paid, approved by {by}")),
        Some(Decision { by, .. }) => Ok(format!("refused by {by}")),
        None => Ok("nobody decided within a week".to_owned()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let scratch = tempfile::tempdir()?;
    let address = format!("sqlite://{}/jobs.db", scratch.path().display());
    let queue = Queue::builder(connect(&std::env::args().nth(1).unwrap_or(address))?).build();
    queue.migrate().await?;
    queue.register("payout", payout)?;
    let id = queue.enqueue("payout", &250).send().await?.id();

    let worker = Worker::builder(&queue).build()?;
    let shutdown = CancellationToken::new();
    let (stops, waits) = (shutdown.clone(), std::sync::Arc::new(tokio::sync::Notify::new()));
    let is_waiting = waits.clone();
    queue.hooks().on_complete(move |_| stops.cancel()).on_waiting(move |_| is_waiting.notify_one());
    let running = tokio::spawn(async move { worker.run(shutdown).await });

    waits.notified().await;
    println!("the job is {}", queue.status(id).await?);
    queue.signal(id, "decision", &Decision { by: "Ada".to_owned(), is_approved: true }).await?;
    running.await??;
    println!("{}", queue.result::<String>(id).await?);
    Ok(())
}
