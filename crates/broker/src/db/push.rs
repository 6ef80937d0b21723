//! Twins of `sql/procedures/push.sql`.
