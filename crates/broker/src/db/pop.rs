//! Twins of `sql/procedures/pop.sql`.
