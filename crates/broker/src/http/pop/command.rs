//! A pop request, checked.

use std::time::Duration;

use uuid::Uuid;

use super::super::Settings;
use super::super::openapi::query::query;
use super::super::params::Params;
use crate::db::pop::Claim;
use crate::error::Error;
use crate::id::{QUEUE_MODE, checked_name};
use crate::wake::Interest;

/// A larger batch is cut to this.
pub(in crate::http) const BATCH_MAX: i64 = 10_000;
const BATCH_DEFAULT: i64 = 200;
/// More partitions are cut to this. A call looks at no more than 512, whatever it may claim.
const PARTITIONS_MAX: i64 = 1_000;
/// More partitions of a pop that conflates are cut to this: each gives one message, and holds a lease.
const CONFLATED_PARTITIONS_MAX: i64 = 64;
/// A longer wait is cut to this.
const TIMEOUT_MS_MAX: i64 = 600_000;
/// A week; a longer lease is refused, since it outlives what could still acknowledge it.
pub(crate) const LEASE_SECONDS_MAX: i64 = 7 * 24 * 3600;

query!(pub(super) MatchingQuery:
    name("namespace", "Only queues of this namespace; required if there is no task."),
    name("task", "Only queues of this task; required if there is no namespace."),
);

query!(pub(super) PopQuery:
    integer("batch", 1..=i64::MAX, "Most messages of the answer, over all partitions; more than 10,000 is cut.")
        .or(BATCH_DEFAULT),
    integer("partitions", 1..=i64::MAX, "Most partitions to take from; more than 1,000 is cut.").or(1),
    flag("wait", "Wait for a message if there is none.").or(false),
    integer("timeout", 1..=i64::MAX, "How long to wait, in milliseconds; more than 600,000 is cut."),
    name("consumerGroup", "Who takes: a group has cursors of its own."),
    flag("autoAck", "Commit at delivery: what a broken connection loses is lost.").or(false),
    integer("leaseSeconds", 1..=LEASE_SECONDS_MAX, "How long the messages are leased; else as the queue says."),
    name("subscriptionMode", "Where a group starts at its first contact: `new` at the tail, `all` at the oldest message."),
    name("subscriptionFrom", "`now` or a time: where a group starts at its first contact. Goes before the mode."),
    flag("autopilot", "Let the server choose what is not given, and say what it chose.").or(false),
    flag("conflation", "Deliver only the newest message of each partition; recorded at a group's first contact. Not with `autoAck`.")
        .or(false),
);

/// Where a pop takes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Queue(String),
    Partition {
        queue: String,
        partition: String,
    },
    /// An empty filter matches everything; not both are empty.
    Matching {
        namespace: String,
        task: String,
    },
}

/// A pop that can be carried out.
#[derive(Debug)]
pub(super) struct Pop {
    pub(super) source: Source,
    pub(super) claim: Claim,
    /// How long to wait for a message; `None` looks once.
    pub(super) wait: Option<Duration>,
    /// What the answer tells a client that let the server choose.
    pub(super) autopilot_wait_ms: Option<u128>,
    /// The client left it to the server from how many partitions to take.
    pub(super) is_width_open: bool,
}

impl Source {
    pub(super) fn queue(queue: String) -> Result<Self, Error> {
        checked_name("queue", &queue)?;
        Ok(Self::Queue(queue))
    }

    pub(super) fn partition(queue: String, partition: String) -> Result<Self, Error> {
        checked_name("queue", &queue)?;
        checked_name("partition", &partition)?;
        Ok(Self::Partition { queue, partition })
    }

    /// `None` if the request names neither filter.
    pub(super) fn matching(params: &Params) -> Result<Option<Self>, Error> {
        let namespace = checked_text(params, "namespace")?;
        let task = checked_text(params, "task")?;
        let is_given = !namespace.is_empty() || !task.is_empty();
        Ok(is_given.then_some(Self::Matching { namespace, task }))
    }

    pub(super) fn interest(&self) -> Interest {
        match self {
            Self::Queue(queue) => Interest::Queue(queue.clone()),
            Self::Partition { queue, partition } => {
                Interest::Partition { queue: queue.clone(), partition: partition.clone() }
            }
            Self::Matching { namespace, task } => {
                Interest::Discovery { namespace: namespace.clone(), task: task.clone() }
            }
        }
    }
}

impl Pop {
    pub(super) fn new(source: Source, params: &Params, settings: &Settings) -> Result<Self, Error> {
        let (conflation, auto_ack) = (params.flag("conflation")?, params.flag("autoAck")?);
        let autopilot = params.flag("autopilot")?;
        let wait = params.flag("wait")?;
        let timeout_ms = positive(params, "timeout", TIMEOUT_MS_MAX)?;
        let timeout = timeout_ms.map_or(settings.pop_timeout, |ms| Duration::from_millis(ms.unsigned_abs()));
        let group = checked_text(params, "consumerGroup")?;
        if conflation && auto_ack {
            return Err(Error::invalid("conflation", "cannot be combined with autoAck"));
        }
        if conflation && (group.is_empty() || group == QUEUE_MODE) {
            return Err(Error::invalid("conflation", "needs a consumerGroup"));
        }
        let batch = positive(params, "batch", BATCH_MAX)?.unwrap_or(BATCH_DEFAULT);
        let given = positive(params, "partitions", PARTITIONS_MAX)?;
        let partitions = match given {
            _ if conflation => given.unwrap_or(batch).min(CONFLATED_PARTITIONS_MAX),
            Some(partitions) => partitions,
            None => 1,
        };
        let sub_mode = checked_text(params, "subscriptionMode")?;
        let mode_default = if settings.subscribe_to_new { "new" } else { "all" };
        let claim = Claim {
            group: if group.is_empty() { QUEUE_MODE.to_owned() } else { group },
            partitions: as_int(partitions),
            budget: as_int(batch),
            lease_seconds: params.integer("leaseSeconds", 1..=LEASE_SECONDS_MAX)?.map(as_int),
            worker: Uuid::now_v7().to_string(),
            auto_ack,
            sub_mode: if sub_mode.is_empty() { mode_default.to_owned() } else { sub_mode },
            sub_from: checked_text(params, "subscriptionFrom")?,
            conflation,
        };
        Ok(Self {
            source,
            claim,
            wait: wait.then_some(timeout),
            autopilot_wait_ms: autopilot.then_some(settings.pop_wait.initial.as_millis()),
            is_width_open: autopilot && given.is_none() && !conflation,
        })
    }
}

/// A whole number of at least 1, cut to `most`.
fn positive(params: &Params, name: &'static str, most: i64) -> Result<Option<i64>, Error> {
    Ok(params.integer(name, 1..=i64::MAX)?.map(|value| value.min(most)))
}

fn as_int(value: i64) -> i32 {
    i32::try_from(value).expect("cut or refused above its limit")
}

fn checked_text(params: &Params, name: &'static str) -> Result<String, Error> {
    params.text(name).map_or(Ok(String::new()), |text| checked_name(name, text).map(str::to_owned))
}
