//! Twins of `sql/procedures/configure.sql`.
