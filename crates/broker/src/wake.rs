//! Wakes waiting pops when there may be something for them.
