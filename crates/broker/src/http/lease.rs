//! Routes of leases, and which partitions a lease id stands for.

mod holders;

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::App;
use super::body::RawBody;
use super::pop::{LEASE_SECONDS_MAX, utc_text};
use crate::db::lease::{Renewal, log_renew_lease_v1};
use crate::error::Error;
pub use holders::Leases;

/// By how much a renewal that does not say extends.
const SECONDS_DEFAULT: i64 = 60;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(extend))
}

/// How long to keep a lease.
#[derive(Deserialize, ToSchema)]
struct Extend {
    /// From now on.
    #[schema(minimum = 1, maximum = 604_800, default = 60)]
    seconds: Option<i64>,
}

/// Whether there was such a lease, and until when it is kept. The time has three names.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Extended {
    lease_id: String,
    success: bool,
    /// In how many partitions.
    renewed: i64,
    new_expires_at: Option<String>,
    expires_at: Option<String>,
    #[serde(rename = "lease_expires_at")]
    lease_expires_at: Option<String>,
}

/// Keeps a live lease for longer; it never shortens one, and revives none.
#[utoipa::path(
    post, path = "/api/v1/lease/{leaseId}/extend", request_body = Option<Extend>, responses((status = 200, body = Extended))
)]
async fn extend(
    State(app): State<Arc<App>>, path: Result<Path<String>, PathRejection>, body: RawBody,
) -> Result<Json<Extended>, Error> {
    let Path(lease_id) = path.map_err(|rejection| Error::invalid("leaseId", rejection.body_text()))?;
    let seconds = if body.0.is_empty() { None } else { body.json::<Extend>()?.seconds };
    let seconds = seconds.unwrap_or(SECONDS_DEFAULT);
    if !(1..=LEASE_SECONDS_MAX).contains(&seconds) {
        return Err(Error::invalid("seconds", format!("must be a whole number from 1 to {LEASE_SECONDS_MAX}")));
    }
    let seconds = i32::try_from(seconds).expect("within its range");
    let renewal = renew(&app, &lease_id, seconds).await?;
    let expires_at = renewal.expires_at.map(utc_text);
    Ok(Json(Extended {
        lease_id,
        success: 0 < renewal.renewed,
        renewed: renewal.renewed.into(),
        new_expires_at: expires_at.clone(),
        expires_at: expires_at.clone(),
        lease_expires_at: expires_at,
    }))
}

/// A lease that no server gave out, or that ended, renews nothing.
async fn renew(app: &Arc<App>, lease_id: &str, seconds: i32) -> Result<Renewal, Error> {
    const NOTHING: Renewal = Renewal { renewed: 0, expires_at: None };
    // Lease ids are made here in this form; anything else is not worth a search.
    if Uuid::parse_str(lease_id).ok().and_then(|id| id.get_timestamp()).is_none() {
        return Ok(NOTHING);
    }
    let Some(holding) = app.leases.find(&app.db, lease_id).await? else { return Ok(NOTHING) };
    let renewal = log_renew_lease_v1(&app.db.conn().await?, lease_id, seconds, &holding).await?;
    if renewal.renewed == 0 {
        app.leases.forget(lease_id);
    }
    Ok(renewal)
}
