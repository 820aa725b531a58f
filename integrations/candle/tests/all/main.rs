//! One program, as linking candle takes long.

mod cache;
mod definition;
mod flash;
mod refusal;
