//! Twins of `sql/procedures/traces.sql`.
