//! Writes completions together: what finishes while one transaction is written shares the next.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::Completed;
use super::engine::Engine;
use crate::ctx::repeated;
use crate::error::Error;
use crate::outcome::Completion;

/// Runs until every handler has let go of its end of the channel and all that was sent is written.
pub(super) async fn write_completions(engine: Arc<Engine>, mut finished: mpsc::Receiver<Completed>) {
    let most = engine.config.completion_batch as usize;
    let mut batch: Vec<Completed> = Vec::with_capacity(most);
    let mut completions: Vec<Completion> = Vec::with_capacity(most);
    while 0 < finished.recv_many(&mut batch, most).await {
        gather(&engine, &mut finished, &mut batch, most).await;
        let mut endings = Vec::with_capacity(batch.len());
        for Completed { completion, ended } in batch.drain(..) {
            completions.push(completion);
            endings.push(ended);
        }
        let outcomes = write(&engine, &completions).await;
        for (ended, written) in endings.iter().zip(outcomes) {
            engine.completed(ended, written);
        }
        completions.clear();
    }
}

/// Waits for more, if the worker was told to.
async fn gather(engine: &Engine, finished: &mut mpsc::Receiver<Completed>, batch: &mut Vec<Completed>, most: usize) {
    let delay = engine.config.completion_delay;
    if delay.is_zero() {
        return;
    }
    let until = Instant::now() + delay;
    while batch.len() < most {
        let room = most - batch.len();
        match timeout_at(until, finished.recv_many(batch, room)).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

async fn write(engine: &Engine, completions: &[Completion]) -> Vec<Result<(), Error>> {
    let storage = engine.queue.storage();
    let retry = &engine.config.storage_retry;
    if let (Some(store), true) = (storage.batch_completion(), 1 < completions.len())
        && let Ok(outcomes) = repeated(retry, || store.complete_batch(completions)).await
    {
        let outcome = |(completion, is_done): (&Completion, bool)| {
            if is_done { Ok(()) } else { Err(Error::JobNotOwned(completion.claim.job_id)) }
        };
        return completions.iter().zip(outcomes).map(outcome).collect();
    }
    // One that the storage cannot take must not keep the others from theirs.
    let mut outcomes = Vec::with_capacity(completions.len());
    for completion in completions {
        outcomes.push(repeated(retry, || storage.complete(completion)).await);
    }
    outcomes
}
