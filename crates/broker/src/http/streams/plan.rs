//! A cycle's body ─► what is to happen, and what will be said about it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Failure, KEY_BYTES_MAX, STATE_ROWS_MAX, flag, id, optional};
use crate::db::ack::Status;
use crate::db::streams::{Cycle, CycleAck, Upsert};
use crate::db::transaction::Push;
use crate::error::Error;
use crate::http::ack::element::{parse_status, storable, text};
use crate::http::body::checked_depth;
use crate::http::json;
use crate::http::message::{self, present};
use crate::id::{PartitionId, QUEUE_MODE, QueryId, checked_name};
use crate::seal::Sealing;
use crate::segment::{Frame, Packer, new_message_id};

/// Largest value of a row of state, in bytes.
const VALUE_BYTES_MAX: usize = 1 << 20;
/// Most results of one cycle.
const PUSH_ITEMS_MAX: usize = 100_000;
/// Most partitions that the results of one cycle go to.
const SINKS_MAX: usize = 10_000;

/// What is to happen together or not at all.
#[derive(Deserialize, ToSchema)]
#[schema(as = StreamsCycle)]
pub(super) struct Wire<'a> {
    #[serde(borrow)]
    #[schema(value_type = Uuid, required)]
    query_id: Option<&'a RawValue>,
    /// The source's.
    #[serde(borrow)]
    #[schema(value_type = Uuid, required)]
    partition_id: Option<&'a RawValue>,
    /// Whose cursor `ack` moves. None is queue mode.
    #[serde(borrow)]
    #[schema(value_type = Option<String>, max_length = 255)]
    consumer_group: Option<&'a RawValue>,
    /// Whether a completed `ack` ends the lease; else it passes `count` messages and keeps the lease for the rest.
    #[serde(borrow)]
    #[schema(value_type = Option<bool>, default = true)]
    release_lease: Option<&'a RawValue>,
    /// Carried out in their order.
    #[serde(borrow)]
    #[schema(value_type = Option<Vec<Op<'a>>>, max_items = 100_000)]
    state_ops: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<Vec<Item<'a>>>, max_items = 100_000)]
    push_items: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<Ack<'a>>)]
    ack: Option<&'a RawValue>,
}

/// One change of state.
#[derive(Deserialize, ToSchema)]
#[schema(as = StreamsStateOp)]
struct Op<'a> {
    /// `upsert` or `delete`.
    #[serde(borrow, rename = "type")]
    #[schema(value_type = String, required)]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = String, required, max_length = 2048)]
    key: Option<&'a RawValue>,
    /// What `upsert` stores, as it is sent.
    #[serde(borrow, default, deserialize_with = "present")]
    #[schema(value_type = serde_json::Value)]
    value: Option<&'a RawValue>,
}

/// A result: a message whose ids the server makes.
#[derive(Deserialize, ToSchema)]
#[schema(as = StreamsPushItem)]
struct Item<'a> {
    #[serde(borrow)]
    #[schema(value_type = String, required, min_length = 1, max_length = 255)]
    queue: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255, default = "Default")]
    partition: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    #[schema(value_type = serde_json::Value, required)]
    payload: Option<&'a RawValue>,
}

/// How the batch of the source ends.
#[derive(Deserialize, ToSchema)]
#[schema(as = StreamsAck)]
#[serde(rename_all = "camelCase")]
struct Ack<'a> {
    /// Said for a reader of the request; the lease and `count` decide.
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    transaction_id: Option<&'a RawValue>,
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    lease_id: Option<&'a RawValue>,
    /// `completed` if none; anything else gives the batch back.
    #[serde(borrow)]
    #[schema(value_type = Option<String>)]
    status: Option<&'a RawValue>,
    /// How many messages are done: needed without `release_lease`.
    #[serde(borrow)]
    #[schema(value_type = Option<i64>, minimum = 0)]
    count: Option<&'a RawValue>,
}

pub(super) struct Plan {
    pub(super) cycle: Cycle,
    /// As many as were sent.
    pub(super) state_ops: usize,
    /// One for each result, in the order in which they were sent.
    pub(super) sunk: Vec<Sunk>,
}

/// A result that is to be pushed.
pub(super) struct Sunk {
    pub(super) message_id: Uuid,
    pub(super) queue: String,
}

/// How results are packed.
pub(super) struct Packing {
    /// zstd level of the segments.
    pub(super) level: i32,
    /// Who sent the cycle, by the token.
    pub(super) producer: Option<Arc<str>>,
    pub(super) sealing: Arc<Sealing>,
}

/// What came of planning.
pub(super) enum Planned {
    Plan(Box<Plan>),
    /// Whether these queues want their payloads encrypted has to be asked first.
    Unknown(BTreeSet<String>),
}

/// # Errors
/// [`Failure::Refused`] for a kind of state operation that does not exist; else an [`Error`] that names the field.
pub(super) fn plan(body: &[u8], packing: &Packing) -> Result<Planned, Failure> {
    let wire: Wire<'_> = json::read(body)?;
    let query_id = QueryId(id("query_id", wire.query_id)?);
    let partition_id = PartitionId(id("partition_id", wire.partition_id)?);
    let group = group(wire.consumer_group)?;
    let release = flag("release_lease", wire.release_lease)?.unwrap_or(true);
    let ops_max = usize::try_from(STATE_ROWS_MAX).expect("more than none");
    let ops = list("state_ops", wire.state_ops, ops_max)?;
    let items = list("push_items", wire.push_items, PUSH_ITEMS_MAX)?;
    let ack = wire.ack.map(|raw| checked_ack(raw, release).map_err(|error| placed("ack", &error))).transpose()?;
    let mut changes = Changes::default();
    for (index, raw) in ops.iter().enumerate() {
        changes.add(raw).map_err(|failure| match failure {
            Failure::Failed(error) => placed(&format!("state_ops[{index}]"), &error).into(),
            refused @ Failure::Refused(_) => refused,
        })?;
    }
    let mut sinks = Sinks::default();
    for (index, raw) in items.iter().enumerate() {
        sinks.add(raw).map_err(|error| placed(&format!("push_items[{index}]"), &error))?;
    }
    let pushes = match sinks.packed(packing)? {
        Ok(pushes) => pushes,
        Err(unknown) => return Ok(Planned::Unknown(unknown)),
    };
    // With a lease it is the lease that proves that the results were not pushed before.
    let is_fenced_by_state = ack.is_none() && !pushes.is_empty();
    let Written { upserts, deletes, expected } = changes.net(is_fenced_by_state);
    let cycle = Cycle { query_id, partition_id, group, release, upserts, deletes, expected, pushes, ack };
    Ok(Planned::Plan(Box::new(Plan { cycle, state_ops: ops.len(), sunk: sinks.sunk })))
}

fn group(raw: Option<&RawValue>) -> Result<String, Error> {
    match text("consumer_group", raw)?.filter(|group| !group.is_empty()) {
        Some(group) => checked_name("consumer_group", &group).map(str::to_owned),
        None => Ok(QUEUE_MODE.to_owned()),
    }
}

fn list<'a>(field: &'static str, raw: Option<&'a RawValue>, max: usize) -> Result<Vec<&'a RawValue>, Error> {
    let elements: Vec<&RawValue> = optional(field, raw, "must be a list")?.unwrap_or_default();
    if max < elements.len() {
        return Err(Error::invalid(field, format!("must have at most {max}, has {}", elements.len())));
    }
    Ok(elements)
}

fn placed(place: &str, error: &Error) -> Error {
    Error::BadBody(format!("{place}.{error}"))
}

fn object<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Result<T, Error> {
    json::read(raw.get().as_bytes())
}

fn checked_ack(raw: &RawValue, release: bool) -> Result<CycleAck, Error> {
    let Ack { transaction_id, lease_id, status, count } = object(raw)?;
    text("transactionId", transaction_id)?;
    let worker = storable(text("leaseId", lease_id)?.unwrap_or_default());
    let completed = text("status", status)?.is_none_or(|status| parse_status(&status) == Status::Completed);
    let reason = "must be a whole number from 0 to 9223372036854775807";
    let count: Option<i64> = optional("count", count, reason)?;
    match count {
        Some(count) if count < 0 => Err(Error::invalid("count", reason)),
        None if completed && !release => Err(Error::Missing("count")),
        count => Ok(CycleAck { worker, completed, count }),
    }
}

/// What the operations on one key come to.
struct Change<'a> {
    /// Whether the first of them deletes what was there.
    deletes_first: bool,
    /// `None` if the key is gone in the end.
    value: Option<&'a str>,
}

#[derive(Default)]
struct Changes<'a>(BTreeMap<String, Change<'a>>);

/// What is to be written, each key once.
struct Written {
    upserts: Vec<Upsert>,
    deletes: Vec<String>,
    expected: Vec<String>,
}

impl<'a> Changes<'a> {
    fn add(&mut self, raw: &'a RawValue) -> Result<(), Failure> {
        let Op { kind, key, value } = object(raw)?;
        let kind = text("type", kind)?.ok_or(Error::Missing("type"))?;
        let key = text("key", key)?.ok_or(Error::Missing("key"))?;
        if KEY_BYTES_MAX < key.len() {
            let reason = format!("must have at most {KEY_BYTES_MAX} bytes, has {}", key.len());
            return Err(Error::invalid("key", reason).into());
        }
        let value = match kind.as_str() {
            "upsert" => Some(checked_value(value.ok_or(Error::Missing("value"))?)?),
            "delete" => None,
            _ => return Err(Failure::Refused(format!("unknown state op type: {}", kind.escape_debug()))),
        };
        let change = self.0.entry(key).or_insert(Change { deletes_first: value.is_none(), value });
        change.value = value;
        Ok(())
    }

    fn net(self, is_fence: bool) -> Written {
        let mut written = Written { upserts: Vec::new(), deletes: Vec::new(), expected: Vec::new() };
        for (key, Change { deletes_first, value }) in self.0 {
            if is_fence && deletes_first {
                written.expected.push(key.clone());
            }
            match value {
                Some(value) => {
                    let upsert = Upsert { key, value: value.to_owned(), window_end: window_end(value) };
                    written.upserts.push(upsert);
                }
                None => written.deletes.push(key),
            }
        }
        written
    }
}

fn checked_value(raw: &RawValue) -> Result<&str, Error> {
    let value = raw.get();
    if VALUE_BYTES_MAX < value.len() {
        let reason = format!("must have at most {VALUE_BYTES_MAX} bytes, has {}", value.len());
        return Err(Error::invalid("value", reason));
    }
    checked_depth("value", value)
}

/// The end of the window that `value` is the state of, if it says one.
fn window_end(value: &str) -> Option<f64> {
    #[derive(Deserialize)]
    struct Window<'a> {
        #[serde(borrow, rename = "windowEnd")]
        end: Option<&'a RawValue>,
    }
    if !value.starts_with('{') {
        return None;
    }
    let Window { end } = serde_json::from_str(value).ok()?;
    serde_json::from_str(end?.get()).ok()
}

/// The results, by partition.
#[derive(Default)]
struct Sinks<'a> {
    lanes: Vec<Lane<'a>>,
    lane_of: HashMap<(Cow<'a, str>, Cow<'a, str>), usize>,
    sunk: Vec<Sunk>,
}

struct Lane<'a> {
    queue: Cow<'a, str>,
    partition: Cow<'a, str>,
    messages: Vec<(Uuid, &'a [u8])>,
}

impl<'a> Sinks<'a> {
    fn add(&mut self, raw: &'a RawValue) -> Result<(), Error> {
        let Item { queue, partition, payload } = object(raw)?;
        let message = message::Wire { queue, partition, payload, ..message::Wire::default() }.checked()?;
        let key = (message.queue.clone(), message.partition.clone());
        let at = *self.lane_of.entry(key).or_insert_with(|| {
            let (queue, partition) = (message.queue.clone(), message.partition.clone());
            self.lanes.push(Lane { queue, partition, messages: Vec::new() });
            self.lanes.len() - 1
        });
        if SINKS_MAX < self.lanes.len() {
            return Err(Error::invalid("partition", format!("must be one of at most {SINKS_MAX} of a cycle")));
        }
        let message_id = new_message_id();
        self.lanes[at].messages.push((message_id, message.payload.as_bytes()));
        self.sunk.push(Sunk { message_id, queue: message.queue.into_owned() });
        Ok(())
    }

    /// The inner error names queues of which it is not known whether they want their payloads encrypted.
    fn packed(&mut self, packing: &Packing) -> Result<Result<Vec<Push>, BTreeSet<String>>, Error> {
        let mut packer = Packer::new(packing.level);
        let mut pushes = Vec::with_capacity(self.lanes.len());
        let mut unknown = BTreeSet::new();
        for lane in std::mem::take(&mut self.lanes) {
            match packing.sealing.wanted(&lane.queue) {
                Some(is_sealed) => pushes.push(lane.packed(&mut packer, is_sealed, packing)?),
                None => drop(unknown.insert(lane.queue.into_owned())),
            }
        }
        Ok(if unknown.is_empty() { Ok(pushes) } else { Err(unknown) })
    }
}

impl Lane<'_> {
    fn packed(self, packer: &mut Packer, is_sealed: bool, packing: &Packing) -> Result<Push, Error> {
        let sealer = packing.sealing.sealer();
        let stored = self.messages.iter().map(|&(id, payload)| {
            if is_sealed {
                Cow::Owned(sealer.seal(id, payload).expect("wanted only with a key"))
            } else {
                Cow::Borrowed(payload)
            }
        });
        let payloads: Vec<Cow<'_, [u8]>> = stored.collect();
        let transaction_ids: Vec<String> = self.messages.iter().map(|(id, _)| id.to_string()).collect();
        let frames =
            self.messages.iter().zip(&payloads).zip(&transaction_ids).map(|(((id, _), payload), text)| Frame {
                message_id: *id,
                trace_id: None,
                transaction_id: text,
                producer: packing.producer.as_deref(),
                is_encrypted: is_sealed,
                payload,
            });
        let packed = packer.pack(frames)?;
        Ok(Push {
            queue: self.queue.into_owned(),
            partition: self.partition.into_owned(),
            blob: packed.blob,
            hashes: packed.hashes,
            count: packed.count,
            sealed: sealer.has_key().then_some(is_sealed),
            transaction_ids,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_window_is_a_number_of_an_object() {
        for (value, end) in [
            (r#"{"acc": {"windowEnd": 1}, "windowEnd": 1700000000000}"#, Some(1_700_000_000_000.0)),
            (r#"{"windowEnd":-1.5}"#, Some(-1.5)),
            (r#"{"windowEnd":"7"}"#, None),
            (r#"{"windowEnd":null}"#, None),
            (r#"{"acc":1}"#, None),
            (r#"[{"windowEnd":7}]"#, None),
            ("7", None),
        ] {
            assert_eq!(window_end(value), end, "{value}");
        }
    }

    fn changes(ops: &[&str]) -> Written {
        let raws: Vec<Box<RawValue>> =
            ops.iter().map(|op| RawValue::from_string((*op).to_owned()).expect("JSON")).collect();
        let mut changes = Changes::default();
        for raw in &raws {
            assert!(changes.add(raw).is_ok());
        }
        changes.net(true)
    }

    #[test]
    fn the_last_operation_on_a_key_counts_and_the_first_is_the_fence() {
        let written = changes(&[
            r#"{"type": "delete", "key": "a"}"#,
            r#"{"type": "upsert", "key": "a", "value": 1}"#,
            r#"{"type": "upsert", "key": "b", "value": 2}"#,
            r#"{"type": "delete", "key": "b"}"#,
            r#"{"type": "delete", "key": "c"}"#,
        ]);
        let upserts: Vec<_> =
            written.upserts.iter().map(|upsert| (upsert.key.as_str(), upsert.value.as_str())).collect();
        assert_eq!(upserts, [("a", "1")]);
        assert_eq!((written.deletes, written.expected), (vec!["b".into(), "c".into()], vec!["a".into(), "c".into()]));
    }
}
