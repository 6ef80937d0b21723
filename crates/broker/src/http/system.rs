//! Routes of the server itself: its spool, and the switches that all servers obey.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::RawBody;
use crate::error::Error;
use crate::spool::Status;
use crate::switches::Switch;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new()
        .routes(routes!(buffers))
        .routes(routes!(maintenance, set_maintenance))
        .routes(routes!(pop_maintenance, set_pop_maintenance))
        .routes(routes!(shared_state))
        .routes(routes!(ephemeral, set_ephemeral))
}

/// The spool of the server that answers.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Buffers {
    /// Messages that wait to be replayed.
    pending: usize,
    /// Messages that the database refused for good; they are in `failed.jsonl`.
    failed: usize,
    /// The database answered when it was last needed.
    db_healthy: bool,
    /// Always 0: a server has one spool.
    worker: u32,
}

/// What this server keeps on its disk while the database is away.
#[utoipa::path(get, path = "/api/v1/status/buffers", responses((status = 200, body = Buffers)))]
async fn buffers(State(app): State<Arc<App>>) -> Json<Buffers> {
    let status = app.spool.status();
    Json(Buffers { pending: status.pending, failed: status.failed, db_healthy: status.is_database_there, worker: 0 })
}

/// What to turn a switch to.
#[derive(Deserialize, ToSchema)]
#[schema(as = SwitchTo)]
struct Wire {
    #[schema(required)]
    enabled: Option<bool>,
}

fn enabled(body: &RawBody) -> Result<bool, Error> {
    body.json::<Wire>()?.enabled.ok_or(Error::Missing("enabled"))
}

/// How far the spool has come.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct BufferStats {
    pending: usize,
    failed: usize,
    bytes: u64,
    /// 0 for a server without a spool.
    bytes_max: u64,
    /// Why nothing is replayed although the database answers.
    held: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Maintenance {
    maintenance_mode: bool,
    pop_maintenance_mode: bool,
    buffered_messages: usize,
    /// There is a spool with room, and nothing holds it up.
    buffer_healthy: bool,
    buffer_stats: BufferStats,
}

fn is_healthy(status: &Status) -> bool {
    status.held.is_none() && status.bytes < status.bytes_max
}

/// Whether pushes or pops are under maintenance, and what is spooled here.
#[utoipa::path(get, path = "/api/v1/system/maintenance", responses((status = 200, body = Maintenance)))]
async fn maintenance(State(app): State<Arc<App>>) -> Json<Maintenance> {
    let status = app.spool.status();
    Json(Maintenance {
        maintenance_mode: app.switches.is_on(Switch::PushMaintenance),
        pop_maintenance_mode: app.switches.is_on(Switch::PopMaintenance),
        buffered_messages: status.pending,
        buffer_healthy: is_healthy(&status),
        buffer_stats: BufferStats {
            pending: status.pending,
            failed: status.failed,
            bytes: status.bytes,
            bytes_max: status.bytes_max,
            held: status.held,
        },
    })
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct MaintenanceSet {
    maintenance_mode: bool,
    buffered_messages: usize,
    buffer_healthy: bool,
    message: &'static str,
}

/// Turns push maintenance on or off, for all servers: while it is on, pushes are spooled.
#[utoipa::path(
    post, path = "/api/v1/system/maintenance", request_body = Wire, responses((status = 200, body = MaintenanceSet))
)]
async fn set_maintenance(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<MaintenanceSet>, Error> {
    let is_on = enabled(&body)?;
    app.turn(Switch::PushMaintenance, is_on).await?;
    let status = app.spool.status();
    Ok(Json(MaintenanceSet {
        maintenance_mode: is_on,
        buffered_messages: status.pending,
        buffer_healthy: is_healthy(&status),
        message: if is_on { "pushes are spooled" } else { "pushes are stored; what is spooled is replayed first" },
    }))
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct PopMaintenance {
    pop_maintenance_mode: bool,
    message: &'static str,
}

impl PopMaintenance {
    fn of(is_on: bool) -> Json<Self> {
        let message = if is_on { "pops find nothing" } else { "pops are served" };
        Json(Self { pop_maintenance_mode: is_on, message })
    }
}

/// Whether pops are under maintenance.
#[utoipa::path(get, path = "/api/v1/system/maintenance/pop", responses((status = 200, body = PopMaintenance)))]
async fn pop_maintenance(State(app): State<Arc<App>>) -> Json<PopMaintenance> {
    PopMaintenance::of(app.switches.is_on(Switch::PopMaintenance))
}

/// Turns pop maintenance on or off, for all servers: while it is on, pops find nothing.
#[utoipa::path(
    post, path = "/api/v1/system/maintenance/pop", request_body = Wire,
    responses((status = 200, body = PopMaintenance))
)]
async fn set_pop_maintenance(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<PopMaintenance>, Error> {
    let is_on = enabled(&body)?;
    app.turn(Switch::PopMaintenance, is_on).await?;
    Ok(PopMaintenance::of(is_on))
}

#[derive(Serialize, ToSchema)]
struct SharedState {
    /// Servers keep no state between them: what they share is in the database.
    enabled: bool,
    reason: &'static str,
    maintenance_mode: bool,
    pop_maintenance_mode: bool,
}

/// What the servers of a database share.
#[utoipa::path(get, path = "/api/v1/system/shared-state", responses((status = 200, body = SharedState)))]
async fn shared_state(State(app): State<Arc<App>>) -> Json<SharedState> {
    Json(SharedState {
        enabled: false,
        reason: "servers share the database and nothing else, and wake each other through it",
        maintenance_mode: app.switches.is_on(Switch::PushMaintenance),
        pop_maintenance_mode: app.switches.is_on(Switch::PopMaintenance),
    })
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct EphemeralState {
    /// False while an operator has paused ephemeral queues.
    ephemeral_enabled: bool,
    /// On this server.
    queues: usize,
    bytes: usize,
    bytes_max: usize,
}

impl EphemeralState {
    fn of(app: &App) -> Json<Self> {
        Json(Self {
            ephemeral_enabled: !app.switches.is_on(Switch::EphemeralPaused),
            queues: app.ephemeral.list().len(),
            bytes: app.ephemeral.bytes(),
            bytes_max: app.ephemeral.settings().bytes_max,
        })
    }
}

/// Whether ephemeral queues are served, and what they take here.
#[utoipa::path(get, path = "/api/v1/system/ephemeral", responses((status = 200, body = EphemeralState)))]
async fn ephemeral(State(app): State<Arc<App>>) -> Json<EphemeralState> {
    EphemeralState::of(&app)
}

/// Pauses ephemeral queues, or serves them again, on all servers.
#[utoipa::path(
    post, path = "/api/v1/system/ephemeral", request_body = Wire, responses((status = 200, body = EphemeralState))
)]
async fn set_ephemeral(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<EphemeralState>, Error> {
    app.turn(Switch::EphemeralPaused, !enabled(&body)?).await?;
    Ok(EphemeralState::of(&app))
}
