//! Twins of `sql/procedures/dead_letters.sql`.
