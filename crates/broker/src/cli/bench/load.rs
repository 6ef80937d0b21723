//! The load: producers that push as fast as answers come, and consumers that pop, check and ack.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use hdrhistogram::Histogram;
use serde::Deserialize;
use tokio::task::JoinSet;

use super::body::{PushRequest, mix, transaction_id};
use super::client::{Connection, request};

/// How long consumers may go on after the last push.
const DRAIN_WAIT: Duration = Duration::from_secs(300);

/// One queue under load.
#[derive(Clone)]
pub(super) struct Load {
    pub(super) address: SocketAddr,
    pub(super) queue: String,
    pub(super) partitions: usize,
    pub(super) payload_bytes: usize,
    pub(super) batch: usize,
    pub(super) producers: usize,
    pub(super) length: Duration,
    /// Makes the transaction ids of one load differ from those of every other.
    pub(super) seed: u64,
    /// Ends the load early: a number of messages.
    pub(super) messages_max: u64,
}

/// What came of a load.
pub(super) struct Measured {
    pub(super) messages: u64,
    pub(super) elapsed: Duration,
    /// Of one request, in microseconds.
    pub(super) latency: Histogram<u64>,
    /// Rate of the first five seconds, where a cold cache would show.
    pub(super) first_rate: f64,
}

impl Measured {
    pub(super) fn rate(&self) -> f64 {
        self.messages as f64 / self.elapsed.as_secs_f64()
    }

    pub(super) fn quantile_ms(&self, quantile: f64) -> f64 {
        self.latency.value_at_quantile(quantile) as f64 / 1000.0
    }
}

const FIRST_SECONDS: Duration = Duration::from_secs(5);

pub(super) fn latency() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 120_000_000, 3).expect("the bounds are valid")
}

/// Pushes until the time or the messages run out. Every answer must be 201 and every message queued.
pub(super) async fn push(load: &Load) -> anyhow::Result<Measured> {
    let numbers = Arc::new(AtomicU64::new(0));
    let mut producers = JoinSet::new();
    let connections = open(load.address, load.producers).await?;
    let started = Instant::now();
    for (index, connection) in connections.into_iter().enumerate() {
        producers.spawn(produce(load.clone(), index, connection, numbers.clone(), started));
    }
    let mut measured = Measured { messages: 0, elapsed: Duration::ZERO, latency: latency(), first_rate: 0.0 };
    while let Some(produced) = producers.join_next().await {
        let produced = produced.context("a producer panicked")??;
        measured.messages += produced.messages;
        measured.latency.add(&produced.latency)?;
        measured.first_rate += produced.first as f64 / FIRST_SECONDS.min(load.length).as_secs_f64();
    }
    measured.elapsed = started.elapsed();
    Ok(measured)
}

async fn open(address: SocketAddr, count: usize) -> anyhow::Result<Vec<Connection>> {
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        connections.push(Connection::open(address).await?);
    }
    Ok(connections)
}

struct Produced {
    messages: u64,
    first: u64,
    latency: Histogram<u64>,
}

async fn produce(
    load: Load, index: usize, mut connection: Connection, numbers: Arc<AtomicU64>, started: Instant,
) -> anyhow::Result<Produced> {
    let batch = load.batch as u64;
    let mut request = PushRequest::new(&load.queue, load.batch, load.payload_bytes, load.seed, mix(index as u64));
    let mut produced = Produced { messages: 0, first: 0, latency: latency() };
    let mut turn = index as u64;
    while started.elapsed() < load.length {
        let first = numbers.fetch_add(batch, Ordering::Relaxed);
        if load.messages_max < first + batch {
            break;
        }
        turn = mix(turn);
        let sent = Instant::now();
        let reply = connection.send(request.patched(first, turn as usize % load.partitions)).await?;
        produced.latency.saturating_record(sent.elapsed().as_micros() as u64);
        ensure!(reply.status == 201, "push answered {}: {}", reply.status, reply.excerpt());
        let text = std::str::from_utf8(reply.body).context("an answer that is not text")?;
        let queued = text.matches(r#""status":"queued""#).count() as u64;
        ensure!(queued == batch, "{queued} of {batch} messages were queued: {}", reply.excerpt());
        produced.messages += queued;
        if started.elapsed() < FIRST_SECONDS {
            produced.first += queued;
        }
    }
    Ok(produced)
}

/// How a consumer pops.
#[derive(Clone, Copy)]
pub(super) struct Popping {
    pub(super) consumers: usize,
    pub(super) batch: usize,
    pub(super) partitions: usize,
}

/// Which messages have been acknowledged: a bit each.
struct Ledger {
    bits: Vec<AtomicU64>,
    acked: AtomicU64,
    twice: AtomicU64,
    produced: AtomicU64,
    producing: AtomicBool,
}

/// What came of pushing, popping and acking at once.
pub(super) struct Through {
    pub(super) pushed: Measured,
    /// Everything that was pushed, over the time from the first push to the last ack.
    pub(super) rate: f64,
    pub(super) lost: u64,
    /// Messages delivered and acknowledged more than once.
    pub(super) twice: u64,
    /// Of a pop that brought messages, in microseconds.
    pub(super) pop_latency: Histogram<u64>,
}

/// Pushes for the load's time while consumers pop and ack, then lets them finish.
pub(super) async fn through(load: &Load, popping: Popping) -> anyhow::Result<Through> {
    let words = usize::try_from(load.messages_max.div_ceil(64))?;
    let ledger = Arc::new(Ledger {
        bits: std::iter::repeat_with(|| AtomicU64::new(0)).take(words).collect(),
        acked: AtomicU64::new(0),
        twice: AtomicU64::new(0),
        produced: AtomicU64::new(0),
        producing: AtomicBool::new(true),
    });
    let started = Instant::now();
    let mut consumers = JoinSet::new();
    for connection in open(load.address, popping.consumers).await? {
        consumers.spawn(consume(load.clone(), popping, connection, ledger.clone()));
    }
    let pushed = push(load).await?;
    ledger.produced.store(pushed.messages, Ordering::Relaxed);
    ledger.producing.store(false, Ordering::Release);
    let mut pop_latency = latency();
    while let Some(consumed) = consumers.join_next().await {
        pop_latency.add(&consumed.context("a consumer panicked")??)?;
    }
    let elapsed = started.elapsed();
    let marked: u64 = ledger.bits.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum();
    Ok(Through {
        rate: marked as f64 / elapsed.as_secs_f64(),
        lost: pushed.messages - marked,
        twice: ledger.twice.load(Ordering::Relaxed),
        pushed,
        pop_latency,
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Popped<'a> {
    lease_id: &'a str,
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Message<'a> {
    transaction_id: &'a str,
    partition_id: &'a str,
    #[serde(borrow)]
    data: Data<'a>,
}

#[derive(Deserialize)]
struct Data<'a> {
    n: &'a str,
}

async fn consume(
    load: Load, popping: Popping, mut connection: Connection, ledger: Arc<Ledger>,
) -> anyhow::Result<Histogram<u64>> {
    let path = format!(
        "/api/v1/pop/queue/{}?batch={}&partitions={}&wait=true&timeout=500",
        load.queue, popping.batch, popping.partitions
    );
    let pop = request("GET", &path, b"");
    let mut latency = latency();
    let mut acks = Vec::new();
    let mut drain_started = None;
    while !ledger.is_done() {
        if !ledger.producing.load(Ordering::Acquire) {
            let drained_for = drain_started.get_or_insert_with(Instant::now).elapsed();
            ensure!(drained_for < DRAIN_WAIT, "{} messages were not delivered", ledger.missing());
        }
        let sent = Instant::now();
        let reply = connection.send(&pop).await?;
        if reply.status == 204 {
            continue;
        }
        ensure!(reply.status == 200, "pop answered {}: {}", reply.status, reply.excerpt());
        latency.saturating_record(sent.elapsed().as_micros() as u64);
        let popped: Popped<'_> =
            serde_json::from_slice(reply.body).with_context(|| format!("a pop's answer: {}", reply.excerpt()))?;
        acks.clear();
        let numbers = check(&popped, load.seed, &mut acks)?;
        let reply = connection.send(&request("POST", "/api/v1/ack/batch", &acks)).await?;
        ensure!(reply.status == 200, "ack answered {}: {}", reply.status, reply.excerpt());
        let text = std::str::from_utf8(reply.body).context("an answer that is not text")?;
        let accepted = text.matches(r#""success":true"#).count();
        ensure!(accepted == numbers.len(), "{accepted} of {} acks accepted: {}", numbers.len(), reply.excerpt());
        numbers.into_iter().try_for_each(|number| ledger.mark(number))?;
    }
    Ok(latency)
}

/// The numbers of the messages, whose ids must be those that were pushed; and the ack of each of them.
fn check(popped: &Popped<'_>, seed: u64, acks: &mut Vec<u8>) -> anyhow::Result<Vec<u64>> {
    use std::io::Write;
    acks.extend_from_slice(b"{\"acknowledgments\":[");
    let mut numbers = Vec::with_capacity(popped.messages.len());
    for (at, message) in popped.messages.iter().enumerate() {
        let Message { transaction_id: id, partition_id, data } = message;
        let number = data.n.parse().context("a payload without its number")?;
        ensure!(id.as_bytes() == transaction_id(seed, number), "message {number} came back with id {id}");
        numbers.push(number);
        let (comma, lease) = (if at == 0 { "" } else { "," }, popped.lease_id);
        write!(
            acks,
            r#"{comma}{{"transactionId":"{id}","partitionId":"{partition_id}","status":"completed","leaseId":"{lease}"}}"#
        )?;
    }
    acks.extend_from_slice(b"]}");
    Ok(numbers)
}

impl Ledger {
    fn is_done(&self) -> bool {
        !self.producing.load(Ordering::Acquire) && self.missing() == 0
    }

    fn missing(&self) -> u64 {
        self.produced.load(Ordering::Relaxed).saturating_sub(self.acked.load(Ordering::Relaxed))
    }

    fn mark(&self, number: u64) -> anyhow::Result<()> {
        let word = self.bits.get(usize::try_from(number / 64)?).context("a number that was never pushed")?;
        let bit = 1 << (number % 64);
        let counter = if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 { &self.acked } else { &self.twice };
        counter.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
