//! Twins of `sql/procedures/transaction.sql`.

use serde::Deserialize;
use serde_json::{Value, json};
use tokio_postgres::types::{Json, Type};

use super::Sql;
use super::ack::{Acked, Batch, TransactionHash};
use super::dead_letters::Letter;
use super::{kv, timers};
use crate::error::Error;
use crate::id::{Offset, PartitionId};

/// Messages for one partition, packed. No two pushes of a transaction name the same partition.
pub struct Push {
    pub queue: String,
    pub partition: String,
    /// The segment.
    pub blob: Vec<u8>,
    /// 16 bytes a message, in frame order.
    pub hashes: Vec<u8>,
    pub count: i32,
    /// Whether the payloads are encrypted; `None` where that is not compared with the queue.
    pub sealed: Option<bool>,
    /// In frame order; one of them is named if it is stored already.
    pub transaction_ids: Vec<String>,
}

/// Acknowledgements for one cursor.
pub struct Ack {
    pub partition_id: PartitionId,
    pub group: String,
    /// Leases of which the cursor's must be one. Empty checks none.
    pub workers: Vec<String>,
    pub batch: Batch,
    /// In the order of the batch; one of them is named if it is unknown.
    pub transaction_ids: Vec<String>,
}

/// Everything that is to happen, or nothing of it.
#[derive(Default)]
pub struct Transaction {
    pub pushes: Vec<Push>,
    pub acks: Vec<Ack>,
    /// What was asked for by [`Error::LettersNeeded`], each with the position of its [`Ack`].
    pub letters: Vec<(usize, Letter)>,
    pub kv: Vec<kv::Op>,
    pub timers: Vec<timers::Op>,
}

/// One entry of [`Error::LettersNeeded`].
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct LetterNeeded {
    /// Position in [`Transaction::acks`].
    pub ack: usize,
    pub offset: Offset,
    pub hash: TransactionHash,
}

/// What became of a committed transaction's operations, in their order.
#[derive(Deserialize)]
pub struct Committed {
    pub acks: Vec<Acked>,
    pub kv: Vec<kv::Done>,
    pub timers: Vec<timers::Done>,
}

/// `queen.log_transaction_wire_v1`
///
/// # Errors
/// [`Error::Duplicate`], [`Error::AckRejected`], [`Error::LettersNeeded`], [`Error::KvUnmet`], [`Error::Paused`], or whatever else the
/// database answers. Nothing happened then.
pub async fn log_transaction_wire_v1(db: &(impl Sql + Sync), transaction: &Transaction) -> Result<Committed, Error> {
    let request = wire(transaction);
    let query = "select queen.log_transaction_wire_v1($1)";
    let row = db.row(query, &[(&Json(&request), Type::JSONB)]).await?;
    let Json(committed) = row.try_get(0)?;
    Ok(committed)
}

fn wire(transaction: &Transaction) -> Value {
    let pushes = transaction.pushes.iter().map(|push| {
        json!({
            "queue": push.queue,
            "partition": push.partition,
            "count": push.count,
            "hashes": hex(&push.hashes),
            "blob": hex(&push.blob),
            "sealed": push.sealed,
            "transactionIds": push.transaction_ids,
        })
    });
    let acks = transaction.acks.iter().map(|ack| {
        json!({
            "partitionId": ack.partition_id.0,
            "group": ack.group,
            "workers": ack.workers,
            "hashes": hex(&ack.batch.hashes),
            "statuses": ack.batch.statuses,
            "transactionIds": ack.transaction_ids,
        })
    });
    let letters = transaction.letters.iter().map(|(ack, letter)| {
        let ack = &transaction.acks[*ack];
        json!({
            "partitionId": ack.partition_id.0,
            "group": ack.group,
            "offset": letter.offset,
            "messageId": letter.message_id,
            "transactionId": letter.transaction_id,
            "payload": letter.payload,
            "error": letter.error,
            "traceId": letter.trace_id,
            "producer": letter.producer,
            "isEncrypted": letter.is_encrypted,
        })
    });
    json!({
        "pushes": pushes.collect::<Vec<_>>(),
        "acks": acks.collect::<Vec<_>>(),
        "letters": letters.collect::<Vec<_>>(),
        "kv": transaction.kv.iter().map(kv::Op::wire).collect::<Vec<_>>(),
        "kvBytes": kv::READ_BYTES_MAX,
        "timers": transaction.timers.iter().map(timers::Op::wire).collect::<Vec<_>>(),
    })
}

pub(super) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn hexadecimal_has_two_digits_a_byte() {
        assert_eq!(super::hex(&[0, 9, 0xA5, 0xFF]), "0009a5ff");
    }
}
