//! Entries of the tile that used tensor memory first: the tests of gqa-ptx compile and assemble
//! them, those of gqa-kernels run them on the simulator.
#![no_std]
#![feature(abi_ptx)]

mod tile;

use gqa_kernels::num::{bf16, f16};
use gqa_kernels::simt::Global;

macro_rules! entries {
    ($($tile:ident = $element:ty;)*) => {$(
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
    )*};
}
entries! {
    tile_f16 = f16;
    tile_bf16 = bf16;
}
