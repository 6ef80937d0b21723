//! The controls: the same data put straight into PostgreSQL, measured in the same run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::body::{mix, payload};
use super::load::{Measured, latency};
use crate::db::Target;
use crate::db::bench::{MessageSession, SegmentSession};

/// Sessions that insert segments for `length`, `rows` rows a commit.
pub(super) async fn segments(
    target: &Target, sessions: usize, rows: usize, messages_each: u64, blobs: Arc<Vec<Vec<u8>>>, length: Duration,
) -> anyhow::Result<Measured> {
    ensure!(!blobs.is_empty(), "no segment of {messages_each} messages was stored to compare with");
    let mut opened = Vec::with_capacity(sessions);
    for _ in 0..sessions {
        opened.push(SegmentSession::new(target.connect("ebbtide-bench").await?).await?);
    }
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for session in opened {
        let blobs = blobs.clone();
        tasks.spawn(async move {
            let partitions: Vec<Uuid> = std::iter::repeat_with(Uuid::new_v4).take(rows).collect();
            let mut written = Written::new();
            let mut base = 0i64;
            while started.elapsed() < length {
                let end = base + messages_each as i64 - 1;
                let chosen: Vec<&[u8]> = (0..rows)
                    .map(|row| blobs[(written.calls as usize * rows + row) % blobs.len()].as_slice())
                    .collect();
                let sent = Instant::now();
                let inserted = session.insert(&partitions, &vec![base; rows], &vec![end; rows], &chosen).await?;
                written.add(sent, inserted * messages_each);
                base = end + 1;
            }
            anyhow::Ok(written)
        });
    }
    collect(tasks, started).await
}

/// Sessions that insert one message a commit for `length`, as a queue with a row a message does.
pub(super) async fn rows(
    target: &Target, sessions: usize, payload_bytes: usize, length: Duration,
) -> anyhow::Result<Measured> {
    let mut opened = Vec::with_capacity(sessions);
    for _ in 0..sessions {
        opened.push(MessageSession::new(target.connect("ebbtide-bench").await?).await?);
    }
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for (index, session) in opened.into_iter().enumerate() {
        tasks.spawn(async move {
            let payload = payload(payload_bytes, 0, mix(index as u64));
            let mut written = Written::new();
            while started.elapsed() < length {
                let sent = Instant::now();
                let inserted = session.insert(Uuid::now_v7(), "bench", &payload).await?;
                written.add(sent, inserted);
            }
            anyhow::Ok(written)
        });
    }
    collect(tasks, started).await
}

struct Written {
    calls: u64,
    messages: u64,
    latency: hdrhistogram::Histogram<u64>,
}

impl Written {
    fn new() -> Self {
        Self { calls: 0, messages: 0, latency: latency() }
    }

    fn add(&mut self, sent: Instant, messages: u64) {
        self.calls += 1;
        self.messages += messages;
        self.latency.saturating_record(sent.elapsed().as_micros() as u64);
    }
}

async fn collect(mut tasks: JoinSet<anyhow::Result<Written>>, started: Instant) -> anyhow::Result<Measured> {
    let mut measured = Measured { messages: 0, elapsed: Duration::ZERO, latency: latency(), first_rate: 0.0 };
    while let Some(written) = tasks.join_next().await {
        let written = written.context("a session panicked")??;
        measured.messages += written.messages;
        measured.latency.add(&written.latency)?;
    }
    measured.elapsed = started.elapsed();
    Ok(measured)
}
