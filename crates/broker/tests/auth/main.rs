//! Tokens: which count, whose keys are believed, and what each role may do.

#[path = "../support/mod.rs"]
mod support;

mod keys;
mod routes;
mod start;
mod tokens;
