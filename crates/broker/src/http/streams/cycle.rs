//! `POST /streams/v1/cycle`: state, results and the acknowledgement of their source, all or nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use bytes::Bytes;
use serde::Serialize;
use tracing::debug;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Failure;
use super::plan::{self, Packing, Plan, Planned, Sunk, Wire};
use crate::db::Conn;
use crate::db::streams::{CycleAck, Cycled, Done, log_streams_cycle_v1};
use crate::error::Error;
use crate::http::App;
use crate::http::auth::Producer;
use crate::http::body::RawBody;
use crate::http::pop::BATCH_MAX;

/// Tries for a cycle that lost a race, the first included.
const TRIES_MAX: usize = 6;
/// Larger bodies are read and packed off the threads that answer requests.
const INLINE_BYTES_MAX: usize = 64 << 10;

/// What happened: everything.
#[derive(Serialize, ToSchema)]
#[schema(as = StreamsCycled)]
pub(super) struct Answer {
    success: bool,
    query_id: Uuid,
    partition_id: Uuid,
    /// The source's.
    #[serde(rename = "queueName")]
    queue_name: String,
    state_ops_applied: usize,
    push_results: Vec<Pushed>,
    ack_result: Option<Acked>,
}

/// What happened: nothing, and why.
#[derive(ToSchema)]
#[schema(as = StreamsRefused)]
#[expect(dead_code, reason = "only describes")]
struct Refused {
    success: bool,
    error: String,
}

#[derive(ToSchema)]
#[schema(as = StreamsCycleAnswer)]
#[serde(untagged)]
#[expect(dead_code, reason = "only describes")]
enum Either {
    Done(Answer),
    Refused(Refused),
}

/// A result that was stored.
#[derive(Serialize, ToSchema)]
#[schema(as = StreamsPushed)]
struct Pushed {
    index: usize,
    message_id: Uuid,
    transaction_id: Uuid,
    #[serde(rename = "queueName")]
    queue_name: String,
    status: &'static str,
}

/// What became of the source's batch.
#[derive(Serialize, ToSchema)]
#[schema(as = StreamsAcked)]
struct Acked {
    success: bool,
    /// Messages that the cursor passed.
    #[schema(minimum = 0)]
    count: i64,
    lease_released: bool,
    dlq: bool,
}

/// Commits a cycle of a query in a partition, all or nothing.
#[utoipa::path(
    post, path = "/streams/v1/cycle", request_body = Wire<'_>, responses((status = 200, body = Either))
)]
pub(super) async fn cycle(
    State(app): State<Arc<App>>, producer: Producer, body: RawBody,
) -> Result<Json<Answer>, Failure> {
    let RawBody(body) = body;
    let mut tries = 1;
    loop {
        let plan = match planned(&app, &producer, body.clone()).await? {
            Planned::Plan(plan) => plan,
            Planned::Unknown(queues) if tries < TRIES_MAX => {
                let queues: Vec<&str> = queues.iter().map(String::as_str).collect();
                app.sealing.ask(&app.db.conn().await?, &queues).await?;
                tries += 1;
                continue;
            }
            Planned::Unknown(_) => return Err(Error::EncryptionChanged.into()),
        };
        let conn = app.db.conn().await?;
        match commit(&conn, &plan, &mut tries).await {
            Err(Error::EncryptionChanged) if tries < TRIES_MAX => {
                plan.cycle.pushes.iter().for_each(|push| app.sealing.forget(&push.queue));
                tries += 1;
            }
            Ok(Cycled::Done(done)) => {
                tell(&app, &plan, &done);
                return Ok(Json(Answer::new(*plan, done)));
            }
            Ok(Cycled::Refused { error }) => return Err(Failure::Refused(error)),
            Err(error) => {
                count_refused(&app, &plan, &error);
                return Err(error.into());
            }
        }
    }
}

async fn planned(app: &App, Producer(producer): &Producer, body: Bytes) -> Result<Planned, Failure> {
    let level = app.settings.push.zstd_level;
    let packing = Packing { level, producer: producer.clone(), sealing: app.sealing.clone() };
    if body.len() <= INLINE_BYTES_MAX {
        return plan::plan(&body, &packing);
    }
    let planning = tokio::task::spawn_blocking(move || plan::plan(&body, &packing));
    planning.await.expect("planning does not panic and is not aborted")
}

/// One call, and another one for each lost race.
async fn commit(conn: &Conn, plan: &Plan, tries: &mut usize) -> Result<Cycled, Error> {
    loop {
        match log_streams_cycle_v1(conn, &plan.cycle).await {
            // Packed wrongly, it would be refused again.
            Err(error @ Error::EncryptionChanged) => return Err(error),
            Err(error) if error.is_retryable() && *tries < TRIES_MAX => {
                debug!(target: "http", %error, tries, "cycle again");
                *tries += 1;
            }
            result => return result,
        }
    }
}

/// Wakes who may find something now, and counts what was done.
fn tell(app: &App, plan: &Plan, done: &Done) {
    let mut queued_by_queue = BTreeMap::new();
    for push in &plan.cycle.pushes {
        app.wake.pushed(&push.queue, &push.partition);
        *queued_by_queue.entry(push.queue.as_str()).or_default() += push.transaction_ids.len() as u64;
    }
    for (queue, queued) in queued_by_queue {
        app.telemetry.pushed(queue, queued);
    }
    if let (Some(ack), Some(moved)) = (&plan.cycle.ack, done.ack) {
        if moved.wake {
            app.wake.released(&done.queue, &done.partition, &plan.cycle.group);
        }
        let (passed, given_back) = if ack.completed { (moved.count.unsigned_abs(), 0) } else { (0, claimed(ack)) };
        app.telemetry.acked(plan.cycle.partition_id, passed, given_back);
    }
}

fn count_refused(app: &App, plan: &Plan, error: &Error) {
    if let (Some(ack), Error::AckRejected(_)) = (&plan.cycle.ack, error) {
        app.telemetry.acked(plan.cycle.partition_id, 0, claimed(ack));
    }
}

/// How many messages an acknowledgement says it is of. Nothing has checked that, so it is at most what one pop delivers.
fn claimed(ack: &CycleAck) -> u64 {
    ack.count.unwrap_or(0).unsigned_abs().min(BATCH_MAX.unsigned_abs())
}

impl Answer {
    fn new(plan: Plan, done: Done) -> Self {
        let Plan { cycle, state_ops, sunk } = plan;
        let pushed = |(index, Sunk { message_id, queue })| Pushed {
            index,
            message_id,
            transaction_id: message_id,
            queue_name: queue,
            status: "queued",
        };
        Self {
            success: true,
            query_id: cycle.query_id.0,
            partition_id: cycle.partition_id.0,
            queue_name: done.queue,
            state_ops_applied: state_ops,
            push_results: sunk.into_iter().enumerate().map(pushed).collect(),
            ack_result: done.ack.map(|moved| Acked {
                success: true,
                count: moved.count,
                lease_released: moved.lease_released,
                dlq: false,
            }),
        }
    }
}
