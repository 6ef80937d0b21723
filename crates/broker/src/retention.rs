//! The five phases of a cycle, in order.
