//! The switches with which an operator pauses key/value and timers, on all servers.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::RawBody;
use crate::db::kv::{Paused, features_paused_v1, pause_features_v1};
use crate::error::Error;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(show, switch))
}

/// What is allowed, and how the quotas of tenants stand; this version knows one tenant and no quota.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Features {
    kv_enabled: bool,
    /// Whether timers may be scheduled. They may always be cancelled.
    timers_schedule_enabled: bool,
    timers_fire_enabled: bool,
    quota_tenants: i64,
    quota_age_ms: Option<i64>,
    quota_hot: i64,
}

/// What is to be allowed; what is left out stays as it is.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(as = FeatureSwitches, min_properties = 1)]
struct Switches {
    kv: Option<bool>,
    timers_schedule: Option<bool>,
    timers_fire: Option<bool>,
}

/// Says what is paused.
#[utoipa::path(get, path = "/api/v1/system/kv-timers", responses((status = 200, body = Features)))]
async fn show(State(app): State<Arc<App>>) -> Result<Json<Features>, Error> {
    shown(&app).await
}

async fn shown(app: &App) -> Result<Json<Features>, Error> {
    let Paused { kv, timers_schedule, timers_fire } = features_paused_v1(&app.db.conn().await?).await?;
    Ok(Json(Features {
        kv_enabled: !kv,
        timers_schedule_enabled: !timers_schedule,
        timers_fire_enabled: !timers_fire,
        quota_tenants: 0,
        quota_age_ms: None,
        quota_hot: 0,
    }))
}

/// Pauses features and lets them go on: true allows, false pauses.
#[utoipa::path(
    post, path = "/api/v1/system/kv-timers", request_body = Switches, responses((status = 200, body = Features))
)]
async fn switch(State(app): State<Arc<App>>, body: RawBody) -> Result<Json<Features>, Error> {
    let Switches { kv, timers_schedule, timers_fire } = body.json()?;
    if kv.is_none() && timers_schedule.is_none() && timers_fire.is_none() {
        return Err(Error::Missing("kv, timersSchedule or timersFire"));
    }
    let paused = |enabled: Option<bool>| enabled.map(|enabled| !enabled);
    pause_features_v1(&app.db.conn().await?, paused(kv), paused(timers_schedule), paused(timers_fire)).await?;
    if timers_fire == Some(true) {
        app.alarm.ring_in(Duration::ZERO);
    }
    shown(&app).await
}
