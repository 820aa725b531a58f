//! CTAs of a cluster that copy boxes to each other, and the fault of each broken rule.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Fault, FaultKind, Launch, Swizzle, TensorLayout, launch};

const SEEDS: std::ops::Range<u64> = 0..16;
const CLUSTER: u32 = 2;
const THREADS: u32 = 32;
const ROUNDS: u32 = 4;
/// Elements and bytes of a box, one row of the tensor.
const COLUMNS: u32 = 64;
const BOX: u32 = 2 * COLUMNS;
const FULL: u32 = CLUSTER * BOX;
const EMPTY: u32 = FULL + 8;
const ROWS: [u32; 4] = [COLUMNS, CLUSTER * ROUNDS, 1, 1];
const TENSOR: TensorLayout = TensorLayout {
    size: ROWS,
    stride: [BOX as u64, (BOX * ROWS[1]) as u64, (BOX * ROWS[1]) as u64],
    tile: [COLUMNS, 1, 1, 1],
    swizzle: Swizzle::None,
};

#[derive(Clone, Copy, PartialEq)]
enum Plant {
    Nothing,
    NoStart,
    NoHandshake,
    NoEnd,
}

/// In each round, each CTA copies a row to both, and both add the two rows.
fn exchange(arguments: &Arguments, plant: Plant) {
    let (base, rank, thread) = (shared_base(), cluster_rank(), thread_idx());
    if thread == 0 {
        mbarrier_init(base + FULL, 1);
        mbarrier_init(base + EMPTY, CLUSTER);
        fence_mbarrier_init();
    }
    sync_threads();
    if plant != Plant::NoStart {
        cluster_arrive_relaxed();
        cluster_wait();
    }
    for round in 0..ROUNDS {
        if thread == 0 {
            if round > 0 && plant != Plant::NoHandshake {
                mbarrier_wait_cluster(base + EMPTY, (round - 1) % 2);
            }
            mbarrier_arrive_expect(base + FULL, CLUSTER * BOX);
            let from = [0, round * CLUSTER + rank, 0, 0];
            let (to, map) = (base + rank * BOX, arguments.tensor_map(0));
            tma_load_multicast(to, map, from, base + FULL, 0b11);
        }
        mbarrier_wait(base + FULL, round % 2);
        let [a, b] = [0, 1].map(|rank| ld_shared::<u32>(base + rank * BOX + 4 * thread));
        let i = (block_idx_x() * ROUNDS + round) * THREADS + thread;
        arguments.global::<u32>(1).store(i as usize, a + b);
        sync_warp();
        if thread < CLUSTER {
            mbarrier_arrive_peer_after_reads(peer_address(base + EMPTY, thread));
        }
    }
    if plant != Plant::NoEnd {
        cluster_arrive();
        cluster_wait();
    }
}

fn run(plant: Plant, seed: u64) -> Result<Vec<u32>, Fault> {
    let rows: Vec<u32> = (0..ROWS[0] * ROWS[1] / 2).collect();
    let mut sums = vec![u32::MAX; (CLUSTER * ROUNDS * THREADS) as usize];
    let shape = Launch {
        name: "exchange",
        grid: [CLUSTER, 1, 1],
        threads: THREADS,
        shared_bytes: EMPTY + 8,
        seed,
        cluster: CLUSTER,
        ..Launch::default()
    };
    let given = [Arg::read(&rows).tensor_map(TENSOR), Arg::write(&mut sums)];
    launch(&shape, &|arguments: &Arguments| exchange(arguments, plant), &given)?;
    Ok(sums)
}

#[test]
fn rows_arrive_in_both() {
    for seed in SEEDS {
        let sums = run(Plant::Nothing, seed).unwrap();
        for (i, sum) in sums.into_iter().enumerate() {
            let (round, thread) = (i as u32 / THREADS % ROUNDS, i as u32 % THREADS);
            let first = round * CLUSTER * COLUMNS / 2 + thread;
            assert_eq!(sum, first + first + COLUMNS / 2);
        }
    }
}

#[test]
fn broken_rules_are_found() {
    for plant in [Plant::NoStart, Plant::NoHandshake, Plant::NoEnd] {
        let is_found = |seed| match run(plant, seed) {
            Ok(_) => false,
            Err(fault) => match (plant, &fault.kind) {
                (Plant::NoHandshake, FaultKind::Mbarrier { .. } | FaultKind::AsyncRace { .. }) => {
                    true
                }
                (Plant::NoStart | Plant::NoEnd, FaultKind::Cluster { .. }) => true,
                _ => panic!("{fault}"),
            },
        };
        assert!(SEEDS.clone().any(is_found));
    }
}
