//! PagedAttention on every back end, against the f64 reference.

use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io};
use gqa_host::engine::{Heads, Layer, Paged};
use gqa_host::plan::{DeviceInfo, PlanOptions, TensorId, Tensors, plan};
use gqa_host::{DType, Tensor};
use gqa_tests::{
    Alone, Case, DECODE_KERNELS, Made, PREFILL_KERNELS, PagedCase, Parity, Scheduled, Unchecked,
    any_dtype, case, copied, cut_off, half_dtype, heads_up_to, in_place, invariant_cases,
    packed_rows, paged, paged_concurrent, paged_crowd_steps, paged_crowds, paged_in_parts,
    paged_long, paged_mixed, paged_prompts, paged_reads, paged_steps, parity, quantized,
    reads_with_gaps, slow_device, steps, with_gaps, with_row_scales, with_some_lse,
};
use ndarray::{Array2, arr1};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::HashSet;

#[test]
fn on_the_cpu() {
    let cases = paged(case(any_dtype(), heads_up_to(256), 40), 70);
    parity("cpu, paged", 1500, cases, &Cpu::default());
}

#[test]
fn of_codes_on_the_cpu() {
    let cases = paged(quantized(case(any_dtype(), heads_up_to(256), 40)), 70);
    parity("cpu, paged codes", 600, cases, &Cpu::default());
}

#[test]
fn of_scales_of_rows_on_the_cpu() {
    let cases = paged(with_row_scales(case(any_dtype(), heads_up_to(256), 40)), 70);
    parity("cpu, paged, scales of rows", 600, cases, &Cpu::default());
    let cases = paged_steps(with_row_scales(steps(40)), 400);
    parity("cpu, paged steps, scales of rows", 100, cases, &Cpu::default());
}

#[test]
fn of_codes_as_planned() {
    let cases = paged(quantized(case(any_dtype(), heads_up_to(128), 24)), 40);
    parity("sim, paged codes", 300, cases, &Sim::default());
}

#[test]
fn as_planned() {
    let cases = paged(case(any_dtype(), heads_up_to(128), 24), 40);
    parity("sim, paged", 300, cases, &Sim::default());
}

#[test]
fn prompts_on_hopper() {
    let cases = paged_prompts(case(half_dtype(), heads_up_to(256), 24), 60);
    parity("sim, paged prompts", 20, cases, &Sim::default());
}

/// Quantized caches, whose dequantized values are in new blocks.
#[test]
fn prompts_of_codes_on_hopper() {
    let cases = paged_prompts(quantized(case(half_dtype(), heads_up_to(128), 24)), 60);
    parity("sim, paged prompts, quantized", 20, cases, &Sim::default());
}

/// Each CTA takes many work tiles, whose descriptions it must not overwrite before all threads have
/// read them.
#[test]
fn prompts_on_few_multiprocessors() {
    let device = DeviceInfo { multiprocessors: 2, ..DeviceInfo::h200() };
    let cases = paged_prompts(case(half_dtype(), heads_up_to(128), 24), 60);
    let sim = Sim::default().with_device(device);
    parity("sim, 2 SMs, paged prompts", 20, cases, &sim);
}

/// Each kernel skips the sequences of the other one.
#[test]
fn mixed_batches() {
    let small = DeviceInfo { multiprocessors: 2, ..DeviceInfo::h200() };
    let sim = Sim::default().with_device(small.clone());
    parity("sim, mixed batches", 5, paged_mixed(steps(24), 60), &sim);
    let codes = || quantized(steps(24));
    parity("sim, mixed batches, quantized", 5, paged_mixed(codes(), 60), &sim);
    let first_steps = |steps| paged_concurrent(paged_mixed(steps, 60), &small, DECODE_KERNELS);
    parity("sim, mixed batches, decode first", 5, first_steps(steps(24)), &sim);
    parity("sim, mixed batches, decode first, quantized", 5, first_steps(codes()), &sim);
    for slow in [4, 132].map(slow_device) {
        let cases = paged_concurrent(paged_mixed(steps(24), 60), &slow, PREFILL_KERNELS);
        parity("sim, mixed batches, prefill first", 5, cases, &Sim::default().with_device(slow));
    }
}

/// Of these calls, such as the forced kernel takes.
fn in_place_by<C: Parity + 'static>(
    options: &PlanOptions,
    device: &DeviceInfo,
    cases: BoxedStrategy<C>,
) -> BoxedStrategy<C> {
    let (options, device) = (options.clone(), device.clone());
    let is_taken = move |case: &C| plan(&case.problem().expect("legal"), &device, &options).is_ok();
    cases.prop_filter("the kernel takes it", is_taken).boxed()
}

/// Heads that share row tiles, and long row tiles in parts, which are merged.
#[test]
fn long_sequences_in_parts() {
    // More rows than a share, what a merge costs, and a tile.
    let kernels = [
        ("gqa_hopper_paged_split_f16_d64", DType::F16, 64, 1200),
        ("gqa_hopper_paged_split_f16_d96", DType::F16, 96, 1200),
        ("gqa_hopper_paged_split_bf16_d128", DType::BF16, 128, 1200),
        ("gqa_hopper_paged_split_bf16_d192", DType::BF16, 192, 2400),
        ("gqa_hopper_paged_split_f16_d256", DType::F16, 256, 2400),
        ("gqa_hopper_paged_quantized_split_f16_d64", DType::F16, 64, 1200),
        ("gqa_hopper_paged_quantized_split_bf16_d128", DType::BF16, 128, 1200),
        ("gqa_hopper_paged_quantized_split_f8_bf16_d64", DType::BF16, 64, 1200),
        ("gqa_hopper_paged_quantized_split_f8_bf16_d128", DType::BF16, 128, 1200),
    ];
    for (name, dtype, head_size, rows) in kernels {
        let is_quantized = name.contains("_quantized_");
        let steps = if is_quantized { quantized(steps(8)) } else { steps(8) };
        let of = move |case: PagedCase| PagedCase {
            case: Case {
                dtype,
                head_size,
                rotary: case.case.rotary.map(|(sixteenths, interleaved, positions)| {
                    (1 + (sixteenths - 1) % (head_size / 16), interleaved, positions)
                }),
                ..case.case
            },
            ..case
        };
        let options = PlanOptions { force: Some(name), ..PlanOptions::default() };
        let cases = in_place_by(
            &options,
            &DeviceInfo::h200(),
            paged_long(steps, rows..=rows + 300).prop_map(of).boxed(),
        );
        let sim = Sim::default().with_options(options);
        parity(&format!("sim, parts, {name}"), 4, cases.clone(), &sim);
        parity(&format!("sim, parts, gaps, {name}"), 2, with_gaps(cases), &sim);
    }
}

/// Kernels that split prefill, of one head size each.
const SPLIT_KERNELS: [(&str, DType, usize); 4] = [
    ("gqa_hopper_paged_split_f16_d64", DType::F16, 64),
    ("gqa_hopper_paged_split_bf16_d128", DType::BF16, 128),
    ("gqa_hopper_paged_split_f16_d256", DType::F16, 256),
    ("gqa_hopper_paged_quantized_split_f8_bf16_d128", DType::BF16, 128),
];

/// A GPU whose CTAs have several row tiles each.
fn few_sms() -> DeviceInfo {
    DeviceInfo { multiprocessors: 12, ..DeviceInfo::h200() }
}

/// Calls of [ragged] sequences and of two chunks, for each of these kernels, with options that
/// force it.
fn ragged_chunks() -> impl Iterator<Item = (&'static str, PlanOptions, BoxedStrategy<PagedCase>)> {
    SPLIT_KERNELS.into_iter().map(|(name, dtype, head_size)| {
        let steps = if name.contains("_quantized_") { quantized(steps(8)) } else { steps(8) };
        let of = move |mut case: PagedCase| {
            let size = case.block_size;
            case.sequences.insert(2, [size - 1, 33]);
            case.sequences.push([500, 20]);
            let case_of = Case { dtype, head_size, rotary: None, ..case.case };
            PagedCase { case: case_of, ..case }
        };
        let options = PlanOptions { force: Some(name), ..PlanOptions::default() };
        let cases = in_place_by(&options, &DeviceInfo::h200(), ragged(steps).prop_map(of).boxed());
        (name, options, cases)
    })
}

/// Of a schedule that agrees with the call each CTA takes its range, and otherwise divides the
/// work, as it does where its range is damaged.
#[test]
fn ragged_chunks_in_parts_by_a_schedule() {
    let others = [Made::OtherLengths, Made::OtherSlots, Made::OtherKeys, Made::Nothing];
    let damaged = [0, 1, 2].map(Made::Damaged);
    for (name, options, cases) in ragged_chunks() {
        let sim = Sim::default().with_device(few_sms()).with_options(options.clone());
        parity(&format!("sim, ragged, {name}"), 2, cases.clone(), &sim);
        for made in [Made::Right].into_iter().chain(others).chain(damaged) {
            let scheduled = Scheduled::new(few_sms(), made).with_options(options.clone());
            parity(&format!("sim, {made:?}, {name}"), 2, cases.clone(), &scheduled);
        }
    }
}

/// A kernel that divided the work in spite of a schedule would write its outputs.
#[test]
fn a_schedule_of_no_work_leaves_outputs() {
    for (_, options, cases) in ragged_chunks() {
        let case = sample(cases);
        let made = |made| Scheduled::new(few_sms(), made).with_options(options.clone());
        case.check(&made(Made::Right)).unwrap();
        case.check(&made(Made::Emptied)).unwrap_err();
    }
}

/// Forged ranges make results wrong, or a race, but nothing is read or written outside of tensors
/// and of scratch memory.
#[test]
fn no_schedule_leads_parts_outside() {
    let mut wrong = 0;
    for (_, options, cases) in ragged_chunks() {
        let case = sample(cases);
        for seed in 0..8 {
            let forged = Scheduled::new(few_sms(), Made::Forged(seed));
            let error = case.check(&forged.with_options(options.clone())).err();
            let error = error.unwrap_or_default();
            wrong += usize::from(!error.is_empty());
            let is_outside = error.contains(" accesses ") || error.contains("panicked");
            assert!(!is_outside, "{error}");
        }
    }
    assert!(wrong > 0, "no forged range was taken");
}

/// Row tiles in more parts than a warp of the merge looks for at a time.
#[test]
fn a_long_sequence_in_many_parts() {
    let name = Some("gqa_hopper_paged_split_f16_d64");
    let options = PlanOptions { force: name, ..PlanOptions::default() };
    let of = |case: PagedCase| PagedCase {
        case: Case { dtype: DType::F16, head_size: 64, rotary: None, ..case.case },
        ..case
    };
    let cases = paged_long(steps(8), 9000..=9600).prop_map(of).boxed();
    let sim = Sim::default().with_options(options.clone());
    parity("sim, many parts", 4, in_place_by(&options, &DeviceInfo::h200(), cases), &sim);
}

/// Decode steps that divide the keys of all sequences by their lengths: with places for many parts
/// of each, and with more sequences than places.
#[test]
fn steps_in_parts() {
    let ampere = DeviceInfo { sm: 80, shared_bytes: 99 << 10, ..slow_device(8) };
    for device in [slow_device(2), slow_device(8), slow_device(132), ampere] {
        let sim = Sim::default().with_device(device.clone());
        let name = format!("{} SMs of {}", device.multiprocessors, device.sm);
        let of = |cases: BoxedStrategy<Case>| {
            let cases = prop_oneof![paged_steps(cases.clone(), 60), paged_long(cases, 300..=1500)];
            paged_in_parts(cases.boxed(), &device)
        };
        parity(&format!("sim, steps in parts, {name}"), 12, of(steps(4)), &sim);
        parity(&format!("sim, codes in parts, {name}"), 6, of(quantized(steps(4))), &sim);
    }
    let device = slow_device(8);
    let crowds = paged_in_parts(paged_crowd_steps(steps(2), 200), &device);
    parity("sim, steps of crowds in parts", 3, crowds, &Sim::default().with_device(device));
}

/// Each CTA takes its part from a schedule that agrees with the call, and otherwise computes it.
#[test]
fn steps_in_parts_by_a_schedule() {
    let others = [Made::OtherLengths, Made::OtherSlots, Made::OtherKeys, Made::Nothing];
    for device in [2, 8, 132].map(slow_device) {
        let cases = || {
            let cases = prop_oneof![
                paged_steps(steps(4), 60),
                paged_long(steps(4), 300..=1500),
                ragged(steps(4)),
                ragged(quantized(steps(4))),
                paged_crowd_steps(steps(1), 60),
            ];
            paged_in_parts(cases.boxed(), &device)
        };
        let made = |made| Scheduled::new(device.clone(), made);
        let name = format!("{} SMs", device.multiprocessors);
        let right = made(Made::Right);
        parity(&format!("sim, scheduled, {name}"), 24, cases(), &right);
        for other in others {
            parity(&format!("sim, {other:?}, {name}"), 8, cases(), &made(other));
        }
    }
}

/// A CTA whose part is damaged in a schedule computes it.
#[test]
fn steps_in_parts_by_a_damaged_schedule() {
    for (device, seed) in [2, 8, 132].map(slow_device).into_iter().zip(0..) {
        let cases = prop_oneof![ragged(steps(4)), ragged(quantized(steps(4)))].boxed();
        let name = format!("sim, damaged, {} SMs", device.multiprocessors);
        for seed in 4 * seed..4 * seed + 4 {
            let damaged = Scheduled::new(device.clone(), Made::Damaged(seed));
            parity(&name, 4, paged_in_parts(cases.clone(), &device), &damaged);
        }
    }
}

/// Forged parts make results wrong, or a race, but nothing is read or written outside of tensors
/// and of scratch memory.
#[test]
fn no_schedule_leads_a_step_outside() {
    let mut wrong = 0;
    for (device, seed) in [2, 8, 40].map(slow_device).into_iter().zip(0..) {
        let cases = prop_oneof![ragged(steps(4)), ragged(quantized(steps(4)))].boxed();
        let case = sample(paged_in_parts(cases, &device));
        for seed in 16 * seed..16 * seed + 16 {
            let forged = Scheduled::new(device.clone(), Made::Forged(seed));
            let result = case.check(&forged);
            let error = result.err().unwrap_or_default();
            wrong += usize::from(!error.is_empty());
            assert!(!error.contains(" accesses ") && !error.contains("panicked"), "{error}");
        }
    }
    assert!(wrong > 0, "no forged part was taken");
}

/// A kernel that computed parts in spite of a schedule would write its outputs.
#[test]
fn a_schedule_without_parts_leaves_outputs() {
    let device = slow_device(8);
    let case = sample(paged_in_parts(ragged(steps(4)), &device));
    case.check(&Scheduled::new(device.clone(), Made::Right)).unwrap();
    case.check(&Scheduled::new(device, Made::Emptied)).unwrap_err();
}

/// A sequence of a batch-invariant call has the same bits alone, whatever its company: steps,
/// chunks and prompts.
#[test]
fn batch_invariant_calls() {
    let ampere = DeviceInfo { sm: 80, shared_bytes: 99 << 10, ..slow_device(8) };
    for device in [slow_device(2), slow_device(132), ampere] {
        let alone = Alone::new(device.clone());
        let name = format!("sim, alone, {} SMs of {}", device.multiprocessors, device.sm);
        let of = |cases: BoxedStrategy<Case>| {
            let cases = prop_oneof![
                paged_steps(cases.clone(), 60),
                paged_long(cases.clone(), 300..=1500),
                paged_mixed(cases.clone(), 40),
                ragged(cases),
            ];
            invariant_cases(cases.boxed(), &device)
        };
        parity(&name, 24, of(steps(4)), &alone);
        parity(&format!("{name}, codes"), 12, of(quantized(steps(4))), &alone);
        parity(&format!("{name}, lse"), 8, with_some_lse(of(steps(4))), &alone);
    }
}

/// Sequences with 0, 1, a block less one, a block, and many keys before the token, in any order,
/// and one without tokens.
fn ragged(cases: BoxedStrategy<Case>) -> BoxedStrategy<PagedCase> {
    (paged_steps(cases, 60), 600..=1500usize, any::<[prop::sample::Index; 6]>())
        .prop_map(|(case, longest, places)| {
            let size = case.block_size;
            let mut sequences = Vec::new();
            let new = [[0, 1], [1, 1], [size - 2, 1], [size - 1, 1], [longest, 1], [size, 0]];
            for (sequence, place) in new.into_iter().zip(places) {
                sequences.insert(place.index(sequences.len() + 1), sequence);
            }
            PagedCase { sequences, ..case }
        })
        .boxed()
}

/// One of these calls.
fn sample(cases: BoxedStrategy<PagedCase>) -> PagedCase {
    cases.new_tree(&mut TestRunner::deterministic()).unwrap().current()
}

/// Row tiles that belong to a few of many sequences.
#[test]
fn crowds() {
    for slow in [2, 132].map(slow_device) {
        let sim = Sim::default().with_device(slow.clone());
        let cases = |steps| paged_concurrent(paged_crowds(steps, 20), &slow, PREFILL_KERNELS);
        parity("sim, many sequences", 2, cases(steps(8)), &sim);
        parity("sim, many sequences, quantized", 1, cases(quantized(steps(8))), &sim);
    }
}

#[test]
fn as_planned_for_ampere() {
    let device = DeviceInfo::known("a100").expect("a known device");
    let cases = paged(case(half_dtype(), heads_up_to(256), 24), 60);
    parity("sim, a100, paged", 100, cases, &Sim::default().with_device(device));
}

/// Read in place, by the kernels of GPUs without wgmma.
#[test]
fn prompts_on_ampere() {
    for name in ["a100", "rtx4090"] {
        let sim = Sim::default().with_device(DeviceInfo::known(name).expect("a known device"));
        let cases = paged_prompts(case(half_dtype(), heads_up_to(256), 24), 60);
        parity(&format!("sim, {name}, paged prompts"), 40, with_some_lse(cases), &sim);
        let codes = paged_prompts(quantized(case(half_dtype(), heads_up_to(128), 24)), 60);
        let codes = with_some_lse(codes);
        parity(&format!("sim, {name}, paged prompts, quantized"), 10, codes, &sim);
    }
}

/// Sequences of any length, in blocks, some of them outside of the cache, by kernels with tensor
/// memory. Their queries are rotated ahead.
#[test]
fn prompts_with_tensor_memory() {
    let b200 = known("b200");
    for (name, dtype, sizes) in [
        ("gqa_blackwell_paged_f16_d64", DType::F16, [16, 40, 64]),
        ("gqa_blackwell_paged_bf16_d128", DType::BF16, [72, 104, 128]),
        ("gqa_blackwell_paged_f16_d192_v128", DType::F16, [64, 96, 128]),
    ] {
        let force = PlanOptions { force: Some(name), ..PlanOptions::default() };
        let sim = Sim::default().with_device(b200.clone()).with_options(force.clone());
        let unchecked = Unchecked(Sim::default().with_device(b200.clone()), force.clone());
        let sizes = || prop::sample::select(sizes.to_vec()).boxed();
        let of = |rows| paged_prompts(case(Just(dtype).boxed(), sizes(), 24), rows);
        let prompts = |rows| in_place_by(&force, &b200, with_some_lse(of(rows)));
        parity(&format!("sim, {name}"), 12, prompts(100), &sim);
        parity(&format!("sim, {name}, more rows"), 4, prompts(500), &sim);
        let gaps = in_place_by(&force, &b200, with_gaps(with_some_lse(of(200))));
        parity(&format!("sim, {name}, with gaps"), 12, gaps, &sim);
        let reads = |tokens| paged_reads(Just(dtype).boxed(), &[64, 128], tokens);
        let of_calls = |calls| in_place_by(&force, &b200, calls);
        parity(&format!("sim, {name}, reads"), 12, of_calls(reads(150)), &sim);
        let gaps = of_calls(reads_with_gaps(reads(150)));
        parity(&format!("sim, {name}, reads with gaps"), 8, gaps, &sim);
        let bounds = of_calls(cut_off(reads(150)));
        parity(&format!("sim, {name}, bounds"), 8, bounds, &unchecked);
    }
}

/// As planned: some sequences of a few tokens, and one of enough for tensor memory.
#[test]
fn mixed_batches_with_tensor_memory() {
    for multiprocessors in [2, 148] {
        let sim = Sim::default().with_device(DeviceInfo { multiprocessors, ..known("b200") });
        let mixed = with_some_lse(paged_mixed(steps(24), 200));
        parity(&format!("sim, b200, {multiprocessors} SMs, mixed batches"), 5, mixed, &sim);
        let codes = with_some_lse(paged_mixed(quantized(steps(24)), 200));
        parity(&format!("sim, b200, {multiprocessors} SMs, mixed, codes"), 3, codes, &sim);
    }
}

/// The decode kernel first, then the prefill kernel.
#[test]
fn mixed_batches_on_ampere() {
    let ampere = DeviceInfo::known("a100").expect("a known device");
    let small = DeviceInfo { multiprocessors: 2, ..ampere };
    let sim = Sim::default().with_device(small);
    let elements = with_some_lse(paged_mixed(steps(24), 60));
    parity("sim, a100, mixed batches", 10, elements, &sim);
    let codes = with_some_lse(paged_mixed(quantized(steps(24)), 60));
    parity("sim, a100, mixed batches, quantized", 5, codes, &sim);
}

#[test]
fn one_launch_for_each_duty() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let cases = paged(case(any_dtype(), heads_up_to(64), 24), 24);
    parity("sim, unfused, paged", 100, cases, &Sim::default().with_options(options));
}

#[test]
fn decode_reads_blocks() {
    let elements = |rows| paged_steps(steps(40), rows);
    let codes = |rows| paged_steps(quantized(steps(40)), rows);
    parity("sim, paged decode", 150, elements(200), &Sim::default());
    parity("sim, paged decode, quantized", 150, codes(200), &Sim::default());
    for (cluster, splits) in [(8, 1), (1, 5), (2, 3)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let options = PlanOptions { cluster, splits, ..PlanOptions::default() };
        let sim = Sim::default().with_options(options);
        parity("sim, blocks in clusters", 20, elements(300), &sim);
        parity("sim, blocks of codes in clusters", 20, codes(300), &sim);
    }
}

/// A call that appends nothing may have more tokens than keys.
#[test]
fn tokens_without_a_key() {
    let sizes = [64, 128, 256];
    let of_any = |sizes, tokens| paged_reads(any_dtype(), sizes, tokens);
    parity("cpu, reads of blocks", 400, of_any(&[16, 64, 80], 24), &Cpu::default());
    let steps = || paged_reads(half_dtype(), &sizes, 8);
    let prompts = || paged_reads(half_dtype(), &sizes, 150);
    for device in ["h200", "a100"] {
        let sim = Sim::default().with_device(DeviceInfo::known(device).expect("a known device"));
        parity(&format!("sim, {device}, reads of blocks"), 60, steps(), &sim);
        parity(&format!("sim, {device}, reads of blocks, prompts"), 20, prompts(), &sim);
    }
    parity("sim, reads of blocks by general kernels", 40, of_any(&[16, 80], 8), &Sim::default());
}

/// Packed keys and values, with NaN between sequences and after them. `hopper_paged` and
/// `blackwell_paged` read them in place, other kernels a copy.
#[test]
fn packed_keys_and_values() {
    let alike = [[64, 64], [128, 128], [256, 256]];
    let unlike = [[192, 128], [168, 104], [128, 64], [64, 128]];
    let sim = |name| Sim::default().with_device(known(name));
    let any = packed_rows(any_dtype(), &[[64, 64], [80, 80]], 40);
    parity("cpu, packed", 400, any.clone(), &Cpu::default());
    let narrow = packed_rows(any_dtype(), &[[48, 24], [192, 128], [32, 64]], 40);
    parity("cpu, packed, unlike values", 200, narrow, &Cpu::default());
    parity("sim, a100, packed", 20, any.clone(), &sim("a100"));
    parity("sim, h200, packed", 20, any, &sim("h200"));
    let prompts = packed_rows(half_dtype(), &alike, 200);
    parity("sim, h200, packed prompts", 20, prompts, &sim("h200"));
    let prompts = packed_rows(half_dtype(), &unlike, 200);
    parity("sim, h200, packed, unlike values", 30, prompts.clone(), &sim("h200"));
    let tiled = packed_rows(half_dtype(), &[[64, 64], [128, 128], [192, 128], [168, 104]], 300);
    parity("sim, b200, packed prompts", 20, tiled, &sim("b200"));
    let few = DeviceInfo { multiprocessors: 2, ..DeviceInfo::h200() };
    let few = Sim::default().with_device(few);
    parity("sim, 2 SMs, packed, unlike values", 20, prompts, &few);
}

/// Sequences whose first row is no row of the keys have none.
#[test]
fn packed_keys_outside() {
    let any = || reads_with_gaps(packed_rows(any_dtype(), &[[64, 64], [80, 80]], 40));
    let unlike = || reads_with_gaps(packed_rows(half_dtype(), &[[192, 128], [64, 64]], 150));
    parity("cpu, packed, outside", 200, any(), &Cpu::default());
    for device in ["a100", "h200"] {
        let sim = Unchecked(Sim::default().with_device(known(device)), PlanOptions::default());
        parity(&format!("sim, {device}, packed, outside"), 30, any(), &sim);
    }
    let sim = Unchecked(Sim::default(), PlanOptions::default());
    parity("sim, h200, packed prompts, outside", 20, unlike(), &sim);
    let sim = Unchecked(Sim::default().with_device(known("b200")), PlanOptions::default());
    parity("sim, b200, packed prompts, outside", 20, unlike(), &sim);
}

/// Rows that belong to no sequence, or to tokens that are cut off, become 0, and their log-sum-exps
/// -inf.
#[test]
fn packed_rows_of_none() {
    const TOKENS: usize = 420;
    let starts = [9, 9, 49, 349, 362];
    // More rows than a sequence may have, in the third one.
    let most = 200;
    let computed = [9..49, 49..249, 349..362].into_iter().flatten();
    let computed: HashSet<usize> = computed.collect();
    let few = DeviceInfo { multiprocessors: 2, ..DeviceInfo::h200() };
    for (size, value_size, lse, force) in [
        (192, 128, true, None),
        (192, 128, false, None),
        (64, 64, true, None),
        (128, 128, false, Some("gqa_hopper_paged_split_f16_d128")),
    ] {
        let layer = Layer::new(DType::F16, Heads { query: 4, kv: 2, size });
        let call = Paged::in_rows(4, TOKENS, TOKENS).value_size(value_size);
        let call = call.most_tokens(most).longest(300);
        let problem = layer.paged(if lse { call.log_sum_exp() } else { call }).unwrap();
        let filled = |shape: &[usize]| {
            let count: usize = shape.iter().product();
            Tensor::from_f32(DType::F16, shape, &vec![1.0; count]).unwrap()
        };
        let nan = |dtype, shape: &[usize]| {
            let mut tensor = Tensor::zeros(dtype, shape);
            tensor.with_bytes_mut(|bytes| bytes.fill(0xff));
            tensor
        };
        let query = filled(&[TOKENS, 4 * size]);
        let [mut key, mut value] = [size, value_size].map(|size| filled(&[TOKENS, 1, 2, size]));
        let lengths: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let firsts = Array2::from_shape_vec((4, 1), starts[..4].to_vec()).unwrap();
        let [starts, lengths]: [Tensor; 2] = [arr1(&starts).into(), arr1(&lengths).into()];
        let firsts: Tensor = firsts.into();
        let b200 = Some(known("b200")).filter(|_| force.is_none());
        for device in [DeviceInfo::h200(), few.clone()].into_iter().chain(b200) {
            let mut output = nan(DType::F16, &problem.output_shape());
            let mut sums = lse.then(|| nan(DType::F32, &problem.lse_shape()));
            let inputs = Tensors::default()
                .with(TensorId::Query, &query)
                .with(TensorId::SeqlensK, &lengths)
                .with(TensorId::CumulativeSequenceLength, &starts)
                .with(TensorId::BlockTable, &firsts);
            let mut io = Io {
                inputs,
                output: &mut output,
                present_key: &mut key,
                present_value: &mut value,
                row_scales: None,
                output_qk: None,
                lse: sums.as_mut(),
            };
            let options = PlanOptions { force, ..PlanOptions::default() };
            let sim = Unchecked(Sim::default().with_device(device), options);
            sim.run(&problem, &mut io).unwrap();
            let width = 4 * value_size;
            for (row, columns) in output.to_f64().chunks(width).enumerate() {
                let wanted = if computed.contains(&row) { 1.0 } else { 0.0 };
                assert!(columns.iter().all(|&x| (x - wanted).abs() < 1e-2), "{row} {columns:?}");
            }
            for (i, sum) in sums.iter().flat_map(Tensor::to_f64).enumerate() {
                let is_finite = computed.contains(&(i % TOKENS));
                assert!(if is_finite { sum.is_finite() } else { sum == f64::NEG_INFINITY });
            }
        }
    }
}

/// A bound that is too small cuts tokens off; those before them are where they would be without it.
#[test]
fn bounds_below_what_sequences_bring() {
    let sizes = [64, 128, 256];
    for device in ["h200", "a100", "t4"] {
        let sim = Sim::default().with_device(known(device));
        let sim = Unchecked(sim, PlanOptions::default());
        let steps = cut_off(paged_reads(half_dtype(), &sizes, 8));
        parity(&format!("sim, {device}, bounds of steps"), 60, steps, &sim);
        let prompts = cut_off(paged_reads(half_dtype(), &sizes, 150));
        parity(&format!("sim, {device}, bounds of prompts"), 30, prompts, &sim);
    }
    let sim = Unchecked(Sim::default(), PlanOptions::default());
    let of_any = cut_off(paged_reads(any_dtype(), &[16, 80], 8));
    parity("sim, bounds, general kernels", 40, of_any, &sim);
}

/// A block outside of the cache takes no rows, and the keys that it would hold are masked.
#[test]
fn gaps_on_the_cpu() {
    let any = |max| case(any_dtype(), heads_up_to(256), max);
    parity("cpu, gaps", 400, with_gaps(paged(any(40), 70)), &Cpu::default());
    parity("cpu, gaps, codes", 400, with_gaps(paged(quantized(any(40)), 70)), &Cpu::default());
    let of_rows = with_gaps(paged(with_row_scales(any(40)), 70));
    parity("cpu, gaps, scales of rows", 400, of_rows, &Cpu::default());
    let reads = reads_with_gaps(paged_reads(any_dtype(), &[16, 64, 80], 24));
    parity("cpu, gaps, reads", 400, reads, &Cpu::default());
}

fn known(device: &str) -> DeviceInfo {
    DeviceInfo::known(device).expect("a known device")
}

#[test]
fn gaps_in_decode() {
    let elements = |rows| with_gaps(paged_steps(steps(40), rows));
    let codes = |rows| with_gaps(paged_steps(quantized(steps(40)), rows));
    let of_rows = |rows| with_gaps(paged_steps(with_row_scales(steps(40)), rows));
    let check = |name: &str, cases, of, device: &DeviceInfo, options: PlanOptions| {
        let sim = Sim::default().with_device(device.clone()).with_options(options.clone());
        parity(
            &format!("sim, decode with gaps, {name}"),
            cases,
            in_place(of, device, &options),
            &sim,
        );
    };
    for device in ["h200", "a100"] {
        let (known, options) = (known(device), PlanOptions::default);
        check(device, 120, elements(200), &known, options());
        check(&format!("{device}, codes"), 80, codes(200), &known, options());
        check(&format!("{device}, scales of rows"), 40, of_rows(200), &known, options());
    }
    for (cluster, splits) in [(8, 1), (1, 5), (2, 3)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let options = PlanOptions { cluster, splits, ..PlanOptions::default() };
        check("in clusters", 40, elements(300), &known("h200"), options.clone());
        check("codes in clusters", 20, codes(300), &known("h200"), options);
    }
}

#[test]
fn gaps_in_prompts() {
    let check = |name: &str, cases, of, device: &DeviceInfo| {
        let (sim, options) = (Sim::default().with_device(device.clone()), PlanOptions::default());
        let of = in_place(with_gaps(of), device, &options);
        parity(&format!("sim, {name} with gaps"), cases, of, &sim);
    };
    for device in ["h200", "a100"] {
        let prompts = paged_prompts(case(half_dtype(), heads_up_to(256), 24), 60);
        check(&format!("prompts on {device}"), 40, prompts, &known(device));
    }
    let codes = paged_prompts(quantized(case(half_dtype(), heads_up_to(128), 24)), 60);
    check("prompts of codes", 16, codes, &known("h200"));
    let few = DeviceInfo { multiprocessors: 2, ..DeviceInfo::h200() };
    let prompts = paged_prompts(case(half_dtype(), heads_up_to(128), 24), 200);
    check("prompts on 2 SMs", 20, prompts, &few);
    check("mixed batches", 10, paged_mixed(steps(24), 60), &few);
}

/// Where attention reads a copy of the cache, gathered or dequantized.
#[test]
fn gaps_in_copies() {
    let check = |name: &str, cases, of, device: &str, options: PlanOptions| {
        let device = known(device);
        let sim = Sim::default().with_device(device.clone()).with_options(options.clone());
        let of = copied(with_gaps(of), &device, &options);
        parity(&format!("sim, copies with gaps, {name}"), cases, of, &sim);
    };
    let any = |heads| case(any_dtype(), heads_up_to(heads), 24);
    let usual = PlanOptions::default;
    for device in ["h200", "a100", "t4"] {
        check(device, 40, paged(any(128), 24), device, usual());
        check(&format!("{device}, codes"), 40, paged(quantized(any(64)), 24), device, usual());
        let of_rows = paged(with_row_scales(any(64)), 24);
        check(&format!("{device}, scales of rows"), 20, of_rows, device, usual());
        let codes = paged_prompts(quantized(case(half_dtype(), heads_up_to(128), 24)), 30);
        check(&format!("{device}, prompts of codes"), 12, codes, device, usual());
    }
    let prompts = with_some_lse(paged_prompts(case(half_dtype(), heads_up_to(128), 24), 30));
    check("prompts with log-sum-exps", 12, prompts, "h200", usual());
    check("wide heads", 8, paged(any(640), 8), "h200", usual());
    let unfused = PlanOptions { disable_fused_kv: true, ..usual() };
    check("a launch for each duty", 20, paged(any(64), 24), "h200", unfused);
}

#[test]
fn gaps_in_copies_that_are_only_read() {
    for (device, types, sizes) in [
        ("t4", half_dtype(), &[64, 128][..]),
        ("h200", any_dtype(), &[16, 80]),
        ("a100", any_dtype(), &[48, 272]),
    ] {
        let (device, options) = (known(device), PlanOptions::default());
        let sim = Sim::default().with_device(device.clone());
        for tokens in [8, 70] {
            let reads = reads_with_gaps(paged_reads(types.clone(), sizes, tokens));
            let reads = copied(reads, &device, &options);
            parity(&format!("sim, {}, reads of copies with gaps", device.name), 40, reads, &sim);
        }
    }
}

#[test]
fn gaps_in_reads() {
    for device in ["h200", "a100"].map(known) {
        let (sim, options) = (Sim::default().with_device(device.clone()), PlanOptions::default());
        let reads = |tokens| {
            let reads = paged_reads(half_dtype(), &[64, 128, 256], tokens);
            in_place(reads_with_gaps(reads), &device, &options)
        };
        parity("sim, reads with gaps", 60, reads(8), &sim);
        parity("sim, reads with gaps, prompts", 20, reads(150), &sim);
    }
}
