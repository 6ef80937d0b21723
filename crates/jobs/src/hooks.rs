//! Calls into the program around a job's runs, and middleware around its handler.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tracing::error;

use crate::ctx::Ctx;
use crate::enqueue::EnqueueOptions;
use crate::error::Error;
use crate::job::Job;
use crate::job_error::JobError;
use crate::outcome::Reclaimed;

type Hook<T> = Arc<dyn Fn(&T) + Send + Sync>;
type HookWith<T, U> = Arc<dyn Fn(&T, &U) + Send + Sync>;

#[derive(Clone, Default)]
pub(crate) struct HookSet {
    on_start: Vec<Hook<Job>>,
    on_complete: Vec<Hook<Job>>,
    on_fail: Vec<HookWith<Job, JobError>>,
    on_retry: Vec<HookWith<Job, (JobError, Duration)>>,
    on_waiting: Vec<Hook<Job>>,
    on_reclaimed: Vec<Hook<Reclaimed>>,
    on_attempt_end: Vec<Hook<Job>>,
}

/// The hooks of one queue. They run in the worker, between two writes: a slow one delays its job. One that panics is
/// reported and changes nothing.
#[derive(Default)]
pub(crate) struct HookTable(RwLock<Arc<HookSet>>);

impl HookTable {
    fn edit(&self, edit: impl FnOnce(&mut HookSet)) {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        edit(Arc::make_mut(&mut table));
    }

    fn read(&self) -> Arc<HookSet> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn start(&self, job: &Job) {
        self.read().on_start.iter().for_each(|hook| contained("on_start", || hook(job)));
    }

    pub(crate) fn complete(&self, job: &Job) {
        self.read().on_complete.iter().for_each(|hook| contained("on_complete", || hook(job)));
    }

    pub(crate) fn fail(&self, job: &Job, failed: &JobError) {
        self.read().on_fail.iter().for_each(|hook| contained("on_fail", || hook(job, failed)));
    }

    pub(crate) fn retry(&self, job: &Job, failed: JobError, delay: Duration) -> JobError {
        let failed = (failed, delay);
        self.read().on_retry.iter().for_each(|hook| contained("on_retry", || hook(job, &failed)));
        failed.0
    }

    pub(crate) fn waiting(&self, job: &Job) {
        self.read().on_waiting.iter().for_each(|hook| contained("on_waiting", || hook(job)));
    }

    pub(crate) fn reclaimed(&self, job: &Reclaimed) {
        self.read().on_reclaimed.iter().for_each(|hook| contained("on_reclaimed", || hook(job)));
    }

    pub(crate) fn attempt_end(&self, job: &Job) {
        self.read().on_attempt_end.iter().for_each(|hook| contained("on_attempt_end", || hook(job)));
    }
}

fn contained(hook: &'static str, call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        error!(target: "jobs", hook, "a hook panicked");
    }
}

/// Where hooks are added. Each is called after those that were there.
pub struct Hooks<'a>(pub(crate) &'a HookTable);

impl Hooks<'_> {
    /// Before a handler runs.
    pub fn on_start(&self, hook: impl Fn(&Job) + Send + Sync + 'static) -> &Self {
        self.0.edit(|set| set.on_start.push(Arc::new(hook)));
        self
    }

    /// After a completion was written.
    pub fn on_complete(&self, hook: impl Fn(&Job) + Send + Sync + 'static) -> &Self {
        self.0.edit(|set| set.on_complete.push(Arc::new(hook)));
        self
    }

    /// After a failure for good was written.
    pub fn on_fail(&self, hook: impl Fn(&Job, &JobError) + Send + Sync + 'static) -> &Self {
        self.0.edit(|set| set.on_fail.push(Arc::new(hook)));
        self
    }

    /// After a failure was written after which the job runs again, with the wait until then.
    pub fn on_retry(&self, hook: impl Fn(&Job, &JobError, Duration) + Send + Sync + 'static) -> &Self {
        let hook = move |job: &Job, (error, delay): &(JobError, Duration)| hook(job, error, *delay);
        self.0.edit(|set| set.on_retry.push(Arc::new(hook)));
        self
    }

    /// After a job was suspended.
    pub fn on_waiting(&self, hook: impl Fn(&Job) + Send + Sync + 'static) -> &Self {
        self.0.edit(|set| set.on_waiting.push(Arc::new(hook)));
        self
    }

    /// After a job was taken from a lost worker.
    pub fn on_reclaimed(&self, hook: impl Fn(&Reclaimed) + Send + Sync + 'static) -> &Self {
        self.0.edit(|set| set.on_reclaimed.push(Arc::new(hook)));
        self
    }

    /// After a run ended without any outcome: its claim was over, it was stopped, or the storage took no write.
    pub fn on_attempt_end(&self, hook: impl Fn(&Job) + Send + Sync + 'static) -> &Self {
        self.0.edit(|set| set.on_attempt_end.push(Arc::new(hook)));
        self
    }
}

/// A future without a name.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a handler answers, as it is stored.
pub(crate) type Answer = Result<Vec<u8>, JobError>;

pub(crate) type ExecutionLayer = Arc<dyn Fn(Ctx, Next) -> BoxFuture<'static, Answer> + Send + Sync>;

/// The rest of the way to the handler, the handler included.
pub struct Next {
    pub(crate) layers: Arc<[ExecutionLayer]>,
    pub(crate) at: usize,
    pub(crate) handler: Box<dyn FnOnce(Ctx) -> BoxFuture<'static, Answer> + Send>,
}

impl Next {
    /// Goes on. The answer is the handler's result as JSON.
    ///
    /// # Errors
    /// What the handler, or a layer further in, failed with. Pass it on: it may be a suspension.
    pub fn run(mut self, ctx: Ctx) -> BoxFuture<'static, Result<Vec<u8>, JobError>> {
        match self.layers.get(self.at).cloned() {
            Some(layer) => {
                self.at += 1;
                layer(ctx, self)
            }
            None => (self.handler)(ctx),
        }
    }
}

/// A job on its way into the database, before anything about it is checked.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The name of its handler.
    pub job_type: String,
    /// Its arguments as JSON.
    pub args: Vec<u8>,
    /// Its options.
    pub options: EnqueueOptions,
}

pub(crate) type EnqueueLayer = Arc<dyn Fn(Draft) -> Result<Draft, Error> + Send + Sync>;

/// Passes a draft through every layer. A panic in one is an error of the caller.
pub(crate) fn through(layers: &[EnqueueLayer], draft: Draft) -> Result<Draft, Error> {
    layers.iter().try_fold(draft, |draft, layer| {
        catch_unwind(AssertUnwindSafe(|| layer(draft)))
            .unwrap_or_else(|_| Err(Error::invalid("job", "was refused: an enqueue layer panicked")))
    })
}
