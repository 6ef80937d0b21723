//! Twins of `sql/procedures/metrics.sql`.
