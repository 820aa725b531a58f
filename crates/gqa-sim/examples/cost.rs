//! Prints the cost of each instruction on this machine, in nanoseconds of one core;
//! `docs/simulator.md` quotes it.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Launch, launch};
use std::hint::black_box;
use std::time::Instant;

const REPEATS: u32 = 200;
const THREADS: u32 = 128;

/// Seconds of the fastest of many runs, each short enough to be uninterrupted.
fn fastest(mut run: impl FnMut()) -> f64 {
    let times = (0..100).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// A CTA whose accesses the warps' clocks order.
const PLAIN: Launch<'static> = Launch {
    name: "cost",
    grid: [1, 1, 1],
    threads: THREADS,
    shared_bytes: 16 * THREADS + 16,
    seed: 1,
    cluster: 1,
    communicates: false,
    programmatic: false,
};

/// Nanoseconds that one more `instruction` adds, per group of `share` threads.
fn cost<R>(share: u32, instruction: impl Fn(&Arguments) -> R + Sync) -> f64 {
    cost_in(&PLAIN, false, share, instruction)
}

/// The same in a launch of that shape, with or without an mbarrier, which switches the CTA to
/// vector clocks.
fn cost_in<R>(
    shape: &Launch<'_>,
    mbarrier: bool,
    share: u32,
    instruction: impl Fn(&Arguments) -> R + Sync,
) -> f64 {
    let (input, mut output) =
        (vec![[0u32; 4]; THREADS as usize], vec![[0u32; 4]; THREADS as usize]);
    let mut seconds = |repeats: u32| {
        let kernel = |arguments: &Arguments| {
            st_shared_vec(shared_base() + 16 * thread_idx(), [0; 4]);
            if mbarrier && thread_idx() == 0 {
                mbarrier_init(shared_base() + 16 * THREADS, 1);
                fence_mbarrier_init();
            }
            sync_threads();
            if shape.cluster > 1 {
                cluster_arrive();
                cluster_wait();
            }
            for _ in 0..repeats {
                black_box(instruction(arguments));
            }
            if shape.cluster > 1 {
                cluster_arrive();
                cluster_wait();
            }
        };
        fastest(|| {
            launch(shape, &kernel, &[Arg::read(&input), Arg::write(&mut output)])
                .expect("a correct kernel");
        })
    };
    let threads = shape.threads * shape.grid[0];
    (seconds(REPEATS + 1) - seconds(1)) * 1e9 / f64::from(REPEATS * threads / share)
}

fn launch_cost(threads: u32, shared_bytes: u32) -> f64 {
    let shape = Launch { name: "empty", threads, shared_bytes, ..Launch::default() };
    fastest(|| {
        launch(&shape, &|_| {}, &[]).expect("an empty kernel");
    }) * 1e9
}

fn main() {
    let row = || shared_base() + 16 * thread_idx();
    let print = |name: &str, nanoseconds: f64| println!("{name:38} {nanoseconds:9.1} ns");
    println!("per thread");
    print("ld_shared u16", cost(1, |_| ld_shared::<u16>(row())));
    print("ld_shared u32", cost(1, |_| ld_shared::<u32>(row())));
    print("ld_shared_vec", cost(1, |_| ld_shared_vec(row())));
    print("st_shared u32", cost(1, |_| st_shared(row(), 1u32)));
    print("st_shared_vec", cost(1, |_| st_shared_vec(row(), [1; 4])));
    print("global load f32", cost(1, |a| a.global::<f32>(0).load(thread_idx() as usize)));
    print("global load_vec", cost(1, |a| a.global::<u32>(0).load_vec(4 * thread_idx() as usize)));
    print("global store f32", cost(1, |a| a.global::<f32>(1).store(thread_idx() as usize, 1.0)));
    let copy = |a: &Arguments| {
        cp_async_16(row(), a.global::<u32>(0), 0, true);
        cp_async_commit();
        cp_async_wait::<0>();
    };
    print("cp_async_16, commit, wait", cost(1, copy));
    print("fma", cost(1, |_| fma(black_box(1.5), 2.5, 3.5)));
    print("exp2", cost(1, |_| exp2(black_box(1.5))));
    println!("per warp");
    print("sync_warp", cost(32, |_| sync_warp()));
    print("shfl_xor_f32", cost(32, |_| shfl_xor_f32(1.0, 1)));
    print("ldmatrix_x4", cost(32, |_| ldmatrix_x4(row())));
    print("ldmatrix_x4_trans", cost(32, |_| ldmatrix_x4_trans(row())));
    print("mma_m16n8k16_f16", cost(32, |_| mma_m16n8k16_f16(&mut [0.0; 4], [0; 4], [0; 2])));
    print("mma_m16n8k16_bf16", cost(32, |_| mma_m16n8k16_bf16(&mut [0.0; 4], [0; 4], [0; 2])));
    print("mma_m16n8k8_tf32", cost(32, |_| mma_m16n8k8_tf32(&mut [0.0; 4], [0; 4], [0; 2])));
    println!("per block");
    print("sync_threads, 128 threads", cost(THREADS, |_| sync_threads()));
    print("launch, 128 threads, 48 KiB shared", launch_cost(128, 48 * 1024));
    print("launch, 1024 threads", launch_cost(1024, 0));
    println!("with vector clocks");
    print("ld_shared u32", cost_in(&PLAIN, true, 1, |_| ld_shared::<u32>(row())));
    print("ld_shared_vec", cost_in(&PLAIN, true, 1, |_| ld_shared_vec(row())));
    print("st_shared_vec", cost_in(&PLAIN, true, 1, |_| st_shared_vec(row(), [1; 4])));
    print("ldmatrix_x4, per warp", cost_in(&PLAIN, true, 32, |_| ldmatrix_x4(row())));
    print("sync_warp", cost_in(&PLAIN, true, 32, |_| sync_warp()));
    print("sync_threads, 128 threads", cost_in(&PLAIN, true, THREADS, |_| sync_threads()));
    println!("in clusters of 8");
    let shape = Launch { cluster: 8, grid: [8, 1, 1], ..PLAIN };
    let peer = || peer_address(shared_base() + 16 * thread_idx(), (cluster_rank() + 1) % 8);
    print("ld_peer_vec", cost_in(&shape, false, 1, |_| ld_peer_vec(peer())));
    print("sync_warp", cost_in(&shape, false, 32, |_| sync_warp()));
    let sync = |_: &Arguments| {
        cluster_arrive();
        cluster_wait();
    };
    print("cluster barrier, 1024 threads", cost_in(&shape, false, 8 * THREADS, sync));
    println!("where blocks communicate");
    let shape = Launch { communicates: true, ..PLAIN };
    let place = || 4 * thread_idx() as usize;
    let load = |a: &Arguments| a.global::<u32>(0).load_vec(place());
    print("global load_vec, read-only", cost_in(&shape, true, 1, load));
    let load = |a: &Arguments| a.global::<u32>(1).load_vec(place());
    print("global load_vec, writable", cost_in(&shape, true, 1, load));
    let store = |a: &Arguments| a.global::<u32>(1).store_vec(place(), [1; 4]);
    print("global store_vec", cost_in(&shape, true, 1, store));
    let add = |a: &Arguments| a.global::<u32>(1).atomic_add_acq_rel(place(), 1);
    print("atomic_add_acq_rel", cost_in(&shape, true, 1, add));
}
