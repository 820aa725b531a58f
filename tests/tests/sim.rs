//! The kernels, on the simulated machine, against the f64 reference: random calls through the
//! planner.

use gqa_host::backend::Backend;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_host::{DType, Problem};
use gqa_kernels::registry::{Entry, Family};
use gqa_tests::{
    Alone, Case, any_dtype, case, every_entry, half_dtype, heads_in, heads_up_to, is_of_attention,
    parity, prompts, quantized_output, quantized_steps, ragged, sliding, steps,
};
use proptest::prelude::*;

fn sim(options: PlanOptions) -> Sim {
    Sim::default().with_options(options)
}

#[test]
fn as_planned() {
    let cases = case(half_dtype(), heads_up_to(128), 40);
    parity("sim", 800, cases, &sim(PlanOptions::default()));
}

/// An entry of a batch-invariant call has the same bits alone.
#[test]
fn batch_invariant() {
    for device in ["h200", "a100"] {
        let alone = Alone::new(DeviceInfo::known(device).expect("a known device"));
        let cases = case(half_dtype(), heads_up_to(128), 40);
        parity(&format!("sim, alone, {device}"), 60, cases, &alone);
        parity(&format!("sim, steps alone, {device}"), 40, steps(300), &alone);
        parity(&format!("sim, codes alone, {device}"), 20, quantized_steps(300), &alone);
    }
}

#[test]
fn memory_efficient() {
    let options = PlanOptions { disable_flash_attention: true, ..PlanOptions::default() };
    parity("sim, general", 800, case(any_dtype(), heads_up_to(96), 24), &sim(options));
}

/// A GPU with kernels older than Hopper only.
fn ampere(options: PlanOptions) -> Sim {
    sim(options).with_device(DeviceInfo::known("a100").expect("a known device"))
}

#[test]
fn as_planned_for_ampere() {
    let cases = case(half_dtype(), heads_up_to(128), 40);
    parity("sim, a100", 400, cases, &ampere(PlanOptions::default()));
}

/// Prefills use tensor memory; where they are short, TMA tiles, for head sizes that have them.
#[test]
fn as_planned_for_blackwell() {
    let b200 = DeviceInfo::known("b200").expect("a known device");
    // Short prompts fill one SM.
    let one_sm = Sim::default().with_device(DeviceInfo { multiprocessors: 1, ..b200.clone() });
    let b200 = Sim::default().with_device(b200);
    parity("sim, b200", 200, case(half_dtype(), heads_up_to(128), 40), &b200);
    parity("sim, b200, prompts", 80, prompts(128, 200), &b200);
    parity("sim, b200, one SM, prompts", 80, prompts(256, 150), &one_sm);
}

/// Its tensor cores support float16 only, and it has little shared memory.
#[test]
fn as_planned_for_turing() {
    let device = DeviceInfo::known("t4").expect("a known device");
    let sim = Sim::default().with_device(device);
    parity("sim, t4", 200, case(Just(DType::F16).boxed(), heads_up_to(192), 40), &sim);
}

#[test]
fn without_split_kv() {
    let options = PlanOptions { disable_flash_decode: true, ..PlanOptions::default() };
    parity("sim, tiled only", 400, case(half_dtype(), heads_up_to(96), 90), &ampere(options));
}

/// `tiled_f32`, for calls without further features.
#[test]
fn float32_as_planned() {
    let cases = case(Just(DType::F32).boxed(), heads_up_to(192), 90);
    parity("sim, float32", 400, cases, &sim(PlanOptions::default()));
}

/// float32 output, by every family that supports it.
#[test]
fn float32_output() {
    let wide = |case| Case { float32_output: true, ..case };
    let on_ampere = case(half_dtype(), heads_up_to(256), 90).prop_map(wide);
    parity("sim, a100, float32 output", 200, on_ampere, &ampere(PlanOptions::default()));
    let heads = heads_in(264..=512);
    let wide_heads = case(half_dtype(), heads, 60).prop_map(wide);
    parity("sim, wide heads, float32 output", 40, wide_heads, &sim(PlanOptions::default()));
    let plain = case(half_dtype(), heads_up_to(128), 24).prop_map(wide);
    let unfused = PlanOptions {
        disable_memory_efficient_attention: true,
        disable_flash_attention: true,
        ..PlanOptions::default()
    };
    parity("sim, unfused, float32 output", 100, plain, &sim(unfused));
}

/// float8e4m3fn output with a scale: by Hopper kernels, and by a launch after others.
#[test]
fn quantized_outputs() {
    let planned = sim(PlanOptions::default());
    parity("sim, decode, quantized output", 200, quantized_output(steps(200)), &planned);
    parity("sim, hopper, quantized output", 40, quantized_output(prompts(256, 150)), &planned);
    let any = || case(any_dtype(), heads_up_to(96), 40);
    parity("sim, quantized output", 100, quantized_output(any()), &planned);
    let on_ampere = ampere(PlanOptions::default());
    parity("sim, a100, quantized output", 100, quantized_output(any()), &on_ampere);
    let codes = quantized_output(quantized_steps(100));
    parity("sim, quantized cache and output", 60, codes, &planned);
    let sliding = sliding(case(half_dtype(), heads_up_to(96), 30), 30);
    parity("sim, sliding, quantized output", 60, quantized_output(sliding), &planned);
}

/// Chunks after pasts of any lengths, over contiguous caches, by the kernels that divide the work
/// of all sequences among CTAs.
#[test]
fn chunks_of_ragged_lengths() {
    for (sizes, dtype, name) in [
        (32..=64, DType::F16, "gqa_hopper_paged_split_f16_d64"),
        (72..=96, DType::BF16, "gqa_hopper_paged_split_bf16_d96"),
        (104..=128, DType::F16, "gqa_hopper_paged_split_f16_d128"),
        (136..=192, DType::BF16, "gqa_hopper_paged_split_bf16_d192"),
        (200..=256, DType::F16, "gqa_hopper_paged_split_f16_d256"),
    ] {
        let cases = ragged(case(Just(dtype).boxed(), heads_in(sizes), 70));
        let options = PlanOptions { force: Some(name), ..PlanOptions::default() };
        parity(&format!("sim, ragged chunks, {name}"), 12, cases, &sim(options));
    }
}

#[test]
fn separate_prologue() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    parity("sim, unfused", 400, case(any_dtype(), heads_up_to(64), 24), &sim(options));
}

/// Few splits, which a warp merges, and more, which a CTA merges.
#[test]
fn splits() {
    let sim = |splits| ampere(PlanOptions { splits: Some(splits), ..PlanOptions::default() });
    parity("sim, 3 splits", 300, case(half_dtype(), heads_up_to(96), 150), &sim(3));
    parity("sim, 11 splits", 100, case(half_dtype(), heads_up_to(96), 300), &sim(11));
}

#[test]
fn large_heads() {
    let heads = heads_in(136..=512);
    parity("sim, large heads", 200, case(any_dtype(), heads, 16), &sim(PlanOptions::default()));
}

const DECODE: [Family; 2] = [Family::Decode, Family::DecodeQuantized];
const HOPPER: [Family; 7] = [
    Family::Hopper,
    Family::HopperMasked,
    Family::HopperPaged,
    Family::HopperQuantized,
    Family::HopperPagedQuantized,
    Family::HopperFloat8,
    Family::HopperWide,
];

const BLACKWELL: [Family; 2] = [Family::Blackwell, Family::BlackwellPaged];

/// Calls of every kernel, as concurrent launches.
fn every_kernel(name: &str, is_wanted: impl Fn(Family) -> bool) {
    every_kernel_on(&DeviceInfo::h200(), 1, name, is_wanted);
}

fn every_kernel_on(
    device: &DeviceInfo,
    calls: u32,
    name: &str,
    is_wanted: impl Fn(Family) -> bool,
) {
    let is_wanted = |entry: &Entry| is_of_attention(entry) && is_wanted(entry.family);
    let name = format!("sim, each kernel, {name}");
    let backend =
        |options| -> Box<dyn Backend> { Box::new(sim(options).with_device(device.clone())) };
    every_entry(&name, calls, device, is_wanted, is_short, backend);
}

/// A call that simulates in seconds; with `PARITY_FULL`, any. A long prefill on a kernel for few
/// rows takes five seconds, for each shape of that kernel.
fn is_short(p: &Problem) -> bool {
    const MOST_PRODUCTS: usize = 1 << 24;
    let is_full = std::env::var_os("PARITY_FULL").is_some();
    is_full || p.batch * p.q_heads * p.q_len * p.total_len * p.head_size <= MOST_PRODUCTS
}

/// Over contiguous and over paged KV caches.
#[test]
fn every_kernel_of_decode() {
    every_kernel("decode", |family| DECODE.contains(&family));
}

#[test]
fn every_kernel_of_hopper() {
    every_kernel("hopper", |family| HOPPER.contains(&family));
}

/// Calls of ragged lengths, windows and masks, forced onto each kernel.
#[test]
fn every_kernel_of_blackwell() {
    let b200 = DeviceInfo::known("b200").expect("a known device");
    every_kernel_on(&b200, 20, "blackwell", |family| BLACKWELL.contains(&family));
}

/// The same with types of output.
#[test]
fn every_kernel_of_decode_with_tensor_memory() {
    const FAMILIES: [Family; 2] = [Family::BlackwellDecode, Family::BlackwellDecodePaged];
    let b200 = DeviceInfo::known("b200").expect("a known device");
    every_kernel_on(&b200, 12, "tensor memory", |family| FAMILIES.contains(&family));
}

#[test]
fn every_kernel_of_other_families() {
    let others = [&DECODE[..], &HOPPER].concat();
    every_kernel("others", |family| !others.contains(&family));
}

/// `tiled_wide`: every shape that some GPU uses, and split keys.
#[test]
fn wide_heads() {
    let cases = |rows| case(half_dtype(), heads_in(264..=504), rows);
    let on = |name| DeviceInfo::known(name).expect("a known device");
    for name in ["h200", "a100", "rtx4090"] {
        let sim = sim(PlanOptions::default()).with_device(on(name));
        parity(&format!("sim, wide heads, {name}"), 20, cases(60), &sim);
    }
    let options = PlanOptions { splits: Some(3), ..PlanOptions::default() };
    parity("sim, wide heads, 3 parts", 20, cases(100), &sim(options));
}
