//! A workflow whose process is killed in the middle, and that the next process finishes without repeating a step:
//! `cargo run -p ebbtide-jobs --all-features --example order [-- postgres://… | sqlite://file]`

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use ebbtide_jobs::{Ctx, JobError, Queue, Worker, connect};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

/// Set for the process that is to be killed.
const VICTIM: &str = "ORDER_EXAMPLE_VICTIM";

/// Stands for a call to somebody else's system. The job's id is a good key to make such a call idempotent.
async fn effect(what: &str) -> Result<String, JobError> {
    println!("process {}: {what}", std::process::id());
    Ok(format!("{what} done"))
}

async fn order(ctx: Ctx, item: String) -> Result<Vec<String>, JobError> {
    let mut receipts = Vec::new();
    receipts.push(ctx.step("reserve", || effect("reserve")).await?);
    receipts.push(ctx.step("charge", || effect("charge")).await?);
    if std::env::var(VICTIM).is_ok() {
        println!("waiting to be killed");
        std::future::pending::<()>().await;
    }
    receipts.push(ctx.step("ship", || effect("ship")).await?);
    receipts.push(format!("{item} ordered"));
    Ok(receipts)
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let scratch = tempfile::tempdir()?;
    let address = format!("sqlite://{}/jobs.db", scratch.path().display());
    let address = std::env::args().nth(1).unwrap_or(address);
    let queue = Queue::builder(connect(&address)?).build();
    queue.migrate().await?;
    queue.register("order", order)?;

    // Three heartbeats fit into the age at which a worker counts as lost. The defaults are in minutes.
    let worker = Worker::builder(&queue)
        .stale_lock_age(Duration::from_secs(2))
        .stale_lock_interval(Duration::from_secs(1))
        .build()?;
    if std::env::var(VICTIM).is_ok() {
        worker.run(CancellationToken::new()).await?;
        return Ok(());
    }

    let id = queue.enqueue("order", &"book").send().await?.id();
    kill_in_the_middle(&address)?;
    let shutdown = CancellationToken::new();
    let stops = shutdown.clone();
    queue.hooks().on_complete(move |_| stops.cancel());
    worker.run(shutdown).await?;
    println!("{:?}", queue.result::<Vec<String>>(id).await?);
    Ok(())
}

/// Runs this program as another process, and kills it with signal 9 once two of the three steps are done.
fn kill_in_the_middle(address: &str) -> Result<(), Failure> {
    let mut victim =
        Command::new(std::env::current_exe()?).arg(address).env(VICTIM, "1").stdout(Stdio::piped()).spawn()?;
    let output = BufReader::new(victim.stdout.take().expect("it is piped"));
    for line in output.lines() {
        let line = line?;
        println!("{line}");
        if line == "waiting to be killed" {
            break;
        }
    }
    victim.kill()?;
    victim.wait()?;
    println!("killed");
    Ok(())
}
