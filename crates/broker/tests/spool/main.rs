//! Pushes while the database is away: kept on disk, replayed in order and once.

#[path = "../support/mod.rs"]
mod support;

mod killed;
mod outage;
mod unknown;
