//! Kernels that break a rule, and the fault that each must end in; kernels that a small change
//! corrects must then pass.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Fault, FaultKind, Hazard, Launch, Place, Report, launch};

fn block(threads: u32) -> Launch<'static> {
    Launch {
        name: "kernel",
        grid: [1, 1, 1],
        threads,
        shared_bytes: 1024,
        seed: 1,
        ..Launch::default()
    }
}

fn run(threads: u32, kernel: impl Fn() + Sync) -> Result<Report, Fault> {
    launch(&block(threads), &|_: &Arguments| kernel(), &[])
}

fn fault(threads: u32, kernel: impl Fn() + Sync) -> FaultKind {
    run(threads, kernel).expect_err("the kernel breaks a rule").kind
}

/// Byte `i` of the CTA's shared memory.
fn at(i: u32) -> u32 {
    shared_base() + i
}

#[test]
fn barrier_that_exited_warps_never_reach() {
    let kind = fault(64, || {
        if warp() == 0 {
            sync_threads();
        }
    });
    let FaultKind::PartialBarrier(places) = kind else { panic!("{kind}") };
    assert!(places.0.iter().any(
        |(threads, place)| *place == Place::Exited && threads.0 == (32..64).collect::<Vec<_>>()
    ));
}

#[test]
fn barrier_that_exited_lanes_never_reach() {
    let kind = fault(32, || {
        if lane() < 5 {
            return;
        }
        sync_threads();
    });
    let FaultKind::PartialBarrier(places) = &kind else { panic!("{kind}") };
    assert!(kind.to_string().contains("threads 0-4 have exited"), "{kind}");
    assert_eq!(places.0.len(), 2);
}

fn barrier_of_either_arm(first: bool) {
    match first {
        true => sync_threads(),
        false => {
            sync_threads();
        }
    }
}

#[test]
fn barriers_in_both_arms_of_a_divergent_branch() {
    let kind = fault(32, || barrier_of_either_arm(lane() < 16));
    assert!(matches!(kind, FaultKind::Divergence(_)), "{kind}");
}

#[test]
fn barriers_of_whole_warps_may_differ() {
    run(64, || barrier_of_either_arm(warp() == 0)).unwrap();
}

#[test]
fn lanes_that_wait_for_each_other_at_different_instructions() {
    let kind = fault(32, || if lane() == 3 { sync_threads() } else { sync_warp() });
    let FaultKind::Deadlock(places) = &kind else { panic!("{kind}") };
    let waiting = places.0.iter().find(|(_, place)| matches!(place, Place::Barrier(_))).unwrap();
    assert_eq!(waiting.0.0, [3]);
}

#[test]
fn shuffle_that_misses_lanes() {
    let kind = fault(32, || {
        if lane() != 9 {
            shfl_xor_u32(1, 1);
        }
    });
    assert!(matches!(kind, FaultKind::Divergence(_)), "{kind}");
    assert!(kind.to_string().contains("threads 9 have exited"), "{kind}");
    let kind = fault(32, || {
        if lane() < 16 {
            shfl_xor_u32(1, 1)
        } else {
            shfl_idx_u32(1, 1)
        };
    });
    assert!(matches!(kind, FaultKind::Divergence(_)), "{kind}");
}

#[test]
fn fault_names_kernel_block_and_thread_in_one_line() {
    let shape = Launch { grid: [2, 3, 1], ..block(32) };
    let fault = launch(
        &shape,
        &|_| {
            if block_idx_y() == 2 && lane() == 4 {
                trap()
            }
        },
        &[],
    )
    .unwrap_err();
    assert_eq!(fault.block, Some([0, 2, 0]));
    assert_eq!(fault.to_string(), "kernel, block (0, 2, 0): thread 4 trapped");
}

#[test]
fn read_of_unwritten_shared_memory() {
    let kind = fault(32, || {
        if lane() == 0 {
            st_shared::<u16>(at(8), 7);
            ld_shared::<u32>(at(8));
        }
    });
    assert_eq!(kind, FaultKind::UninitialisedShared { thread: 0, address: 1024 + 10 });
    let kind = fault(32, || {
        ld_shared_vec(at(16));
    });
    assert!(matches!(kind, FaultKind::UninitialisedShared { address: 1040, .. }), "{kind}");
}

#[test]
fn shared_memory_of_one_block_is_not_the_next_ones() {
    let shape = Launch { grid: [20, 1, 1], ..block(32) };
    let kernel = |_: &Arguments| {
        if block_idx_x() < 19 {
            st_shared(at(4 * lane()), 1u32);
        } else {
            ld_shared::<u32>(at(4 * lane()));
        }
    };
    let fault = launch(&shape, &kernel, &[]).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::UninitialisedShared { .. }), "{fault}");
}

#[test]
fn shared_access_outside_or_misaligned() {
    let kind = fault(32, || st_shared(at(1024), 1u16));
    assert!(
        matches!(kind, FaultKind::SharedBounds { address: 2048, bytes: 2, end: 2048, .. }),
        "{kind}"
    );
    let kind = fault(32, || st_shared(4 * lane(), 1u32));
    assert!(matches!(kind, FaultKind::SharedBounds { .. }), "{kind}");
    let kind = fault(32, || st_shared_vec(at(8), [0; 4]));
    assert!(matches!(kind, FaultKind::SharedAlignment { bytes: 16, .. }), "{kind}");
    let kind = fault(32, || {
        ldmatrix_x4(at(2));
    });
    assert!(matches!(kind, FaultKind::SharedAlignment { bytes: 16, .. }), "{kind}");
}

/// Two accesses by two threads with `between` between them; the second thread is `distance / 32`
/// warps further on.
fn two_accesses(first: fn(), between: fn(), second: fn(), distance: u32) -> Result<Report, Fault> {
    run(64, move || {
        if thread_idx() < 32 {
            st_shared(at(4 * thread_idx()), 0u32);
        }
        sync_threads();
        // Shuffles fix the order within a warp; a second warp may run at any time.
        if thread_idx() == 0 {
            first();
        }
        shfl_xor_u32(0, 1);
        between();
        if thread_idx() == distance {
            second();
        }
    })
}

fn hazard(outcome: Result<Report, Fault>) -> Hazard {
    match outcome.expect_err("a race").kind {
        FaultKind::Race { hazard, first: 0, second: 1, .. } => hazard,
        kind => panic!("{kind}"),
    }
}

const READ: fn() = || {
    ld_shared::<u32>(at(0));
};
const WRITE: fn() = || st_shared(at(0), 1u32);

#[test]
fn races_within_a_warp_and_that_sync_warp_cures_them() {
    for (first, second, expected) in [
        (WRITE, READ, Hazard::ReadAfterWrite),
        (READ, WRITE, Hazard::WriteAfterRead),
        (WRITE, WRITE, Hazard::WriteAfterWrite),
    ] {
        assert_eq!(hazard(two_accesses(first, || {}, second, 1)), expected);
        assert_eq!(
            hazard(two_accesses(
                first,
                || {
                    any_sync(true);
                },
                second,
                1
            )),
            expected
        );
        two_accesses(first, || sync_warp(), second, 1).unwrap();
        two_accesses(first, || sync_threads(), second, 1).unwrap();
    }
    two_accesses(READ, || {}, READ, 1).unwrap();
}

#[test]
fn races_between_warps_and_that_only_a_block_barrier_cures_them() {
    for (first, second) in [(WRITE, READ), (READ, WRITE), (WRITE, WRITE)] {
        for between in [(|| {}) as fn(), || sync_warp()] {
            let fault = two_accesses(first, between, second, 32).unwrap_err();
            assert!(matches!(fault.kind, FaultKind::Race { address: 1024, .. }), "{fault}");
        }
        two_accesses(first, || sync_threads(), second, 32).unwrap();
    }
}

#[test]
fn halves_of_a_word_are_separate_places() {
    run(64, || {
        st_shared(at(2 * thread_idx()), thread_idx() as u16);
        sync_threads();
        ld_shared::<u32>(at(4 * (thread_idx() % 32)));
        sync_threads();
        if thread_idx() < 32 {
            st_shared(at(4 * thread_idx()), 0u32);
        }
        sync_threads();
        st_shared(at(thread_idx()), 0u8);
    })
    .unwrap();
    let kind = fault(32, || st_shared(at(lane() / 2 * 2), 0u16));
    assert!(matches!(kind, FaultKind::Race { hazard: Hazard::WriteAfterWrite, .. }), "{kind}");
}

#[test]
fn matrix_load_of_rows_that_other_lanes_just_wrote() {
    let write = || st_shared_vec(at(16 * lane()), [lane(); 4]);
    let kind = fault(32, || {
        write();
        ldmatrix_x4(at(16 * lane()));
    });
    assert!(matches!(kind, FaultKind::Race { hazard: Hazard::ReadAfterWrite, .. }), "{kind}");
    let kind = fault(32, || {
        write();
        sync_warp();
        ldmatrix_x4_trans(at(16 * lane()));
        write();
    });
    assert!(matches!(kind, FaultKind::Race { hazard: Hazard::WriteAfterRead, .. }), "{kind}");
    run(32, || {
        write();
        sync_warp();
        ldmatrix_x4_trans(at(16 * lane()));
        sync_warp();
        write();
    })
    .unwrap();
}

fn copy(kernel: impl Fn(Global<u32>) + Sync) -> Result<Report, Fault> {
    let source: Vec<u32> = (0..256).collect();
    launch(&block(64), &|arguments| kernel(arguments.global(0)), &[Arg::read(&source)])
}

#[test]
fn copies_are_seen_only_after_they_were_waited_for() {
    let start = |source, i: u32| cp_async_16(at(16 * i), source, 4 * i as usize, true);
    let own = || assert_eq!(ld_shared::<u32>(at(16 * thread_idx())), 4 * thread_idx());
    let waits: [(fn(), bool); 4] = [
        (|| {}, false),
        (|| cp_async_commit(), false),
        (|| cp_async_wait::<0>(), false),
        (
            || {
                cp_async_commit();
                cp_async_wait::<0>();
            },
            true,
        ),
    ];
    for (wait, enough) in waits {
        let outcome = copy(|source| {
            start(source, thread_idx());
            wait();
            own();
        });
        match outcome {
            Ok(_) => assert!(enough),
            Err(fault) => {
                assert!(!enough && matches!(fault.kind, FaultKind::CopyInFlight { .. }), "{fault}")
            }
        }
    }
}

#[test]
fn copies_of_other_threads_need_a_barrier_too() {
    let kernel = |barrier: bool| {
        move |source: Global<u32>| {
            let i = thread_idx();
            cp_async_16(at(16 * i), source, 4 * i as usize, true);
            cp_async_commit();
            cp_async_wait::<0>();
            if barrier {
                sync_threads();
            }
            assert_eq!(ld_shared::<u32>(at(16 * (63 - i))), 4 * (63 - i));
        }
    };
    copy(kernel(true)).unwrap();
    let fault = copy(kernel(false)).unwrap_err();
    // The thread that runs first determines which fault is found.
    let found = matches!(
        fault.kind,
        FaultKind::Race { hazard: Hazard::ReadAfterWrite, .. }
            | FaultKind::UninitialisedShared { .. }
    );
    assert!(found, "{fault}");
}

#[test]
fn older_group_lands_while_the_newer_is_in_flight() {
    let kernel = |read_newer: bool| {
        move |source: Global<u32>| {
            if thread_idx() > 0 {
                return;
            }
            for group in 0..2 {
                cp_async_16(at(16 * group), source, 16 * group as usize, true);
                cp_async_commit();
            }
            cp_async_wait::<1>();
            assert_eq!(ld_shared::<u32>(at(0)), 0);
            if read_newer {
                ld_shared::<u32>(at(16));
            }
        }
    };
    copy(kernel(false)).unwrap();
    assert_eq!(
        copy(kernel(true)).unwrap_err().kind,
        FaultKind::CopyInFlight { thread: 0, copier: 0, address: 1040 }
    );
}

#[test]
fn copy_into_what_others_still_read() {
    let outcome = copy(|source| {
        if warp() == 0 {
            st_shared_vec(at(16 * lane()), [0; 4]);
        }
        sync_threads();
        ld_shared_vec(at(16 * lane()));
        if thread_idx() == 40 {
            cp_async_16(at(0), source, 0, true);
        }
    });
    let kind = outcome.unwrap_err().kind;
    assert!(matches!(kind, FaultKind::Race { .. } | FaultKind::CopyInFlight { .. }), "{kind}");
}

#[test]
fn copy_that_is_not_valid_fills_with_zeros_and_reads_nothing() {
    copy(|source| {
        cp_async_16(at(16 * thread_idx()), source, 1 << 40, false);
        cp_async_commit();
        cp_async_wait::<0>();
        assert_eq!(ld_shared_vec(at(16 * thread_idx())), [0; 4]);
    })
    .unwrap();
}

fn global(kernel: impl Fn(Global<u16>, Global<u16>) + Sync) -> Result<Report, Fault> {
    let (input, mut output) = ([[7u32; 4]; 8], [[0u32; 4]; 8]);
    let kernel = |arguments: &Arguments| kernel(arguments.global(0), arguments.global(1));
    launch(&block(32), &kernel, &[Arg::read(&input), Arg::write(&mut output)])
}

#[test]
fn global_access_outside_the_view() {
    let kind = global(|input, _| {
        input.load(64);
    })
    .unwrap_err()
    .kind;
    assert!(
        matches!(
            kind,
            FaultKind::GlobalBounds { argument: 0, offset: 128, bytes: 2, limit: 128, .. }
        ),
        "{kind}"
    );
    for far in [usize::MAX, usize::MAX / 2, 1 << 62] {
        let kind = global(|input, _| {
            input.offset(far).load(far);
        })
        .unwrap_err()
        .kind;
        assert!(matches!(kind, FaultKind::GlobalBounds { .. }), "{kind}");
    }
    let kind = global(|_, output| output.offset(60).store_vec(4, [0; 4])).unwrap_err().kind;
    assert!(matches!(kind, FaultKind::GlobalBounds { argument: 1, bytes: 16, .. }), "{kind}");
}

#[test]
fn global_vector_access_on_no_boundary() {
    let misaligned = |fault: Fault| matches!(fault.kind, FaultKind::GlobalAlignment { .. });
    assert!(misaligned(
        global(|input, _| {
            input.load_vec(4);
        })
        .unwrap_err()
    ));
    assert!(misaligned(
        global(|input, _| {
            input.load_vec8(2);
        })
        .unwrap_err()
    ));
    assert!(misaligned(global(|input, _| cp_async_16(at(0), input, 4, true)).unwrap_err()));
    global(|input, output| output.store_vec(8, input.load_vec(8))).unwrap();
}

#[test]
fn store_through_a_read_only_view() {
    let kind = global(|input, _| {
        if lane() == 6 {
            input.store(1, 1)
        }
    })
    .unwrap_err()
    .kind;
    assert_eq!(kind, FaultKind::ReadOnly { thread: 6, argument: 0, offset: 2 });
}

#[test]
fn null_is_known_and_not_to_be_touched() {
    let kernel = |arguments: &Arguments| {
        let pointer = arguments.global::<f32>(0);
        assert!(pointer.is_null());
        pointer.load(0);
    };
    let fault = launch(&block(32), &kernel, &[Arg::null()]).unwrap_err();
    assert!(matches!(fault.kind, FaultKind::NullPointer { argument: 0, .. }), "{fault}");
}

#[test]
fn two_blocks_that_write_one_element() {
    let mut output = [0u16; 64];
    let shape = Launch { grid: [4, 1, 1], ..block(32) };
    let kernel = |overlap: usize| {
        move |arguments: &Arguments| {
            let i = block_idx_x() as usize * (8 - overlap) + lane() as usize;
            if lane() < 8 {
                arguments.global::<u16>(0).store(i, 1);
            }
        }
    };
    launch(&shape, &kernel(0), &[Arg::write(&mut output)]).unwrap();
    let fault = launch(&shape, &kernel(1), &[Arg::write(&mut output)]).unwrap_err();
    assert_eq!(fault.kind, FaultKind::WriteConflict { argument: 0, offset: 14, blocks: [0, 1] });
}

#[test]
fn panic_in_a_kernel_is_a_fault_with_its_message() {
    let table = [1, 2, 3];
    let kind = fault(64, || {
        std::hint::black_box(table[thread_idx() as usize % 4]);
    });
    let FaultKind::Panic { message, .. } = kind else { panic!("{kind}") };
    assert!(message.contains("index out of bounds") && message.contains("faults.rs"), "{message}");
}

#[test]
fn destructors_run_when_a_fault_takes_the_kernel_down() {
    let live = std::sync::Arc::new(());
    fault(64, || {
        let _held = live.clone();
        sync_threads();
        if thread_idx() == 50 {
            trap();
        }
        sync_threads();
    });
    assert_eq!(std::sync::Arc::strong_count(&live), 1);
}

#[test]
fn arguments_that_do_not_fit_the_kernel() {
    let kernel = |arguments: &Arguments| {
        arguments.params::<u64>(0);
    };
    for (arg, words) in [(Arg::params(&1u32), "of 4"), (Arg::null(), "a pointer")] {
        let fault = launch(&block(32), &kernel, &[arg]).unwrap_err();
        assert!(
            matches!(&fault.kind, FaultKind::Argument { argument: 0, what } if what.contains(words)),
            "{fault}"
        );
    }
    let fault = launch(
        &block(32),
        &|arguments| {
            arguments.global::<u8>(3);
        },
        &[],
    )
    .unwrap_err();
    assert!(matches!(fault.kind, FaultKind::Argument { argument: 3, .. }), "{fault}");
}

#[test]
fn impossible_launches() {
    let shapes = [
        block(33),
        block(0),
        block(1056),
        Launch { grid: [0, 1, 1], ..block(32) },
        Launch { shared_bytes: 228 * 1024, ..block(32) },
    ];
    for shape in shapes {
        let fault = launch(&shape, &|_| {}, &[]).unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Launch(_)) && fault.block.is_none(), "{fault}");
    }
}

#[test]
#[should_panic(expected = "outside a kernel")]
fn device_functions_outside_a_kernel() {
    thread_idx();
}
