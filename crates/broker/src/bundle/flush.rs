//! One bundle from packing to its answers.

mod sealing;

use std::sync::Arc;

use jiff::Timestamp;
use metrics::{counter, histogram};
use tokio::time::Instant;
use tracing::debug;
use uuid::Uuid;

use super::queue::{Taken, Waiting};
use super::{Answer, Failure, Group, Message, Outcome, Shared, load};
use crate::db::Conn;
use crate::db::push::{Batch, Pushed, Written, log_provision_v1, log_push_batch_v1, log_segment_at_v1};
use crate::dedup::Hint;
use crate::error::Error;
use crate::id::{Offset, PartitionId, PartitionName};
use crate::segment::{Frame, Packed, Packer, Segment, new_message_id};

/// How long a bundle waits for the lock of any of its partitions before it is split.
const LOCK_MS: i32 = 20;
/// Tries after a lost race: a partition deleted under the push, or a deadlock.
const ATTEMPTS_MAX: usize = 5;

/// A partition in flight. However it ends, the partition's next groups may go.
struct Flight {
    shared: Arc<Shared>,
    name: PartitionName,
    groups: Vec<Waiting>,
    /// Of every message of every group, in order.
    outcomes: Vec<Option<Outcome>>,
    is_sealed: bool,
}

impl Drop for Flight {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.land(&self.name);
        self.shared.start_lanes(&mut queue);
    }
}

impl Flight {
    fn messages(&self) -> impl Iterator<Item = &Message> {
        self.groups.iter().flat_map(|group| &group.messages)
    }

    /// What the database compares with the queue: without a key there is no choice.
    fn sealed(&self) -> Option<bool> {
        self.shared.sealing.sealer().has_key().then_some(self.is_sealed)
    }

    fn answer(mut self) {
        let mut outcomes = std::mem::take(&mut self.outcomes).into_iter();
        for group in self.groups.drain(..) {
            let of_group = outcomes.by_ref().take(group.messages.len());
            let answer: Vec<Outcome> = of_group.map(|o| o.expect("every message has come to an end")).collect();
            reply(group, Ok(answer));
        }
    }

    fn fail(mut self, error: &Arc<Error>) {
        for mut group in self.groups.drain(..) {
            let messages = std::mem::take(&mut group.messages);
            let given = Group { name: self.name.clone(), messages };
            reply(group, Err(Failure { error: error.clone(), group: Some(given) }));
        }
    }

    /// Gives each message that has no outcome its id, and says which ones those are. Called in offset order and with
    /// the partition in flight, so that ids sort along the partition.
    fn mint(&mut self) -> Vec<(usize, Uuid)> {
        let messages = self.groups.iter_mut().flat_map(|group| &mut group.messages);
        let open = messages.enumerate().filter(|(position, _)| self.outcomes[*position].is_none());
        open.map(|(position, message)| (position, *message.id.get_or_insert_with(new_message_id))).collect()
    }
}

/// Nobody may be waiting any more; what was stored is stored.
fn reply(group: Waiting, answer: Answer) {
    let _ = group.reply.send(answer);
}

/// A segment to be written: the messages of a flight that have no outcome yet.
struct Element {
    flight: Flight,
    packed: Packed,
    /// Position among the flight's messages, and the message id, of each frame.
    frames: Vec<(usize, Uuid)>,
    hint: Hint,
    /// As hinted, or as made.
    partition_id: Option<PartitionId>,
}

impl Element {
    fn id(&self) -> PartitionId {
        self.partition_id.expect("resolved before it was written")
    }
}

pub(super) struct Flush<'a> {
    shared: &'a Arc<Shared>,
    flights: Vec<Flight>,
}

impl<'a> Flush<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>, taken: Vec<Taken>) -> Self {
        let flight = |Taken { name, groups }| {
            let count = groups.iter().map(|group: &Waiting| group.messages.len()).sum();
            Flight { shared: shared.clone(), name, groups, outcomes: vec![None; count], is_sealed: false }
        };
        Self { shared, flights: taken.into_iter().map(flight).collect() }
    }

    pub(super) async fn run(mut self, packer: &mut Packer) {
        let started = Instant::now();
        if let Err(error) = sealing::settle(self.shared, &mut self.flights).await {
            let error = Arc::new(error);
            return self.flights.into_iter().for_each(|flight| flight.fail(&error));
        }
        let mut elements: Vec<Element> = self.flights.into_iter().filter_map(|flight| pack(flight, packer)).collect();
        counter!("ebbtide_push_bundles_total").increment(1);
        counter!("ebbtide_push_segments_total").increment(elements.len() as u64);
        match write(self.shared, &mut elements, Some(LOCK_MS), packer).await {
            Ok(pushed) => finish(self.shared, elements, pushed, packer).await,
            Err(error) if is_worth_splitting(&error) => split(self.shared, elements, packer, error).await,
            Err(error) => fail(elements, error),
        }
        histogram!("ebbtide_push_flush_seconds").record(started.elapsed().as_secs_f64());
    }
}

/// Makes the segment of what has no outcome yet. `None` if the flight ended here.
fn pack(mut flight: Flight, packer: &mut Packer) -> Option<Element> {
    let frames = flight.mint();
    match segment(&flight, &frames, packer) {
        Ok(packed) => {
            let hint = flight.shared.index.hint(&flight.name, &packed.hashes);
            Some(Element { flight, packed, frames, partition_id: hint.partition_id, hint })
        }
        Err(error) => {
            flight.fail(&Arc::new(error));
            None
        }
    }
}

/// Packs the messages of a flight that `frames` names, sealed if the queue wants it.
fn segment(flight: &Flight, frames: &[(usize, Uuid)], packer: &mut Packer) -> Result<Packed, Error> {
    let all: Vec<&Message> = flight.messages().collect();
    let messages = frames.iter().map(|(position, id)| (all[*position], *id));
    let minted: Vec<Option<String>> =
        messages.clone().map(|(message, id)| message.transaction_id.is_none().then(|| id.to_string())).collect();
    let sealer = flight.shared.sealing.sealer();
    let sealed: Vec<Vec<u8>> = if flight.is_sealed {
        messages
            .clone()
            .map(|(message, id)| sealer.seal(id, &message.payload).expect("wanted only with a key"))
            .collect()
    } else {
        Vec::new()
    };
    packer.pack(messages.zip(&minted).enumerate().map(|(index, ((message, message_id), minted))| Frame {
        message_id,
        trace_id: message.trace_id,
        transaction_id: message.transaction_id.as_ref().or(minted.as_ref()).expect("given or minted"),
        producer: message.producer.as_deref(),
        is_encrypted: flight.is_sealed,
        payload: sealed.get(index).map_or(&message.payload, Vec::as_slice),
    }))
}

/// One call for all of `elements`. A lost race is tried again, with the partitions made anew.
async fn write(
    shared: &Shared, elements: &mut [Element], lock_ms: Option<i32>, packer: &mut Packer,
) -> Result<(Vec<Pushed>, Timestamp), Error> {
    let conn = shared.db.conn().await?;
    let mut attempt = 1;
    loop {
        let error = match write_once(&conn, elements, lock_ms).await {
            Err(error @ (Error::Retryable(_) | Error::ForeignKey | Error::EncryptionChanged))
                if attempt < ATTEMPTS_MAX =>
            {
                error
            }
            result => return result,
        };
        debug!(target: "http", %error, attempt, "push lost a race");
        if matches!(error, Error::EncryptionChanged) {
            sealing::pack_anew(shared, &conn, elements, packer).await?;
        }
        for element in &mut *elements {
            element.partition_id = None;
        }
        attempt += 1;
    }
}

async fn write_once(
    conn: &Conn, elements: &mut [Element], lock_ms: Option<i32>,
) -> Result<(Vec<Pushed>, Timestamp), Error> {
    let unknown: Vec<&mut Element> = elements.iter_mut().filter(|element| element.partition_id.is_none()).collect();
    if !unknown.is_empty() {
        let queues: Vec<&str> = unknown.iter().map(|element| element.flight.name.queue()).collect();
        let partitions: Vec<&str> = unknown.iter().map(|element| element.flight.name.partition()).collect();
        let ids = log_provision_v1(conn, &queues, &partitions).await?;
        for (element, id) in unknown.into_iter().zip(ids) {
            element.partition_id = id;
        }
    }
    let ids: Option<Vec<PartitionId>> = elements.iter().map(|element| element.partition_id).collect();
    let ids = ids.ok_or_else(|| Error::Retryable("a partition was deleted as it was made".to_owned()))?;
    log_push_batch_v1(conn, &batch(elements, &ids), lock_ms).await
}

fn batch<'a>(elements: &'a [Element], ids: &[PartitionId]) -> Batch<'a> {
    let each = elements.iter();
    // What the index vouches for is of the partition that it knew.
    let verified = |(element, id): (&Element, &PartitionId)| {
        if element.hint.partition_id == Some(*id) { element.hint.verified } else { -1 }
    };
    Batch {
        partition_ids: ids.iter().map(|id| id.0).collect(),
        counts: each.clone().map(|element| element.packed.count).collect(),
        hashes: each.clone().map(|element| element.packed.hashes.as_slice()).collect(),
        blobs: each.clone().map(|element| element.packed.blob.as_slice()).collect(),
        verified: each.clone().zip(ids).map(verified).collect(),
        windows: each.clone().map(|element| element.hint.window_seconds).collect(),
        sealed: each.map(|element| element.flight.sealed()).collect(),
    }
}

/// Whether an element may fare better without the others. When the database is away, none does.
fn is_worth_splitting(error: &Error) -> bool {
    !error.is_away()
}

/// Pushes the partitions of a failed bundle one by one. One whose lock is slow waits in a task of its own.
async fn split(shared: &Arc<Shared>, elements: Vec<Element>, packer: &mut Packer, error: Error) {
    counter!("ebbtide_push_splits_total").increment(1);
    let is_lock = matches!(error, Error::LockTimeout);
    if elements.len() == 1 && !is_lock {
        return fail(elements, error);
    }
    for element in elements {
        let mut alone = vec![element];
        match write(shared, &mut alone, Some(LOCK_MS), packer).await {
            Ok(pushed) => finish(shared, alone, pushed, packer).await,
            Err(Error::LockTimeout) => {
                tokio::spawn(wait_for_lock(shared.clone(), alone));
            }
            Err(error) => fail(alone, error),
        }
    }
}

async fn wait_for_lock(shared: Arc<Shared>, mut elements: Vec<Element>) {
    let _permit = shared.patient().acquire().await.expect("never closed");
    let mut packer = shared.packer();
    match write(&shared, &mut elements, None, &mut packer).await {
        Ok(pushed) => finish(&shared, elements, pushed, &mut packer).await,
        Err(error) => fail(elements, error),
    }
    shared.keep_packer(packer);
}

fn fail(elements: Vec<Element>, error: Error) {
    let error = Arc::new(error);
    for element in elements {
        element.flight.fail(&error);
    }
}

/// Answers what was written; pushes again what shared a segment with a duplicate.
async fn finish(
    shared: &Arc<Shared>, elements: Vec<Element>, (pushed, stamp): (Vec<Pushed>, Timestamp), packer: &mut Packer,
) {
    assert_eq!(elements.len(), pushed.len(), "one answer an element");
    let mut with_duplicates = Vec::new();
    let stored = elements.iter().zip(&pushed).filter(|(_, pushed)| matches!(pushed.written, Written::Base(_)));
    counter!("ebbtide_messages_pushed_total").increment(stored.map(|(element, _)| element.frames.len() as u64).sum());
    for (element, pushed) in elements.into_iter().zip(pushed) {
        match pushed.written {
            Written::Base(base) => written(shared, element, &pushed, base, stamp),
            Written::Duplicates(duplicates) => with_duplicates.push((element, duplicates)),
        }
    }
    for (element, duplicates) in with_duplicates {
        without_duplicates(shared, element, duplicates, packer).await;
    }
}

fn written(shared: &Arc<Shared>, element: Element, pushed: &Pushed, base: Offset, stamp: Timestamp) {
    let partition_id = element.id();
    let Element { mut flight, packed, frames, .. } = element;
    let stored = Some((base, packed.hashes.as_slice(), stamp));
    if let Some(load) = shared.index.record(&flight.name, partition_id, pushed.window_seconds, stored) {
        tokio::spawn(load::load(shared.clone(), load));
    }
    for (position, id) in frames {
        flight.outcomes[position] = Some(Outcome::Queued(id));
    }
    (shared.on_stored)(&flight.name);
    flight.answer();
}

/// Each round ends at least one message as a duplicate, so there are no more rounds than messages.
async fn without_duplicates(
    shared: &Arc<Shared>, mut element: Element, mut duplicates: Vec<(usize, Offset)>, packer: &mut Packer,
) {
    loop {
        assert!(!duplicates.is_empty(), "an element is refused for its duplicates");
        let ids = originals(shared, element.id(), &duplicates).await;
        let Element { mut flight, frames, .. } = element;
        match ids {
            Ok(ids) => {
                counter!("ebbtide_push_duplicates_total").increment(ids.len() as u64);
                for ((index, _), id) in duplicates.iter().zip(ids) {
                    flight.outcomes[frames[*index].0] = Some(Outcome::Duplicate(id));
                }
            }
            Err(error) => return flight.fail(&Arc::new(error)),
        }
        if flight.outcomes.iter().all(Option::is_some) {
            return flight.answer();
        }
        let Some(rest) = pack(flight, packer) else { return };
        let mut rest = [rest];
        let result = write(shared, &mut rest, None, packer).await;
        [element] = rest;
        let (pushed, stamp) = match result {
            Ok((mut pushed, stamp)) => (pushed.pop().expect("one answer an element"), stamp),
            Err(error) => return element.flight.fail(&Arc::new(error)),
        };
        match pushed.written {
            Written::Base(base) => {
                counter!("ebbtide_messages_pushed_total").increment(element.frames.len() as u64);
                return written(shared, element, &pushed, base, stamp);
            }
            Written::Duplicates(more) => duplicates = more,
        }
    }
}

/// The ids of the messages at `duplicates`' offsets, in that order; all-zero where retention was faster.
async fn originals(
    shared: &Shared, partition_id: PartitionId, duplicates: &[(usize, Offset)],
) -> Result<Vec<Uuid>, Error> {
    let conn = shared.db.conn().await?;
    let mut unpacked: Option<(Offset, Segment)> = None;
    let mut ids = Vec::with_capacity(duplicates.len());
    for &(_, offset) in duplicates {
        let in_segment = |(base, segment): &(Offset, Segment)| {
            let index = usize::try_from(offset - base).ok()?;
            segment.frame(index).map(|frame| frame.message_id)
        };
        let mut id = unpacked.as_ref().and_then(in_segment);
        if id.is_none()
            && let Some(stored) = log_segment_at_v1(&conn, partition_id, offset).await?
        {
            unpacked = Some((stored.base_offset, Segment::unpack(&stored.blob)?));
            id = unpacked.as_ref().and_then(in_segment);
        }
        ids.push(id.unwrap_or(Uuid::nil()));
    }
    Ok(ids)
}
