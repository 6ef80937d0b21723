//! Ebbtide's broker: ordered lanes, consumer groups and dead letters on PostgreSQL.

pub mod auth;
pub mod bundle;
pub mod cli;
pub mod config;
pub mod db;
pub mod dedup;
pub mod embedded;
pub mod ephemeral;
pub mod error;
pub mod http;
pub mod id;
pub mod logging;
pub mod quota;
pub mod retention;
pub mod seal;
pub mod segment;
pub mod spool;
pub mod switches;
pub mod telemetry;
pub mod timers;
pub mod wake;
