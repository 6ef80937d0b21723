//! Twins of `sql/procedures/transaction.sql`.
