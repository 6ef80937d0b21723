//! A transaction's body ─► what is to happen, and what will be said about it.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::db::ack::{Batch, Target};
use crate::db::transaction::{Ack, Push, Transaction};
use crate::error::Error;
use crate::http::ack::element::{self, Element, storable};
use crate::http::json::{self, placed};
use crate::http::kv;
use crate::http::message::{self, Message, present};
use crate::http::timers;
use crate::seal::Sealing;
use crate::segment::{Frame, Packer, new_message_id};

/// What is to happen, and one step for each element of the answer.
pub(super) struct Plan {
    pub(super) transaction: Transaction,
    pub(super) steps: Vec<Step>,
}

/// How messages are packed.
pub(super) struct Packing {
    /// zstd level of the segments.
    pub(super) level: i32,
    /// Who pushes, by the token.
    pub(super) producer: Option<Arc<str>>,
    pub(super) sealing: Arc<Sealing>,
}

/// What came of planning.
pub(super) enum Planned {
    Plan(Plan),
    /// Whether these queues want their payloads encrypted has to be asked first.
    Unknown(BTreeSet<String>),
}

pub(super) enum Step {
    /// An element of the transaction's acknowledgement at `ack`.
    Ack { ack: usize, element: Element },
    /// A message; a duplicate has the id of the one that it repeats.
    Push { queue: String, transaction_id: String, message_id: Uuid, is_duplicate: bool },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire<'a> {
    #[serde(borrow)]
    operations: Option<&'a RawValue>,
    #[serde(borrow)]
    required_leases: Option<&'a RawValue>,
    #[serde(borrow)]
    kv: Option<&'a RawValue>,
    #[serde(borrow)]
    timers: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Kind<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    items: Option<&'a RawValue>,
}

/// The other name of `payload` inside a transaction.
#[derive(Deserialize)]
struct Data<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    data: Option<&'a RawValue>,
}

/// # Errors
/// An [`Error`] that names the operation and the field, or [`Error::TooLarge`].
pub(super) fn plan(body: &[u8], packing: &Packing) -> Result<Planned, Error> {
    let wire: Wire<'_> = json::read(body)?;
    let operations: Vec<&RawValue> = list("operations", wire.operations)?;
    let kv: Vec<&RawValue> = list("kv", wire.kv)?;
    let timers: Vec<&RawValue> = list("timers", wire.timers)?;
    if operations.is_empty() && kv.is_empty() && timers.is_empty() {
        return Err(Error::Missing("operations"));
    }
    let leases: Vec<String> = list("requiredLeases", wire.required_leases)?;
    let mut draft = Draft { leases: leases.into_iter().map(storable).collect(), ..Draft::default() };
    for (index, raw) in operations.iter().enumerate() {
        draft.add(raw).map_err(|error| placed(format_args!("operations[{index}]"), error))?;
    }
    if !kv.is_empty() {
        draft.kv = kv::ops(&kv, kv::Limits::RIDING).map_err(|refusal| rider("kv", refusal.error))?;
    }
    if !timers.is_empty() {
        draft.timers = timers::drafts(&timers).map_err(|error| rider("timers", error))?;
    }
    draft.packed(packing)
}

fn list<'a, T: Deserialize<'a>>(field: &'static str, raw: Option<&'a RawValue>) -> Result<Vec<T>, Error> {
    let Some(raw) = raw else { return Ok(Vec::new()) };
    serde_json::from_str(raw.get()).map_err(|error| Error::invalid(field, format!("must be a list: {error}")))
}

/// What is wrong with a rider, whose operations are called by its own name here.
fn rider(name: &str, error: Error) -> Error {
    let renamed = |reason: String| reason.replacen("operations", name, 1);
    match error {
        Error::BadBody(reason) => Error::BadBody(renamed(reason)),
        Error::TooLarge(reason) => Error::TooLarge(renamed(reason)),
        Error::HorizonExceeded(reason) => Error::HorizonExceeded(renamed(reason)),
        error => Error::BadBody(renamed(error.to_string())),
    }
}

fn object<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Result<T, Error> {
    if !raw.get().starts_with('{') {
        return Err(Error::Missing("an object"));
    }
    json::read(raw.get().as_bytes())
}

#[derive(Default)]
struct Draft<'a> {
    leases: Vec<String>,
    acks: Vec<Ack>,
    ack_of: HashMap<Target, usize>,
    lanes: Vec<Lane<'a>>,
    lane_of: HashMap<(Cow<'a, str>, Cow<'a, str>), usize>,
    steps: Vec<Step>,
    kv: Vec<crate::db::kv::Op>,
    timers: Vec<timers::Draft>,
}

/// The messages for one partition.
struct Lane<'a> {
    queue: Cow<'a, str>,
    partition: Cow<'a, str>,
    messages: Vec<(Uuid, String, Message<'a>)>,
    ids: HashMap<String, Uuid>,
}

impl<'a> Draft<'a> {
    fn add(&mut self, raw: &'a RawValue) -> Result<(), Error> {
        let Kind { kind, items } = object(raw)?;
        match element::text("type", kind)?.as_deref() {
            Some("ack") => self.ack(object::<element::Wire<'_>>(raw)?.checked(None)?),
            Some("push") => self.push_all(raw, items)?,
            Some(_) => return Err(Error::invalid("type", "must be ack or push")),
            None => return Err(Error::Missing("type")),
        }
        Ok(())
    }

    fn ack(&mut self, element: Element) {
        let at = *self.ack_of.entry(element.target.clone()).or_insert_with(|| {
            let target = &element.target;
            let own = !target.worker.is_empty();
            self.acks.push(Ack {
                partition_id: target.partition_id,
                group: target.group.clone(),
                workers: if own { vec![target.worker.clone()] } else { self.leases.clone() },
                batch: Batch::default(),
                transaction_ids: Vec::new(),
            });
            self.acks.len() - 1
        });
        self.acks[at].batch.add(element.hash, element.status);
        self.acks[at].transaction_ids.push(storable(element.transaction_id.clone()));
        self.steps.push(Step::Ack { ack: at, element });
    }

    fn push_all(&mut self, raw: &'a RawValue, items: Option<&'a RawValue>) -> Result<(), Error> {
        let Some(items) = items else {
            return self.push(raw);
        };
        let items: Vec<&RawValue> =
            serde_json::from_str(items.get()).map_err(|_| Error::invalid("items", "must be a list"))?;
        if items.is_empty() {
            return Err(Error::invalid("items", "must have at least one"));
        }
        for (index, item) in items.into_iter().enumerate() {
            self.push(item).map_err(|error| placed(format_args!("items[{index}]"), error))?;
        }
        Ok(())
    }

    fn push(&mut self, raw: &'a RawValue) -> Result<(), Error> {
        let mut wire: message::Wire<'_> = object(raw)?;
        if wire.payload.is_none() {
            wire.payload = object::<Data<'_>>(raw)?.data;
        }
        let message = wire.checked().map_err(|error| match error {
            Error::Missing("payload") => Error::Missing("payload or data"),
            error => error,
        })?;
        let lane = self.lane(&message);
        let minted = new_message_id();
        let transaction_id = message.transaction_id.as_deref().map_or_else(|| minted.to_string(), str::to_owned);
        let message_id = *lane.ids.entry(transaction_id.clone()).or_insert(minted);
        let is_duplicate = message_id != minted;
        let queue = message.queue.clone().into_owned();
        if !is_duplicate {
            lane.messages.push((minted, transaction_id.clone(), message));
        }
        self.steps.push(Step::Push { queue, transaction_id, message_id, is_duplicate });
        Ok(())
    }

    fn lane(&mut self, message: &Message<'a>) -> &mut Lane<'a> {
        let key = (message.queue.clone(), message.partition.clone());
        let at = *self.lane_of.entry(key).or_insert_with(|| {
            self.lanes.push(Lane {
                queue: message.queue.clone(),
                partition: message.partition.clone(),
                messages: Vec::new(),
                ids: HashMap::new(),
            });
            self.lanes.len() - 1
        });
        &mut self.lanes[at]
    }

    fn packed(self, packing: &Packing) -> Result<Planned, Error> {
        let mut packer = Packer::new(packing.level);
        let mut pushes = Vec::with_capacity(self.lanes.len());
        let mut unknown = BTreeSet::new();
        for lane in self.lanes {
            match packing.sealing.wanted(&lane.queue) {
                Some(is_sealed) => pushes.push(lane.packed(&mut packer, is_sealed, packing)?),
                None => drop(unknown.insert(lane.queue.into_owned())),
            }
        }
        let timers = timers::sealed(&self.timers, &packing.sealing, packing.producer.as_ref());
        let timers = timers.unwrap_or_else(|queues| {
            unknown.extend(queues);
            Vec::new()
        });
        if !unknown.is_empty() {
            return Ok(Planned::Unknown(unknown));
        }
        let transaction = Transaction { pushes, acks: self.acks, letters: Vec::new(), kv: self.kv, timers };
        Ok(Planned::Plan(Plan { transaction, steps: self.steps }))
    }
}

impl Lane<'_> {
    fn packed(self, packer: &mut Packer, is_sealed: bool, packing: &Packing) -> Result<Push, Error> {
        let sealer = packing.sealing.sealer();
        let sealed: Vec<Vec<u8>> = if is_sealed {
            let seal = |(id, _, message): &(Uuid, String, Message<'_>)| sealer.seal(*id, message.payload.as_bytes());
            self.messages.iter().map(|message| seal(message).expect("wanted only with a key")).collect()
        } else {
            Vec::new()
        };
        let frames = self.messages.iter().enumerate().map(|(index, (message_id, transaction_id, message))| Frame {
            message_id: *message_id,
            trace_id: message.trace_id,
            transaction_id,
            producer: packing.producer.as_deref(),
            is_encrypted: is_sealed,
            payload: sealed.get(index).map_or(message.payload.as_bytes(), Vec::as_slice),
        });
        let packed = packer.pack(frames)?;
        Ok(Push {
            queue: self.queue.into_owned(),
            partition: self.partition.into_owned(),
            blob: packed.blob,
            hashes: packed.hashes,
            count: packed.count,
            sealed: sealer.has_key().then_some(is_sealed),
            transaction_ids: self.messages.into_iter().map(|(_, id, _)| id).collect(),
        })
    }
}
