//! Jobs by the clock, once for any number of workers:
//! `cargo run -p ebbtide-jobs --all-features --example cron [-- postgres://… | sqlite://file]`

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ebbtide_jobs::{Ctx, Queue, Schedule, Worker, connect};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let scratch = tempfile::tempdir()?;
    let address = format!("sqlite://{}/jobs.db", scratch.path().display());
    let queue = Queue::builder(connect(&std::env::args().nth(1).unwrap_or(address))?).build();
    queue.migrate().await?;
    queue.register("report", |ctx: Ctx, name: String| async move {
        println!("{name} at {}", ctx.job().created_at);
        Ok(())
    })?;

    let nightly = Schedule::cron("CRON_TZ=Europe/Berlin 30 2 * * *")?;
    println!("the next night: {:?}", nightly.next_after(queue.storage().now().await?));
    queue.schedule("nightly", nightly, queue.enqueue("report", &"nightly"))?;
    let often = Schedule::every(Duration::from_millis(500))?;
    queue.schedule("often", often, queue.enqueue("report", &"often"))?;

    let shutdown = CancellationToken::new();
    let (stops, seen) = (shutdown.clone(), AtomicU32::new(0));
    queue.hooks().on_complete(move |_| {
        if seen.fetch_add(1, Ordering::Relaxed) == 2 {
            stops.cancel();
        }
    });
    // Two workers carry the same schedules, and each time is fired once.
    let workers = [Worker::builder(&queue).build()?, Worker::builder(&queue).build()?];
    let (one, other) = tokio::join!(workers[0].run(shutdown.clone()), workers[1].run(shutdown.clone()));
    one?;
    other?;
    Ok(())
}
