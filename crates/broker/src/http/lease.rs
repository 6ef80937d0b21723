//! Routes of leases.

use std::sync::Arc;

use axum::Router;

use super::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
}
