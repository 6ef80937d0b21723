//! One job: `cargo run -p ebbtide-jobs --all-features --example hello [-- postgres://… | sqlite://file]`

use ebbtide_jobs::{Ctx, Queue, Worker, connect};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let scratch = tempfile::tempdir()?;
    let address = format!("sqlite://{}/jobs.db", scratch.path().display());
    let queue = Queue::builder(connect(&std::env::args().nth(1).unwrap_or(address))?).build();
    queue.migrate().await?;

    let greet = queue.define("greet", |ctx: Ctx, name: String| async move {
        println!("run {} of job {}", ctx.attempt(), ctx.job_id());
        Ok(format!("hello {name}"))
    })?;
    let id = greet.enqueue("world".to_owned()).send().await?.id();

    let worker = Worker::builder(&queue).build()?;
    let shutdown = CancellationToken::new();
    // A program of yours cancels the token when it is told to end.
    let stops = shutdown.clone();
    queue.hooks().on_complete(move |_| stops.cancel());
    worker.run(shutdown).await?;

    println!("{}", queue.result::<String>(id).await?);
    Ok(())
}
