//! A job that is enqueued exactly if the caller's own transaction commits:
//! `cargo run -p ebbtide-jobs --all-features --example outbox [-- postgres://… | sqlite://file]`

use ebbtide_jobs::{Ctx, Queue, Worker, connect};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let scratch = tempfile::tempdir()?;
    let address = format!("sqlite://{}/jobs.db", scratch.path().display());
    let address = std::env::args().nth(1).unwrap_or(address);
    let queue = Queue::builder(connect(&address)?).build();
    queue.migrate().await?;
    queue.register("mail", |_: Ctx, to: String| async move {
        println!("mail to {to}");
        Ok(())
    })?;

    if let Some(path) = address.strip_prefix("sqlite://") {
        sign_up_sqlite(&queue, path).await?;
    } else {
        sign_up_postgres(&queue, &address).await?;
    }

    let worker = Worker::builder(&queue).build()?;
    let shutdown = CancellationToken::new();
    let stops = shutdown.clone();
    queue.hooks().on_complete(move |_| stops.cancel());
    worker.run(shutdown).await?;
    Ok(())
}

/// The first sign-up is rolled back, and its mail with it.
async fn sign_up_sqlite(queue: &Queue, path: &str) -> Result<(), Failure> {
    let mut db = rusqlite::Connection::open(path)?;
    db.execute_batch("create table if not exists customers (name text)")?;
    for (name, is_valid) in [("nobody@example.org", false), ("ada@example.org", true)] {
        let transaction = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        transaction.execute("insert into customers (name) values (?1)", [name])?;
        queue.enqueue("mail", &name).send_in(&transaction).await?;
        if is_valid {
            transaction.commit()?;
        }
    }
    Ok(())
}

async fn sign_up_postgres(queue: &Queue, address: &str) -> Result<(), Failure> {
    let (mut client, connection) = tokio_postgres::connect(address, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute("create table if not exists customers (name text)").await?;
    for (name, is_valid) in [("nobody@example.org", false), ("ada@example.org", true)] {
        let transaction = client.transaction().await?;
        transaction.execute("insert into customers (name) values ($1)", &[&name]).await?;
        queue.enqueue("mail", &name).send_in(&transaction).await?;
        if is_valid {
            transaction.commit().await?;
        }
    }
    Ok(())
}
