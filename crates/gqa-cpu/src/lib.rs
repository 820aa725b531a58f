//! Attention of query rows over tiles of keys and values, on the vectors of a processor: the inner
//! loops of gqa-host's CPU back end. They know no operators, no threads and no errors.
//!
//! What compiles longest is here, apart from what changes most: every loop is compiled for each
//! width of vectors, each number of rows and each type of cache.
//!
//! Many rows lie across the lanes of a vector (`panel`), and are multiplied by single numbers
//! (`singles`) or by pairs of bfloat16 (`pairs`); where rows are too few for that, the elements of
//! a head lie there (`decode`). A cache is read as it is stored ([`StoredTile`]), and memory is
//! asked for a tile ahead (`prefetch`); what many rows read is converted first (`widen`). Rows are
//! rotated by `rotate`.
//! Instructions that pulp has no word for are in `native` and `amx`.

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
pub use stored::{Float8, Int4, Int8, StoredRows, StoredTile};
pub use widen::{CacheElement, narrow_to_bf16, narrow_to_f16};
