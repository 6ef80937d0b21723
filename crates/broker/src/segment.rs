//! The stored format of a segment: frames to blob and back.
