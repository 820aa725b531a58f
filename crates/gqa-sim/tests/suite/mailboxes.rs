//! CTAs of a cluster that reduce by asynchronous stores to each other (DSMEM), and the fault of
//! each broken rule, with every seed.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Fault, FaultKind, Launch, Place, launch};

const SEEDS: std::ops::Range<u64> = 0..16;
const CLUSTER: u32 = 4;
const THREADS: u32 = 64;
/// Rounds, each of which sums a word per thread over the cluster, in the CTA whose rank is the
/// round's number modulo 2.
const ROUNDS: u32 = 3;
/// A word for each rank and thread.
const MAIL: u32 = 0;
const MAIL_BYTES: u32 = CLUSTER * THREADS * 4;
const FULL: u32 = MAIL + MAIL_BYTES;
const EMPTY: u32 = FULL + 8;
const SHARED_BYTES: u32 = EMPTY + 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    Nothing,
    NoBarrier,
    NoFence,
    TooManyBytes,
    TooFewBytes,
    UsedBefore,
    UsedAndReleased,
    ReadEarly,
    NarrowWait,
    NoWait,
    NoHandshake,
    OtherBarrier,
    UnseenArrival,
}
use Plant::*;

fn shape(seed: u64) -> Launch<'static> {
    Launch {
        name: "reduce",
        grid: [2 * CLUSTER, 1, 1],
        threads: THREADS,
        shared_bytes: SHARED_BYTES,
        seed,
        cluster: CLUSTER,
        ..Launch::default()
    }
}

fn word(block: u32, round: u32, thread: u32) -> u32 {
    block * 10_000 + round * 1000 + thread
}

fn initialise(base: u32, plant: Plant) {
    mbarrier_init(base + FULL, 1);
    mbarrier_init(base + EMPTY, 1);
    if plant != NoFence {
        fence_mbarrier_init();
    }
}

fn expect(base: u32, plant: Plant) {
    let bytes = match plant {
        TooManyBytes => MAIL_BYTES + 16,
        TooFewBytes => MAIL_BYTES - 16,
        _ => MAIL_BYTES,
    };
    mbarrier_arrive_expect(base + FULL, bytes);
}

/// Sends 64 words to the owner, some in fours, some in pairs, some one by one.
fn send(base: u32, owner: u32, round: u32, plant: Plant) {
    let (rank, thread) = (cluster_rank(), thread_idx());
    let elsewhere = if plant == OtherBarrier { (owner + 1) % CLUSTER } else { owner };
    let full = peer_address(base + FULL, elsewhere);
    let mail = peer_address(base + MAIL + rank * THREADS * 4, owner);
    let words = |i| word(block_idx_x(), round, i);
    match thread {
        0..8 => st_async_vec(mail + 16 * thread, [0, 1, 2, 3].map(|i| words(4 * thread + i)), full),
        8..16 => {
            let first = 32 + 2 * (thread - 8);
            st_async_vec2(mail + 4 * first, [words(first), words(first + 1)], full);
        }
        48..64 => st_async(mail + 4 * thread, words(thread), full),
        _ => {}
    }
}

fn sum(base: u32) -> u32 {
    let place = |rank| base + MAIL + (rank * THREADS + thread_idx()) * 4;
    (0..CLUSTER).map(|rank| ld_shared::<u32>(place(rank))).sum()
}

fn wait(base: u32, parity: u32, plant: Plant) {
    match plant {
        NarrowWait => mbarrier_wait(base + FULL, parity),
        NoWait => {}
        _ => mbarrier_wait_cluster(base + FULL, parity),
    }
}

fn reduce(arguments: &Arguments, plant: Plant) {
    let (base, rank) = (shared_base(), cluster_rank());
    if matches!(plant, UsedBefore | UsedAndReleased) {
        st_shared(base + MAIL + 4 * thread_idx(), 1u32);
    }
    if thread_idx() == 0 {
        initialise(base, plant);
        if rank < 2 {
            expect(base, plant);
        }
    }
    sync_threads();
    match plant {
        NoBarrier => {}
        UsedAndReleased => cluster_arrive(),
        _ => cluster_arrive_relaxed(),
    }
    if plant != NoBarrier {
        cluster_wait();
    }
    for round in 0..ROUNDS {
        let (owner, turn) = (round % 2, round / 2);
        if turn > 0 && plant != NoHandshake {
            // The owner has read its buffer and expects more.
            mbarrier_wait_cluster(base + EMPTY, (turn - 1) % 2);
        }
        send(base, owner, round, plant);
        if rank != owner {
            continue;
        }
        if plant == ReadEarly {
            sum(base);
        }
        wait(base, turn % 2, plant);
        let total = if plant == NoWait { 0 } else { sum(base) };
        let i = ((block_idx_x() / CLUSTER * ROUNDS + round) * THREADS + thread_idx()) as usize;
        arguments.global::<u32>(0).store(i, total);
        sync_threads();
        if round + 2 < ROUNDS || plant == UnseenArrival {
            if thread_idx() == 0 {
                expect(base, if round + 2 < ROUNDS { plant } else { Nothing });
            }
            if thread_idx() < CLUSTER {
                mbarrier_arrive_peer(peer_address(base + EMPTY, thread_idx()));
            }
        }
    }
}

fn run(seed: u64, plant: Plant) -> Result<Vec<u32>, Fault> {
    let mut out = vec![0u32; (2 * ROUNDS * THREADS) as usize];
    launch(
        &shape(seed),
        &|arguments: &Arguments| reduce(arguments, plant),
        &[Arg::write(&mut out)],
    )?;
    Ok(out)
}

fn fault(seed: u64, plant: Plant) -> FaultKind {
    match run(seed, plant) {
        Ok(_) => panic!("{plant:?} passes with seed {seed}"),
        Err(fault) => fault.kind,
    }
}

fn mbarrier_fault(plant: Plant, says: &str) {
    for seed in SEEDS {
        let kind = fault(seed, plant);
        assert!(matches!(kind, FaultKind::Mbarrier { .. }), "{plant:?}: {kind}");
        assert!(kind.to_string().contains(says), "{plant:?}: {kind}");
    }
}

#[test]
fn sums_of_mail() {
    for seed in SEEDS {
        let out = run(seed, Nothing).unwrap();
        for (i, got) in out.into_iter().enumerate() {
            let (cluster, round) = (i as u32 / THREADS / ROUNDS, i as u32 / THREADS % ROUNDS);
            let words =
                (0..CLUSTER).map(|rank| word(cluster * CLUSTER + rank, round, i as u32 % THREADS));
            assert_eq!(got, words.sum(), "cluster {cluster}, round {round}");
        }
    }
}

#[test]
fn senders_must_know_that_the_receiver_has_started() {
    for seed in SEEDS {
        let kind = fault(seed, NoBarrier);
        assert!(
            matches!(&kind, FaultKind::Cluster { what, .. } if what.contains("start of that CTA")),
            "{kind}"
        );
    }
}

#[test]
fn senders_must_know_that_the_barrier_is_initialised() {
    for seed in SEEDS {
        let kind = fault(seed, NoFence);
        let races = matches!(kind, FaultKind::AsyncRace { .. });
        assert!(races || matches!(kind, FaultKind::Mbarrier { .. }), "{kind}");
    }
}

#[test]
fn too_many_bytes_are_waited_for() {
    for seed in SEEDS {
        let kind = fault(seed, TooManyBytes);
        let FaultKind::Deadlock(places) = &kind else { panic!("{kind}") };
        let misses = |place: &Place| matches!(place, Place::Phase { bytes: 16, .. });
        assert!(places.0.iter().any(|(_, place)| misses(place)), "{kind}");
    }
}

#[test]
fn too_few_bytes_are_waited_for() {
    for seed in SEEDS {
        let kind = fault(seed, TooFewBytes);
        let says = kind.to_string();
        let early = says.contains("completes while") || says.contains("phase before has completed");
        assert!(early || says.contains("more than expected"), "{kind}");
    }
}

#[test]
fn mailboxes_that_the_receiver_has_used_need_a_releasing_arrival() {
    for seed in SEEDS {
        let kind = fault(seed, UsedBefore);
        assert!(matches!(kind, FaultKind::AsyncRace { .. }), "{kind}");
        run(seed, UsedAndReleased).unwrap();
    }
}

#[test]
fn mail_must_be_waited_for() {
    for seed in SEEDS {
        let kind = fault(seed, ReadEarly);
        let races = matches!(kind, FaultKind::AsyncRace { .. });
        assert!(races || matches!(kind, FaultKind::UninitialisedShared { .. }), "{kind}");
    }
    mbarrier_fault(NarrowWait, "mbarrier_wait_cluster");
}

#[test]
fn a_receiver_must_not_exit_before_its_mail_has_come() {
    for seed in SEEDS {
        let kind = fault(seed, NoWait);
        let says = kind.to_string();
        let exits = says.contains("nobody has waited") || says.contains("exit");
        let races = matches!(kind, FaultKind::AsyncRace { .. });
        // It may also continue to the next round, whose stores then come too early.
        assert!(exits || races || says.contains("phase before has completed"), "{kind}");
    }
}

#[test]
fn senders_must_know_that_the_mailbox_is_free() {
    for seed in SEEDS {
        let kind = fault(seed, NoHandshake);
        let says = kind.to_string();
        let early =
            says.contains("phase before has completed") || says.contains("more than expected");
        let races = matches!(kind, FaultKind::AsyncRace { .. });
        let ends = says.contains("exit") || says.contains("completes while");
        assert!(early || races || ends, "{kind}");
    }
}

#[test]
fn mail_completes_on_a_barrier_of_its_own_block() {
    for seed in SEEDS {
        let kind = fault(seed, OtherBarrier);
        assert!(kind.to_string().contains("mbarrier of another"), "{kind}");
    }
}

#[test]
fn a_block_must_not_exit_while_peers_arrive_at_its_barriers() {
    for seed in SEEDS {
        let kind = fault(seed, UnseenArrival);
        let exits = matches!(&kind, FaultKind::Cluster { what, .. } if what.contains("exit"));
        // Nor did it wait for those of the phase before.
        assert!(exits || kind.to_string().contains("of the previous phase"), "{kind}");
    }
}
