//! Deletion by policy: every rule, every edge, against a real database.

#[path = "../support/mod.rs"]
mod support;

mod cleanup;
mod cost;
mod cycle;
mod differential;
mod due;
mod eviction;
mod holds;
mod kv;
mod pacing;
mod purge;
mod rules;
mod told;
