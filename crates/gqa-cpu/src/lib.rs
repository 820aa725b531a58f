//! Attention of query rows over tiles of keys and values, on the vectors of a processor: the inner
//! loops of gqa-host's CPU back end. This crate has no operators, threads or errors.
//!
//! It is a crate of its own because it compiles slowly and changes rarely: every loop is compiled
//! for each vector width, row count and cache type.
//!
//! In prefill, lanes hold rows (`panel`), and products take single float32 elements (`singles`) or
//! pairs of bfloat16 (`pairs`). In decode, which has too few rows for that, lanes hold the elements
//! of a head (`decode`). Decode reads the cache as stored ([`StoredTile`]) and prefetches a tile
//! ahead (`prefetch`); prefill converts a tile to float32 first (`widen`). Rows are rotated by
//! `rotate`. Instructions that pulp lacks are in `native` and `amx`.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attend;
mod decode;
mod instructions;
mod key_range;
mod lanes;
mod native;
#[cfg(any(target_arch = "x86_64", test))]
mod pairs;
mod panel;
mod panels;
mod prefetch;
mod rotate;
mod row_starts;
mod scratch;
mod singles;
mod stored;
#[cfg(any(target_arch = "x86_64", test))]
mod tiles;
mod widen;

#[cfg(test)]
extern crate self as gqa_cpu;
#[cfg(test)]
#[path = "../tests/made_up/mod.rs"]
mod made_up;

pub use attend::{Shown, attend, scores};
pub use instructions::Instructions;
pub use key_range::{Softmax, Write};
pub use panel::{KEYS, PADDED_TO, Rows, Tile, span};
pub use rotate::rotate;
pub use row_starts::Starts;
pub use stored::{Float4, Float8, Int4, Int8, StoredRows, StoredTile};
pub use widen::{CacheElement, narrow_to_bf16, narrow_to_f16};
