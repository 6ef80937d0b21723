//! What deletion does to pushes beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ebbtide_sweep::pause;
use tokio_util::sync::CancellationToken;

use super::{Case, Run, SEGMENT_MESSAGES};
use crate::cli::bench::load::{Load, push};
use crate::cli::bench::open_loop::{Answered, OpenLoop};
use crate::db::bench::retention as db;

/// How long data may take to go.
const GONE_WAIT: Duration = Duration::from_secs(600);
/// How long is pushed before anything is measured, for caches and connections to be as they stay.
const WARM_UP: Duration = Duration::from_secs(5);
/// How long the hot partition is pushed to as fast as it takes, to know what half of that is.
const SATURATION: Duration = Duration::from_secs(5);
const SATURATION_PRODUCERS: usize = 8;
/// Messages of the hot partition that go.
const HOT_MESSAGES: i64 = 2_000_000;

impl Run<'_> {
    pub(super) fn steady(&self, queue: &str, partitions: usize) -> OpenLoop {
        OpenLoop {
            address: self.server.address,
            queue: queue.to_owned(),
            partitions,
            batch: self.options.push_messages as usize,
            payload_bytes: self.options.payload_bytes as usize,
            per_second: f64::from(self.options.pushes),
            seed: super::super::body::mix(self.made ^ u64::from(std::process::id()) << 24),
        }
    }

    pub(super) async fn beside_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Pushes at a steady rate while data goes");
        for run in 0..self.options.runs {
            let (name, id) = self.old_queue(i64::from(self.options.partitions), self.options.messages).await?;
            let load = self.steady(&name, self.options.partitions as usize);
            load.run(WARM_UP, &Arc::default()).await?;
            let with_first = run % 2 == 1;
            if with_first {
                self.while_it_goes(&load, id, &mut case).await?;
            }
            let without = load.run(self.length(), &Arc::default()).await?;
            record(&mut case, "without", &without);
            if !with_first {
                self.while_it_goes(&load, id, &mut case).await?;
            }
            db::delete_queue(&self.client, &name).await?;
        }
        let ratio =
            |case: &Case, what: &str| case.median(&format!("with: {what}")) / case.median(&format!("without: {what}"));
        let (p99, max) = (ratio(&case, "push p99"), ratio(&case, "push max"));
        case.record("ratio of p99", "", p99);
        case.record("ratio of max", "", max);
        case.reach("p99 at most 1.15 times".to_owned(), p99 <= 1.15);
        case.reach("max at most twice".to_owned(), max <= 2.0);
        case.reach("1,500,000 messages/s deleted".to_owned(), 1.5e6 <= case.median("with: deleted"));
        Ok(case)
    }

    /// Pushes until the server's own retention has deleted all that was old.
    async fn while_it_goes(&self, load: &OpenLoop, id: uuid::Uuid, case: &mut Case) -> anyhow::Result<()> {
        let enough = Arc::new(AtomicBool::new(false));
        let pushing = tokio::spawn({
            let (load, enough) = (load.clone(), enough.clone());
            async move { load.run(GONE_WAIT, &enough).await }
        });
        let before = self.server.held_back().await?;
        db::retain_an_hour(&self.client, id).await?;
        let watched = self.wait_until_gone(id).await;
        enough.store(true, Ordering::Relaxed);
        let with = pushing.await.context("the load panicked")??;
        watched?;
        let (messages, seconds) = db::deleted(&self.client, id).await?;
        record(case, "with", &with);
        case.record("with: deleted", "msg/s", messages as f64 / seconds);
        for (reason, held) in self.server.held_back().await? {
            let held = held - before.get(&reason).copied().unwrap_or_default();
            if 0.0 < held {
                case.record(&format!("with: held back by {reason}"), "s", held);
            }
        }
        Ok(())
    }

    async fn wait_until_gone(&self, id: uuid::Uuid) -> anyhow::Result<()> {
        let started = Instant::now();
        while db::has_stale(&self.client, id).await? {
            ensure!(started.elapsed() < GONE_WAIT, "the data did not go in {GONE_WAIT:?}");
            pause(Duration::from_millis(100), &CancellationToken::new()).await;
        }
        Ok(())
    }

    pub(super) async fn hot_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("One hot partition at half of what it takes, while its data goes");
        for _ in 0..self.options.runs {
            let (name, id) = self.old_queue(1, HOT_MESSAGES).await?;
            let fast = Load {
                address: self.server.address,
                queue: name.clone(),
                partitions: 1,
                payload_bytes: self.options.payload_bytes as usize,
                batch: self.options.push_messages as usize,
                producers: SATURATION_PRODUCERS,
                length: SATURATION,
                seed: super::super::body::mix(self.made),
                messages_max: u64::MAX / 2,
            };
            let rate = push(&fast).await?.rate() / f64::from(self.options.push_messages);
            case.record("as fast as it takes", "push/s", rate);
            let load = OpenLoop { per_second: rate / 2.0, ..self.steady(&name, 1) };
            let without = load.run(self.length() / 2, &Arc::default()).await?;
            record(&mut case, "without", &without);
            self.while_it_goes(&load, id, &mut case).await?;
            db::delete_queue(&self.client, &name).await?;
            let (name, id) = self.old_queue(1, HOT_MESSAGES).await?;
            let at_once = self.while_all_goes_at_once(OpenLoop { queue: name.clone(), ..load }, id).await?;
            record(&mut case, "all at once", &at_once);
            db::delete_queue(&self.client, &name).await?;
        }
        let (with, without) = (case.median("with: push p99"), case.median("without: push p99"));
        let at_once = case.median("all at once: push p99");
        case.record("ratio of p99", "", with / without);
        case.reach("p99 at most twice".to_owned(), with <= 2.0 * without);
        case.reach("p99 at most a twentieth of all at once".to_owned(), with <= at_once / 20.0);
        Ok(case)
    }

    async fn while_all_goes_at_once(&self, load: OpenLoop, id: uuid::Uuid) -> anyhow::Result<Answered> {
        let enough = Arc::new(AtomicBool::new(false));
        let pushing = tokio::spawn({
            let enough = enough.clone();
            async move { load.run(GONE_WAIT, &enough).await }
        });
        let mut client = self.database.target.connect("ebbtide-bench-control").await?;
        let deleted = db::delete_at_once(&mut client, id).await;
        enough.store(true, Ordering::Relaxed);
        let answered = pushing.await.context("the load panicked")??;
        ensure!(deleted? == (HOT_MESSAGES / SEGMENT_MESSAGES as i64).unsigned_abs(), "not all of it went");
        Ok(answered)
    }

    pub(super) async fn snapshot_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Pushes beside a snapshot that is never let go");
        let length = self.length() * 3;
        for _ in 0..self.options.runs {
            let name = self.next_name();
            let id = db::make_queue(&self.client, &name, i64::from(self.options.partitions)).await?;
            db::retain(&self.client, id, 10).await?;
            let load = self.steady(&name, self.options.partitions as usize);
            let without = load.run(length, &Arc::default()).await?;
            record(&mut case, "without", &without);
            let holder = self.database.target.connect("ebbtide-bench-snapshot").await?;
            db::hold_snapshot(&holder).await?;
            let with = load.run(length, &Arc::default()).await?;
            record(&mut case, "with", &with);
            drop(holder);
            db::delete_queue(&self.client, &name).await?;
        }
        let ratio = case.median("with: push p99") / case.median("without: push p99");
        case.record("ratio of p99", "", ratio);
        case.reach("p99 at most twice".to_owned(), ratio <= 2.0);
        Ok(case)
    }
}

fn record(case: &mut Case, label: &str, answered: &Answered) {
    case.record(&format!("{label}: push p50"), "ms", answered.quantile_ms(0.5));
    case.record(&format!("{label}: push p99"), "ms", answered.quantile_ms(0.99));
    case.record(&format!("{label}: push max"), "ms", answered.max_ms());
}
