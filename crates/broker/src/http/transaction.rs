//! Pushes and acknowledgements that happen together or not at all.

mod described;
mod plan;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Serialize;
use serde_json::json;
use tracing::debug;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::ack::element::{default_reason, storable};
use super::auth::Producer;
use super::body::RawBody;
use super::dead_letters::snapshot::{self, Condemned};
use super::{App, kv, metrics, timers};
use crate::db::Conn;
use crate::db::ack::{Acked, Status};
use crate::db::timers::Op;
use crate::db::transaction::{Committed, LetterNeeded, log_transaction_wire_v1};
use crate::error::Error;
use plan::{Packing, Plan, Planned, Step};

/// Tries for a transaction that lost a race or has to bring dead letters, the first included.
const TRIES_MAX: usize = 6;
/// Larger bodies are read and packed off the threads that answer requests.
const INLINE_BYTES_MAX: usize = 64 << 10;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(transaction))
}

/// One element of a committed transaction's answer.
#[derive(Serialize, ToSchema)]
#[schema(as = TransactionResult)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Outcome<'a> {
    #[serde(rename_all = "camelCase")]
    Ack {
        index: usize,
        success: bool,
        transaction_id: &'a str,
        error: Option<&'static str>,
        dlq: bool,
    },
    #[serde(rename_all = "camelCase")]
    Push {
        index: usize,
        success: bool,
        transaction_id: &'a str,
        message_id: Uuid,
        queue_name: &'a str,
        #[serde(skip_serializing_if = "is_false")]
        duplicate: bool,
    },
    Kv(kv::Element),
    Timer(timers::Element),
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Pushes and acknowledges, all or nothing.
#[utoipa::path(
    post, path = "/api/v1/transaction", request_body = described::Transaction,
    responses((status = 200, body = described::Answer), (status = 400, body = described::Answer),
        (status = 403, body = described::Answer))
)]
async fn transaction(State(app): State<Arc<App>>, producer: Producer, body: RawBody) -> Response {
    let id = Uuid::now_v7();
    match carry_out(&app, &producer, body).await {
        Ok((plan, committed)) => {
            let results = outcomes(&plan, committed);
            Json(json!({"transactionId": id, "success": true, "results": results})).into_response()
        }
        Err((error, steps)) => refused(id, &error, steps),
    }
}

/// A failure comes with the number of elements that stand before those of the riders.
async fn carry_out(app: &App, producer: &Producer, body: RawBody) -> Result<(Plan, Committed), (Error, usize)> {
    let mut steps = 0;
    try_carry_out(app, producer, body, &mut steps).await.map_err(|error| (error, steps))
}

async fn try_carry_out(
    app: &App, producer: &Producer, body: RawBody, steps: &mut usize,
) -> Result<(Plan, Committed), Error> {
    let RawBody(body) = body;
    let (mut tries, mut is_admitted) = (1, false);
    loop {
        let mut plan = match planned(app, producer, body.clone()).await? {
            Planned::Plan(plan) => plan,
            Planned::Unknown(queues) if tries < TRIES_MAX => {
                let queues: Vec<&str> = queues.iter().map(String::as_str).collect();
                app.sealing.ask(&app.db.conn().await?, &queues).await?;
                tries += 1;
                continue;
            }
            Planned::Unknown(_) => return Err(Error::EncryptionChanged),
        };
        *steps = plan.steps.len();
        if !std::mem::replace(&mut is_admitted, true) {
            app.quotas.admit_kv(kv::demand(&plan.transaction.kv))?;
            app.quotas.admit_timers(timers::demand(&plan.transaction.timers))?;
        }
        let conn = app.db.conn().await?;
        match commit(&conn, &mut plan).await {
            Err(Error::EncryptionChanged) if tries < TRIES_MAX => {
                forget_queues(app, &plan);
                tries += 1;
            }
            Err(error) => return Err(error),
            Ok(committed) => {
                tell(app, &plan, &committed);
                return Ok((plan, committed));
            }
        }
    }
}

fn forget_queues(app: &App, plan: &Plan) {
    plan.transaction.pushes.iter().for_each(|push| app.sealing.forget(&push.queue));
    for op in &plan.transaction.timers {
        if let Op::Schedule(schedule) = op {
            app.sealing.forget(&schedule.queue);
        }
    }
}

async fn planned(app: &App, Producer(producer): &Producer, body: Bytes) -> Result<Planned, Error> {
    let level = app.settings.push.zstd_level;
    let packing = Packing { level, producer: producer.clone(), sealing: app.sealing.clone() };
    if body.len() <= INLINE_BYTES_MAX {
        return plan::plan(&body, &packing);
    }
    let planning = tokio::task::spawn_blocking(move || plan::plan(&body, &packing));
    planning.await.expect("planning does not panic and is not aborted")
}

/// Wakes who may find something now, and counts what was done.
fn tell(app: &App, plan: &Plan, committed: &Committed) {
    let mut queued_by_queue = BTreeMap::new();
    for push in &plan.transaction.pushes {
        app.wake.pushed(&push.queue, &push.partition);
        *queued_by_queue.entry(push.queue.as_str()).or_default() += push.transaction_ids.len() as u64;
    }
    for (queue, queued) in queued_by_queue {
        app.telemetry.pushed(queue, queued);
        app.telemetry.transacted(queue);
    }
    for (ack, acked) in plan.transaction.acks.iter().zip(&committed.acks) {
        if let Some(lane) = &acked.wake {
            app.wake.released(&lane.queue, &lane.partition, &ack.group);
        }
        let done = ack.batch.completed();
        app.telemetry.acked(ack.partition_id, done, ack.transaction_ids.len() as u64 - done);
        app.telemetry.dead_lettered(acked.dlq.into());
    }
    timers::ring(app, &plan.transaction.timers);
}

/// One call, and another one for each lost race or when it turns out that dead letters are needed.
async fn commit(conn: &Conn, plan: &mut Plan) -> Result<Committed, Error> {
    let mut tries = 1;
    loop {
        match log_transaction_wire_v1(conn, &plan.transaction).await {
            Err(Error::LettersNeeded(list)) if tries < TRIES_MAX => bring_letters(conn, plan, &list).await?,
            // Packed wrongly, it would be refused again.
            Err(error @ Error::EncryptionChanged) => return Err(error),
            Err(error) if error.is_retryable() && tries < TRIES_MAX => {
                debug!(target: "http", %error, tries, "transaction again");
            }
            result => return result,
        }
        tries += 1;
    }
}

async fn bring_letters(conn: &Conn, plan: &mut Plan, list: &str) -> Result<(), Error> {
    let needed: Vec<LetterNeeded> =
        serde_json::from_str(list).map_err(|error| Error::Corrupt(format!("list of dead letters: {error}")))?;
    let condemned: Vec<Condemned> = needed.iter().map(|needed| condemned(plan, needed)).collect();
    let letters = snapshot::letters(conn, &condemned).await?;
    plan.transaction.letters.extend(needed.iter().map(|needed| needed.ack).zip(letters));
    Ok(())
}

fn condemned(plan: &Plan, needed: &LetterNeeded) -> Condemned {
    let named = |step: &Step| match step {
        Step::Ack { ack, element } => {
            *ack == needed.ack && element.hash == needed.hash && element.status != Status::Completed
        }
        Step::Push { .. } => false,
    };
    let Some(Step::Ack { element, .. }) = plan.steps.iter().find(|step| named(step)) else {
        unreachable!("the function stopped at an element of this transaction");
    };
    Condemned {
        partition_id: element.target.partition_id,
        offset: needed.offset,
        transaction_id: storable(element.transaction_id.clone()),
        reason: element.reason.clone().unwrap_or_else(|| default_reason(element.status).to_owned()),
    }
}

fn outcomes(plan: &Plan, committed: Committed) -> Vec<Outcome<'_>> {
    let Committed { acks, kv, timers } = committed;
    let before_timers = plan.steps.len() + kv.len();
    let kv = kv::elements(&plan.transaction.kv, kv).into_iter();
    let kv = kv.map(|element| Outcome::Kv(element.riding(plan.steps.len())));
    let timers = timers.into_iter().enumerate();
    let timers = timers.map(|(at, done)| Outcome::Timer(timers::Element::riding(done, before_timers, at)));
    step_outcomes(&plan.steps, &acks).into_iter().chain(kv).chain(timers).collect()
}

fn step_outcomes<'a>(steps: &'a [Step], acks: &[Acked]) -> Vec<Outcome<'a>> {
    let outcome = |(index, step): (usize, &'a Step)| match step {
        Step::Ack { ack, element } => {
            let acked = &acks[*ack];
            let is_signal = element.status != Status::Completed;
            let is_stale = is_signal && acked.stale_hashes.contains(&element.hash);
            Outcome::Ack {
                index,
                success: !is_stale,
                transaction_id: &element.transaction_id,
                error: is_stale.then_some("already committed: the message is behind the cursor"),
                dlq: is_signal && acked.dlq && acked.hash == Some(element.hash),
            }
        }
        Step::Push { queue, transaction_id, message_id, is_duplicate } => Outcome::Push {
            index,
            success: true,
            transaction_id,
            message_id: *message_id,
            queue_name: queue,
            duplicate: *is_duplicate,
        },
    };
    steps.iter().enumerate().map(outcome).collect()
}

/// `steps` elements stand before those of the riders.
fn refused(id: Uuid, error: &Error, steps: usize) -> Response {
    let status = match error {
        // Waiting a moment would not help.
        Error::Paused(_) => StatusCode::FORBIDDEN,
        error => error.status(),
    };
    let reason = match error {
        Error::Duplicate(_) => "duplicate",
        Error::AckRejected(_) => "ack_rejected",
        Error::TooLarge(_) => "payload_too_large",
        Error::KvUnmet(_) => "kv_precondition",
        Error::HorizonExceeded(_) => "timer_horizon_exceeded",
        Error::Paused(code) => code,
        Error::RateLimited { .. } => "rate_limited",
        Error::QuotaExceeded { code, .. } => code,
        _ if status == StatusCode::BAD_REQUEST => "bad_request",
        _ => "db_error",
    };
    if status.is_server_error() {
        metrics::failed(error);
    }
    let mut body = json!({
        "transactionId": id, "success": false, "reason": reason, "error": error.to_string(), "results": [],
    });
    match error {
        Error::KvUnmet(text) => match kv::unmet(text) {
            Ok(unmet) => return (status, Json(kv::UnmetBody::new(body, unmet, steps))).into_response(),
            Err(error) => metrics::failed(&error),
        },
        Error::Paused(code) => {
            body["error"] = code.as_str().into();
            body["code"] = code.as_str().into();
        }
        _ => {}
    }
    (status, Json(body)).into_response()
}
