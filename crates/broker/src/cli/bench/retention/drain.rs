//! How fast data goes: alone, through one long partition, and as fast as it comes.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use ebbtide_sweep::{Led, pause};
use tokio_util::sync::CancellationToken;

use super::{Case, Run, SEGMENT_MESSAGES};
use crate::cli::bench::open_loop::OpenLoop;
use crate::db::bench::retention as db;
use crate::retention::{Settings, once};

/// Segments of one message in the long partition.
const STEP_ROWS: i32 = 1000;
/// Steps at each end of it, of which the median counts.
const STEPS: u32 = 11;
/// Window of the churn case, and how many times it is pushed.
const WINDOW: Duration = Duration::from_secs(6);
const WINDOWS: u32 = 20;
const CHURN_PUSHES: f64 = 1000.0;
/// How often a server that sweeps at the same moment is waited for.
const TRIES_MAX: u32 = 100;

impl Run<'_> {
    pub(super) async fn drain_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Deleting with nobody else there");
        for _ in 0..self.options.runs {
            let (name, id) = self.old_queue(i64::from(self.options.partitions), self.options.messages).await?;
            self.server.stop().await?;
            db::retain_an_hour(&self.client, id).await?;
            let (log, cpu) = (db::log_bytes(&self.client).await?, self.database_cpu());
            let started = Instant::now();
            self.sweep().await?;
            let elapsed = started.elapsed().as_secs_f64();
            let (log, cpu) = (db::log_bytes(&self.client).await? - log, self.database_cpu() - cpu);
            let (messages, _) = db::deleted(&self.client, id).await?;
            ensure!(db::stale_segments(&self.client, id).await? == 0, "the cycle left something");
            let messages = messages as f64;
            case.record("deleted, with the sidecar", "msg/s", messages / elapsed);
            case.record("PostgreSQL processor time", "us/msg", cpu * 1e6 / messages);
            case.record("log written, after a checkpoint", "B/msg", log as f64 / messages);
            db::delete_queue(&self.client, &name).await?;
            self.restart().await?;
        }
        case.reach("3,000,000 messages/s".to_owned(), 3e6 <= case.median("deleted, with the sidecar"));
        case.reach("0.25 us of processor time a message".to_owned(), case.median("PostgreSQL processor time") <= 0.25);
        case.reach("110 bytes of log a message".to_owned(), case.median("log written, after a checkpoint") <= 110.0);
        Ok(case)
    }

    /// One whole cycle in this process.
    async fn sweep(&self) -> anyhow::Result<()> {
        let settings = Settings { vacuum: false, cleanup_days: None, ..Settings::default() };
        for _ in 0..TRIES_MAX {
            match once(self.database.target.clone(), &settings, &CancellationToken::new()).await? {
                Led::Ran(swept) => match swept.report.first_error() {
                    Some(error) => bail!("the cycle failed: {error}"),
                    None => return Ok(()),
                },
                Led::Skipped => pause(Duration::from_millis(50), &CancellationToken::new()).await,
            };
        }
        bail!("another session leads")
    }

    pub(super) async fn steps_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("The steps through one partition of many stale segments");
        let name = self.next_name();
        let id = db::make_queue(&self.client, &name, 1).await?;
        let small = vec![vec![0x42; 200]];
        db::build_log(&self.client, id, self.options.long_segments, 1, &small).await?;
        db::checkpoint(&self.client).await?;
        let mut left = self.options.long_segments;
        for label in ["first", "last"] {
            for _ in 0..STEPS {
                let (milliseconds, deleted) = db::step_cost(&self.client, id, STEP_ROWS).await?;
                case.record(&format!("{label} steps"), "ms", milliseconds);
                left -= deleted;
            }
            while label == "first" && i64::from(STEP_ROWS) * i64::from(STEPS) < left {
                let rows = (left - i64::from(STEP_ROWS) * i64::from(STEPS)).min(20_000);
                left -= db::step_cost(&self.client, id, i32::try_from(rows)?).await?.1;
            }
        }
        let (first, last) = (case.median("first steps"), case.median("last steps"));
        case.record("ratio", "", (last / first).max(first / last));
        case.reach("first and last within twice each other".to_owned(), case.median("ratio") <= 2.0);
        db::delete_queue(&self.client, &name).await?;
        Ok(case)
    }

    pub(super) async fn churn_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Pushing and deleting 20 times the live window");
        let name = self.next_name();
        let id = db::make_queue(&self.client, &name, i64::from(self.options.partitions)).await?;
        db::retain(&self.client, id, i32::try_from(WINDOW.as_secs())?).await?;
        let load = OpenLoop {
            batch: SEGMENT_MESSAGES,
            per_second: CHURN_PUSHES,
            ..self.steady(&name, self.options.partitions as usize)
        };
        let cpu = self.database_cpu();
        let answered = load.run(WINDOW * WINDOWS, &std::sync::Arc::default()).await?;
        let cpu = self.database_cpu() - cpu;
        let (table, live) = db::table_and_live_bytes(&self.client).await?;
        let messages = answered.requests as f64 * SEGMENT_MESSAGES as f64;
        case.record("pushed", "msg/s", messages / (WINDOW * WINDOWS).as_secs_f64());
        case.record("deleted", "msg", db::deleted(&self.client, id).await?.0 as f64);
        case.record("push p99", "ms", answered.quantile_ms(0.99));
        case.record("table and toast", "MiB", table / f64::from(1 << 20));
        case.record("live", "MiB", live / f64::from(1 << 20));
        case.record("ratio", "", table / live);
        case.record("PostgreSQL processor time, vacuum included", "us/msg", cpu * 1e6 / messages);
        case.reach("table and toast at most twice the live bytes".to_owned(), case.median("ratio") <= 2.0);
        db::delete_queue(&self.client, &name).await?;
        Ok(case)
    }

    /// A fresh server, since an old one was stopped.
    async fn restart(&mut self) -> anyhow::Result<()> {
        self.server = crate::cli::bench::server::Server::start(&self.database.url, super::SERVER_SETTINGS).await?;
        Ok(())
    }
}
