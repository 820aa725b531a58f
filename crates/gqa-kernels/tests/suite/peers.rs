//! Typed places in the memory of a cluster's other blocks.

use gqa_kernels::simt::*;
use gqa_sim::{Arg, Arguments, Launch, launch};

const CLUSTER: u32 = 4;
const MAIL: u32 = 64;

/// Every block sends its rank to all in each of the ways there are; thread 0 of each sums up what
/// has come.
fn kernel(arguments: &Arguments) {
    let (rank, base) = (cluster_rank(), shared_base());
    if thread_idx() == 0 {
        mbarrier_init(base, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect(base, CLUSTER * 20);
    }
    sync_cluster();
    let to = thread_idx();
    if to < CLUSTER {
        let mail = Shared::<f32>::at(MAIL).on(to);
        let barrier = peer_address(base, to);
        mail.store_async(rank, rank as f32, barrier);
        mail.offset(4).store_async_vec(4 * rank, [(10.0 * rank as f32).to_bits(); 4], barrier);
        mail.offset(20).store(rank, 100.0 * rank as f32);
        mail.offset(24).store_vec(4 * rank, [(1000.0 * rank as f32).to_bits(); 4]);
    }
    mbarrier_wait_cluster(base, 0);
    sync_cluster();
    let here = Shared::<f32>::at(MAIL);
    if thread_idx() == 0 {
        let sum: f32 = (0..40).map(|i| here.load(i)).sum();
        arguments.global::<f32>(0).store(block_idx_x() as usize, sum);
    }
    let next = here.on((rank + 1) % CLUSTER);
    let [first, ..] = next.offset(8).load_vec(0).map(f32::from_bits);
    assert_eq!((next.load(2), first), (2.0, 10.0));
    assert_eq!(next.offset(3).address() - next.address(), 12);
    sync_cluster();
}

#[test]
fn places_in_peers_are_those_of_the_block_itself() {
    for seed in 0..8 {
        let mut sums = [0.0f32; 8];
        let shape = Launch {
            grid: [8, 1, 1],
            threads: 64,
            shared_bytes: 256,
            seed,
            cluster: CLUSTER,
            ..Launch::default()
        };
        launch(&shape, &kernel, &[Arg::write(&mut sums)]).unwrap();
        assert_eq!(sums, [6.0 * (1.0 + 40.0 + 100.0 + 4000.0); 8]);
    }
}
