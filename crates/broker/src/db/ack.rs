//! Twins of `sql/procedures/ack.sql`.

use std::collections::HashSet;

use serde::{Deserialize, Deserializer};
use tokio_postgres::types::{Json, Type};

use super::Sql;
use crate::error::Error;
use crate::id::{Offset, PartitionId};

const HASH_BYTES: usize = 16;

/// A transaction id as the sidecar knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransactionHash(pub [u8; HASH_BYTES]);

impl<'de> Deserialize<'de> for TransactionHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match u128::from_str_radix(&text, 16) {
            Ok(number) if text.len() == 2 * HASH_BYTES => Ok(Self(number.to_be_bytes())),
            _ => Err(serde::de::Error::custom("a hash has 32 hexadecimal digits")),
        }
    }
}

/// What became of a message, as its consumer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Completed,
    /// Give it back and charge no failure.
    Retry,
    Failed,
    /// Dead-letter it at once.
    Dlq,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Retry => "retry",
            Self::Failed => "failed",
            Self::Dlq => "dlq",
        }
    }
}

/// The acknowledgements for one leased batch. They are carried out together.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// 16 bytes a message.
    pub hashes: Vec<u8>,
    /// One per message, joined by commas.
    pub statuses: String,
    completed: u64,
}

impl Batch {
    pub fn add(&mut self, hash: TransactionHash, status: Status) {
        if !self.hashes.is_empty() {
            self.statuses.push(',');
        }
        self.hashes.extend_from_slice(&hash.0);
        self.statuses.push_str(status.as_str());
        self.completed += u64::from(status == Status::Completed);
    }

    /// How many of them say that their message is done.
    pub fn completed(&self) -> u64 {
        self.completed
    }
}

/// Whose cursor a batch moves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    pub partition_id: PartitionId,
    pub group: String,
    /// The lease that must be held; empty checks none.
    pub worker: String,
}

/// What became of a batch.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Acked {
    pub success: bool,
    pub error: Option<String>,
    pub lease_released: bool,
    /// The message at `offset` waits to be filed as a dead letter, or was filed by a transaction.
    pub dlq: bool,
    pub offset: Option<Offset>,
    pub hash: Option<TransactionHash>,
    #[serde(default)]
    pub noop_hashes: HashSet<TransactionHash>,
    #[serde(default)]
    pub stale_hashes: HashSet<TransactionHash>,
    #[serde(default)]
    pub unresolved_hashes: HashSet<TransactionHash>,
    /// Signals for messages that retention has deleted.
    #[serde(default)]
    pub gone_hashes: HashSet<TransactionHash>,
    /// Where the log begins, if that is behind the start of the batch.
    pub log_start: Option<Offset>,
    pub wake: Option<Lane>,
}

/// Where another pop of the group may find something.
#[derive(Clone, Debug, Deserialize)]
pub struct Lane {
    pub queue: String,
    pub partition: String,
}

/// `queen.log_ack_by_hash_multi_v1`
///
/// # Errors
/// Whatever the database answers; nothing was acknowledged then.
pub async fn log_ack_by_hash_multi_v1(
    db: &(impl Sql + Sync), batches: &[(&Target, &Batch)],
) -> Result<Vec<Acked>, Error> {
    let pids: Vec<uuid::Uuid> = batches.iter().map(|(target, _)| target.partition_id.0).collect();
    let groups: Vec<&str> = batches.iter().map(|(target, _)| target.group.as_str()).collect();
    let workers: Vec<&str> = batches.iter().map(|(target, _)| target.worker.as_str()).collect();
    let hashes: Vec<&[u8]> = batches.iter().map(|(_, batch)| batch.hashes.as_slice()).collect();
    let statuses: Vec<&str> = batches.iter().map(|(_, batch)| batch.statuses.as_str()).collect();
    let query = "select queen.log_ack_by_hash_multi_v1($1, $2, $3, $4, $5)";
    let row = db
        .row(
            query,
            &[
                (&pids, Type::UUID_ARRAY),
                (&groups, Type::TEXT_ARRAY),
                (&workers, Type::TEXT_ARRAY),
                (&hashes, Type::BYTEA_ARRAY),
                (&statuses, Type::TEXT_ARRAY),
            ],
        )
        .await?;
    let Json(acked) = row.try_get(0)?;
    Ok(acked)
}
