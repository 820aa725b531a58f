//! The kernel families, one file each.

mod blackwell;
mod blackwell_decode;
mod blackwell_paged;
mod decode;
mod decode_parts;
mod decode_quantized;
mod general;
mod hopper;
mod hopper_float8;
mod hopper_masked;
mod hopper_paged;
mod hopper_paged_quantized;
mod hopper_quantized;
mod hopper_split;
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

use super::device::DeviceInfo;
use super::family::Sequences::{Long, Short};
use super::family::{Family, Paged, Sequences};
use crate::problem::Problem;

/// Families for contiguous KV caches, best first: the order in which the cascade asks them.
pub(super) static CONTIGUOUS: [&dyn Family; 20] = [
    &blackwell_decode::BlackwellDecode { paged: false },
    &decode_quantized::DecodeQuantized { paged: false },
    &decode::Decode { paged: false },
    &split_kv::SplitKv,
    &split_kv_masked::SplitKvMasked,
    &hopper_float8::HopperFloat8,
    &hopper_quantized::HopperQuantized,
    &hopper_split::HopperSplit,
    &hopper::Hopper,
    &hopper_masked::HopperMasked,
    &hopper_wide::HopperWide { paged: false },
    &blackwell::Blackwell,
    &tiled_tma::TiledTma,
    &tiled::Tiled,
    &tiled_masked::TiledMasked,
    &tiled_f32::TiledF32,
    &tiled_wide::TiledWide,
    &latent_mma::LatentMma { paged: false },
    &general::General,
    &unfused::Unfused,
];

const LATENT_MMA: &dyn Family = &latent_mma::LatentMma { paged: true };

/// Families for paged KV caches, best first, with the sequences that they take and the calls about
/// which they are asked (`mixed.rs`).
pub(super) static PAGED: [Paged; 11] = [
    paged(&blackwell_decode::BlackwellDecode { paged: true }, Short, |p, _| !p.latent),
    paged(&decode::Decode { paged: true }, Short, |p, _| is_plain(p)),
    paged(&decode_quantized::DecodeQuantized { paged: true }, Short, |p, _| {
        !p.latent && p.quantized.is_some()
    }),
    paged(&hopper_wide::HopperWide { paged: true }, Short, |p, _| {
        is_plain(p) && p.head_size > LARGEST_DECODE_HEAD
    }),
    paged(LATENT_MMA, Short, |p, device| p.latent && latent_mma::comes_first(p, device)),
    paged(&latent::Latent, Short, |p, _| p.latent),
    paged(LATENT_MMA, Short, |p, device| p.latent && !latent_mma::comes_first(p, device)),
    paged(&hopper_paged_quantized::HopperPagedQuantized, Long, |p, _| {
        p.quantized.is_some() && !p.batch_invariant
    }),
    paged(&hopper_paged::HopperPaged, Long, |p, _| p.quantized.is_none() && !p.batch_invariant),
    paged(&blackwell_paged::BlackwellPaged, Long, |p, _| {
        p.quantized.is_none() && !p.batch_invariant
    }),
    paged(&tiled_paged::TiledPaged, Long, |p, _| p.quantized.is_none()),
];

const fn paged(
    family: &'static dyn Family,
    sequences: Sequences,
    concerns: fn(&Problem, &DeviceInfo) -> bool,
) -> Paged {
    Paged { family, sequences, concerns }
}

/// Largest heads for which `decode` has more than one row tile: wider ones share keys better in
/// the tiles of `hopper_wide`.
pub(super) const LARGEST_DECODE_HEAD: usize = 256;

/// Whether keys and values are apart, and not quantized.
fn is_plain(p: &Problem) -> bool {
    !p.latent && p.quantized.is_none()
}

pub(super) use decode::in_halves;
pub(super) use decode_parts::{division, in_parts, schedule};
pub(super) use hopper_paged::{work_division, work_schedule};
