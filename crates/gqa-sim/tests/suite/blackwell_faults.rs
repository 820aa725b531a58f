//! A tile of attention without softmax that breaks a rule of tensor memory, and the fault that each
//! must end in, with every seed.

use gqa_sim::device::*;
use gqa_sim::{Agent, Arg, Arguments, Fault, FaultKind, Hazard, Launch, Place, launch};
use half::bf16;

/// Keys, and the head size.
const KEYS: u32 = 64;
const HEAD: u32 = 64;
/// Rows of 128 bytes: Q of 128 rows, K and V of 64.
const Q: u32 = 0;
const K: u32 = Q + 128 * 128;
const V: u32 = K + KEYS * 128;
/// Barriers: scores, weights, output, and one more.
const BARRIERS: u32 = V + KEYS * 128;
const SLOT: u32 = BARRIERS + 32;
const SHARED_BYTES: u32 = SLOT + 16;
/// Columns: scores, which the weights replace, and then the output.
const COLUMNS: u32 = 128;
const OUTPUT: u32 = 64;

/// What is wrong with the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    Nothing,
    NoCommit,
    NoScoresWait,
    NoFenceBehindScores,
    NoLoadWait,
    NoStoreWait,
    NoFenceBehindStores,
    NoWeightsWait,
    NoFenceBehindWeights,
    NoOutputWait,
    NoFreeBarrier,
    NoFree,
    FreeOfHalf,
    NoProxyFence,
    NoFenceBehindOperands,
    /// Keys that are not copied.
    MissingKeys,
    KeysOverwritten,
    /// The first product of the output adds to what was there.
    OutputNotCleared,
    /// A second product of scores over the weights that the first output product reads.
    ScoresOverWeights,
    /// Another thread goes on with the output.
    SecondIssuer,
    ScoresBesideAllocation,
    LoadBesideAllocation,
    OtherLanes,
    /// Lanes give different addresses.
    DifferentAddresses,
    AllocationAfterRelinquish,
    /// A commit at the end that nobody waits for.
    LastCommit,
    /// Bits of descriptors turned over: of K, of V, of the instruction for scores.
    KeyBits(u64),
    ValueBits(u64),
    InstructionBits(u32),
}
use Plant::*;

/// K-major rows of 128 bytes.
fn k_major(address: u32) -> u64 {
    (address >> 4) as u64 | (1024 >> 4) << 32 | 1 << 46 | 2 << 61
}

/// bf16 by bf16, 128 by 64; B is MN-major if `transposed`.
fn instruction(transposed: bool) -> u32 {
    1 << 4 | 1 << 7 | 1 << 10 | u32::from(transposed) << 16 | (64 / 8) << 17 | (128 / 16) << 24
}

/// Copies rows of 64 elements to swizzled rows of 128 bytes.
fn copy(from: Global<u16>, to: u32, rows: u32) {
    for unit in (thread_idx()..rows * 8).step_by(128) {
        let (row, part) = (unit / 8, unit % 8);
        let words = from.load_vec((unit * 8) as usize);
        st_shared_vec(to + row * 128 + 16 * (part ^ (row % 8)), words);
    }
}

fn set_up(arguments: &Arguments, base: u32, plant: Plant) -> u32 {
    if thread_idx() == 0 {
        for (i, arrivals) in [1, 128, 1, 1].into_iter().enumerate() {
            mbarrier_init(base + BARRIERS + 8 * i as u32, arrivals);
        }
        fence_mbarrier_init();
    }
    if warp() == 0 {
        tcgen05_alloc(base + SLOT, COLUMNS);
        tcgen05_relinquish();
        if plant == AllocationAfterRelinquish {
            tcgen05_alloc(base + SLOT, COLUMNS);
        }
    }
    copy(arguments.global(0), base + Q, 128);
    copy(arguments.global(1), base + K, if plant == MissingKeys { KEYS - 1 } else { KEYS });
    copy(arguments.global(2), base + V, KEYS);
    if plant != NoProxyFence {
        fence_proxy_async();
    }
    sync_threads();
    if plant != NoFenceBehindOperands {
        tcgen05_fence_after();
    }
    ld_shared(base + SLOT)
}

/// Scores of 128 rows and 64 keys.
fn issue_scores(base: u32, memory: u32, plant: Plant) {
    let bits = if let KeyBits(bits) = plant { bits } else { 0 };
    let more = if let InstructionBits(bits) = plant { bits } else { 0 };
    let beside = if plant == ScoresBesideAllocation { COLUMNS - 32 } else { 0 };
    for step in 0..u64::from(HEAD / 16) {
        let (q, k) = (k_major(base + Q) + 2 * step, (k_major(base + K) + 2 * step) ^ bits);
        tcgen05_mma_f16(memory + beside, q, k, instruction(false) ^ more, step > 0);
    }
}

/// The output of the weights, bf16 in the columns of the scores, and V.
fn issue_output(base: u32, memory: u32, plant: Plant) {
    let bits = if let ValueBits(bits) = plant { bits } else { 0 };
    for step in 0..KEYS / 16 {
        let (p, v) = (memory + 8 * step, k_major(base + V + step * 16 * 128) ^ bits);
        let keep = step > 0 || plant == OutputNotCleared;
        tcgen05_mma_tensor_f16(memory + OUTPUT, p, v, instruction(true), keep);
    }
}

/// A row's scores become weights of bf16 in the first 32 columns.
fn weigh(memory: u32, plant: Plant) {
    let row = memory + (warp() << 21);
    let lane = if plant == OtherLanes { memory + ((warp() ^ 1) << 21) } else { row };
    let at = match plant {
        LoadBesideAllocation => lane + COLUMNS - 32,
        DifferentAddresses => lane + thread_idx() % 2,
        _ => lane,
    };
    let scores = tcgen05_ld_32x32b::<64>(at);
    if plant != NoLoadWait {
        tcgen05_wait_ld();
    }
    let scores = scores.registers();
    let pair = |i: usize| {
        let [low, high] = [2 * i, 2 * i + 1].map(|i| f32::from_bits(scores[i]) / 64.0);
        f32x2_to_bf16x2(low, high)
    };
    tcgen05_st_32x32b::<32>(row, std::array::from_fn(pair));
    if plant != NoStoreWait {
        tcgen05_wait_st();
    }
    if plant != NoFenceBehindStores {
        tcgen05_fence_before();
    }
}

fn store_output(memory: u32, out: Global<f32>) {
    let output = tcgen05_ld_32x32b::<64>(memory + OUTPUT + (warp() << 21));
    tcgen05_wait_ld();
    for (column, value) in output.registers().into_iter().enumerate() {
        out.store((thread_idx() * HEAD) as usize + column, f32::from_bits(value));
    }
}

fn give_back(memory: u32, plant: Plant) {
    tcgen05_fence_before();
    if plant != NoFreeBarrier {
        sync_threads();
    }
    if warp() == 0 && plant != NoFree {
        let columns = if plant == FreeOfHalf { COLUMNS / 2 } else { COLUMNS };
        tcgen05_dealloc(memory, columns);
    }
}

fn tile(arguments: &Arguments, plant: Plant) {
    let base = shared_base();
    let [scored, weighed, done, last] = [0, 8, 16, 24].map(|i| base + BARRIERS + i);
    let memory = set_up(arguments, base, plant);
    if thread_idx() == 0 {
        issue_scores(base, memory, plant);
        if plant != NoCommit {
            tcgen05_commit(scored);
        }
    }
    if plant == KeysOverwritten && thread_idx() == 5 {
        st_shared(base + K, 0u32);
    }
    if plant != NoScoresWait {
        mbarrier_wait(scored, 0);
    }
    if plant != NoFenceBehindScores {
        tcgen05_fence_after();
    }
    weigh(memory, plant);
    mbarrier_arrive(weighed);
    if thread_idx() == 0 {
        if plant != NoWeightsWait {
            mbarrier_wait(weighed, 0);
        }
        if plant != NoFenceBehindWeights {
            tcgen05_fence_after();
        }
        issue_output(base, memory, plant);
        if plant == ScoresOverWeights {
            issue_scores(base, memory, plant);
        }
        if plant != SecondIssuer {
            tcgen05_commit(done);
        }
    }
    if plant == SecondIssuer {
        tcgen05_fence_before();
        sync_threads();
        tcgen05_fence_after();
        if thread_idx() == 32 {
            let p = memory;
            let v = k_major(base + V);
            tcgen05_mma_tensor_f16(memory + OUTPUT, p, v, instruction(true), true);
            tcgen05_commit(done);
        }
    }
    if plant != NoOutputWait {
        mbarrier_wait(done, 0);
    }
    tcgen05_fence_after();
    store_output(memory, arguments.global(3));
    if plant == LastCommit && thread_idx() == 0 {
        tcgen05_commit(last);
    }
    give_back(memory, plant);
}

fn value(i: usize) -> f32 {
    ((i * 5 + i / 64 * 3) % 9) as f32 - 4.0
}

fn values(rows: usize) -> Vec<u16> {
    (0..rows * 64).map(|i| bf16::from_f32(value(i)).to_bits()).collect()
}

fn run(plant: Plant, seed: u64) -> Result<Vec<f32>, Fault> {
    let (q, k, mut out) = (values(128), values(64), vec![f32::NAN; 128 * 64]);
    let given = [Arg::read(&q), Arg::read(&k), Arg::read(&k), Arg::write(&mut out)];
    let shape = Launch {
        name: "tile",
        threads: 128,
        shared_bytes: SHARED_BYTES,
        seed,
        ..Launch::default()
    };
    let report = launch(&shape, &|arguments| tile(arguments, plant), &given)?;
    assert!(report.tensor_products == 8 || plant != Nothing);
    Ok(out)
}

fn expected() -> Vec<f32> {
    let score = |row: usize, key: usize| -> f32 {
        (0..64).map(|d| value(row * 64 + d) * value(key * 64 + d)).sum()
    };
    let weight = |row, key| bf16::from_f32(score(row, key) / 64.0).to_f32();
    let out = |i: usize| -> f32 {
        (0..64).map(|key| weight(i / 64, key) * value(key * 64 + i % 64)).sum()
    };
    (0..128 * 64).map(out).collect()
}

/// Asserts that the planted error ends in a fault that satisfies `is`, with every seed.
fn finds(plant: Plant, is: impl Fn(&FaultKind) -> bool) {
    for seed in 0..12 {
        let kind = run(plant, seed).expect_err("the kernel breaks a rule").kind;
        assert!(is(&kind), "{plant:?}, seed {seed}: {kind}");
    }
}

/// A race of these two that lacks one of these.
fn race(
    kind: &FaultKind,
    expected: Hazard,
    is: impl Fn(Agent, Agent) -> bool,
    lacks: &[&str],
) -> bool {
    match kind {
        FaultKind::TensorRace { hazard, first, second, missing, .. } => {
            *hazard == expected && is(*first, *second) && lacks.contains(missing)
        }
        _ => false,
    }
}

fn misuse(kind: &FaultKind, says: &str) -> bool {
    matches!(kind, FaultKind::TensorMemory { what, .. } if what.contains(says))
}

#[test]
fn nothing_wrong() {
    let expected = expected();
    for seed in 0..20 {
        assert!(run(Nothing, seed).unwrap() == expected, "seed {seed}");
    }
}

#[test]
fn scores_loaded_before_they_are_complete() {
    let product_then_load = |first, second| {
        matches!((first, second), (Agent::Product { thread: 0 }, Agent::TensorLoad { .. }))
    };
    // Where nothing was issued yet, nothing is there.
    finds(NoScoresWait, |kind| {
        race(kind, Hazard::ReadAfterWrite, product_then_load, &["a wait for its commit"])
            || misuse(kind, "never written")
    });
    finds(NoFenceBehindScores, |kind| {
        race(kind, Hazard::ReadAfterWrite, product_then_load, &["tcgen05_fence_after"])
    });
    finds(NoCommit, |kind| {
        let FaultKind::Deadlock(places) = kind else { return false };
        places.0.iter().any(|(_, place)| matches!(place, Place::Phase { arrivals: 1, .. }))
    });
    finds(NoOutputWait, |kind| {
        race(kind, Hazard::ReadAfterWrite, product_then_load, &["a wait for its commit"])
            || misuse(kind, "never written")
    });
}

#[test]
fn registers_read_before_they_are_loaded() {
    finds(NoLoadWait, |kind| misuse(kind, "without tcgen05_wait_ld"));
}

#[test]
fn weights_multiplied_before_they_are_stored() {
    let store_then_product = |first, second| {
        matches!((first, second), (Agent::TensorStore { .. }, Agent::Product { thread: 0 }))
    };
    let missing = |kind: &FaultKind, lacks: &[&str]| {
        race(kind, Hazard::ReadAfterWrite, store_then_product, lacks)
    };
    finds(NoStoreWait, |kind| missing(kind, &["tcgen05_wait_st"]));
    finds(NoFenceBehindStores, |kind| missing(kind, &["tcgen05_fence_before"]));
    finds(NoFenceBehindWeights, |kind| missing(kind, &["tcgen05_fence_after"]));
    // Warps that come late store over what was read.
    let product_then_store = |first, second| {
        matches!((first, second), (Agent::Product { thread: 0 }, Agent::TensorStore { .. }))
    };
    finds(NoWeightsWait, |kind| {
        let waits = ["a barrier", "tcgen05_wait_st"];
        let lacks = ["a wait for its commit"];
        missing(kind, &waits) || race(kind, Hazard::WriteAfterRead, product_then_store, &lacks)
    });
}

#[test]
fn memory_given_back_too_early_or_not_at_all() {
    let early = |kind: &FaultKind| match kind {
        FaultKind::TensorRace { first, second, .. } => {
            matches!(first, Agent::TensorLoad { .. })
                && matches!(second, Agent::TensorDealloc { warp: 0 })
        }
        // Other warps load from memory that is gone.
        kind => misuse(kind, "not inside of an allocation"),
    };
    finds(NoFreeBarrier, early);
    finds(NoFree, |kind| misuse(kind, "has not given back 128 columns"));
    finds(FreeOfHalf, |kind| misuse(kind, "are not an allocation"));
    finds(AllocationAfterRelinquish, |kind| misuse(kind, "after tcgen05_relinquish"));
}

#[test]
fn operands_in_shared_memory() {
    let product = Agent::Product { thread: 0 };
    finds(
        NoProxyFence,
        |kind| matches!(kind, FaultKind::MissingProxyFence { reader, .. } if *reader == product),
    );
    finds(NoFenceBehindOperands, |kind| misuse(kind, "behind the wait for its operands"));
    finds(MissingKeys, |kind| matches!(kind, FaultKind::UninitialisedShared { thread: 0, .. }));
    finds(KeysOverwritten, |kind| match kind {
        FaultKind::AsyncRace { hazard, first, second, .. } => {
            let overwritten = (*first, *second) == (product, Agent::Thread(5));
            let read = (*first, *second) == (Agent::Thread(5), product);
            *hazard == Hazard::WriteAfterRead && overwritten
                || *hazard == Hazard::ReadAfterWrite && read
        }
        _ => false,
    });
}

#[test]
fn places_that_no_product_has_written() {
    finds(OutputNotCleared, |kind| misuse(kind, "never written"));
}

/// Hardware pipelines products into one place; others need the commit.
#[test]
fn products_that_hardware_does_not_order() {
    let both = |of: u32| {
        move |first: Agent, second: Agent| {
            (first, second) == (Agent::Product { thread: 0 }, Agent::Product { thread: of })
        }
    };
    let lacks = ["a wait for its commit"];
    finds(ScoresOverWeights, |kind| race(kind, Hazard::WriteAfterRead, both(0), &lacks));
    finds(SecondIssuer, |kind| race(kind, Hazard::ReadAfterWrite, both(32), &lacks));
}

#[test]
fn columns_and_lanes_of_others() {
    let outside = |kind: &FaultKind| misuse(kind, "not inside of an allocation");
    finds(ScoresBesideAllocation, |kind| outside(kind) && misuse(kind, "tcgen05_mma"));
    finds(LoadBesideAllocation, |kind| outside(kind) && misuse(kind, "tcgen05_ld_32x32b"));
    finds(OtherLanes, |kind| misuse(kind, "has lanes"));
    finds(DifferentAddresses, |kind| misuse(kind, "different addresses"));
}

#[test]
fn commits_that_nobody_waits_for() {
    let unwaited = |what: &str| what.contains("nobody has waited");
    finds(LastCommit, |kind| matches!(kind, FaultKind::Mbarrier { what, .. } if unwaited(what)));
}

/// A descriptor that is legal but of another tile gives other numbers, or reads what is not there.
#[test]
fn wrong_descriptors_give_wrong_numbers_or_faults() {
    let expected = expected();
    let differs = |plant| {
        let same = run(plant, 3).is_ok_and(|out| out == expected);
        assert!(!same, "{plant:?}");
    };
    // Another row, other strides, the other swizzles, no swizzle, the next tile.
    let places = [8, 1 << 38, 3 << 38, 6 << 61, 4 << 61, 2 << 61, 1024 >> 4];
    places.into_iter().for_each(|bits| differs(KeyBits(bits)));
    [8, 6 << 61, 4 << 61, 2 << 61, 1024 >> 4].into_iter().for_each(|bits| differs(ValueBits(bits)));
    // Types, signs, orders, N and M.
    let fields = [1 << 7, 9 << 7, 1 << 13, 1 << 15, 1 << 16, 12 << 17, 12 << 24];
    fields.into_iter().for_each(|bits| differs(InstructionBits(bits)));
    let said = [
        (KeyBits(1 << 46), "0b001"),
        (KeyBits(1 << 50), "base offset"),
        (KeyBits(1 << 61), "no valid swizzle"),
        (KeyBits(8), "first row"),
        (ValueBits(1 << 32), "whole swizzle patterns"),
        (InstructionBits(1 << 4), "D in f32"),
        (InstructionBits(1 << 17), "multiple of 16"),
    ];
    for (plant, says) in said {
        finds(plant, |kind| misuse(kind, says) && misuse(kind, "tcgen05_mma"));
    }
    // With a swizzle, K-major operands ignore the leading offset.
    assert!(run(KeyBits(5 << 16), 3).unwrap() == expected);
}

/// Runs a kernel of one warp with 64 columns.
fn fault(kernel: impl Fn(u32) + Sync) -> FaultKind {
    let shape = Launch { threads: 32, shared_bytes: 1024, ..Launch::default() };
    let body = |_: &Arguments| {
        tcgen05_alloc(shared_base(), 64);
        sync_warp();
        let memory: u32 = ld_shared(shared_base());
        kernel(memory);
        tcgen05_dealloc(memory, 64);
    };
    launch(&shape, &body, &[]).expect_err("the kernel breaks a rule").kind
}

#[test]
fn moves_of_a_warp_that_it_does_not_wait_for() {
    let lacks = |kind: FaultKind, hazard, missing: &str| {
        let is = race(&kind, hazard, |_, _| true, &[missing]);
        assert!(is, "{kind}");
    };
    let stored = |memory: u32| {
        tcgen05_st_32x32b(memory, [lane(); 4]);
        tcgen05_wait_st();
    };
    let overwritten = fault(|memory| {
        stored(memory);
        drop(tcgen05_ld_32x32b::<4>(memory));
        tcgen05_st_32x32b(memory, [0; 4]);
    });
    lacks(overwritten, Hazard::WriteAfterRead, "tcgen05_wait_ld");
    let loaded = fault(|memory| {
        tcgen05_st_32x32b(memory, [lane(); 4]);
        drop(tcgen05_ld_32x32b::<4>(memory));
    });
    lacks(loaded, Hazard::ReadAfterWrite, "tcgen05_wait_st");
    let twice = fault(|memory| {
        tcgen05_st_32x32b(memory, [1; 4]);
        tcgen05_wait_ld();
        tcgen05_st_32x32b(memory, [2; 4]);
    });
    lacks(twice, Hazard::WriteAfterWrite, "tcgen05_wait_st");
    let given_back = fault(|memory| tcgen05_st_32x32b(memory, [1; 4]));
    lacks(given_back, Hazard::WriteAfterWrite, "tcgen05_wait_st");
}

#[test]
fn allocations_that_hardware_refuses_or_waits_for_forever() {
    let says = |kernel: &(dyn Fn(u32) + Sync), what: &str| {
        let kind = fault(kernel);
        assert!(misuse(&kind, what), "{kind}");
    };
    let alloc = |columns| move |_: u32| tcgen05_alloc(shared_base() + 64, columns);
    says(&alloc(48), "a power of two from 32 to 512");
    says(&alloc(16), "a power of two from 32 to 512");
    says(&alloc(128), "allocations must not grow");
    says(&|_| (0..8).for_each(|_| tcgen05_alloc(shared_base() + 64, 64)), "waits forever");
    says(&|memory| drop(tcgen05_ld_32x32b::<4>(memory)), "never written");
    says(&|memory| tcgen05_st_16x256b::<4>(memory + (8 << 16), [0; 4]), "at lane 8");
    says(&|memory| tcgen05_st_32x32b::<64>(memory + 1, [0; 64]), "not inside of an allocation");
    says(&|memory| tcgen05_dealloc(memory + 32, 32), "are not an allocation");
}
