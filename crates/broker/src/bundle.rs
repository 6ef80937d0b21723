//! Concurrent pushes, committed together.
