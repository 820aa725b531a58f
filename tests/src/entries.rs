//! Random calls until every kernel of the registry has run.

use crate::parity::{self, SEED};
use crate::{
    AttentionCase, Case, DECODE_KERNELS, Parity, any_dtype, attention_case, biased_prompts, case,
    external, float8_prompts, half_dtype, heads_up_to, latent, latent_in_float8, latent_in_place,
    packed_rows, padded, paged, paged_prompts, paged_steps, prompts, quantized, quantized_output,
    quantized_prompts, quantized_steps, sliding, steps, tree_steps, trees, wide, wide_paged,
};
use gqa_host::backend::Backend;
use gqa_host::plan::{Arg, DeviceInfo, Launch, Plan, PlanOptions, plan};
use gqa_host::{DType, Problem};
use gqa_kernels::registry::{Entry, Family, Role, entries};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::cell::LazyCell;
use std::rc::Rc;

/// Whether the drawn calls can use a kernel: `rotary_rows` and `scatter_rows` belong to other
/// operators, and engines launch schedules and `merge_peers` apart from calls.
pub fn is_of_attention(entry: &Entry) -> bool {
    let apart = [Role::RotaryRows, Role::ScatterRows, Role::MergePeers, Role::Schedule];
    !apart.contains(&entry.role)
}

/// Kernels with float8 products, with the element type of their output and the columns of their
/// tile.
pub fn float8_kernels() -> impl Iterator<Item = (DType, usize, &'static str)> {
    let is_wanted =
        |entry: &&Entry| entry.family == Family::HopperFloat8 && entry.role == Role::Attention;
    entries().filter(is_wanted).map(|entry| {
        let is_bf16 = entry.dtype == gqa_kernels::num::DType::BF16;
        let dtype = if is_bf16 { DType::BF16 } else { DType::F16 };
        (dtype, entry.head_size as usize, entry.name)
    })
}

/// The number of calls per kernel after which too few calls on some kernel are a failure.
const DRAWS: u32 = 20_000;

/// Runs `calls` random calls on every selected kernel that `takes` them and that `device` can run,
/// forced where the planner would choose another, and compares them with the reference.
/// `PARITY_CASES` overrides their number, and `PROPTEST_RNG_SEED` sets the seed. Fails where too
/// few calls reach a kernel.
pub fn every_entry(
    name: &str,
    calls: u32,
    device: &DeviceInfo,
    is_wanted: impl Fn(&Entry) -> bool,
    takes: impl Fn(&Problem) -> bool,
    backend: impl Fn(PlanOptions) -> Box<dyn Backend>,
) {
    let config = parity::config(name, calls, "cuda");
    let (calls, seed) = (config.cases, config.rng_seed);
    let runs =
        |entry: &Entry| entry.runs_on(device.sm) && entry.shared_bytes <= device.shared_bytes;
    let wanted = |entry: &&Entry| runs(entry) && is_wanted(entry);
    let over = |entry| caches(entry).iter().map(move |cache| (entry, *cache, calls));
    let mut left: Vec<_> = entries().filter(wanted).flat_map(over).collect();
    let kernels = left.len();
    let (mut runner, strategy) = (TestRunner::new(config), any_call());
    for _ in 0..DRAWS * calls {
        let call = strategy.new_tree(&mut runner).expect("nothing is filtered for long").current();
        let problem = call.problem().unwrap_or_else(|error| panic!("{call:?}: {error}"));
        if !takes(&problem) {
            continue;
        }
        let judge = LazyCell::new(|| call.judge());
        for (entry, cache, calls) in &mut left {
            // Kernels with float8 products are compared in calls that allow them, which have wider
            // bounds; all other kernels in the other calls.
            if problem.float8_products != (entry.family == Family::HopperFloat8) {
                continue;
            }
            let is_over = |plan: &Plan| cache.is_none_or(|paged| reads_blocks(plan) == paged);
            let reaches = |options: &PlanOptions| {
                plan(&problem, device, options).is_ok_and(|plan| is_over(&plan))
            };
            if let Some(options) = forcing(entry).into_iter().find(reaches) {
                let judge = judge.as_ref().map_err(String::clone);
                let result = judge.and_then(|judge| judge(&*backend(options)));
                result.unwrap_or_else(|error| {
                    panic!("{name}, {SEED}={seed}: {}: {call:?}: {error}", entry.name)
                });
                *calls -= 1;
            }
        }
        left.retain(|(.., calls)| *calls > 0);
        if left.is_empty() {
            println!("{name}: {calls} calls of each of {kernels} kernels");
            return;
        }
    }
    panic!("{name}, {SEED}={seed}: of these kernels fewer than {calls} calls ran: {left:?}");
}

/// Whether an entry is to run over paged KV caches, or contiguous ones: each of both where one text
/// takes both; `None`: any.
fn caches(entry: &Entry) -> &'static [Option<bool>] {
    match entry.family {
        Family::Decode | Family::DecodeQuantized if entry.head_size.is_power_of_two() => {
            &[Some(false), Some(true)]
        }
        _ => &[None],
    }
}

/// Whether a decode step of the plan reads blocks where they are.
fn reads_blocks(plan: &Plan) -> bool {
    let is_step = |launch: &&Launch| DECODE_KERNELS.contains(&launch.entry().family);
    let has_table = |launch: &Launch| {
        let names = launch.entry().arguments.iter().zip(launch.args());
        names.into_iter().any(|(name, arg)| *name == "block_table" && *arg != Arg::Null)
    };
    plan.launches().iter().filter(is_step).any(has_table)
}

/// Options under which a plan uses `entry` or fails. Some prologues do not lead to any kernel of
/// few rows.
fn forcing(entry: &Entry) -> [PlanOptions; 3] {
    let force = PlanOptions { force: Some(entry.name), ..PlanOptions::default() };
    let unfused = PlanOptions { disable_fused_kv: true, ..force.clone() };
    let many_rows = PlanOptions { disable_flash_decode: true, ..force.clone() };
    [unfused, force, many_rows]
}

/// Head sizes of keys and values for a tile that only takes calls with two different sizes.
const WIDE_KEYS: [[usize; 2]; 2] = [[192, 128], [168, 104]];

/// Head sizes for packed keys and values, some with narrower values.
const PACKED: [[usize; 2]; 4] = [[64, 64], [192, 128], [168, 104], [128, 128]];

/// Any call of the operators.
fn any_call() -> BoxedStrategy<Rc<dyn Parity>> {
    fn shared<C: Parity + 'static>(case: C) -> Rc<dyn Parity> {
        Rc::new(case)
    }
    let flash = (attention_case(any_dtype(), 256, 60), 1..=200usize);
    let biased = case(any_dtype(), heads_up_to(128), 60);
    let biased = biased.prop_filter("a bias", |case| case.bias.is_some()).boxed();
    prop_oneof![
        1 => case(any_dtype(), heads_up_to(512), 60).prop_map(shared),
        1 => prompts(256, 200).prop_map(shared),
        1 => biased_prompts(256, 200).prop_map(shared),
        1 => steps(400).prop_map(shared),
        1 => steps(400).prop_map(|case| Case { float32_output: true, ..case }).prop_map(shared),
        1 => quantized_output(case(any_dtype(), heads_up_to(128), 60)).prop_map(shared),
        1 => quantized_output(prompts(256, 200)).prop_map(shared),
        1 => quantized_output(steps(400)).prop_map(shared),
        1 => quantized(case(any_dtype(), heads_up_to(128), 60)).prop_map(shared),
        1 => quantized_steps(400).prop_map(shared),
        1 => quantized_prompts(prompts(128, 200)).prop_map(shared),
        1 => float8_prompts(128, 200).prop_map(shared),
        1 => float8_prompts(256, 200).prop_map(shared),
        1 => sliding(case(any_dtype(), heads_up_to(128), 60), 40).prop_map(shared),
        1 => sliding(biased, 40).prop_map(shared),
        1 => paged(case(any_dtype(), heads_up_to(128), 24), 40).prop_map(shared),
        1 => paged(quantized(case(any_dtype(), heads_up_to(128), 24)), 40).prop_map(shared),
        1 => paged_prompts(case(half_dtype(), heads_up_to(256), 24), 80).prop_map(shared),
        1 => paged_prompts(quantized(case(half_dtype(), heads_up_to(128), 24)), 40).prop_map(shared),
        1 => paged_steps(steps(40), 400).prop_map(shared),
        1 => paged_steps(quantized(steps(40)), 400).prop_map(shared),
        1 => padded(case(any_dtype(), heads_up_to(256), 60)).prop_map(shared),
        1 => padded(steps(400)).prop_map(shared),
        2 => tree_steps(400).prop_map(shared),
        1 => trees(any_dtype(), heads_up_to(128), 60).prop_map(shared),
        4 => attention_case(any_dtype(), 512, 40).prop_map(shared),
        1 => attention_case(half_dtype(), 256, 60).prop_map(AttentionCase::for_flash).prop_map(shared),
        1 => flash.prop_map(|(case, rows)| case.for_masked_flash(rows)).prop_map(shared),
        1 => external(half_dtype(), &WIDE_KEYS, [60, 100]).prop_map(shared),
        2 => packed_rows(half_dtype(), &PACKED, 100).prop_map(shared),
        1 => latent_in_place(latent(&[[576, 512]], 400), &DeviceInfo::h200()).prop_map(shared),
        1 => latent_in_float8(latent(&[[576, 512]], 400), &DeviceInfo::h200()).prop_map(shared),
        1 => wide(100).prop_map(shared),
        1 => wide_paged(100).prop_map(shared),
    ].boxed()
}
