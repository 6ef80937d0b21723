//! Timer operations as the document shows them; [`super::request`] reads the fields one by one, to name what is wrong.
#![expect(dead_code, reason = "these types only describe")]

use utoipa::ToSchema;

/// What is to become of one timer.
#[derive(ToSchema)]
#[schema(as = TimerOperation)]
#[serde(tag = "op", rename_all = "camelCase")]
pub(in crate::http) enum Operation {
    Schedule(Schedule),
    Reschedule(Schedule),
    Cancel(Cancel),
}

/// A message that is to be pushed later. A timer of the same queue and key is replaced.
#[derive(ToSchema)]
#[schema(as = TimerSchedule)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Schedule {
    #[schema(min_length = 1, max_length = 255)]
    queue: String,
    #[schema(min_length = 1, max_length = 512)]
    timer_key: String,
    /// Base64 of the JSON that the message's data will be, at most 1 MiB of it.
    payload: String,
    /// From now on, by the database's clock; at most 90 days. Below zero is at once.
    delay_ms: i64,
    /// The transaction id of the message.
    #[schema(min_length = 1, max_length = 65_535)]
    txn: String,
    #[schema(min_length = 1, max_length = 255, default = "Default")]
    partition: Option<String>,
    /// Whether the payload is packed with zstd.
    payload_zstd: Option<bool>,
}

#[derive(ToSchema)]
#[schema(as = TimerCancel)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Cancel {
    #[schema(min_length = 1, max_length = 255)]
    queue: String,
    #[schema(min_length = 1, max_length = 512)]
    timer_key: String,
    #[schema(min_length = 1, max_length = 65_535)]
    txn: Option<String>,
}

/// One timer, or that there is none: then the fields after `timerKey` are left out.
#[derive(ToSchema)]
#[schema(as = TimerPeek)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct Peek {
    found: bool,
    queue: String,
    timer_key: String,
    /// Base64 of what is stored.
    #[schema(required = false)]
    payload: String,
    #[schema(required = false)]
    partition: String,
    /// Not before.
    #[schema(required = false)]
    deliver_at: String,
    #[schema(required = false)]
    txn: String,
    #[schema(required = false)]
    message_id: uuid::Uuid,
    #[schema(required = false)]
    payload_zstd: bool,
    #[schema(required = false)]
    encrypted: bool,
    producer_sub: Option<String>,
    #[schema(required = false)]
    attempts: i32,
    last_error: Option<String>,
    #[schema(required = false)]
    claimed: bool,
    #[schema(required = false)]
    created_at: String,
    #[schema(required = false)]
    updated_at: String,
}
