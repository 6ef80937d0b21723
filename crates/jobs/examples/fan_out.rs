//! A job that starts a thousand children and adds up what they return:
//! `cargo run -p ebbtide-jobs --all-features --example fan_out [-- postgres://… | sqlite://file]`

use ebbtide_jobs::{Ctx, FanOut, JobError, Queue, SubJob, Worker, connect};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

async fn sum_of_squares(ctx: Ctx, most: u64) -> Result<u64, JobError> {
    let children = (1..=most).map(|n| SubJob::new("square", &n)).collect();
    let results = ctx.fan_out::<u64>(children, FanOut::fail_fast()).await?;
    Ok(results.values().into_iter().sum())
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let scratch = tempfile::tempdir()?;
    let address = format!("sqlite://{}/jobs.db", scratch.path().display());
    let queue = Queue::builder(connect(&std::env::args().nth(1).unwrap_or(address))?).build();
    queue.migrate().await?;
    queue.register("square", |_: Ctx, n: u64| async move { Ok(n * n) })?;
    queue.register("sum_of_squares", sum_of_squares)?;
    let id = queue.enqueue("sum_of_squares", &1000).send().await?.id();

    let worker = Worker::builder(&queue).concurrency(100).dequeue_batch_size(100).build()?;
    let shutdown = CancellationToken::new();
    let stops = shutdown.clone();
    queue.hooks().on_complete(move |job| {
        if job.id == id {
            stops.cancel();
        }
    });
    worker.run(shutdown).await?;
    println!("the sum of the first thousand squares is {}", queue.result::<u64>(id).await?);
    Ok(())
}
