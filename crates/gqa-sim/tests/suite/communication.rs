//! CTAs that pass partial results through global memory to the last CTA, and the fault of each
//! broken rule, with every seed.

use gqa_sim::device::*;
use gqa_sim::{Agent, Arg, Arguments, Fault, FaultKind, Hazard, Launch, Report, launch};
use std::cell::Cell;

const SEEDS: std::ops::Range<u64> = 0..16;
/// Sums of so many partial results each.
const SUMS: u32 = 3;
const PARTS: u32 = 5;
const THREADS: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    Nothing,
    /// Fences and relaxed atomics instead of ordered atomics.
    Fences,
    NoRelease,
    NoAcquire,
    NoFences,
    NoBarrierBefore,
    NoBarrierAfter,
    NoCounter,
    NoReset,
    PlainReset,
}
use Plant::*;

fn shape(seed: u64) -> Launch<'static> {
    let grid = [PARTS, SUMS, 1];
    Launch {
        grid,
        threads: THREADS,
        shared_bytes: 16,
        seed,
        communicates: true,
        ..Launch::default()
    }
}

/// Counts the CTA; returns how many came before it.
fn count(counter: Global<u32>, plant: Plant) -> u32 {
    let sum = block_idx_y() as usize;
    match plant {
        NoReset => counter.atomic_add_acq_rel(sum, 1),
        PlainReset => {
            let before = counter.atomic_add_acq_rel(sum, 1);
            if before == PARTS - 1 {
                counter.store(sum, 0);
            }
            before
        }
        Fences | NoRelease | NoAcquire | NoFences => {
            if matches!(plant, Fences | NoAcquire) {
                fence_gpu();
            }
            let before = counter.atomic_inc(sum, PARTS - 1);
            if matches!(plant, Fences | NoRelease) {
                fence_gpu();
            }
            before
        }
        _ => counter.atomic_inc_acq_rel(sum, PARTS - 1),
    }
}

/// Sums `i + part` over parts, for element `i` of a CTA's threads.
fn merge(arguments: &Arguments, plant: Plant) {
    let (counter, partial, out) =
        (arguments.global::<u32>(0), arguments.global::<u32>(1), arguments.global::<u32>(2));
    let (part, sum, thread) = (block_idx_x(), block_idx_y(), thread_idx());
    let place = |part: u32| ((sum * PARTS + part) * THREADS + thread) as usize;
    partial.store(place(part), part + thread);
    if plant != NoBarrierBefore {
        sync_threads();
    }
    if thread == 0 {
        let before = if plant == NoCounter { part } else { count(counter, plant) };
        st_shared(shared_base(), before);
    }
    if plant == NoBarrierAfter {
        sync_warp();
    } else {
        sync_threads();
    }
    if ld_shared::<u32>(shared_base()) == PARTS - 1 {
        let total: u32 = (0..PARTS).map(|part| partial.load(place(part))).sum();
        out.store((sum * THREADS + thread) as usize, total);
    }
}

struct Memory {
    counter: Vec<u32>,
    partial: Vec<u32>,
    out: Vec<u32>,
}

impl Memory {
    fn new() -> Self {
        let partial = vec![0; (SUMS * PARTS * THREADS) as usize];
        let mut memory = Self { counter: vec![0; SUMS as usize], partial, out: Vec::new() };
        memory.clear();
        memory
    }

    fn clear(&mut self) {
        self.out = vec![u32::MAX; (SUMS * THREADS) as usize];
    }

    fn run(&mut self, shape: &Launch<'_>, plant: Plant) -> Result<Report, Fault> {
        let arguments = [
            Arg::write(&mut self.counter),
            Arg::write(&mut self.partial),
            Arg::write(&mut self.out),
        ];
        launch(shape, &|arguments: &Arguments| merge(arguments, plant), &arguments)
    }

    fn is_right(&self) -> bool {
        let right = |i: u32| (0..PARTS).map(|part| part + i % THREADS).sum::<u32>();
        self.out.iter().zip(0..).all(|(got, i)| *got == right(i))
    }
}

fn fault(seed: u64, plant: Plant) -> FaultKind {
    match Memory::new().run(&shape(seed), plant) {
        Ok(_) => panic!("{plant:?} passes with seed {seed}"),
        Err(fault) => fault.kind,
    }
}

#[test]
fn the_last_block_merges_launch_after_launch() {
    for seed in SEEDS {
        for plant in [Nothing, Fences, PlainReset] {
            let mut memory = Memory::new();
            for round in 0..3 {
                memory.clear();
                let report = memory.run(&shape(seed + round), plant).unwrap();
                assert_eq!(report.blocks, u64::from(SUMS * PARTS));
                assert!(memory.is_right(), "{plant:?}, round {round}");
                assert_eq!(memory.counter, [0; SUMS as usize]);
            }
        }
    }
}

#[test]
fn clusters_that_communicate_besides() {
    for seed in SEEDS {
        let mut memory = Memory::new();
        let shape = Launch { cluster: PARTS, ..shape(seed) };
        memory.run(&shape, Nothing).unwrap();
        assert!(memory.is_right());
    }
}

#[test]
fn a_counter_that_is_not_reset_spoils_the_next_launch() {
    for seed in SEEDS {
        let mut memory = Memory::new();
        memory.run(&shape(seed), NoReset).unwrap();
        assert!(memory.is_right());
        memory.clear();
        memory.run(&shape(seed), NoReset).unwrap();
        assert!(memory.out.iter().all(|got| *got == u32::MAX), "nobody is the last one now");
    }
}

#[test]
fn partial_results_read_without_acquire_or_stored_without_release() {
    for seed in SEEDS {
        for plant in [NoRelease, NoAcquire, NoFences] {
            let kind = fault(seed, plant);
            let FaultKind::GlobalRace { argument: 1, hazard, first, .. } = kind else {
                panic!("{plant:?}: {kind}")
            };
            assert_eq!(hazard, Hazard::ReadAfterWrite);
            assert!(matches!(first, Agent::Peer { .. }), "{plant:?}: {kind}");
        }
    }
}

#[test]
fn threads_of_a_block_must_meet_before_one_of_them_releases() {
    for seed in SEEDS {
        let kind = fault(seed, NoBarrierBefore);
        assert!(matches!(kind, FaultKind::GlobalRace { argument: 1, .. }), "{kind}");
        let kind = fault(seed, NoBarrierAfter);
        let unwritten = matches!(kind, FaultKind::UninitialisedShared { .. });
        assert!(unwritten || matches!(kind, FaultKind::Race { .. }), "{kind}");
    }
}

#[test]
fn partial_results_without_a_counter() {
    for seed in SEEDS {
        let kind = fault(seed, NoCounter);
        let FaultKind::GlobalRace { argument: 1, hazard, .. } = kind else { panic!("{kind}") };
        assert_ne!(hazard, Hazard::WriteAfterWrite);
    }
}

#[test]
fn launches_must_say_that_their_blocks_communicate() {
    let shape = Launch { communicates: false, ..shape(1) };
    let kind = Memory::new().run(&shape, Nothing).unwrap_err().kind;
    assert!(matches!(kind, FaultKind::Communication { .. }), "{kind}");
}

#[test]
fn the_seed_decides_who_comes_last_and_nothing_else_does() {
    let last = |seed| {
        let (mut counter, mut last) = ([0u32], [0u32]);
        let kernel = |arguments: &Arguments| {
            if thread_idx() == 0 && arguments.global::<u32>(0).atomic_add_acq_rel(0, 1) == 11 {
                arguments.global::<u32>(1).store(0, block_idx_x());
            }
        };
        let shape = Launch { grid: [12, 1, 1], ..shape(seed) };
        launch(&shape, &kernel, &[Arg::write(&mut counter), Arg::write(&mut last)]).unwrap();
        last[0]
    };
    let all: std::collections::BTreeSet<u32> = (0..60).map(last).collect();
    assert!(all.len() > 8, "{all:?}");
    assert!((0..60).all(|seed| last(seed) == last(seed)));
}

/// Runs two CTAs on two words that two arguments share.
fn two_blocks(seed: u64, kernel: impl Fn(&Arguments) + Sync) -> Result<Report, Fault> {
    let mut words = [0u32; 2];
    let cells = Cell::from_mut(&mut words[..]).as_slice_of_cells();
    let shape = Launch { grid: [2, 1, 1], threads: 32, ..shape(seed) };
    launch(&shape, &kernel, &[Arg::cells(cells), Arg::cells(cells)])
}

#[test]
fn arguments_that_share_memory_share_its_history() {
    for seed in SEEDS {
        let fault = two_blocks(seed, |arguments| {
            if lane() == 0 {
                match block_idx_x() {
                    0 => arguments.global::<u32>(0).store(1, 5),
                    _ => _ = arguments.global::<u32>(1).load(1),
                }
            }
        })
        .unwrap_err();
        assert!(matches!(fault.kind, FaultKind::GlobalRace { offset: 4, .. }), "{fault}");
    }
}

#[test]
fn stores_release_and_loads_acquire() {
    let pass = |release: bool, acquire: bool| {
        move |arguments: &Arguments| {
            let (data, flag) = (arguments.global::<u32>(0), arguments.global::<u32>(1).offset(1));
            if lane() != 0 {
                return;
            }
            if block_idx_x() == 0 {
                data.store(0, 5);
                if release { flag.store_release(0, 1) } else { flag.store_relaxed(0, 1) }
            } else if 1 == if acquire { flag.load_acquire(0) } else { flag.load_relaxed(0) } {
                assert_eq!(data.load(0), 5);
            }
        }
    };
    let races = |release, acquire| {
        SEEDS.filter(|seed| two_blocks(*seed, pass(release, acquire)).is_err()).count()
    };
    assert_eq!(races(true, true), 0);
    // If the reader is too early, no fault occurs.
    assert!(races(false, true) > 0 && races(true, false) > 0 && races(false, false) > 0);
}

#[test]
fn threads_of_a_block_race_on_global_memory_too() {
    for seed in SEEDS {
        let kind = two_blocks(seed, |arguments| {
            if block_idx_x() == 0 && lane() < 2 {
                arguments.global::<u32>(0).store(0, lane());
            }
        });
        let kind = kind.unwrap_err().kind;
        let FaultKind::GlobalRace {
            hazard: Hazard::WriteAfterWrite, first: Agent::Thread(_), ..
        } = kind
        else {
            panic!("{kind}")
        };
    }
}

#[test]
fn atomics_are_checked_as_other_accesses() {
    let at = |i: usize| {
        two_blocks(1, move |arguments| {
            arguments.global::<u32>(0).atomic_add(i, 1);
        })
    };
    assert!(matches!(at(2).unwrap_err().kind, FaultKind::GlobalBounds { .. }));
    assert_eq!(at(1).unwrap().blocks, 2);
    let words = [0u32; 2];
    let shape = Launch { threads: 32, ..shape(1) };
    let kernel = |arguments: &Arguments| _ = arguments.global::<u32>(0).atomic_inc(0, 9);
    let kind = launch(&shape, &kernel, &[Arg::read(&words)]).unwrap_err().kind;
    assert!(matches!(kind, FaultKind::ReadOnly { .. }), "{kind}");
    let kind = launch(&shape, &kernel, &[Arg::null()]).unwrap_err().kind;
    assert!(matches!(kind, FaultKind::NullPointer { .. }), "{kind}");
}

/// Two CTAs that send each other a pair of words, and wait for it until the clock says so.
fn pairs(shape: &Launch<'_>, memory: &mut [u128; 4], sends: [bool; 2]) -> Result<Report, Fault> {
    let kernel = |arguments: &Arguments| {
        let (words, me) = (arguments.global::<u64>(0), block_idx_x() as usize);
        let (to, from) = (2 * (1 - me), 2 * me);
        if lane() == 0 && sends[me] {
            words.store_pair_system(to, [1, 2 + me as u64]);
        }
        let begun = nanoseconds();
        while any_sync(words.load_pair_system(from) != [1, 3 - me as u64]) {
            if any_sync(nanoseconds() - begun > 10_000_000) {
                break;
            }
        }
        if lane() == 0 {
            let found = words.load_pair_system(from);
            words.store_pair_system(4 + from, [found[1], 7]);
        }
    };
    launch(shape, &kernel, &[Arg::write(memory)])
}

#[test]
fn pairs_of_words_reach_other_blocks() {
    let word = |high: u128, low: u128| high << 64 | low;
    for seed in SEEDS {
        let shape = Launch { grid: [2, 1, 1], threads: 32, ..shape(seed) };
        let mut memory = [0; 4];
        pairs(&shape, &mut memory, [true; 2]).unwrap();
        assert_eq!(memory, [word(3, 1), word(2, 1), word(7, 3), word(7, 2)]);
        let mut memory = [0; 4];
        pairs(&shape, &mut memory, [true, false]).unwrap();
        assert_eq!(memory, [0, word(2, 1), word(7, 0), word(7, 2)]);
    }
}

#[test]
fn pairs_of_words_are_checked_as_other_accesses() {
    let of = |i: usize, communicates| {
        let (mut memory, shape) = ([0u128; 2], Launch { communicates, ..Launch::default() });
        let kernel = move |arguments: &Arguments| {
            if lane() == 0 {
                arguments.global::<u64>(0).store_pair_system(i, [1, 2]);
            }
        };
        launch(&shape, &kernel, &[Arg::write(&mut memory)]).map_err(|fault| fault.kind)
    };
    assert_eq!(of(2, true).unwrap().blocks, 1);
    assert!(matches!(of(1, true), Err(FaultKind::GlobalAlignment { bytes: 16, .. })));
    assert!(matches!(of(4, true), Err(FaultKind::GlobalBounds { .. })));
    assert!(matches!(of(2, false), Err(FaultKind::Communication { .. })));
}

/// A grid that may start before the previous one has ended: `wait` selects the threads that wait,
/// and how the others are ordered.
fn dependent(wait: fn(), early: bool) -> Result<Report, Fault> {
    let (input, mut out) = ([7u32; 64], [0u32; 64]);
    let kernel = |arguments: &Arguments| {
        let i = thread_idx() as usize;
        let before = if early { arguments.global::<u32>(0).load(i) } else { 0 };
        wait();
        launch_dependents();
        let after = arguments.global::<u32>(1).load(i);
        arguments.global::<u32>(2).store(i, before + after);
    };
    let shape = Launch { threads: THREADS, programmatic: true, ..Launch::default() };
    let arguments = [Arg::read(&input).early(), Arg::read(&input), Arg::write(&mut out)];
    launch(&shape, &kernel, &arguments)
}

#[test]
fn dependent_grids_wait_before_they_touch_what_is_not_early() {
    dependent(grid_dependency_wait, true).unwrap();
    let one_for_all = || {
        if thread_idx() == 0 {
            grid_dependency_wait();
        }
        sync_threads();
    };
    dependent(one_for_all, true).unwrap();
    for wait in [
        || {},
        || {
            if thread_idx() == 0 {
                grid_dependency_wait()
            }
        },
    ] {
        let kind = dependent(wait, true).unwrap_err().kind;
        let FaultKind::Communication { what, .. } = &kind else { panic!("{kind}") };
        assert!(what.contains("argument 1 before grid_dependency_wait"), "{kind}");
    }
}

/// One bulk copy by a block of two warps.
fn bulk(offset: usize, address: u32, bytes: u32, expected: u32) -> Result<Vec<u32>, Fault> {
    let input: Vec<u128> = (0..64).map(|i| i * 3).collect();
    let mut out = vec![0u32; 64];
    let kernel = |arguments: &Arguments| {
        let bar = shared_base();
        if thread_idx() == 0 {
            mbarrier_init(bar, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect(bar, expected);
            let source = arguments.global::<u32>(0);
            bulk_load_hinted(bar + address, source, offset, bytes, bar, evict_first());
        }
        sync_threads();
        mbarrier_wait(bar, 0);
        let word = ld_shared::<u32>(bar + address + 4 * thread_idx());
        arguments.global::<u32>(1).store(thread_idx() as usize, word);
    };
    let shape = Launch { threads: THREADS, shared_bytes: 1024, ..Launch::default() };
    launch(&shape, &kernel, &[Arg::read(&input), Arg::write(&mut out)])?;
    Ok(out)
}

#[test]
fn bulk_copies_and_their_limits() {
    let words: Vec<u32> = (0..64).flat_map(|i| [i * 3, 0, 0, 0]).collect();
    assert_eq!(bulk(8, 256, 256, 256).unwrap(), words[8..72]);
    let kind = |offset, address, bytes| bulk(offset, address, bytes, 256).unwrap_err().kind;
    assert!(matches!(kind(8, 256, 264), FaultKind::TensorCopy { .. }));
    assert!(matches!(kind(8, 256, 0), FaultKind::TensorCopy { .. }));
    assert!(matches!(kind(9, 256, 256), FaultKind::GlobalAlignment { .. }));
    assert!(matches!(kind(256 - 60, 256, 256), FaultKind::GlobalBounds { .. }));
    assert!(matches!(kind(8, 264, 256), FaultKind::SharedAlignment { .. }));
    assert!(matches!(kind(8, 1008, 256), FaultKind::SharedBounds { .. }));
    assert!(matches!(bulk(8, 256, 256, 272).unwrap_err().kind, FaultKind::Deadlock(_)));
    assert!(matches!(bulk(8, 256, 256, 240).unwrap_err().kind, FaultKind::Mbarrier { .. }));
}

#[test]
fn bulk_copies_do_not_read_what_the_launch_wrote() {
    for seed in SEEDS {
        let mut words = [0u128; 2];
        let kernel = |arguments: &Arguments| {
            let (bar, words) = (shared_base(), arguments.global::<u32>(0));
            if thread_idx() == 0 {
                mbarrier_init(bar, 1);
                fence_mbarrier_init();
                words.store(1, 3);
                mbarrier_arrive_expect(bar, 16);
                bulk_load(bar + 16, words, 0, 16, bar);
            }
            sync_threads();
            mbarrier_wait(bar, 0);
        };
        let shape = Launch { grid: [1, 1, 1], shared_bytes: 64, ..shape(seed) };
        let kind = launch(&shape, &kernel, &[Arg::write(&mut words)]).unwrap_err().kind;
        assert!(matches!(kind, FaultKind::Communication { .. }), "{kind}");
    }
}
