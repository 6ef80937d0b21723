//! Bounded deletion.
