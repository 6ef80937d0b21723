//! What a client may get wrong, with the right answer beside it.
//!
//! What is wrong about one route only stands with that route: acknowledging twice, late, by another worker or for
//! another partition in `ack.rs`; ten thousand partitions in one push in `push.rs`; fifty callers that configure a new
//! queue in `configure.rs`; a client that hangs up while it waits in `pop_wait.rs`.

mod empty;
mod fields;
mod names;
mod parameters;
mod recreated;
mod schema;
#[path = "../support/mod.rs"]
mod support;
mod unknown;
