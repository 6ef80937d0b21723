//! Twins of `sql/procedures/ack.sql`.
