//! Entries of kernels that no plan chooses yet: the tests of gqa-ptx compile and assemble them,
//! those of gqa-kernels run them on the simulator.
#![no_std]
#![feature(abi_ptx)]

mod tile;

use gqa_kernels::attention::blackwell;
use gqa_kernels::num::{bf16, f16};
use gqa_kernels::params::AttentionParams;
use gqa_kernels::simt::{Global, TensorMap};
use gqa_kernels::tile::seqlens::Seqlens;

macro_rules! entries {
    ($($tile:ident, $prefill:ident = $element:ty;)*) => {$(
        /// [`tile::tile`] of this type.
        #[unsafe(no_mangle)]
        pub extern "ptx-kernel" fn $tile(
            q: Global<$element>,
            k: Global<$element>,
            v: Global<$element>,
            out: Global<f32>,
        ) {
            tile::tile(q, k, v, out);
        }

        /// [`blackwell::prefill`] of this type; tensor maps by their addresses.
        #[unsafe(no_mangle)]
        pub extern "ptx-kernel" fn $prefill(
            q: u64,
            k: u64,
            v: u64,
            seqlens_k: Global<i32>,
            query_seqlens: Global<i32>,
            head_sink: Global<$element>,
            out: Global<$element>,
            lse: Global<f32>,
            p: AttentionParams,
        ) {
            let to = blackwell::Pointers { head_sink, out, lse };
            let seqlens = Seqlens::new(seqlens_k, query_seqlens);
            blackwell::prefill([q, k, v].map(TensorMap::at), seqlens, to, p);
        }
    )*};
}
entries! {
    tile_f16, prefill_f16 = f16;
    tile_bf16, prefill_bf16 = bf16;
}
