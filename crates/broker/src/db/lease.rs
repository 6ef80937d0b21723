//! Twins of `sql/procedures/lease.sql`.
