//! Replays or deletes one or many dead letters, in bounded steps.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;
use utoipa::ToSchema;
use uuid::Uuid;

use super::replay;
use crate::db::dead_letter_admin::{Picked, log_dlq_delete_v1, log_dlq_pick_v1};
use crate::db::dead_letters::Filter;
use crate::error::Error;
use crate::http::App;
use crate::http::body::RawBody;
use crate::http::instant::instant;
use crate::http::openapi::query::query;
use crate::http::params::Params;
use crate::http::retry::retried;
use crate::id::checked_name;

/// Dead letters of a call that does not say how many, and the most that one may ask for.
const LIMIT_DEFAULT: i64 = 1000;
const LIMIT_MAX: i64 = 10_000;
const IDS_MAX: usize = 1000;
/// Dead letters of one step: one transaction, in which pushes to their partitions wait.
const STEP_ROWS_MAX: usize = 500;
/// Payload of one step, but for the dead letter that reaches it.
const STEP_BYTES_MAX: i64 = 8 << 20;
/// After this long no further step begins; the answer says what remains.
const TIME_MAX: Duration = Duration::from_secs(10);

/// The fields of the body, unchecked. One that is misspelt would widen what is meant, so none is ignored.
#[derive(Default, Deserialize, ToSchema)]
#[schema(as = DeadLetterSelection)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Wire {
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    queue: Option<Value>,
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    consumer_group: Option<Value>,
    #[schema(value_type = Option<String>, min_length = 1, max_length = 255)]
    partition: Option<Value>,
    #[schema(value_type = Option<String>, format = DateTime)]
    from: Option<Value>,
    #[schema(value_type = Option<String>, format = DateTime)]
    to: Option<Value>,
    #[schema(value_type = Option<Vec<Uuid>>, min_items = 1, max_items = 1000)]
    ids: Option<Value>,
    #[schema(value_type = Option<i32>, minimum = 1, maximum = 10_000, default = 1000)]
    limit: Option<Value>,
}

query!(BulkQuery:
    name("queue", "Only of this queue; required if there are no ids."),
    name("consumerGroup", "Only those that this group gave up."),
    name("partition", "Only of partitions of this name."),
    time("from", "Given up at this time or later."),
    time("to", "Given up at this time or earlier."),
    text("ids", "Only these, at most 1000, separated by commas."),
    integer("limit", 1..=LIMIT_MAX, "Most dead letters, the oldest first.").or(LIMIT_DEFAULT),
);

const NAMES: [&str; 7] = ["queue", "consumerGroup", "partition", "from", "to", "ids", "limit"];

/// Which dead letters are meant.
struct Selection {
    queue: Option<String>,
    group: Option<String>,
    partition: Option<String>,
    from: Option<Timestamp>,
    to: Option<Timestamp>,
    ids: Option<Vec<Uuid>>,
    limit: i32,
}

/// What was replayed.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Replayed {
    success: bool,
    /// How many are meant, at most the limit.
    matched: i64,
    replayed: usize,
    /// Fewer where several groups had given up the same message.
    messages: usize,
    /// Those whose payload was lost before they were filed.
    without_payload: i64,
    /// Left for the same request again.
    remaining: i64,
}

/// What was deleted.
#[derive(Serialize, ToSchema)]
#[schema(as = DeadLettersDeleted)]
pub(super) struct Deleted {
    success: bool,
    /// How many are meant, at most the limit.
    matched: i64,
    deleted: i64,
    /// Left for the same request again.
    remaining: i64,
}

/// Pushes dead letters again and deletes them.
#[utoipa::path(
    post, path = "/api/v1/dlq/replay", params(BulkQuery), request_body = Option<Wire>,
    responses((status = 200, body = Replayed), (status = 409))
)]
pub(super) async fn replay(
    State(app): State<Arc<App>>, params: Params, body: RawBody,
) -> Result<Json<Replayed>, Error> {
    let selection = Selection::parse(&params, &body)?;
    let conn = app.db.conn().await?;
    let started = Instant::now();
    let Picked { ids, matched, lost } = selection.pick(&conn, true).await?;
    let (mut done, mut letters, mut messages) = (0, 0, 0);
    while done < ids.len() && (done == 0 || started.elapsed() < TIME_MAX) {
        let end = ids.len().min(done + STEP_ROWS_MAX);
        let step = replay::step(&app, &conn, &ids[done..end], STEP_BYTES_MAX).await?;
        done += step.ids;
        letters += step.letters;
        messages += step.messages.len();
    }
    Ok(Json(Replayed {
        success: true,
        matched,
        replayed: letters,
        messages,
        without_payload: lost,
        remaining: remaining(matched - lost, done),
    }))
}

/// Deletes dead letters for good.
#[utoipa::path(
    delete, path = "/api/v1/dlq", params(BulkQuery), request_body = Option<Wire>,
    responses((status = 200, body = Deleted))
)]
pub(super) async fn delete(State(app): State<Arc<App>>, params: Params, body: RawBody) -> Result<Json<Deleted>, Error> {
    let selection = Selection::parse(&params, &body)?;
    let conn = app.db.conn().await?;
    let started = Instant::now();
    let Picked { ids, matched, .. } = selection.pick(&conn, false).await?;
    let (mut done, mut deleted) = (0, 0);
    for step in ids.chunks(STEP_ROWS_MAX) {
        if TIME_MAX <= started.elapsed() && 0 < done {
            break;
        }
        deleted += retried(|| log_dlq_delete_v1(&conn, step)).await?;
        done += step.len();
    }
    Ok(Json(Deleted { success: true, matched, deleted: deleted.into(), remaining: remaining(matched, done) }))
}

fn remaining(of: i64, done: usize) -> i64 {
    of - i64::try_from(done).expect("at most the limit")
}

impl Selection {
    fn parse(params: &Params, body: &RawBody) -> Result<Self, Error> {
        if let Some(unknown) = params.names().find(|name| !NAMES.contains(name)) {
            return Err(Error::invalid(
                "query",
                format!("has no parameter {unknown:?}; those it has: {}", NAMES.join(", ")),
            ));
        }
        let wire: Wire = body.object()?;
        let time = |field: &'static str, given: Option<Value>| -> Result<Option<Timestamp>, Error> {
            text(field, params, given)?.map(|text| instant(field, &text)).transpose()
        };
        let selection = Self {
            queue: name("queue", params, wire.queue)?,
            group: name("consumerGroup", params, wire.consumer_group)?,
            partition: name("partition", params, wire.partition)?,
            from: time("from", wire.from)?,
            to: time("to", wire.to)?,
            ids: ids(params, wire.ids)?,
            limit: limit(params, wire.limit)?,
        };
        if selection.queue.is_none() && selection.ids.is_none() {
            return Err(Error::Missing("queue or ids"));
        }
        Ok(selection)
    }

    async fn pick(&self, conn: &crate::db::Conn, is_replay: bool) -> Result<Picked, Error> {
        let filter = Filter {
            queue: self.queue.as_deref(),
            group: self.group.as_deref(),
            partition: self.partition.as_deref(),
            from: self.from,
            to: self.to,
        };
        log_dlq_pick_v1(conn, &filter, self.ids.as_deref(), is_replay, self.limit).await
    }
}

/// A field is given in the query or in the body. Null is not given.
fn either(field: &'static str, params: &Params, given: Option<Value>) -> Result<Option<Value>, Error> {
    let in_query = params.names().any(|name| name == field);
    match (in_query, given.filter(|value| !value.is_null())) {
        (true, Some(_)) => Err(Error::invalid(field, "must be given in the query or in the body, not in both")),
        (true, None) => Ok(Some(Value::from(params.text(field).unwrap_or_default()))),
        (false, given) => Ok(given),
    }
}

fn text(field: &'static str, params: &Params, given: Option<Value>) -> Result<Option<String>, Error> {
    match either(field, params, given)? {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(field, "must be a string")),
    }
}

/// An empty name is no filter that lets everything through.
fn name(field: &'static str, params: &Params, given: Option<Value>) -> Result<Option<String>, Error> {
    let name = text(field, params, given)?;
    if let Some(name) = &name {
        checked_name(field, name)?;
    }
    Ok(name)
}

fn ids(params: &Params, given: Option<Value>) -> Result<Option<Vec<Uuid>>, Error> {
    let wrong = || Error::invalid("ids", format!("must be 1 to {IDS_MAX} ids of dead letters"));
    let parse = |text: &str| Uuid::parse_str(text).map_err(|_| wrong());
    let ids: Vec<Uuid> = match either("ids", params, given)? {
        None => return Ok(None),
        Some(Value::String(list)) => list.split(',').map(parse).collect::<Result<_, _>>()?,
        Some(Value::Array(list)) => {
            list.iter().map(|id| parse(id.as_str().unwrap_or_default())).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(wrong()),
    };
    if ids.is_empty() || IDS_MAX < ids.len() { Err(wrong()) } else { Ok(Some(ids)) }
}

fn limit(params: &Params, given: Option<Value>) -> Result<i32, Error> {
    let number = match either("limit", params, given)? {
        None => Some(LIMIT_DEFAULT),
        Some(Value::String(text)) => text.parse().ok(),
        Some(value) => value.as_i64(),
    };
    number
        .filter(|number| (1..=LIMIT_MAX).contains(number))
        .map(|number| i32::try_from(number).expect("within its range"))
        .ok_or_else(|| Error::invalid("limit", format!("must be a whole number from 1 to {LIMIT_MAX}")))
}
