//! What it costs to know what is due, and to keep that knowledge.

use std::time::Instant;

use super::{Case, Run};
use crate::db::bench::retention as db;

const QUEUES: i64 = 100;
const FEW: i64 = 1000;
const DUE: i64 = 1000;
/// Looks of which the median counts.
const LOOKS: u32 = 5;
/// Commits of the stamps case, and segments of each.
const COMMITS: i32 = 2000;
const SEGMENTS: i32 = 30;

impl Run<'_> {
    pub(super) async fn plan_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("What is due, among many partitions of 100 queues");
        db::plan_as_the_leader(&self.client).await?;
        for (label, partitions) in [("few", FEW), ("many", self.options.many)] {
            db::make_young(&self.client, QUEUES, partitions / QUEUES).await?;
            for _ in 0..LOOKS {
                let before = db::log_bytes(&self.client).await?;
                let (quiet, list) = (db::quiet_cost(&self.client, true).await?, db::list_cost(&self.client).await?);
                let written = db::log_bytes(&self.client).await? - before;
                case.record(&format!("idle, {label}: database time"), "ms", quiet.milliseconds + list.milliseconds);
                case.record(&format!("idle, {label}: pages"), "", quiet.pages + list.pages);
                case.record(&format!("idle, {label}: log written"), "B", written as f64);
                let first = db::quiet_cost(&self.client, false).await?;
                case.record(&format!("nothing known, {label}: database time"), "ms", first.milliseconds);
                case.record(&format!("nothing known, {label}: pages"), "", first.pages);
            }
            if label == "many" {
                db::age_some(&self.client, DUE).await?;
                for _ in 0..LOOKS {
                    let due = db::list_cost(&self.client).await?;
                    case.record("1,000 due: database time", "ms", due.milliseconds);
                    case.record("1,000 due: pages each", "", due.pages / due.rows);
                    case.record("1,000 due: found", "", due.rows);
                }
            }
            db::remove_young(&self.client).await?;
        }
        let (few, many) = (case.median("idle, few: database time"), case.median("idle, many: database time"));
        case.reach("idle: 5 ms of database time".to_owned(), many <= 5.0);
        case.reach("idle: 50 pages for 100 queues".to_owned(), case.median("idle, many: pages") <= 50.0);
        case.reach("idle: no log".to_owned(), case.median("idle, many: log written") == 0.0);
        case.reach("idle: twice the time of 1,000 partitions at most".to_owned(), many <= 2.0 * few);
        case.reach("1,000 due: 5 ms of database time".to_owned(), case.median("1,000 due: database time") <= 5.0);
        case.reach("1,000 due: 1.5 pages each".to_owned(), case.median("1,000 due: pages each") <= 1.5);
        Ok(case)
    }

    /// The same pushes in SQL with and without stamps, taking turns at going first.
    pub(super) async fn stamps_case(&mut self) -> anyhow::Result<Case> {
        let mut case = Case::new("Keeping the stamps, against the same push without them");
        let queue = self.next_name();
        db::make_queue(&self.client, &queue, 200).await?;
        db::make_push_without_stamps(&self.client).await?;
        db::push_in_sql(&self.client, true, COMMITS / 4, SEGMENTS).await?;
        for run in 0..2 * self.options.runs {
            let mut each = [0.0; 2];
            for with_stamps in [run % 2 == 0, run % 2 == 1] {
                let started = Instant::now();
                let (updates, cold) = db::push_in_sql(&self.client, with_stamps, COMMITS, SEGMENTS).await?;
                let microseconds = started.elapsed().as_secs_f64() * 1e6 / f64::from(COMMITS * SEGMENTS);
                each[usize::from(with_stamps)] = microseconds;
                let label = if with_stamps { "with stamps" } else { "without" };
                case.record(&format!("{label}: a segment"), "us", microseconds);
                case.record(
                    &format!("{label}: share of HOT updates"),
                    "%",
                    100.0 * (1.0 - cold as f64 / updates as f64),
                );
            }
            case.record("ratio", "", each[1] / each[0]);
        }
        case.reach("3 % at most".to_owned(), case.median("ratio") <= 1.03);
        case.reach("99 % of updates HOT".to_owned(), 99.0 <= case.median("with stamps: share of HOT updates"));
        db::delete_queue(&self.client, &queue).await?;
        Ok(case)
    }
}
