//! The kernel families, one file each.

mod decode;
mod decode_paged;
mod decode_paged_quantized;
mod decode_quantized;
mod general;
mod hopper;
mod hopper_float8;
mod hopper_masked;
mod hopper_paged;
mod hopper_paged_quantized;
mod hopper_quantized;
mod hopper_wide;
mod latent;
mod latent_mma;
mod split_kv;
mod split_kv_masked;
mod tiled;
mod tiled_f32;
mod tiled_masked;
mod tiled_paged;
mod tiled_tma;
mod tiled_wide;
mod unfused;

use super::family::Family;

/// All families, best first: the order in which the cascade asks them.
pub(super) static FAMILIES: [&dyn Family; 25] = [
    &decode_paged::DecodePaged,
    &decode_paged_quantized::DecodePagedQuantized,
    &hopper_paged_quantized::HopperPagedQuantized,
    &hopper_paged::HopperPaged,
    &tiled_paged::TiledPaged,
    &latent::Latent,
    &latent_mma::LatentMma { paged: true },
    &hopper_wide::HopperWide { paged: true },
    &decode_quantized::DecodeQuantized,
    &decode::Decode,
    &split_kv::SplitKv,
    &split_kv_masked::SplitKvMasked,
    &hopper_float8::HopperFloat8,
    &hopper_quantized::HopperQuantized,
    &hopper::Hopper,
    &hopper_masked::HopperMasked,
    &hopper_wide::HopperWide { paged: false },
    &tiled_tma::TiledTma,
    &tiled::Tiled,
    &tiled_masked::TiledMasked,
    &tiled_f32::TiledF32,
    &tiled_wide::TiledWide,
    &latent_mma::LatentMma { paged: false },
    &general::General,
    &unfused::Unfused,
];

pub(super) use decode::in_halves;
pub(super) use decode_paged::{DecodePaged, division, in_parts, schedule};
pub(super) use decode_paged_quantized::DecodePagedQuantized;
pub(super) use hopper_paged::HopperPaged;
pub(super) use hopper_paged_quantized::HopperPagedQuantized;
pub(super) use hopper_wide::HopperWide;
pub(super) use latent::Latent;
pub(super) use latent_mma::LatentMma;
pub(super) use tiled_paged::TiledPaged;
