//! Kernels on the simulator, compared with what they shall compute. One program: each of its
//! modules would else be linked with all kernels.

mod blackwell;
mod blackwell_decode;
mod decode_quantized;
mod flash;
mod general;
mod merge_peers;
mod paged;
mod peers;
mod prologue;
mod rolling;
mod split_kv;
mod splits;
mod support;
mod tiled;
mod tiled_f32;
mod tiled_tma;
mod tiled_wide;
