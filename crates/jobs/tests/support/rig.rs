//! A queue with a worker that runs until the test ends.

use std::time::Duration;

use ebbtide_jobs::{Job, JobId, JobStatus, Queue, Worker, WorkerBuilder};
use ebbtide_sweep::pause;
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::{PATIENCE, Store};

pub const MS: Duration = Duration::from_millis(1);

/// A worker that runs.
pub struct Running {
    pub worker: Worker,
    pub stop: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl Running {
    pub fn start(worker: Worker) -> Self {
        let stop = CancellationToken::new();
        let (runs, token) = (worker.clone(), stop.clone());
        let task = tokio::spawn(async move { runs.run(token).await.expect("it is started once") });
        Self { worker, stop, task: Some(task) }
    }

    /// Stops it and waits for its end.
    pub async fn stop(mut self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(PATIENCE, self.task.take().expect("stopped once")).await;
        ended.expect("the worker ends").expect("the worker does not panic");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A worker that looks often, and whose failed jobs come back at once.
pub fn quick(queue: &Queue) -> WorkerBuilder {
    Worker::builder(queue)
        .poll_interval(50 * MS)
        .ready_promote_interval(50 * MS)
        .ownership_audit_interval(50 * MS)
        .backoff(|_: u32, _: &ebbtide_jobs::JobError| Duration::ZERO)
}

pub fn run(queue: &Queue) -> Running {
    Running::start(quick(queue).build().unwrap())
}

/// Waits until `is_so` answers true.
pub async fn until<F, Fut>(what: &str, is_so: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = bool>,
{
    let started = Instant::now();
    while !is_so().await {
        assert!(started.elapsed() < PATIENCE, "waited in vain: {what}");
        pause(2 * MS, &CancellationToken::new()).await;
    }
}

impl Store {
    pub fn queue(&self) -> Queue {
        Queue::builder(self.storage.clone()).build()
    }

    /// Waits until the job is in this status.
    pub async fn becomes(&self, id: JobId, status: JobStatus) -> Job {
        let what = format!("job becomes {status}");
        until(&what, || async { self.job(id).await.status == status }).await;
        self.job(id).await
    }
}

/// Enqueues one job.
pub async fn send(queue: &Queue, name: &str, args: &impl Serialize) -> JobId {
    queue.enqueue(name, args).send().await.unwrap().id()
}

/// Counts what a handler did, by name.
#[derive(Clone, Default)]
pub struct Effects(std::sync::Arc<std::sync::Mutex<Vec<String>>>);

impl Effects {
    pub fn add(&self, effect: impl Into<String>) {
        self.0.lock().unwrap().push(effect.into());
    }

    pub fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    pub fn count(&self, effect: &str) -> usize {
        self.all().iter().filter(|known| *known == effect).count()
    }
}
