//! Attention of query rows over tiles of keys and values, on the vectors of a processor: the inner
//! loops of gqa-host's CPU back end. They know no operators, no threads and no errors.
//!
//! What compiles longest is here, apart from what changes most: every loop is compiled for each
//! width of vectors, each number of rows and each type of cache.
//!
//! Many rows lie across the lanes of a vector (`panel`); where rows are too few for that, the
//! elements of a head do (`decode`). A cache is read as it is stored ([`StoredTile`]), and memory
//! is asked for a tile ahead (`prefetch`); what many rows read is converted first ([`widen`]).
//! Instructions that pulp has no word for are in `native`.

mod attend;
mod decode;
mod lanes;
mod native;
mod panel;
mod prefetch;
mod scratch;
mod stored;
mod widen;

pub use attend::{Partial, Shown, Softmax, attend, scores};
pub use panel::{KEYS, PADDED_TO, Rows, Tile, span};
pub use stored::{CacheElement, Float8, Int4, Int8, StoredRows, StoredTile};
pub use widen::widen;
