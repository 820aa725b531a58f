//! The attention algorithms.
