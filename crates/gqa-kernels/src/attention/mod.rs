//! The attention algorithms.

pub mod general;
