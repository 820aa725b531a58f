//! The attention algorithms.

pub mod blackwell;
pub mod blackwell_decode;
pub mod combine;
pub mod decode;
pub mod general;
pub mod hopper;
pub mod latent;
pub mod latent_mma;
pub mod merge_peers;
mod out;
mod rows_of_none;
pub mod split_kv;
pub mod tiled;
pub mod tiled_f32;
pub mod tiled_wide;
pub mod unfused;
