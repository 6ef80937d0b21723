//! Twins of `sql/procedures/retention.sql`.
