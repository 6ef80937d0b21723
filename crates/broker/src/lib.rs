//! Ebbtide's broker: ordered lanes, consumer groups and dead letters on PostgreSQL.

pub mod db;
pub mod error;
pub mod id;
