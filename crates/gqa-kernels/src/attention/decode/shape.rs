//! Named shapes of the kernels of a decode step: for each the head size, packed query rows, keys of
//! a tile, warps, pipeline stages, and what differs from a cache of 16-bit elements, heads that
//! fill their tiles, and products by `mma`.

use super::{Decode, Mma, Padded, Wgmma, Whole};

/// The kernel type of a shape. `8 * HALVES` rows are 8 or 16; `bits` are those of a cached value.
macro_rules! shape {
    (head $head:literal, rows 8 * $halves:ident, $($rest:tt)*) => {
        shape!(@tiles $head, [1, $halves], $($rest)*)
    };
    (head $head:literal, rows 32, $($rest:tt)*) => { shape!(@tiles $head, [2, 2], $($rest)*) };
    (head $head:literal, rows 64, $($rest:tt)*) => { shape!(@tiles $head, [4, 2], $($rest)*) };
    (@tiles $head:literal, [$tiles:tt, $halves:tt],
     keys $keys:literal, warps $warps:literal, stages $stages:literal
     $(, bits $bits:literal)? $(, heads $heads:ident)? $(, products $products:ident)?) => {
        Decode<
            { $head / 8 },
            { $head * shape!(@or 16 $(, $bits)?) / 128 },
            $tiles,
            $halves,
            { $keys / 8 },
            $warps,
            $stages,
            shape!(@type Whole $(, $heads)?),
            shape!(@type Mma $(, $products)?),
        >
    };
    (@or $default:literal) => { $default };
    (@or $default:literal, $given:literal) => { $given };
    (@type $default:ident) => { $default };
    (@type $default:ident, $given:ident) => { $given };
}

// One shape per head size for 8 or 16 rows, and `R32` and `R64` for more rows where registers hold
// their output. Each has as many bytes in flight as an SM's share of the memory bandwidth needs.
// `W4` shapes have four warps, and two of their CTAs fit on an SM, so that one streams while the
// other begins or ends: for calls with more CTAs than run at a time.

/// Head size 64.
pub type D64<const HALVES: usize> = shape!(head 64, rows 8 * HALVES, keys 32, warps 8, stages 2);
/// Head size 80.
pub type D80<const HALVES: usize> = shape!(head 80, rows 8 * HALVES, keys 32, warps 8, stages 2);
/// Head size 96.
pub type D96<const HALVES: usize> = shape!(head 96, rows 8 * HALVES, keys 32, warps 8, stages 1);
/// Head size 128.
pub type D128<const HALVES: usize> = shape!(head 128, rows 8 * HALVES, keys 16, warps 8, stages 2);
/// Head size 192.
pub type D192<const HALVES: usize> = shape!(head 192, rows 8 * HALVES, keys 16, warps 8, stages 1);
/// Head size 256.
pub type D256<const HALVES: usize> = shape!(head 256, rows 8 * HALVES, keys 16, warps 8, stages 1);
/// Head size 512, for data-center GPUs since Hopper: no others have enough shared memory.
pub type D512<const HALVES: usize> = shape!(head 512, rows 8 * HALVES, keys 16, warps 4, stages 1);
/// Head size 64, half an SM.
pub type D64W4<const HALVES: usize> = shape!(head 64, rows 8 * HALVES, keys 32, warps 4, stages 2);
/// Head size 80, half an SM.
pub type D80W4<const HALVES: usize> = shape!(head 80, rows 8 * HALVES, keys 32, warps 4, stages 2);
/// Head size 96, half an SM.
pub type D96W4<const HALVES: usize> = shape!(head 96, rows 8 * HALVES, keys 32, warps 4, stages 1);
/// Head size 128, half an SM.
pub type D128W4<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 32, warps 4, stages 1);
/// Head size 192, half an SM.
pub type D192W4<const HALVES: usize> =
    shape!(head 192, rows 8 * HALVES, keys 16, warps 4, stages 1);
/// Head size 256, half an SM.
pub type D256W4<const HALVES: usize> =
    shape!(head 256, rows 8 * HALVES, keys 16, warps 4, stages 1);
/// Head size 64, 32 rows.
pub type D64R32 = shape!(head 64, rows 32, keys 32, warps 8, stages 2);
/// Head size 80, 32 rows.
pub type D80R32 = shape!(head 80, rows 32, keys 32, warps 8, stages 2);
/// Head size 96, 32 rows.
pub type D96R32 = shape!(head 96, rows 32, keys 32, warps 8, stages 1);
/// Head size 128, 32 rows.
pub type D128R32 = shape!(head 128, rows 32, keys 32, warps 8, stages 1);
/// Head size 64, 32 rows, half an SM.
pub type D64R32W4 = shape!(head 64, rows 32, keys 32, warps 4, stages 2);
/// Head size 128, 32 rows, half an SM.
pub type D128R32W4 = shape!(head 128, rows 32, keys 32, warps 4, stages 1);
/// Head size 64, 64 rows.
pub type D64R64 = shape!(head 64, rows 64, keys 64, warps 8, stages 4, products Wgmma);
/// Head size 80, 64 rows.
pub type D80R64 = shape!(head 80, rows 64, keys 64, warps 8, stages 2, products Wgmma);
/// Head size 96, 64 rows.
pub type D96R64 = shape!(head 96, rows 64, keys 64, warps 8, stages 2, products Wgmma);
/// Head size 128, 64 rows.
pub type D128R64 = shape!(head 128, rows 64, keys 64, warps 8, stages 2, products Wgmma);

// 64 rows on GPUs without warpgroup instructions. In 99 KB of shared memory there is room for two
// teams up to head size 96, and for one at 128.

/// Head size 64, 64 rows, without `wgmma`.
pub type D64R64Mma = shape!(head 64, rows 64, keys 64, warps 8, stages 2);
/// Head size 80, 64 rows, without `wgmma`.
pub type D80R64Mma = shape!(head 80, rows 64, keys 64, warps 8, stages 1);
/// Head size 96, 64 rows, without `wgmma`.
pub type D96R64Mma = shape!(head 96, rows 64, keys 32, warps 8, stages 2);
/// Head size 128, 64 rows, without `wgmma`.
pub type D128R64Mma = shape!(head 128, rows 64, keys 32, warps 8, stages 3);
/// Head size 256, 64 rows, without `wgmma`.
pub type D256R64Mma = shape!(head 256, rows 64, keys 32, warps 8, stages 2);
/// Head size 128, 64 rows, without `wgmma`, less shared memory.
pub type D128R64MmaW4 = shape!(head 128, rows 64, keys 32, warps 4, stages 3);
/// Head size 256, 64 rows, without `wgmma`, less shared memory.
pub type D256R64MmaW4 = shape!(head 256, rows 64, keys 32, warps 4, stages 2);

// Quantized caches, for 8 or 16 rows, with as many bytes in flight. 4-bit values of head size 128
// have half of that, in smaller tiles, which is faster (`docs/perf-log.md`).

/// Head size 64, 8-bit values.
pub type D64Quantized8<const HALVES: usize> =
    shape!(head 64, rows 8 * HALVES, keys 32, warps 8, stages 4, bits 8);
/// Head size 128, 8-bit values.
pub type D128Quantized8<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 32, warps 8, stages 2, bits 8);
/// Head size 256, 8-bit values.
pub type D256Quantized8<const HALVES: usize> =
    shape!(head 256, rows 8 * HALVES, keys 16, warps 8, stages 2, bits 8);
/// Head size 64, 4-bit values.
pub type D64Quantized4<const HALVES: usize> =
    shape!(head 64, rows 8 * HALVES, keys 64, warps 8, stages 4, bits 4);
/// Head size 128, 4-bit values.
pub type D128Quantized4<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 32, warps 8, stages 2, bits 4);
/// Head size 256, 4-bit values.
pub type D256Quantized4<const HALVES: usize> =
    shape!(head 256, rows 8 * HALVES, keys 32, warps 8, stages 2, bits 4);

// The same with four warps and fewer stages, for GPUs with 99 KB of shared memory per CTA.

/// Head size 64, 8-bit values, less shared memory.
pub type D64Quantized8W4<const HALVES: usize> =
    shape!(head 64, rows 8 * HALVES, keys 32, warps 4, stages 4, bits 8);
/// Head size 128, 8-bit values, less shared memory.
pub type D128Quantized8W4<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 32, warps 4, stages 1, bits 8);
/// Head size 64, 4-bit values, less shared memory.
pub type D64Quantized4W4<const HALVES: usize> =
    shape!(head 64, rows 8 * HALVES, keys 64, warps 4, stages 2, bits 4);
/// Head size 128, 4-bit values, less shared memory.
pub type D128Quantized4W4<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 64, warps 4, stages 1, bits 4);
/// Head size 256, 4-bit values, less shared memory.
pub type D256Quantized4W4<const HALVES: usize> =
    shape!(head 256, rows 8 * HALVES, keys 16, warps 4, stages 2, bits 4);

// Head sizes without a shape of their own, with shared memory that every GPU has.

/// Head sizes up to 128.
pub type UpTo128<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 32, warps 4, stages 1, heads Padded);
/// Head sizes up to 256.
pub type UpTo256<const HALVES: usize> =
    shape!(head 256, rows 8 * HALVES, keys 16, warps 4, stages 1, heads Padded);
/// Head sizes up to 128, 8-bit values.
pub type UpTo128Quantized8<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 32, warps 4, stages 1, bits 8, heads Padded);
/// Head sizes up to 256, 8-bit values.
pub type UpTo256Quantized8<const HALVES: usize> =
    shape!(head 256, rows 8 * HALVES, keys 16, warps 4, stages 1, bits 8, heads Padded);
/// Head sizes up to 128, 4-bit values.
pub type UpTo128Quantized4<const HALVES: usize> =
    shape!(head 128, rows 8 * HALVES, keys 64, warps 4, stages 1, bits 4, heads Padded);
/// Head sizes up to 256, 4-bit values.
pub type UpTo256Quantized4<const HALVES: usize> =
    shape!(head 256, rows 8 * HALVES, keys 16, warps 4, stages 2, bits 4, heads Padded);
