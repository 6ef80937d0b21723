//! The spool's format: the messages of one request for one partition ⇄ bytes, each record with its length and checksum.
//!
//! A file is a header and records, one after the other, with all integers little-endian:
//!
//! ```text
//! "EBBTIDE spool 1\n" { body length u32 │ CRC-32 of the body u32 │ body }
//! body:    flags u8 │ u16 + queue │ u16 + partition │ count u32 { message }
//! message: flags u8 │ message id 16 │ [trace id 16] │ u16 + transaction id │ [u16 + producer] │ u32 + payload
//! ```

use std::sync::Arc;

use bytes::Bytes;
use uuid::Uuid;

use crate::bundle::{Group, Message};
use crate::id::PartitionName;
use crate::seal::Sealer;
use crate::segment::new_message_id;

pub(super) const HEADER: &[u8; 16] = b"EBBTIDE spool 1\n";
/// Length and checksum.
pub(super) const PREFIX_BYTES: usize = 8;

/// The payloads are sealed, each under its message's id.
const IS_SEALED: u8 = 1;
const HAS_TRACE: u8 = 1;
const HAS_PRODUCER: u8 = 2;

/// What one record holds.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) group: Group,
    pub(super) is_sealed: bool,
}

/// Gives the messages that have none their ids, a transaction id included, and appends their record to `out`.
pub(super) fn put(out: &mut Vec<u8>, group: &mut Group, sealer: &Sealer) {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX_BYTES]);
    out.push(if sealer.has_key() { IS_SEALED } else { 0 });
    put_text(out, group.name.queue());
    put_text(out, group.name.partition());
    put_length(out, group.messages.len());
    for message in &mut group.messages {
        let id = *message.id.get_or_insert_with(new_message_id);
        let transaction_id = message.transaction_id.get_or_insert_with(|| id.to_string());
        let has = |is_there, flag| if is_there { flag } else { 0 };
        out.push(has(message.trace_id.is_some(), HAS_TRACE) | has(message.producer.is_some(), HAS_PRODUCER));
        out.extend_from_slice(id.as_bytes());
        message.trace_id.iter().for_each(|trace| out.extend_from_slice(trace.as_bytes()));
        put_text(out, transaction_id);
        message.producer.iter().for_each(|producer| put_text(out, producer));
        let sealed = sealer.seal(id, &message.payload);
        let payload = sealed.as_deref().unwrap_or(&message.payload);
        put_length(out, payload.len());
        out.extend_from_slice(payload);
    }
    let body = &out[start + PREFIX_BYTES..];
    let prefix = (u32::try_from(body.len()).expect("a request is far shorter"), crc32fast::hash(body));
    out[start..start + 4].copy_from_slice(&prefix.0.to_le_bytes());
    out[start + 4..start + PREFIX_BYTES].copy_from_slice(&prefix.1.to_le_bytes());
}

fn put_length(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&u32::try_from(length).expect("a request is far shorter").to_le_bytes());
}

/// Names and transaction ids were checked to be shorter; a token's subject is shorter than a header.
fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&u16::try_from(text.len()).expect("checked at the edge").to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The body of the record at the start of `bytes`; `None` if it is cut off or altered.
pub(super) fn body(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let body = rest.get(..usize::try_from(u32::from_le_bytes(*length)).ok()?)?;
    // Zeros, as a file system may leave them behind a crash, have the right checksum of nothing.
    (!body.is_empty() && crc32fast::hash(body) == u32::from_le_bytes(*sum)).then_some(body)
}

impl Record {
    /// `None` if `body` is not in this format, in spite of its checksum.
    pub(super) fn read(body: &Bytes) -> Option<Self> {
        let mut reader = Reader { whole: body, rest: body };
        let flags = reader.byte()?;
        let queue = reader.text()?;
        let name = PartitionName::new(queue, reader.text()?);
        let count = reader.length()?;
        let mut messages = Vec::with_capacity(count.min(body.len() / 16));
        for _ in 0..count {
            messages.push(reader.message()?);
        }
        let is_whole = reader.rest.is_empty() && !messages.is_empty();
        is_whole.then_some(Self { group: Group { name, messages }, is_sealed: flags & IS_SEALED != 0 })
    }

    /// The queue, and how many messages there are, without reading those.
    pub(super) fn summary(body: &[u8]) -> Option<(&str, usize)> {
        let nothing = Bytes::new();
        let mut reader = Reader { whole: &nothing, rest: body };
        reader.byte()?;
        let queue = reader.text()?;
        reader.text()?;
        Some((queue, reader.length()?))
    }
}

struct Reader<'w, 'a> {
    whole: &'w Bytes,
    rest: &'a [u8],
}

impl<'a> Reader<'_, 'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }

    fn length(&mut self) -> Option<usize> {
        let bytes = self.take(4)?.first_chunk::<4>()?;
        usize::try_from(u32::from_le_bytes(*bytes)).ok()
    }

    fn text(&mut self) -> Option<&'a str> {
        let length = u16::from_le_bytes(*self.take(2)?.first_chunk::<2>()?);
        std::str::from_utf8(self.take(usize::from(length))?).ok()
    }

    fn uuid(&mut self) -> Option<Uuid> {
        Uuid::from_slice(self.take(16)?).ok()
    }

    fn message(&mut self) -> Option<Message> {
        let flags = self.byte()?;
        let id = self.uuid()?;
        let trace_id = if flags & HAS_TRACE == 0 { None } else { Some(self.uuid()?) };
        let transaction_id = self.text()?.to_owned();
        let producer = if flags & HAS_PRODUCER == 0 { None } else { Some(Arc::from(self.text()?)) };
        let length = self.length()?;
        let payload = self.whole.slice_ref(self.take(length)?);
        Some(Message { id: Some(id), transaction_id: Some(transaction_id), trace_id, producer, payload })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seal::Key;

    fn group() -> Group {
        let message = |transaction_id: Option<&str>, producer: Option<&str>, payload: &'static str| Message {
            id: None,
            transaction_id: transaction_id.map(str::to_owned),
            trace_id: producer.map(|_| Uuid::from_u128(7)),
            producer: producer.map(Arc::from),
            payload: Bytes::from_static(payload.as_bytes()),
        };
        let messages = vec![
            message(Some("t-é"), Some("me"), r#"{"b": 1.0, "a":"\u0000"}"#),
            message(None, None, "null"),
            message(None, None, ""),
        ];
        Group { name: PartitionName::new("orders", "p 1"), messages }
    }

    fn written(sealer: &Sealer) -> (Group, Vec<u8>) {
        let (mut group, mut bytes) = (group(), Vec::new());
        put(&mut bytes, &mut group, sealer);
        (group, bytes)
    }

    #[test]
    fn what_is_written_is_read_byte_for_byte() {
        let (group, bytes) = written(&Sealer::default());
        let body = body(&bytes).expect("whole");
        assert_eq!(Record::summary(body), Some(("orders", 3)));
        let record = Record::read(&Bytes::copy_from_slice(body)).expect("a record");
        assert!(!record.is_sealed);
        assert_eq!(format!("{:?}", record.group), format!("{group:?}"));
        let minted = &group.messages[1];
        assert_eq!(minted.transaction_id, minted.id.map(|id| id.to_string()), "minted with the id");
        assert!(group.messages.is_sorted_by_key(|message| message.id), "ids sort in order");
    }

    #[test]
    fn an_id_of_an_earlier_try_stays() {
        let (mut group, id) = (group(), Uuid::now_v7());
        group.messages[1].id = Some(id);
        put(&mut Vec::new(), &mut group, &Sealer::default());
        assert_eq!(group.messages[1].id, Some(id));
        assert_eq!(group.messages[1].transaction_id, Some(id.to_string()));
    }

    #[test]
    fn with_a_key_no_payload_is_written_in_clear() {
        let sealer = Sealer::new(Some(&Key::from_hex(&"5".repeat(64)).expect("a key")));
        let (group, bytes) = written(&sealer);
        assert!(!String::from_utf8_lossy(&bytes).contains("1.0"));
        let record = Record::read(&Bytes::copy_from_slice(body(&bytes).expect("whole"))).expect("a record");
        assert!(record.is_sealed);
        for (sealed, plain) in record.group.messages.iter().zip(&group.messages) {
            let opened = sealer.open(sealed.id.expect("minted"), &sealed.payload).expect("opens");
            assert_eq!(opened, plain.payload);
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let (_, bytes) = written(&Sealer::default());
        for length in 0..bytes.len() {
            assert!(body(&bytes[..length]).is_none(), "cut at {length}");
        }
        for at in 4..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(body(&changed).is_none(), "byte {at}");
        }
        assert!(body(&[0; 64]).is_none(), "zeros");
    }
}
