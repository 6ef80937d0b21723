//! Dead letters become messages again: each pushed under a new transaction id and deleted, in one transaction.

use std::borrow::Cow;
use std::collections::BTreeMap;

use uuid::Uuid;

use crate::db::Conn;
use crate::db::dead_letter_admin::{Replay, Replayable, log_dlq_letters_v1, log_dlq_of_message_v1, log_dlq_replay_v1};
use crate::error::Error;
use crate::http::App;
use crate::http::retry::retried;
use crate::id::PartitionId;
use crate::seal::Sealer;
use crate::segment::{Frame, Packer, new_message_id};

/// A message that was a dead letter.
pub(in crate::http) struct Replayed {
    pub(in crate::http) queue: String,
    pub(in crate::http) partition: String,
    /// Its transaction id too.
    pub(in crate::http) message_id: Uuid,
}

/// What one step did.
#[derive(Default)]
pub(in crate::http) struct Step {
    pub(in crate::http) messages: Vec<Replayed>,
    /// Dead letters that were deleted: several, where several groups gave up the same message.
    pub(in crate::http) letters: usize,
    /// How many of the ids are dealt with, from the front; some may have been gone already.
    pub(in crate::http) ids: usize,
}

/// Replays from the front of `ids` until `bytes` of payload are reached.
///
/// # Errors
/// [`Error::Conflict`] if a message of theirs has no payload, or whatever the database answers; nothing was
/// replayed then.
pub(in crate::http) async fn step(app: &App, conn: &Conn, ids: &[Uuid], bytes: i64) -> Result<Step, Error> {
    retried(|| attempt(app, conn, ids, bytes)).await
}

/// Reads the letters anew: whoever won the race may have taken some of them.
async fn attempt(app: &App, conn: &Conn, ids: &[Uuid], bytes: i64) -> Result<Step, Error> {
    let letters = log_dlq_letters_v1(conn, ids, bytes).await?;
    let Some(last) = letters.iter().map(|letter| letter.ordinal).max() else {
        return Ok(Step { ids: ids.len(), ..Step::default() });
    };
    let step = commit(app, conn, letters).await?;
    Ok(Step { ids: usize::try_from(last).expect("a position, from 1"), ..step })
}

/// Replays the message that was filed last with a transaction id, for every group that gave it up.
///
/// # Errors
/// [`Error::NotFound`] without a dead letter; else as [`step`].
pub(in crate::http) async fn message(
    app: &App, conn: &Conn, partition_id: PartitionId, transaction_id: &str,
) -> Result<Step, Error> {
    let ids = log_dlq_of_message_v1(conn, partition_id, transaction_id).await?;
    let step = step(app, conn, &ids, i64::MAX).await?;
    if step.messages.is_empty() {
        return Err(Error::NotFound("Dead letter not found".to_owned()));
    }
    Ok(step)
}

async fn commit(app: &App, conn: &Conn, letters: Vec<Replayable>) -> Result<Step, Error> {
    let level = app.settings.push.zstd_level;
    let sealer = app.settings.sealer.clone();
    let count = letters.len();
    let (replay, messages) = tokio::task::spawn_blocking(move || packed(&letters, level, &sealer))
        .await
        .expect("packing does not panic and is not aborted")?;
    log_dlq_replay_v1(conn, &replay).await?;
    let mut pushed_by_queue: BTreeMap<&str, u64> = BTreeMap::new();
    for message in &messages {
        app.wake.pushed(&message.queue, &message.partition);
        *pushed_by_queue.entry(&message.queue).or_default() += 1;
    }
    pushed_by_queue.iter().for_each(|(queue, pushed)| app.telemetry.pushed(queue, *pushed));
    Ok(Step { messages, letters: count, ids: 0 })
}

/// One segment a partition, its messages in the order in which they were first pushed. `letters` are in that order.
fn packed(letters: &[Replayable], level: i32, sealer: &Sealer) -> Result<(Replay, Vec<Replayed>), Error> {
    let mut packer = Packer::new(level);
    let mut replay = Replay { letters: letters.iter().map(|letter| letter.id).collect(), ..Replay::default() };
    let mut messages = Vec::with_capacity(letters.len());
    for of_partition in letters.chunk_by(|a, b| a.partition_id == b.partition_id) {
        // An offset below 0 is that of a message that never had one.
        let restored: Vec<Restored<'_>> = of_partition
            .chunk_by(|a, b| a.offset == b.offset && 0 <= a.offset)
            .map(|of_message| Restored::new(of_message, sealer))
            .collect::<Result<_, _>>()?;
        let segment = packer.pack(restored.iter().map(Restored::frame))?;
        replay.partition_ids.push(of_partition[0].partition_id);
        replay.counts.push(segment.count);
        replay.hashes.push(segment.hashes);
        replay.blobs.push(segment.blob);
        // What was sealed stays so, also in a queue that does not want it any more; that is not compared.
        let are_clear = restored.iter().all(|message| !message.is_sealed);
        let queue_is_encrypted = of_partition[0].queue_is_encrypted;
        replay.sealed.push((sealer.has_key() && (are_clear || queue_is_encrypted)).then_some(queue_is_encrypted));
        messages.extend(restored.into_iter().map(|message| Replayed {
            queue: of_partition[0].queue.clone(),
            partition: of_partition[0].partition.clone(),
            message_id: message.id,
        }));
    }
    Ok((replay, messages))
}

/// A message made of a dead letter.
struct Restored<'a> {
    id: Uuid,
    transaction_id: String,
    letter: &'a Replayable,
    payload: Cow<'a, [u8]>,
    is_sealed: bool,
}

impl<'a> Restored<'a> {
    /// `of_message` are the letters of one message. A sealed payload is sealed again, for the new id.
    fn new(of_message: &'a [Replayable], sealer: &Sealer) -> Result<Self, Error> {
        let id = new_message_id();
        let with_payload = of_message.iter().find_map(|letter| Some((letter, letter.payload.as_deref()?.as_bytes())));
        let (letter, stored) = with_payload.ok_or_else(|| {
            Error::Conflict("its payload was lost before it was filed: there is nothing to push".to_owned())
        })?;
        let clear = if letter.is_encrypted {
            Cow::Owned(sealer.open(letter.message_id.unwrap_or_default(), stored)?)
        } else {
            Cow::Borrowed(stored)
        };
        let wants_seal = letter.is_encrypted || letter.queue_is_encrypted;
        let sealed = if wants_seal { sealer.seal(id, &clear) } else { None };
        let is_sealed = sealed.is_some();
        Ok(Self { id, transaction_id: id.to_string(), letter, payload: sealed.map_or(clear, Cow::Owned), is_sealed })
    }

    fn frame(&self) -> Frame<'_> {
        Frame {
            message_id: self.id,
            trace_id: self.letter.trace_id,
            transaction_id: &self.transaction_id,
            producer: self.letter.producer.as_deref(),
            is_encrypted: self.is_sealed,
            payload: &self.payload,
        }
    }
}
