//! Handlers by the name of their type.

use std::any::TypeId;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backoff::Backoff;
use crate::ctx::Ctx;
use crate::error::Error;
use crate::hooks::{Answer, BoxFuture};
use crate::job_error::JobError;
use crate::limits::JobType;

/// What a handler wants other than its worker.
#[derive(Clone, Default)]
#[must_use = "options do nothing until a handler is registered with them"]
pub struct HandlerOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) backoff: Option<Arc<dyn Backoff>>,
}

impl HandlerOptions {
    /// None of it: no limit of time, and the worker's back-off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Limit of one run, for jobs that have none of their own. Zero means none, the default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = (!timeout.is_zero()).then_some(timeout);
        self
    }

    /// The wait between runs. Default: the worker's.
    pub fn backoff(mut self, backoff: impl Backoff) -> Self {
        self.backoff = Some(Arc::new(backoff));
        self
    }
}

/// A handler whose types were forgotten.
pub(crate) trait AnyHandler: Send + Sync {
    fn run(&self, ctx: Ctx, args: &[u8]) -> BoxFuture<'static, Answer>;
    /// Whether the arguments can be read.
    fn check(&self, args: &[u8]) -> Result<(), String>;
}

struct Typed<F, A, O> {
    handler: F,
    types: PhantomData<fn(A) -> O>,
}

impl<F, Fut, A, O> AnyHandler for Typed<F, A, O>
where
    F: Fn(Ctx, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<O, JobError>> + Send + 'static,
    A: DeserializeOwned + Send + 'static,
    O: Serialize + Send + 'static,
{
    fn run(&self, ctx: Ctx, args: &[u8]) -> BoxFuture<'static, Answer> {
        match serde_json::from_slice::<A>(args) {
            Ok(args) => {
                let run = (self.handler)(ctx, args);
                Box::pin(async move { serde_json::to_vec(&run.await?).map_err(JobError::no_retry) })
            }
            Err(error) => {
                let error = JobError::no_retry(format!("the arguments cannot be read: {error}"));
                Box::pin(async move { Err(error) })
            }
        }
    }

    fn check(&self, args: &[u8]) -> Result<(), String> {
        serde_json::from_slice::<A>(args).map(|_| ()).map_err(|error| error.to_string())
    }
}

pub(crate) struct Registered {
    pub(crate) handler: Box<dyn AnyHandler>,
    pub(crate) options: HandlerOptions,
    types: (TypeId, TypeId),
}

#[derive(Default)]
pub(crate) struct Registry(RwLock<HashMap<String, Arc<Registered>>>);

impl Registry {
    pub(crate) fn add<F, Fut, A, O>(&self, name: &str, options: HandlerOptions, handler: F) -> Result<JobType, Error>
    where
        F: Fn(Ctx, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, JobError>> + Send + 'static,
        A: DeserializeOwned + Send + 'static,
        O: Serialize + Send + 'static,
    {
        let job_type = JobType::new(name)?;
        let types = (TypeId::of::<A>(), TypeId::of::<O>());
        let handler = Box::new(Typed { handler, types: PhantomData });
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if table.get(name).is_some_and(|known| known.types != types) {
            return Err(Error::HandlerRegistered(name.to_owned()));
        }
        table.insert(name.to_owned(), Arc::new(Registered { handler, options, types }));
        Ok(job_type)
    }

    pub(crate) fn find(&self, name: &str) -> Option<Arc<Registered>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}
