//! Replays what is spooled: in order, in bounded batches, and with pauses while the database is away.

use std::collections::HashSet;
use std::time::Duration;

use ebbtide_sweep::{LineLimit, pause};
use metrics::counter;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};
use uuid::Uuid;

use super::disk::Disk;
use super::record::Record;
use super::store::Stored;
use super::{Place, Shared, Spool};
use crate::bundle::{Failure, Group, Message, Outcome};
use crate::error::Error;
use crate::seal::Sealer;

/// The longest pause between two looks for a database that is away.
const PAUSE_LONGEST: Duration = Duration::from_secs(5);
/// How long a look may take.
const LOOK_WAIT: Duration = Duration::from_secs(2);
const LINE_INTERVAL: Duration = Duration::from_secs(30);

/// Records under way. It is kept over failed tries, so that what was stored is not pushed again.
struct Batch {
    /// What is not stored yet, in order.
    left: Vec<Group>,
    /// Queue and messages of each record.
    records: Vec<(String, usize)>,
    /// Behind the last of them.
    end: Place,
    /// Lines for the file of what the database refuses.
    refused: Vec<u8>,
    refused_messages: usize,
}

enum Turn {
    /// Nothing to do until somebody calls.
    Idle,
    Progress,
    /// The database does not answer.
    Away,
    /// It answers, and the replay does not get on.
    Held(Error),
}

/// What is said now and then while something lasts.
struct Lines {
    away: LineLimit,
    held: LineLimit,
    refused: LineLimit,
    was_away: bool,
}

impl Spool {
    /// Replays until `stop`, and finds out whether the database is back when somebody had trouble with it.
    pub async fn replay(self, stop: CancellationToken) {
        let shared = &self.shared;
        let pause_first = shared.disk.as_ref().map_or(LOOK_WAIT, |(_, settings)| settings.pause_first);
        let mut lines = Lines {
            away: LineLimit::new(LINE_INTERVAL),
            held: LineLimit::new(LINE_INTERVAL),
            refused: LineLimit::new(LINE_INTERVAL),
            was_away: false,
        };
        let mut batch = None;
        let mut rest = pause_first;
        while !stop.is_cancelled() {
            let turn = shared.turn(&mut batch, &mut lines).await;
            shared.note(&turn, &mut lines);
            match turn {
                Turn::Progress => rest = pause_first,
                Turn::Idle => {
                    rest = pause_first;
                    let _ = stop.run_until_cancelled(shared.work.notified()).await;
                }
                Turn::Away | Turn::Held(_) => {
                    pause(rest, &stop).await;
                    rest = (rest * 2).min(PAUSE_LONGEST);
                }
            }
        }
    }
}

impl Shared {
    async fn turn(&self, batch: &mut Option<Batch>, lines: &mut Lines) -> Turn {
        let (has_work, is_in_doubt, is_paused) = {
            let state = self.state();
            (state.has_backlog(), state.is_suspect || state.is_away, state.is_paused)
        };
        if is_in_doubt && timeout(LOOK_WAIT, self.db.answers()).await != Ok(true) {
            return Turn::Away;
        }
        let Some((disk, settings)) = self.disk.as_ref().filter(|_| has_work && !is_paused) else {
            self.change(|state| (state.is_away, state.is_suspect, state.held) = (false, false, None));
            return Turn::Idle;
        };
        match self.step(disk, settings.batch_messages, batch, lines).await {
            Ok(true) => Turn::Progress,
            Ok(false) => Turn::Idle,
            Err(error) if error.is_away() => Turn::Away,
            Err(error) => Turn::Held(error),
        }
    }

    /// Tells the pushes and the log how the last turn went.
    fn note(&self, turn: &Turn, lines: &mut Lines) {
        match turn {
            Turn::Idle => {}
            Turn::Progress => {
                self.change(|state| (state.is_away, state.is_suspect, state.held) = (false, false, None));
            }
            Turn::Away => {
                let messages = self.change(|state| {
                    state.is_away = true;
                    state.messages
                });
                if let Some(suppressed) = lines.away.admit() {
                    warn!(target: "spool", messages, suppressed, "the database is away; pushes are spooled");
                }
                lines.was_away = true;
            }
            Turn::Held(reason) => {
                self.change(|state| {
                    state.is_away = false;
                    state.held = Some(reason.to_string());
                });
                if let Some(suppressed) = lines.held.admit() {
                    error!(target: "spool", %reason, suppressed, "the spool is not replayed; pushes of its queues wait behind it");
                }
            }
        }
        self.progress.send_modify(|count| *count += 1);
        if !matches!(turn, Turn::Away) && std::mem::take(&mut lines.was_away) {
            info!(target: "spool", messages = self.state().messages, "the database is back");
        }
    }

    /// Replays one batch. `false` if there was none.
    async fn step(
        &self, disk: &Disk, messages_max: usize, kept: &mut Option<Batch>, lines: &mut Lines,
    ) -> Result<bool, Error> {
        if kept.is_none() {
            *kept = self.batch(disk.next(messages_max).await?)?;
        }
        let Some(batch) = kept else { return Ok(false) };
        while !batch.left.is_empty() {
            self.round(batch, lines).await?;
        }
        disk.advance(batch.end, batch.refused.clone()).await?;
        self.change(|state| {
            batch.records.iter().for_each(|(queue, messages)| state.remove(queue, *messages));
            state.failed += batch.refused_messages;
        });
        *kept = None;
        Ok(true)
    }

    /// Records as they can be pushed: payloads opened, and neighbours of one partition joined.
    fn batch(&self, stored: Vec<Stored>) -> Result<Option<Batch>, Error> {
        let Some(end) = stored.last().map(|stored| stored.end) else { return Ok(None) };
        let records = stored
            .iter()
            .map(|Stored { record: Record { group, .. }, .. }| (group.name.queue().to_owned(), group.messages.len()));
        let records = records.collect();
        let mut left: Vec<Group> = Vec::with_capacity(stored.len());
        for Stored { record, .. } in stored {
            let mut group = record.group;
            if record.is_sealed {
                for message in &mut group.messages {
                    message.payload = self.sealer.open(id(message), &message.payload)?.into();
                }
            }
            match left.iter_mut().rev().find(|earlier| earlier.name == group.name) {
                Some(earlier) if may_join(earlier, &group) => earlier.messages.append(&mut group.messages),
                _ => left.push(group),
            }
        }
        Ok(Some(Batch { left, records, end, refused: Vec::new(), refused_messages: 0 }))
    }

    /// Pushes the first group of each partition.
    async fn round(&self, batch: &mut Batch, lines: &mut Lines) -> Result<(), Error> {
        let (mut now, mut later) = (Vec::new(), Vec::new());
        let mut seen = HashSet::new();
        for group in &batch.left {
            let list = if seen.insert(group.name.clone()) { &mut now } else { &mut later };
            list.push(group.clone());
        }
        let answers = self.bundler.push(now.clone()).await?;
        let mut failure = None;
        let mut again = Vec::new();
        for (group, answer) in now.into_iter().zip(answers) {
            match answer {
                Ok(outcomes) => self.replayed(&group, &outcomes),
                Err(Failure { error, .. }) if error.is_refusal() && group.messages.len() == 1 => {
                    batch.refuse(&group, &error, &self.sealer);
                    counter!("ebbtide_spool_refused_total").increment(1);
                    if let Some(suppressed) = lines.refused.admit() {
                        let (queue, partition) = (group.name.queue(), group.name.partition());
                        error!(target: "spool", queue, partition, %error, suppressed, "the database refuses a spooled message; it goes to failed.jsonl");
                    }
                }
                // One of its messages is refused; alone, the others are not.
                Err(Failure { error, .. }) if error.is_refusal() => again.extend(singles(group)),
                Err(Failure { error, .. }) => {
                    again.push(group);
                    failure = failure.or(Some(error));
                }
            }
        }
        again.append(&mut later);
        batch.left = again;
        match failure {
            None => Ok(()),
            Some(error) if error.is_away() => Err(Error::Disconnected),
            Some(error) => Err(Error::Retryable(error.to_string())),
        }
    }

    fn replayed(&self, group: &Group, outcomes: &[Outcome]) {
        let queued = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Queued(_))).count() as u64;
        debug!(target: "spool", queue = group.name.queue(), queued, of = outcomes.len(), "replayed");
        counter!("ebbtide_spool_replayed_total").increment(queued);
        counter!("ebbtide_spool_duplicates_total").increment(outcomes.len() as u64 - queued);
        self.telemetry.pushed(group.name.queue(), queued);
    }
}

fn id(message: &Message) -> Uuid {
    message.id.expect("a record gives each message an id")
}

/// Messages are stored together only in the order of their ids, and no transaction id twice.
fn may_join(earlier: &Group, group: &Group) -> bool {
    let (Some(last), Some(first)) = (earlier.messages.last(), group.messages.first()) else { return false };
    let known: HashSet<&Option<String>> = earlier.messages.iter().map(|message| &message.transaction_id).collect();
    last.id < first.id && !group.messages.iter().any(|message| known.contains(&message.transaction_id))
}

fn singles(group: Group) -> impl Iterator<Item = Group> {
    let Group { name, messages } = group;
    messages.into_iter().map(move |message| Group { name: name.clone(), messages: vec![message] })
}

impl Batch {
    /// A line says all that a push takes, and why it failed.
    fn refuse(&mut self, group: &Group, error: &Error, sealer: &Sealer) {
        let message = group.messages.first().expect("refused alone");
        let sealed = sealer.seal(id(message), &message.payload);
        let payload = sealed.as_deref().unwrap_or(&message.payload);
        let line = serde_json::json!({
            "error": error.to_string(),
            "queue": group.name.queue(),
            "partition": group.name.partition(),
            "transactionId": message.transaction_id,
            "messageId": id(message),
            "traceId": message.trace_id,
            "producerSub": message.producer.as_deref(),
            "isEncrypted": sealed.is_some(),
            // Its JSON as text: a payload may have line feeds.
            "payload": String::from_utf8_lossy(payload),
        });
        serde_json::to_writer(&mut self.refused, &line).expect("memory takes everything");
        self.refused.push(b'\n');
        self.refused_messages += 1;
    }
}
