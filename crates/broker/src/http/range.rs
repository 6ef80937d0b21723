//! The time range and the queues that a request for statistics is about.

use super::instant::instant;
use super::openapi::query::query;
use super::params::Params;
use crate::db::analytics::Filter;
use crate::error::Error;

query!(pub(super) TimesQuery:
    time("from", "Not before this; else an hour before the end."),
    time("to", "Not after this; else now."),
);

query!(pub(super) QueuesQuery:
    name("queue", "Only this queue."),
    name("namespace", "Only queues of this namespace."),
    name("task", "Only queues of this task."),
);

/// Both sets of parameters.
///
/// # Errors
/// [`Error::Invalid`] naming the parameter.
pub(super) fn filter(params: &Params) -> Result<Filter<'_>, Error> {
    let queues = Filter {
        queue: params.name("queue")?,
        namespace: params.name("namespace")?,
        task: params.name("task")?,
        ..times(params)?
    };
    Ok(queues)
}

/// The time range alone.
///
/// # Errors
/// [`Error::Invalid`] naming the parameter.
pub(super) fn times(params: &Params) -> Result<Filter<'_>, Error> {
    let at = |name: &'static str| params.text(name).map(|text| instant(name, text)).transpose();
    let (from, to) = (at("from")?, at("to")?);
    match (from, to) {
        (Some(from), Some(to)) if to < from => Err(Error::invalid("from", "must not be later than to")),
        _ => Ok(Filter { from, to, ..Filter::default() }),
    }
}
