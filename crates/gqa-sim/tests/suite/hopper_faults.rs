//! Pipelines of copies and warpgroup products that break a rule, and the fault that each must end
//! in, with every seed.

use gqa_sim::device::*;
use gqa_sim::{
    Agent, Arg, Arguments, Fault, FaultKind, Hazard, Launch, Place, Swizzle, TensorLayout, launch,
};
use half::bf16;

/// Tiles of B.
const TILES: u32 = 5;
const STAGES: u32 = 2;
/// Bytes of a tile: 64 rows of 64 elements.
const TILE: u32 = 64 * 128;
const A: u32 = 0;
const B: u32 = TILE;
const FULL: u32 = B + STAGES * TILE;
const EMPTY: u32 = FULL + 8 * STAGES;
const A_FULL: u32 = EMPTY + 8 * STAGES;
const SHARED_BYTES: u32 = A_FULL + 8;

/// What is wrong with the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    Nothing,
    WrongFullParity,
    WrongEmptyParity,
    NoEmptyWait,
    TooFewBytes,
    TooManyBytes,
    ReleaseBeforeWait,
    EmptyCount(u32),
    NoFenceAfterInit,
    NoProxyFence,
    NoBarrierBeforeStore,
    NoStoreWait,
    SourceOverwritten,
    NoWgmmaFence,
    NoWgmmaWait,
    NoCommit,
    BarrierCount,
    Descriptor(u64),
    UnwaitedLoad,
}
use Plant::*;

fn shape(seed: u64) -> Launch<'static> {
    Launch {
        name: "pipeline",
        grid: [1, 1, 1],
        threads: 384,
        shared_bytes: SHARED_BYTES,
        seed,
        ..Launch::default()
    }
}

fn descriptor(address: u32, plant: Plant) -> u64 {
    let right = (address as u64 >> 4) | 1 << 16 | (1024 >> 4) << 32 | 1 << 62;
    if let Descriptor(difference) = plant { right ^ difference } else { right }
}

fn initialise(base: u32, plant: Plant) {
    let releases = if let EmptyCount(count) = plant { count } else { 4 };
    for stage in 0..STAGES {
        mbarrier_init(base + FULL + 8 * stage, 1);
        mbarrier_init(base + EMPTY + 8 * stage, releases);
    }
    mbarrier_init(base + A_FULL, 1);
    if plant != NoFenceAfterInit {
        fence_mbarrier_init();
    }
}

fn produce(base: u32, a: TensorMap, b: TensorMap, plant: Plant) {
    mbarrier_arrive_expect(base + A_FULL, TILE);
    tma_load(base + A, a, [0; 4], base + A_FULL);
    let tiles = if plant == UnwaitedLoad { TILES + 1 } else { TILES };
    for tile in 0..tiles {
        let (stage, parity) = (tile % STAGES, tile / STAGES % 2);
        if plant != NoEmptyWait {
            let wrong = (plant == WrongEmptyParity) as u32;
            mbarrier_wait(base + EMPTY + 8 * stage, parity ^ 1 ^ wrong);
        }
        let bytes = match plant {
            TooFewBytes => TILE - 16,
            TooManyBytes => TILE + 16,
            _ => TILE,
        };
        let full = base + FULL + 8 * stage;
        mbarrier_arrive_expect(full, bytes);
        tma_load(base + B + stage * TILE, b, [0, tile * 64, 0, 0], full);
    }
}

fn release(base: u32, stage: u32) {
    if lane() == 0 {
        mbarrier_arrive(base + EMPTY + 8 * stage);
    }
}

/// C = the sum of A · Bᵀ over all tiles of B.
fn consume(base: u32, plant: Plant) -> [f32; 32] {
    mbarrier_wait(base + A_FULL, 0);
    let mut c = [0.0; 32];
    for tile in 0..TILES {
        let (stage, parity) = (tile % STAGES, tile / STAGES % 2);
        mbarrier_wait(base + FULL + 8 * stage, parity ^ (plant == WrongFullParity) as u32);
        let a = descriptor(base + A, Nothing);
        let b = descriptor(base + B + stage * TILE, plant);
        if plant != NoWgmmaFence {
            wgmma_fence();
        }
        for step in 0..4 {
            wgmma_add_bf16(&mut c, a + 2 * step, b + 2 * step);
        }
        if plant != NoCommit {
            wgmma_commit();
        }
        if plant == ReleaseBeforeWait {
            release(base, stage);
        }
        if plant != NoWgmmaWait {
            wgmma_wait::<0>();
        }
        if plant != ReleaseBeforeWait {
            release(base, stage);
        }
    }
    c
}

/// Writes C over A, and stores it to the tensor from there.
fn store(base: u32, c: &[f32; 32], map: TensorMap, plant: Plant) {
    let row = thread_idx() % 128 / 32 * 16 + lane() / 4;
    let place = |i: u32| {
        let at = base + A + (row + i % 2 * 8) * 128 + i / 2 * 16 + lane() % 4 * 4;
        at ^ (at >> 3 & 0x70)
    };
    for (i, pair) in c.chunks_exact(2).enumerate() {
        st_shared(place(i as u32), f32x2_to_bf16x2(pair[0], pair[1]));
    }
    if plant != NoProxyFence {
        fence_proxy_async();
    }
    if plant != NoBarrierBeforeStore {
        let threads = if plant == BarrierCount { 128 - warp() % 2 * 32 } else { 128 };
        named_barrier_sync(3, threads);
    }
    if thread_idx() == 128 {
        tma_store(map, [0; 4], base + A);
        bulk_commit();
        if plant == SourceOverwritten {
            st_shared(place(0), 0u32);
        }
        if plant != NoStoreWait {
            bulk_wait_read();
        }
    }
}

fn pipeline(arguments: &Arguments, plant: Plant) {
    let base = shared_base();
    let [a, b, c] = [0, 1, 2].map(|i| arguments.tensor_map(i));
    if thread_idx() == 0 {
        initialise(base, plant);
    }
    sync_threads();
    match thread_idx() / 128 {
        0 => {
            registers_lower::<24>();
            if thread_idx() == 0 {
                produce(base, a, b, plant);
            }
        }
        1 => {
            registers_raise::<240>();
            store(base, &consume(base, plant), c, plant);
        }
        _ => registers_lower::<24>(),
    }
}

fn matrix(rows: u32) -> TensorLayout {
    let bytes = rows as u64 * 128;
    TensorLayout {
        size: [64, rows, 1, 1],
        stride: [128, bytes, bytes],
        tile: [64, 64, 1, 1],
        swizzle: Swizzle::Bytes128,
    }
}

fn values(rows: u32) -> Vec<bf16> {
    (0..rows as usize * 64).map(|i| bf16::from_f32(((i * 5 + i / 64) % 7) as f32 - 3.0)).collect()
}

/// The result, or the fault.
fn run(plant: Plant, seed: u64) -> Result<Vec<bf16>, Fault> {
    let (a, b, mut c) = (values(64), values(64 * TILES), vec![bf16::NAN; 64 * 64]);
    let given = [
        Arg::read(&a).tensor_map(matrix(64)),
        Arg::read(&b).tensor_map(matrix(64 * TILES)),
        Arg::write(&mut c).tensor_map(matrix(64)),
    ];
    launch(&shape(seed), &|arguments| pipeline(arguments, plant), &given)?;
    Ok(c)
}

fn expected() -> Vec<bf16> {
    let (a, b) = (values(64), values(64 * TILES));
    let term = |row: usize, column: usize| -> f32 {
        (0..64).map(|k| a[row * 64 + k].to_f32() * b[column * 64 + k].to_f32()).sum()
    };
    let sum = |i: usize| (0..TILES as usize).map(|tile| term(i / 64, tile * 64 + i % 64)).sum();
    (0..64 * 64).map(|i| bf16::from_f32(sum(i))).collect()
}

/// Asserts that the planted error ends in a fault that satisfies `is`, with every seed.
fn finds(plant: Plant, is: impl Fn(&FaultKind) -> bool) {
    for seed in 0..12 {
        let kind = run(plant, seed).expect_err("the pipeline breaks a rule").kind;
        assert!(is(&kind), "{plant:?}, seed {seed}: {kind}");
    }
}

fn race(kind: &FaultKind, expected: Hazard, is: impl Fn(Agent, Agent) -> bool) -> bool {
    match kind {
        FaultKind::AsyncRace { hazard, first, second, .. } => {
            *hazard == expected && is(*first, *second)
        }
        _ => false,
    }
}

#[test]
fn nothing_wrong() {
    let expected = expected();
    for seed in 0..20 {
        assert_eq!(run(Nothing, seed).unwrap(), expected, "seed {seed}");
    }
}

#[test]
fn stage_read_before_it_is_full() {
    finds(WrongFullParity, |kind| match kind {
        FaultKind::Deadlock(_) => true,
        kind => {
            race(kind, Hazard::ReadAfterWrite, |first, second| {
                matches!((first, second), (Agent::Load { .. }, Agent::Wgmma { .. }))
            }) || matches!(kind, FaultKind::UninitialisedShared { .. })
        }
    });
}

#[test]
fn parity_that_never_comes() {
    finds(WrongEmptyParity, |kind| {
        let FaultKind::Deadlock(places) = kind else { return false };
        let waits =
            |place: &Place| matches!(place, Place::Phase { parity: 0, arrivals: 4, bytes: 0, .. });
        places.0.iter().any(|(threads, place)| threads.0 == [0] && waits(place))
    });
}

#[test]
fn stage_overwritten_while_it_is_read() {
    let overwritten = |kind: &FaultKind| {
        race(kind, Hazard::WriteAfterRead, |first, second| {
            matches!((first, second), (Agent::Wgmma { .. }, Agent::Load { .. }))
        })
    };
    finds(ReleaseBeforeWait, overwritten);
    finds(NoWgmmaWait, overwritten);
    finds(NoCommit, overwritten);
    for count in 1..4 {
        finds(EmptyCount(count), |kind| {
            overwritten(kind) || matches!(kind, FaultKind::Deadlock(_) | FaultKind::Mbarrier { .. })
        });
    }
}

#[test]
fn stage_filled_again_before_anybody_waited() {
    finds(NoEmptyWait, |kind| {
        matches!(kind, FaultKind::AsyncRace { .. } | FaultKind::Mbarrier { .. })
    });
}

#[test]
fn phases_that_expect_other_bytes_than_land() {
    finds(
        TooFewBytes,
        |kind| matches!(kind, FaultKind::Mbarrier { what, .. } if what.contains("16 bytes more")),
    );
    finds(TooManyBytes, |kind| {
        let FaultKind::Deadlock(places) = kind else { return false };
        let waits = |place: &Place| matches!(place, Place::Phase { arrivals: 0, bytes: 16, .. });
        places.0.iter().any(|(_, place)| waits(place))
    });
}

#[test]
fn barrier_that_awaits_too_many_arrivals() {
    finds(EmptyCount(5), |kind| matches!(kind, FaultKind::Deadlock(_)));
}

#[test]
fn fences_between_threads_and_units() {
    finds(
        NoFenceAfterInit,
        |kind| matches!(kind, FaultKind::Mbarrier { what, .. } if what.contains("fence_mbarrier_init")),
    );
    finds(NoProxyFence, |kind| {
        matches!(kind, FaultKind::MissingProxyFence { reader: Agent::Store { thread: 128 }, .. })
    });
    finds(
        NoWgmmaFence,
        |kind| matches!(kind, FaultKind::Warpgroup { what, .. } if what.contains("wgmma_fence")),
    );
}

#[test]
fn store_from_memory_that_others_still_write() {
    finds(NoBarrierBeforeStore, |kind| {
        let store = Agent::Store { thread: 128 };
        race(kind, Hazard::ReadAfterWrite, |first, second| {
            matches!(first, Agent::Thread(_) | Agent::Load { .. }) && second == store
        }) || race(kind, Hazard::WriteAfterRead, |first, _| first == store)
    });
}

#[test]
fn source_of_a_store_overwritten_or_abandoned() {
    finds(SourceOverwritten, |kind| {
        race(kind, Hazard::WriteAfterRead, |first, second| {
            (first, second) == (Agent::Store { thread: 128 }, Agent::Thread(128))
        })
    });
    finds(NoStoreWait, |kind| matches!(kind, FaultKind::TensorCopy { thread: 128, .. }));
}

#[test]
fn registers_that_nobody_gives_back() {
    let shortage = |lowered: bool| {
        let shape = Launch { threads: 384, shared_bytes: 0, ..shape(1) };
        let kernel = |_: &Arguments| match thread_idx() / 128 {
            0 if lowered => registers_lower::<24>(),
            0 => registers_lower::<40>(),
            _ => registers_raise::<240>(),
        };
        launch(&shape, &kernel, &[])
    };
    shortage(true).unwrap();
    let kind = shortage(false).unwrap_err().kind;
    let expected =
        |group| FaultKind::RegisterPool { warpgroup: group, wanted: 72 * 128, free: 7168 };
    assert!(kind == expected(1) || kind == expected(2), "{kind}");
}

#[test]
fn named_barrier_with_two_counts() {
    finds(BarrierCount, |kind| matches!(kind, FaultKind::NamedBarrier { id: 3, .. }));
}

#[test]
fn copies_that_nobody_waits_for() {
    finds(
        UnwaitedLoad,
        |kind| matches!(kind, FaultKind::Mbarrier { what, .. } if what.contains("nobody has waited")),
    );
}

#[test]
fn wrong_descriptors_give_wrong_numbers_or_faults() {
    let expected = expected();
    // Rows 16 bytes apart between groups of eight, no swizzle, the two smaller swizzles, the next
    // 16 bytes.
    let differences = [(1024 >> 4) << 32 | 1 << 32, 1 << 62, 3 << 62, 1 << 63, 1];
    for difference in differences {
        let outcome = run(Descriptor(difference), 3);
        assert_ne!(outcome.ok().as_ref(), Some(&expected), "{difference:#x}");
    }
    // With a swizzle, K-major operands ignore the leading offset.
    assert_eq!(run(Descriptor(1 << 17), 3).unwrap(), expected);
    finds(
        Descriptor(1 << 50),
        |kind| matches!(kind, FaultKind::Warpgroup { what, .. } if what.contains("first row")),
    );
}

/// Runs a kernel on two warps, or on the given number.
fn fault(threads: u32, kernel: impl Fn(u32) + Sync) -> FaultKind {
    outcome(threads, 1, kernel).expect_err("the kernel breaks a rule").kind
}

fn outcome(threads: u32, seed: u64, kernel: impl Fn(u32) + Sync) -> Result<(), Fault> {
    let shape = Launch { threads, shared_bytes: 1024, ..shape(seed) };
    launch(&shape, &|_: &Arguments| kernel(shared_base()), &[]).map(|_| ())
}

/// As [`fault`], with a barrier of one arrival at the start of shared memory.
fn mbarrier_fault(kernel: impl Fn(u32) + Sync) -> String {
    let kind = fault(64, |base| {
        if thread_idx() == 0 {
            mbarrier_init(base, 1);
            fence_mbarrier_init();
        }
        sync_threads();
        kernel(base);
    });
    let FaultKind::Mbarrier { what, .. } = kind else { panic!("{kind}") };
    what
}

#[test]
fn mbarriers_are_initialised_once_and_not_memory() {
    let uninitialised = fault(32, |base| mbarrier_wait(base + 8, 1));
    assert!(matches!(uninitialised, FaultKind::Mbarrier { .. }), "{uninitialised}");
    let misplaced = fault(32, |base| mbarrier_init(base + 4, 1));
    assert!(matches!(misplaced, FaultKind::SharedAlignment { .. }), "{misplaced}");
    let first = || thread_idx() == 0;
    assert!(
        mbarrier_fault(|base| if first() {
            mbarrier_init(base, 1)
        })
        .contains("again")
    );
    assert!(
        mbarrier_fault(|base| if first() {
            st_shared(base + 4, 0u32)
        })
        .contains("memory")
    );
    assert!(
        mbarrier_fault(|base| if first() {
            st_shared(base + 6, 0u8)
        })
        .contains("memory")
    );
    assert!(
        mbarrier_fault(|base| if first() {
            ld_shared::<u64>(base);
        })
        .contains("memory")
    );
    let unsynchronised = fault(64, |base| match thread_idx() {
        0 => mbarrier_init(base, 1),
        40 => mbarrier_arrive(base),
        _ => {}
    });
    assert!(
        matches!(unsynchronised, FaultKind::Race { .. } | FaultKind::Mbarrier { .. }),
        "{unsynchronised}"
    );
}

#[test]
fn more_arrivals_than_a_phase_has() {
    let what = mbarrier_fault(|base| {
        if thread_idx() == 0 {
            mbarrier_arrive_expect(base, 16);
            mbarrier_arrive(base);
        }
    });
    assert!(what.contains("more than 1 arrivals"), "{what}");
}

/// Threads 0 and 40 arrive twice at a barrier of two arrivals, and wait in between if `waits`.
fn arrive_twice(seed: u64, waits: bool) -> Result<(), Fault> {
    outcome(64, seed, |base| {
        if thread_idx() == 0 {
            mbarrier_init(base, 2);
        }
        sync_threads();
        if [0, 40].contains(&thread_idx()) {
            mbarrier_arrive(base);
            if waits {
                mbarrier_wait(base, 0);
            }
            mbarrier_arrive(base);
        }
    })
}

#[test]
fn arrivals_that_might_have_come_a_phase_earlier() {
    for seed in 0..20 {
        let kind = arrive_twice(seed, false).unwrap_err().kind;
        assert!(kind.to_string().contains("of the previous phase"), "{kind}");
        arrive_twice(seed, true).unwrap();
    }
}

#[test]
fn a_thread_that_alone_arrives_need_not_wait() {
    let thrice = |base| {
        if thread_idx() == 0 {
            mbarrier_init(base, 1);
            (0..3).for_each(|_| mbarrier_arrive(base));
        }
    };
    outcome(32, 0, thrice).unwrap();
}

/// Thread 0 writes and arrives, thread 40 reads, after a wait if `waits`.
fn handshake(seed: u64, waits: bool) -> Result<(), Fault> {
    outcome(64, seed, |base| {
        if thread_idx() == 0 {
            mbarrier_init(base, 1);
        }
        sync_threads();
        match thread_idx() {
            0 => {
                st_shared(base + 8, 7u32);
                mbarrier_arrive(base);
            }
            40 => {
                if waits {
                    mbarrier_wait(base, 0);
                }
                assert_eq!(ld_shared::<u32>(base + 8), 7);
            }
            _ => {}
        }
    })
}

#[test]
fn arrival_and_wait_order_two_threads() {
    for seed in 0..10 {
        handshake(seed, true).unwrap();
        let kind = handshake(seed, false).unwrap_err().kind;
        assert!(
            matches!(kind, FaultKind::Race { .. } | FaultKind::UninitialisedShared { .. }),
            "{kind}"
        );
    }
}

/// An arrival covers its thread's earlier accesses, and none of the warp's other lanes.
#[test]
fn arrival_covers_one_lane() {
    let exchange = |seed, sync: bool| {
        outcome(64, seed, move |base| {
            if thread_idx() == 0 {
                mbarrier_init(base, 1);
            }
            sync_threads();
            if warp() == 0 {
                st_shared(base + 8 + 4 * lane(), lane());
                if sync {
                    sync_warp();
                }
                if lane() == 5 {
                    mbarrier_arrive(base);
                }
            } else {
                mbarrier_wait(base, 0);
                ld_shared::<u32>(base + 8 + 4 * lane());
            }
        })
    };
    for seed in 0..10 {
        exchange(seed, true).unwrap();
        let kind = exchange(seed, false).unwrap_err().kind;
        assert!(matches!(kind, FaultKind::Race { .. }), "{kind}");
    }
}

/// Warp 0 writes and arrives; warp 1 waits and reads, and then writes what warp 0 may not read.
#[test]
fn named_barrier_orders_those_who_wait_after_those_who_arrive() {
    let exchange = |seed, both_ways: bool| {
        outcome(64, seed, move |base| {
            let place = base + 4 * lane();
            if warp() == 0 {
                st_shared(place, 1u32);
                st_shared(place + 128, 1u32);
                named_barrier_arrive(5, 64);
                if both_ways {
                    ld_shared::<u32>(place + 128);
                }
            } else {
                named_barrier_sync(5, 64);
                ld_shared::<u32>(place);
                st_shared(place + 128, 2u32);
            }
        })
    };
    for seed in 0..10 {
        exchange(seed, false).unwrap();
        let kind = exchange(seed, true).unwrap_err().kind;
        assert!(matches!(kind, FaultKind::Race { .. }), "{kind}");
    }
}

#[test]
fn named_barriers_that_do_not_exist() {
    for (id, threads) in [(16, 64), (1, 48), (1, 0), (1, 96)] {
        let kind = fault(64, |_| named_barrier_sync(id, threads));
        assert!(matches!(kind, FaultKind::NamedBarrier { .. }), "{kind}");
    }
    let kind = fault(64, |_| {
        if warp() == 0 {
            named_barrier_sync(1, 64)
        }
    });
    assert!(matches!(kind, FaultKind::Deadlock(_)), "{kind}");
}

#[test]
fn warpgroups_are_four_warps_at_one_instruction() {
    let kind = fault(96, |_| registers_lower::<24>());
    assert!(matches!(kind, FaultKind::Warpgroup { .. }), "{kind}");
    let kind =
        fault(128, |_| if warp() == 2 { registers_lower::<24>() } else { registers_lower::<32>() });
    assert!(matches!(kind, FaultKind::Warpgroup { .. }), "{kind}");
    let kind = fault(128, |_| {
        if warp() != 2 {
            registers_lower::<24>()
        }
    });
    assert!(matches!(kind, FaultKind::Deadlock(_)), "{kind}");
    let kind = fault(128, |_| registers_lower::<28>());
    assert!(matches!(kind, FaultKind::Warpgroup { .. }), "{kind}");
    let kind = fault(128, |base| {
        wgmma_fence();
        let own = base as u64 >> 4 | 8 << 32;
        let _: [f32; 4] = wgmma_f16(own, own + warp() as u64);
    });
    assert!(
        matches!(&kind, FaultKind::Warpgroup { what, .. } if what.contains("different")),
        "{kind}"
    );
}

#[test]
fn impossible_tensor_maps_and_places() {
    let data = values(64);
    let right = matrix(64);
    let wrong = [
        TensorLayout { size: [0, 64, 1, 1], ..right },
        TensorLayout { stride: [120, 8192, 8192], ..right },
        TensorLayout { tile: [64, 257, 1, 1], ..right },
        TensorLayout { tile: [128, 32, 1, 1], ..right },
        TensorLayout { tile: [4, 32, 1, 1], ..right },
    ];
    for layout in wrong {
        let outcome = launch(&shape(1), &|_| {}, &[Arg::read(&data).tensor_map(layout)]);
        assert!(matches!(outcome.unwrap_err().kind, FaultKind::Launch(_)), "{layout:?}");
    }
    let misplaced = |arguments: &Arguments| {
        if thread_idx() == 0 {
            let barrier = shared_base() + FULL;
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
            tma_load(shared_base() + 512, arguments.tensor_map(0), [0; 4], barrier);
        }
    };
    let outcome = launch(&shape(1), &misplaced, &[Arg::read(&data).tensor_map(right)]);
    assert!(matches!(outcome.unwrap_err().kind, FaultKind::TensorCopy { .. }));
}

#[test]
fn stores_through_a_map_of_read_only_memory() {
    let data = values(64);
    let kernel = |arguments: &Arguments| {
        if thread_idx() < 128 {
            for i in 0..TILE / 2048 {
                st_shared_vec(shared_base() + i * 2048 + thread_idx() * 16, [0; 4]);
            }
        }
        fence_proxy_async();
        sync_threads();
        if thread_idx() == 0 {
            tma_store(arguments.tensor_map(0), [0; 4], shared_base());
        }
    };
    let outcome = launch(&shape(1), &kernel, &[Arg::read(&data).tensor_map(matrix(64))]);
    let kind = outcome.unwrap_err().kind;
    assert!(matches!(kind, FaultKind::ReadOnly { argument: 0, .. }), "{kind}");
}

/// Random accesses and barriers of two warps, the same in every run of a program; vector clocks
/// start after `clocks` steps.
fn random_program(program: u64, clocks: u32) -> Option<FaultKind> {
    let step = |i: u32, thread: u32| {
        let mixed =
            (program << 32 | (i as u64) << 16 | thread as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40
    };
    outcome(64, program, |base| {
        let place = |random: u64| base + (random / 256 % 24) as u32 * 4;
        if warp() == 0 && lane() < 24 {
            st_shared(base + 4 * lane(), 0u32);
        }
        sync_threads();
        for i in 0..8 {
            if i == clocks {
                fence_proxy_async();
            }
            match step(i, 1000) % 4 {
                0 => sync_threads(),
                1 | 2 => sync_warp(),
                _ => {}
            }
            let random = step(i, thread_idx());
            match random % 256 {
                0 => st_shared(place(random), i),
                1 => st_shared(place(random) + 2, i as u8),
                2..6 => drop(ld_shared::<u32>(place(random))),
                6 => drop(ld_shared::<u16>(place(random))),
                _ => {}
            }
        }
    })
    .err()
    .map(|fault| fault.kind)
}

/// Where both apply, vector clocks and warp clocks find the same faults.
#[test]
fn vector_clocks_agree_with_warp_clocks() {
    let mut races = 0;
    for program in 0..1500 {
        let expected = random_program(program, u32::MAX);
        races += expected.is_some() as u32;
        for clocks in [0, 3] {
            let found = random_program(program, clocks);
            assert_eq!(found.is_some(), expected.is_some(), "{program}: {expected:?}, {found:?}");
        }
    }
    assert!((300..1200).contains(&races), "{races}");
}
