//! What GPUs that share the keys merge.

use crate::attention::merge_peers::{self, merge_peers};
use crate::num::{bf16, f16};
use crate::params::PeersParams;

#[cfg(not(target_arch = "nvptx64"))]
pub(super) static TABLES: &[&[super::Entry]] = &[MERGE_PEERS];

kernels!(MERGE_PEERS, Peers: MergePeers, "peers",
    (part: T, part_lse: f32, inbox: u64, peer_0: u64, peer_1: u64, peer_2: u64, peer_3: u64,
     peer_4: u64, peer_5: u64, peer_6: u64, peer_7: u64,
     state: u32, late: u32, out: T, lse: f32; p: PeersParams),
    each { head_size: 0, rows: 0, keys: 0, threads: merge_peers::THREADS, min_blocks: 1, shared: 0,
           hot: true, min_sm: 70, communicates: true }, {
    gqa_merge_peers_f32 => merge_peers::<f32>, T = f32;
    gqa_merge_peers_f16 => merge_peers::<f16>, T = f16;
    gqa_merge_peers_bf16 => merge_peers::<bf16>, T = bf16;
});
