//! Clusters: accesses to other CTAs' shared memory, and the fault of each broken rule, with every
//! seed.

use gqa_sim::device::*;
use gqa_sim::{Agent, Arg, Arguments, Fault, FaultKind, Hazard, Launch, Place, Report, launch};

const SEEDS: std::ops::Range<u64> = 0..12;
const CLUSTER: u32 = 4;
const THREADS: u32 = 64;

fn shape(seed: u64) -> Launch<'static> {
    let grid = [2 * CLUSTER, 1, 1];
    Launch {
        grid,
        threads: THREADS,
        shared_bytes: 4096,
        seed,
        cluster: CLUSTER,
        ..Launch::default()
    }
}

fn run(seed: u64, kernel: impl Fn(&Arguments) + Sync, args: &[Arg<'_>]) -> Result<Report, Fault> {
    launch(&shape(seed), &kernel, args)
}

fn fault(seed: u64, kernel: impl Fn(&Arguments) + Sync) -> FaultKind {
    run(seed, kernel, &[]).expect_err("the kernel breaks a rule").kind
}

fn sync_cluster() {
    cluster_arrive();
    cluster_wait();
}

/// Byte `i` of the CTA's shared memory.
fn at(i: u32) -> u32 {
    shared_base() + i
}

#[test]
fn ranks_count_blocks_along_x() {
    let mut seen = vec![[u32::MAX; 2]; 16];
    let shape = Launch { grid: [8, 2, 1], ..shape(3) };
    let kernel = |arguments: &Arguments| {
        if thread_idx() == 0 {
            let block = block_idx_x() + block_idx_y() * grid_dim_x();
            let place = arguments.global::<u32>(0);
            place.store(2 * block as usize, cluster_rank());
            place.store(2 * block as usize + 1, cluster_size());
        }
    };
    launch(&shape, &kernel, &[Arg::write(seen.as_flattened_mut())]).unwrap();
    for (block, [rank, size]) in seen.into_iter().enumerate() {
        assert_eq!((rank, size), (block as u32 % CLUSTER, CLUSTER));
    }
}

/// As on a Hopper GPU, where a matrix descriptor has no room for the rank.
#[test]
fn addresses_of_a_block_have_its_rank() {
    let mut places = vec![0; 2 * CLUSTER as usize];
    let kernel = |arguments: &Arguments| {
        if thread_idx() == 0 {
            assert_eq!(peer_address(at(16), cluster_rank()), at(16));
            st_shared(at(16), block_idx_x());
            st_peer(at(20), ld_peer::<u32>(at(16)) + 1);
            assert_eq!(ld_shared::<u32>(at(20)), block_idx_x() + 1);
            arguments.global::<u32>(0).store(block_idx_x() as usize, shared_base());
        }
    };
    run(3, kernel, &[Arg::write(&mut places)]).unwrap();
    for (block, place) in places.iter().enumerate() {
        assert_eq!(place - places[0], (block as u32 % CLUSTER) << 24);
    }
}

#[test]
fn impossible_clusters_are_refused() {
    let launches = [
        Launch { cluster: 0, ..shape(0) },
        Launch { cluster: 3, ..shape(0) },
        Launch { grid: [32, 1, 1], cluster: 32, ..shape(0) },
    ];
    for shape in launches {
        let kind = launch(&shape, &|_: &Arguments| {}, &[]).unwrap_err().kind;
        assert!(matches!(kind, FaultKind::Launch(_)), "{kind}");
    }
    launch(&Launch { grid: [32, 1, 1], cluster: 16, ..shape(0) }, &|_: &Arguments| {}, &[])
        .unwrap();
}

/// What is wrong with the exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    Nothing,
    NoBarrierBefore,
    NoBarrierBetween,
    NoBarrierAfter,
    RankOutside,
    RelaxedArrival,
    ArriveTwice,
    WaitOnly,
    PlainAddress,
    CrossedAddress,
}
use Plant::*;

/// Every thread writes a word of the next rank's memory, and reads a word of the rank two before.
fn exchange(plant: Plant) -> impl Fn(&Arguments) + Sync {
    move |arguments: &Arguments| {
        let (rank, thread) = (cluster_rank(), thread_idx());
        st_shared(at(1024 + 4 * thread), 1000 * block_idx_x() + thread);
        if plant != NoBarrierBefore {
            sync_cluster();
        }
        let next = if plant == RankOutside { rank + 1 } else { (rank + 1) % CLUSTER };
        let place = match plant {
            PlainAddress => at(8192 + 4 * thread),
            CrossedAddress => peer_address(at(4096 + 4 * thread), next),
            _ => peer_address(at(4 * thread), next),
        };
        st_peer::<u32>(place, 100 * block_idx_x() + thread);
        match plant {
            NoBarrierBetween => {}
            RelaxedArrival => {
                cluster_arrive_relaxed();
                cluster_wait();
            }
            ArriveTwice => {
                cluster_arrive();
                cluster_arrive();
            }
            WaitOnly => cluster_wait(),
            _ => sync_cluster(),
        }
        let here: u32 = ld_shared(at(4 * (thread ^ 1)));
        let there: u32 = ld_peer(peer_address(at(1024 + 4 * thread), (rank + 2) % CLUSTER));
        if plant != NoBarrierAfter {
            sync_cluster();
        }
        let out = arguments.global::<u32>(0);
        let i = 2 * (block_idx_x() * THREADS + thread) as usize;
        out.store(i, here);
        out.store(i + 1, there);
    }
}

#[test]
fn blocks_write_and_read_each_others_memory() {
    for seed in SEEDS {
        let mut out = vec![[0u32; 2]; (2 * CLUSTER * THREADS) as usize];
        run(seed, exchange(Nothing), &[Arg::write(out.as_flattened_mut())]).unwrap();
        for (i, got) in out.into_iter().enumerate() {
            let (block, thread) = (i as u32 / THREADS, i as u32 % THREADS);
            let rank = |shift| block / CLUSTER * CLUSTER + (block + shift) % CLUSTER;
            assert_eq!(got, [100 * rank(3) + (thread ^ 1), 1000 * rank(2) + thread]);
        }
    }
}

fn exchange_fault(seed: u64, plant: Plant) -> FaultKind {
    let mut out = vec![0u32; (4 * CLUSTER * THREADS) as usize];
    let outcome = run(seed, exchange(plant), &[Arg::write(&mut out)]);
    outcome.expect_err(&format!("{plant:?} with seed {seed}")).kind
}

#[test]
fn peers_must_have_started() {
    for seed in SEEDS {
        let kind = exchange_fault(seed, NoBarrierBefore);
        assert!(
            matches!(&kind, FaultKind::Cluster { what, .. } if what.contains("start of that CTA")),
            "{kind}"
        );
    }
}

#[test]
fn peers_writes_need_a_barrier_before_they_are_read() {
    for seed in SEEDS {
        for plant in [NoBarrierBetween, RelaxedArrival] {
            let kind = exchange_fault(seed, plant);
            // The reader came first, or the writer; or no thread has written yet.
            let raced = matches!(&kind, FaultKind::AsyncRace { first: Agent::Peer { .. }, .. });
            let early = matches!(&kind, FaultKind::UninitialisedShared { .. });
            assert!(raced || early, "{plant:?}: {kind}");
        }
    }
}

#[test]
fn a_block_must_not_exit_while_peers_read_its_memory() {
    for seed in SEEDS {
        let kind = exchange_fault(seed, NoBarrierAfter);
        assert!(
            matches!(&kind, FaultKind::Cluster { what, .. } if what.contains("exit")),
            "{kind}"
        );
    }
}

#[test]
fn rank_outside_the_cluster() {
    for seed in SEEDS {
        let kind = exchange_fault(seed, RankOutside);
        assert!(kind.to_string().contains("rank 4 of a cluster of 4"), "{kind}");
    }
}

#[test]
fn addresses_outside_a_peers_memory() {
    for plant in [PlainAddress, CrossedAddress] {
        let kind = exchange_fault(5, plant);
        assert!(matches!(kind, FaultKind::SharedBounds { .. }), "{kind}");
    }
}

#[test]
fn arrivals_and_waits_take_turns() {
    let kind = exchange_fault(1, ArriveTwice);
    assert!(kind.to_string().contains("cluster_arrive twice"), "{kind}");
    let kind = exchange_fault(1, WaitOnly);
    assert!(kind.to_string().contains("cluster_wait without cluster_arrive"), "{kind}");
}

#[test]
fn barrier_that_a_block_does_not_reach() {
    for seed in SEEDS {
        let kind = fault(seed, |_| {
            if cluster_rank() != 2 {
                sync_cluster();
            }
        });
        let FaultKind::Deadlock(places) = &kind else { panic!("{kind}") };
        let missing = |place: &Place| matches!(place, Place::Cluster { missing: THREADS, .. });
        assert!(places.0.iter().any(|(_, place)| missing(place)), "{kind}");
    }
}

#[test]
fn peers_writes_race_with_each_other() {
    for seed in SEEDS {
        let kind = fault(seed, |_| {
            sync_cluster();
            if thread_idx() == 0 && cluster_rank() < 2 {
                st_peer(peer_address(at(0), 3), cluster_rank());
            }
            sync_cluster();
        });
        let FaultKind::AsyncRace { hazard: Hazard::WriteAfterWrite, .. } = kind else {
            panic!("{kind}")
        };
    }
}

#[test]
fn barriers_of_the_cluster_order_what_block_barriers_and_warps_did() {
    for seed in SEEDS {
        run(
            seed,
            |_| {
                st_shared(at(4 * thread_idx()), 7u32);
                sync_threads();
                let all: u32 = (0..THREADS).map(|i| ld_shared::<u32>(at(4 * i))).sum();
                assert_eq!(all, 7 * THREADS);
                sync_cluster();
                st_peer(peer_address(at(4 * thread_idx()), (cluster_rank() + 1) % CLUSTER), 9u32);
                sync_cluster();
                let all: u32 = (0..THREADS).map(|i| ld_shared::<u32>(at(4 * i))).sum();
                assert_eq!(all, 9 * THREADS);
            },
            &[],
        )
        .unwrap();
    }
}

/// More threads than one process can have stacks for at once.
#[test]
fn large_clusters_run_side_by_side() {
    let shape = Launch { grid: [64, 1, 1], threads: 512, cluster: 16, ..shape(1) };
    let run = || {
        let report = launch(&shape, &|_: &Arguments| sync_cluster(), &[]).unwrap();
        assert_eq!(report.blocks, 64);
    };
    std::thread::scope(|scope| (0..3).for_each(|_| _ = scope.spawn(run)));
}
