//! The decode family on the simulated machine, against the f64 reference: decode steps as planned,
//! and in clusters of every size.

use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io};
use gqa_host::plan::{DeviceInfo, PlanOptions, plan};
use gqa_host::{Problem, Result};
use gqa_kernels::params::PagedDecodeParams;
use gqa_tests::{
    Case, Divided, Parity, paged_steps, parity, quantized, sequences, slow_device, steps,
    tall_steps,
};
use proptest::strategy::Strategy;

fn clusters(cluster: u32, splits: u32) -> Sim {
    let options =
        PlanOptions { cluster: Some(cluster), splits: Some(splits), ..PlanOptions::default() };
    Sim::default().with_options(options)
}

#[test]
fn decode_is_reference() {
    parity("sim, decode", 150, steps(90), &Sim::default());
}

#[test]
fn decode_is_reference_in_large_clusters() {
    parity("sim, clusters of 8", 30, steps(400), &clusters(8, 1));
    parity("sim, clusters of 16", 10, steps(300), &clusters(16, 1));
}

#[test]
fn decode_is_reference_in_blocks_of_their_own() {
    parity("sim, clusters of 1", 40, steps(300), &clusters(1, 1));
}

#[test]
fn decode_is_reference_in_two_blocks_to_a_multiprocessor() {
    let device = DeviceInfo { multiprocessors: 1, ..DeviceInfo::h200() };
    let backend = Sim::default().with_device(device.clone());
    let takes_halves = move |case: &Case| {
        let plan = plan(&case.problem().unwrap(), &device, &PlanOptions::default()).unwrap();
        plan.launches().iter().any(|launch| launch.entry().name.ends_with("_w4"))
    };
    let steps = steps(200).prop_filter("blocks of their own", takes_halves);
    parity("sim, halves", 40, steps, &backend);
}

/// One long sequence and short ones. CTAs load the first keys before they know the length; in short
/// sequences appended rows are among these keys.
#[test]
fn rows_among_keys_asked_for_ahead_are_appended_when_all_ranks_have_read() {
    let steps = (steps(200), 550..700usize).prop_filter_map("one sequence", |(case, long)| {
        let short = case.past.get(1..).filter(|past| !past.is_empty())?;
        Some(Case {
            past: std::iter::once(long).chain(short.iter().copied()).collect(),
            head_size: 128,
            rotary: case.rotary.filter(|(sixteenths, ..)| *sixteenths <= 8),
            q_len: 1,
            shared: true,
            first_prompt: false,
            no_new_rows: false,
            window: -1,
            ..case
        })
    });
    let asks_ahead = |case: &Case| {
        let options = PlanOptions { cluster: Some(2), ..PlanOptions::default() };
        let plan = plan(&case.problem().unwrap(), &DeviceInfo::h200(), &options).unwrap();
        let last = plan.launches().last().unwrap();
        // Another kernel has other parameters.
        last.entry().name.starts_with("gqa_decode_")
            && bytemuck::pod_read_unaligned::<PagedDecodeParams>(last.params()).decode.ahead == 1
    };
    let steps = steps.prop_filter("length first", asks_ahead);
    parity("sim, keys asked for ahead", 30, steps, &clusters(2, 1));
}

#[test]
fn decode_is_reference_in_several_clusters() {
    parity("sim, 5 clusters of 1", 40, steps(300), &clusters(1, 5));
    parity("sim, 3 clusters of 4", 20, steps(300), &clusters(4, 3));
}

/// With places for many parts of each sequence, and with more sequences than places.
#[test]
fn decode_is_reference_where_lengths_divide_the_keys() {
    // Where a GPU has clusters, few sequences keep these.
    let ampere = |multiprocessors| DeviceInfo { sm: 80, ..slow_device(multiprocessors) };
    let small = DeviceInfo { shared_bytes: 99 << 10, ..ampere(8) };
    for device in [slow_device(2), ampere(8), ampere(132), small] {
        let name = format!("{} SMs of {}", device.multiprocessors, device.sm);
        let divided = Divided::new(device);
        let several = steps(900).prop_filter("several sequences", |case| case.past.len() > 1);
        let codes = quantized(several.clone().boxed());
        parity(&format!("sim, by lengths, {name}"), 20, divided.cases(several.boxed()), &divided);
        parity(&format!("sim, codes by lengths, {name}"), 8, divided.cases(codes), &divided);
    }
}

/// Sequences that are empty, of one key, and around the bounds of tiles and parts.
#[test]
fn lengths_at_bounds_divide_the_keys() {
    let divided = Divided::new(slow_device(8));
    let bounds = steps(1).prop_map(|case| Case {
        past: vec![0, 1, 15, 16, 31, 32, 33, 127, 128, 900],
        tokens: None,
        first_prompt: false,
        kv_heads: 1 + case.kv_heads % 2,
        ..case
    });
    parity("sim, bounds of parts", 30, divided.cases(bounds.boxed()), &divided);
}

fn on(name: &str) -> Sim {
    Sim::default().with_device(DeviceInfo::known(name).expect("a known device"))
}

/// Tiles of 64 rows without `wgmma`, and CTAs of four warps where larger ones do not fit.
#[test]
fn decode_is_reference_on_blackwell() {
    parity("sim, thor, more than 32 rows", 25, tall_steps(200), &on("thor"));
    parity("sim, rtx5090", 60, steps(200), &on("rtx5090"));
    parity("sim, rtx5090, more than 32 rows", 25, tall_steps(200), &on("rtx5090"));
    parity("sim, rtx5090, paged", 40, paged_steps(steps(40), 200), &on("rtx5090"));
}

/// On GPUs with tensor memory, dense and over blocks.
#[test]
fn decode_is_reference_with_tensor_memory() {
    parity("sim, b200, decode", 25, steps(500), &on("b200"));
    parity("sim, b300, more than 32 rows", 10, tall_steps(200), &on("b300"));
    parity("sim, b200, paged", 25, paged_steps(steps(40), 400), &on("b200"));
    let clusters = clusters(16, 1).with_device(DeviceInfo::known("b200").expect("a known device"));
    parity("sim, b200, clusters of 16", 6, steps(300), &clusters);
}

/// In clusters, whose reduction buffers reuse the memory of queries and new tokens, and without.
#[test]
fn decode_is_reference_by_warps_of_16_rows() {
    let tall = || tall_steps(300);
    let blackwell = clusters(4, 2).with_device(DeviceInfo::known("thor").expect("a known device"));
    parity("sim, thor, more than 32 rows, 2 clusters of 4", 15, tall(), &blackwell);
    for name in ["a100", "rtx4090"] {
        parity(&format!("sim, {name}, more than 32 rows"), 20, tall(), &on(name));
    }
}

#[test]
fn decode_is_reference_by_warpgroups() {
    parity("sim, more than 32 rows", 40, tall_steps(200), &Sim::default());
    parity("sim, more than 32 rows, 2 clusters of 2", 15, tall_steps(300), &clusters(2, 2));
}

/// Plans each step for sequences as long as the cache, as graphs that serve all steps are.
struct Longest(Sim);

impl Backend for Longest {
    fn name(&self) -> &'static str {
        "sim, longest"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        self.0.run(&problem.with_total_len(problem.capacity)?, io)
    }
}

#[test]
fn a_plan_for_the_longest_sequence_serves_every_step() {
    let tokens = steps(20).prop_map(|case| Case { q_len: 1, kv_heads: 1, ..case });
    sequences("sim, longest", 12, 60, tokens.boxed(), || Longest(Sim::default()));
}

#[test]
fn the_cache_is_carried_from_step_to_step() {
    sequences("sim, steps", 12, 5, steps(60), Sim::default);
    sequences("sim, steps in clusters", 6, 4, steps(60), || clusters(2, 2));
}
