//! Seeds: the same seed gives the same run, another seed another order, and correct kernels give
//! the same results.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Fault, Launch, launch};
use std::sync::Mutex;

fn shape(seed: u64) -> Launch<'static> {
    Launch {
        name: "kernel",
        grid: [1, 1, 1],
        threads: 128,
        shared_bytes: 512,
        seed,
        ..Launch::default()
    }
}

/// The order in which threads run, between two barriers.
fn order(seed: u64) -> Vec<u32> {
    let order = Mutex::new(Vec::new());
    let kernel = |_: &Arguments| {
        sync_threads();
        order.lock().unwrap().push(thread_idx());
        shfl_xor_u32(0, 1);
        order.lock().unwrap().push(thread_idx());
    };
    launch(&shape(seed), &kernel, &[]).unwrap();
    order.into_inner().unwrap()
}

#[test]
fn seed_decides_the_order() {
    assert_eq!(order(1), order(1));
    let orders: std::collections::HashSet<_> = (0..20).map(order).collect();
    assert_eq!(orders.len(), 20);
    for order in orders {
        let mut threads: Vec<_> = order.clone();
        threads.sort_unstable();
        assert_eq!(threads, (0..256).map(|i| i / 2).collect::<Vec<_>>());
    }
}

/// Reverses the CTA's values through shared memory.
fn reverse(seed: u64, blocks: u32, barrier: bool) -> (Vec<u32>, Result<gqa_sim::Report, Fault>) {
    let mut output = vec![0u32; 128 * blocks as usize];
    let kernel = |arguments: &Arguments| {
        let (base, i) = (shared_base(), thread_idx());
        st_shared(base + 4 * i, i);
        if barrier {
            sync_threads();
        }
        let value = ld_shared::<u32>(base + 4 * (127 - i));
        arguments.global::<u32>(0).store((block_idx_x() * 128 + i) as usize, value);
    };
    let outcome = launch(
        &Launch { grid: [blocks, 1, 1], ..shape(seed) },
        &kernel,
        &[Arg::write(&mut output)],
    );
    (output, outcome)
}

#[test]
fn correct_kernels_do_not_notice_the_seed() {
    let (expected, report) = reverse(0, 8, true);
    assert_eq!(report.as_ref().unwrap().barriers, 8);
    for seed in 1..20 {
        assert_eq!(reverse(seed, 8, true), (expected.clone(), report.clone()));
    }
}

#[test]
fn wrong_kernels_fail_with_every_seed_and_the_same_way_each_time() {
    let faults: Vec<Fault> = (0..20).map(|seed| reverse(seed, 8, false).1.unwrap_err()).collect();
    for (seed, fault) in faults.iter().enumerate() {
        assert_eq!(fault.block, Some([0, 0, 0]));
        assert_eq!(reverse(seed as u64, 8, false).1.unwrap_err(), *fault);
    }
    assert!(faults.iter().any(|fault| *fault != faults[0]));
}

#[test]
fn launches_may_run_side_by_side() {
    std::thread::scope(|scope| {
        let runs: Vec<_> =
            (0..4).map(|seed| scope.spawn(move || reverse(seed, 16, true).0)).collect();
        let outputs: Vec<_> = runs.into_iter().map(|run| run.join().unwrap()).collect();
        assert!(outputs.iter().all(|output| *output == outputs[0]));
    });
}
