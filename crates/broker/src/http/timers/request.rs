//! Timer operations as they are sent ─► as they can be carried out.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::db::timers::{self, Op};
use crate::error::Error;
use crate::http::ack::element::text;
use crate::http::body::checked_depth;
use crate::http::json::{self, placed};
use crate::id::{DEFAULT_PARTITION, checked_name, checked_transaction_id};
use crate::seal::Sealing;
use crate::segment::new_message_id;
use crate::timers::payload::{checked_length, unpacked};

/// Operations of one call.
const OPS_MAX: usize = 256;
/// Longest key, in bytes.
const KEY_BYTES_MAX: usize = 512;
/// How far ahead a timer may lie: 90 days.
const HORIZON_MS: i64 = 90 * 86_400_000;

/// The fields as they are sent, unread. What the server decides is no field: nobody may believe to have set it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Wire<'a> {
    #[serde(borrow)]
    op: Option<&'a RawValue>,
    #[serde(borrow)]
    queue: Option<&'a RawValue>,
    #[serde(borrow)]
    timer_key: Option<&'a RawValue>,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
    #[serde(borrow)]
    delay_ms: Option<&'a RawValue>,
    #[serde(borrow)]
    txn: Option<&'a RawValue>,
    #[serde(borrow)]
    partition: Option<&'a RawValue>,
    #[serde(borrow)]
    payload_zstd: Option<&'a RawValue>,
}

/// An operation before it is known whether its queue wants it sealed.
pub(in crate::http) enum Draft {
    Schedule(Box<Schedule>),
    Cancel { queue: String, timer_key: String, txn: Option<String> },
}

pub(in crate::http) struct Schedule {
    queue: String,
    timer_key: String,
    partition: String,
    delay_ms: i64,
    txn: String,
    message_id: Uuid,
    /// The message's data.
    plain: Vec<u8>,
    /// The same as the client packed it.
    packed: Option<Vec<u8>>,
}

impl Draft {
    pub(in crate::http) fn queue(&self) -> &str {
        match self {
            Self::Schedule(schedule) => &schedule.queue,
            Self::Cancel { queue, .. } => queue,
        }
    }

    fn timer_key(&self) -> &str {
        match self {
            Self::Schedule(schedule) => &schedule.timer_key,
            Self::Cancel { timer_key, .. } => timer_key,
        }
    }
}

/// # Errors
/// An [`Error`] that names the operation and the field.
pub(in crate::http) fn drafts(list: &[&RawValue]) -> Result<Vec<Draft>, Error> {
    if list.is_empty() || OPS_MAX < list.len() {
        return Err(Error::invalid("operations", format!("must have 1 to {OPS_MAX} operations, has {}", list.len())));
    }
    let mut seen = HashSet::new();
    let mut drafts = Vec::with_capacity(list.len());
    for (index, raw) in list.iter().enumerate() {
        let place = format!("operations[{index}]");
        let draft = draft(raw).map_err(|error| placed(&place, error))?;
        if !seen.insert((draft.queue().to_owned(), draft.timer_key().to_owned())) {
            let error = Error::invalid("timerKey", "is named by another operation of this call already");
            return Err(placed(&place, error));
        }
        drafts.push(draft);
    }
    Ok(drafts)
}

fn draft(raw: &RawValue) -> Result<Draft, Error> {
    let wire: Wire<'_> = json::read(raw.get().as_bytes())?;
    let kind = text("op", wire.op)?.ok_or(Error::Missing("op"))?;
    let queue = text("queue", wire.queue)?.ok_or(Error::Missing("queue"))?;
    checked_name("queue", &queue)?;
    let timer_key = checked_key(text("timerKey", wire.timer_key)?.ok_or(Error::Missing("timerKey"))?)?;
    let txn = text("txn", wire.txn)?;
    if let Some(txn) = &txn {
        checked_transaction_id("txn", txn)?;
    }
    match kind.as_str() {
        "schedule" | "reschedule" => {
            let txn = txn.ok_or(Error::Missing("txn"))?;
            let partition = text("partition", wire.partition)?.unwrap_or_else(|| DEFAULT_PARTITION.to_owned());
            checked_name("partition", &partition)?;
            let delay_ms = delay(wire.delay_ms.ok_or(Error::Missing("delayMs"))?)?;
            let (plain, packed) = payload(&wire)?;
            let message_id = new_message_id();
            let schedule = Schedule { queue, timer_key, partition, delay_ms, txn, message_id, plain, packed };
            Ok(Draft::Schedule(Box::new(schedule)))
        }
        "cancel" => {
            let others = [
                ("payload", wire.payload),
                ("delayMs", wire.delay_ms),
                ("partition", wire.partition),
                ("payloadZstd", wire.payload_zstd),
            ];
            match others.into_iter().find(|(_, field)| field.is_some()) {
                Some((name, _)) => Err(Error::invalid(name, "is no field of cancel")),
                None => Ok(Draft::Cancel { queue, timer_key, txn }),
            }
        }
        _ => Err(Error::invalid("op", "must be schedule, reschedule or cancel")),
    }
}

/// # Errors
/// [`Error::Invalid`] naming the field and its range.
pub(in crate::http) fn checked_key(key: String) -> Result<String, Error> {
    if key.is_empty() || KEY_BYTES_MAX < key.len() {
        return Err(Error::invalid("timerKey", format!("must have 1 to {KEY_BYTES_MAX} bytes, has {}", key.len())));
    }
    if key.bytes().any(|byte| byte < 0x20) {
        return Err(Error::invalid("timerKey", "must not contain control characters"));
    }
    Ok(key)
}

/// However far it lies in the past, it is due at once.
fn delay(raw: &RawValue) -> Result<i64, Error> {
    let delay_ms: i64 = raw
        .get()
        .parse()
        .map_err(|_| Error::invalid("delayMs", format!("must be a whole number of at most {HORIZON_MS}")))?;
    if HORIZON_MS < delay_ms {
        return Err(Error::HorizonExceeded(format!("delayMs: must be at most {HORIZON_MS}, is {delay_ms}")));
    }
    Ok(delay_ms.max(-HORIZON_MS))
}

/// The message's data, and the same as it was packed.
fn payload(wire: &Wire<'_>) -> Result<(Vec<u8>, Option<Vec<u8>>), Error> {
    let given = text("payload", wire.payload)?.ok_or(Error::Missing("payload"))?;
    let bytes = BASE64_STANDARD
        .decode(&given)
        .map_err(|error| Error::invalid("payload", format!("must be base64 of a JSON document: {error}")))?;
    checked_length(&bytes)?;
    let is_packed = match wire.payload_zstd.map(RawValue::get) {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(Error::invalid("payloadZstd", "must be true or false")),
    };
    let (plain, packed) = if is_packed { (unpacked(&bytes)?, Some(bytes)) } else { (bytes, None) };
    // A message's data goes as it is into the answer of a pop, which must stay JSON.
    let json = std::str::from_utf8(&plain).map_err(|error| not_json(&error))?;
    serde_json::from_str::<&RawValue>(json).map_err(|error| not_json(&error))?;
    checked_depth("payload", json)?;
    Ok((plain, packed))
}

fn not_json(error: &dyn std::error::Error) -> Error {
    Error::invalid("payload", format!("must be base64 of a JSON document: {error}"))
}

/// The operations with payloads as their queues want them, or the queues that have to be asked first.
pub(in crate::http) fn sealed(
    drafts: &[Draft], sealing: &Sealing, producer: Option<&Arc<str>>,
) -> Result<Vec<Op>, BTreeSet<String>> {
    let schedules = drafts.iter().filter(|draft| matches!(draft, Draft::Schedule(_)));
    let unknown: BTreeSet<String> =
        schedules.map(Draft::queue).filter(|queue| sealing.wanted(queue).is_none()).map(str::to_owned).collect();
    if !unknown.is_empty() {
        return Err(unknown);
    }
    Ok(drafts.iter().map(|draft| op(draft, sealing, producer)).collect())
}

fn op(draft: &Draft, sealing: &Sealing, producer: Option<&Arc<str>>) -> Op {
    let schedule = match draft {
        Draft::Schedule(schedule) => schedule,
        Draft::Cancel { queue, timer_key, txn } => {
            return Op::Cancel { queue: queue.clone(), timer_key: timer_key.clone(), txn: txn.clone() };
        }
    };
    let wanted = sealing.wanted(&schedule.queue).unwrap_or(false);
    let sealed = if wanted { sealing.sealer().seal(schedule.message_id, &schedule.plain) } else { None };
    let encrypted = sealed.is_some();
    let packed = if encrypted { None } else { schedule.packed.clone() };
    Op::Schedule(timers::Schedule {
        queue: schedule.queue.clone(),
        timer_key: schedule.timer_key.clone(),
        partition: schedule.partition.clone(),
        delay_ms: schedule.delay_ms,
        txn: schedule.txn.clone(),
        message_id: schedule.message_id,
        payload_zstd: packed.is_some(),
        payload_bytes: i32::try_from(schedule.plain.len()).expect("at most a mebibyte"),
        payload: sealed.or(packed).unwrap_or_else(|| schedule.plain.clone()),
        encrypted,
        compared: sealing.sealer().has_key(),
        producer: producer.map(|producer| producer.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(op: &str) -> Error {
        let list: Vec<&RawValue> = serde_json::from_str(op).expect("a list");
        match drafts(&list) {
            Ok(_) => panic!("{op} is not refused"),
            Err(error) => error,
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let base = r#""op":"schedule","queue":"q","timerKey":"k","txn":"t""#;
        for (op, words) in [
            (format!(r#"[{{{base},"payload":"MQ=="}}]"#), "delayMs is required"),
            (format!(r#"[{{{base},"payload":"MQ==","delayMs":1.5}}]"#), "delayMs"),
            (format!(r#"[{{{base},"payload":"*","delayMs":1}}]"#), "payload"),
            (format!(r#"[{{{base},"payload":"eA==","delayMs":1}}]"#), "JSON"),
            (format!(r#"[{{{base},"payload":"MQ==","delayMs":1,"payloadZstd":true}}]"#), "zstd"),
            (format!(r#"[{{{base},"payload":"MQ==","delayMs":1,"messageId":"x"}}]"#), "messageId"),
            (format!(r#"[{{{base},"payload":"MQ==","delayMs":1,"_x":1}}]"#), "_x"),
            (r#"[{"op":"schedule","queue":"q","timerKey":"k","payload":"MQ==","delayMs":1}]"#.to_owned(), "txn"),
            (r#"[{"op":"cancel","queue":"q","timerKey":""}]"#.to_owned(), "timerKey"),
            (r#"[{"op":"cancel","queue":"q","timerKey":"k","delayMs":1}]"#.to_owned(), "delayMs"),
            (r#"[{"op":"other","queue":"q","timerKey":"k"}]"#.to_owned(), "op: must be"),
        ] {
            let error = refused(&op);
            assert!(matches!(error, Error::BadBody(_)), "{op}: {error:?}");
            assert!(error.to_string().contains("operations[0]") && error.to_string().contains(words), "{op}: {error}");
        }
    }

    #[test]
    fn calls_are_bounded() {
        let cancels = |count: usize| {
            let cancel = |n: usize| format!(r#"{{"op":"cancel","queue":"q","timerKey":"{n}"}}"#);
            format!("[{}]", (0..count).map(cancel).collect::<Vec<_>>().join(","))
        };
        assert!(drafts(&serde_json::from_str::<Vec<&RawValue>>(&cancels(256)).expect("a list")).is_ok());
        refused(&cancels(257));
        refused("[]");
        let far = r#"[{"op":"schedule","queue":"q","timerKey":"k","txn":"t","payload":"MQ==","delayMs":7776000001}]"#;
        assert!(matches!(refused(far), Error::HorizonExceeded(_)));
        let large = format!(
            r#"[{{"op":"schedule","queue":"q","timerKey":"k","txn":"t","delayMs":0,"payload":"{}"}}]"#,
            BASE64_STANDARD.encode(vec![b'1'; (1 << 20) + 1])
        );
        assert!(matches!(refused(&large), Error::TooLarge(_)));
    }
}
