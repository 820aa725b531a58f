//! Multi-head latent attention on every back end, against the f64 reference.

use gqa_host::DType;
use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_tests::{
    LatentCase, Unchecked, any_dtype, half_dtype, heads_up_to, in_float8, latent, latent_by_mma,
    latent_by_wgmma, latent_divided, latent_in_float8, latent_in_place, latent_operators,
    latent_options, latent_ragged, latent_reads, parity, trees, turned_behind,
};
use proptest::strategy::Strategy;

/// Keys and values of a row: DeepSeek's, and smaller ones, which are faster.
const SIZES: [[usize; 2]; 8] =
    [[576, 512], [192, 128], [80, 64], [72, 64], [64, 64], [32, 16], [24, 8], [16, 16]];
const SMALL: &[[usize; 2]] = SIZES.split_at(2).1;

#[test]
fn on_the_cpu() {
    parity("cpu, latent", 1600, latent(&SIZES, 150), &Cpu::default());
}

#[test]
fn on_the_simulated_gpu() {
    parity("sim, latent", 300, latent(SMALL, 60), &Sim::default());
    parity("sim, latent of DeepSeek's size", 20, latent(&SIZES[..1], 20), &Sim::default());
}

#[test]
fn as_the_operator() {
    parity("cpu, LATENT", 400, latent_operators(&SIZES, 100), &Cpu::default());
    parity("sim, LATENT", 80, latent_operators(SMALL, 40), &Sim::default());
}

/// Of other calls, too, elements in the midst of heads may rotate.
#[test]
fn rotary_embeddings_with_an_offset() {
    let calls = |rows| turned_behind(trees(any_dtype(), heads_up_to(128), rows));
    parity("cpu, rotary_offset", 400, calls(50), &Cpu::default());
    parity("sim, rotary_offset", 80, calls(30), &Sim::default());
}

/// A launch for each duty ahead of attention, and the kernels of the slowest family.
#[test]
fn on_the_simulated_gpu_without_fused_launches() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    parity("sim, latent, unfused", 80, latent(SMALL, 40), &Sim::default().with_options(options));
    let options =
        PlanOptions { disable_memory_efficient_attention: true, ..PlanOptions::default() };
    let old = Sim::default().with_device(DeviceInfo::known("v100").expect("a known device"));
    parity("sim, v100, latent", 80, latent(SMALL, 40), &old.with_options(options));
}

/// Decode steps by the kernel for them, with as many splits as suit the device, and with some.
#[test]
fn steps_in_place() {
    for (multiprocessors, splits) in [(1, None), (132, None), (132, Some(3))] {
        let h200 = DeviceInfo::known("h200").expect("a known device");
        let device = DeviceInfo { multiprocessors, ..h200 };
        let options = PlanOptions { splits, ..latent_options() };
        let cases = latent_in_place(latent(&SIZES[..1], 500), &device);
        let sim = Sim::default().with_device(device).with_options(options);
        parity(&format!("sim, latent in place, splits {splits:?}"), 12, cases, &sim);
    }
}

/// The same over float8, which warps convert.
#[test]
fn steps_in_place_over_float8() {
    for (multiprocessors, splits) in [(1, None), (132, None), (132, Some(3))] {
        let h200 = DeviceInfo::known("h200").expect("a known device");
        let device = DeviceInfo { multiprocessors, ..h200 };
        let options = PlanOptions { splits, ..latent_options() };
        let cases = latent_in_float8(latent(&SIZES[..1], 500), &device);
        let sim = Sim::default().with_device(device).with_options(options);
        parity(&format!("sim, latent float8, splits {splits:?}"), 12, cases, &sim);
    }
}

/// By `mma.sync`, as GPUs without `wgmma` have them, over blocks and contiguous caches.
#[test]
fn steps_by_mma_sync() {
    for (name, multiprocessors, splits) in
        [("a100", 1, None), ("rtx4090", 128, None), ("b200", 148, Some(3))]
    {
        let device = DeviceInfo::known(name).expect("a known device");
        let device = DeviceInfo { multiprocessors, ..device };
        let options = PlanOptions { splits, ..PlanOptions::default() };
        let sim = Sim::default().with_device(device.clone()).with_options(options);
        let cases = latent_by_mma(latent(&SIZES[..1], 300), &device);
        parity(&format!("sim, latent, {name}, splits {splits:?}"), 16, cases, &sim);
        let cases = latent_by_mma(in_float8(latent(&SIZES[..1], 300)), &device);
        parity(&format!("sim, latent float8, {name}, splits {splits:?}"), 12, cases, &sim);
    }
}

/// Few rows in bfloat16 over float8, of which `wgmma` multiplies keys as they are.
#[test]
fn steps_over_float8_keys() {
    for (multiprocessors, splits) in [(1, None), (132, None), (132, Some(3))] {
        let h200 = DeviceInfo::known("h200").expect("a known device");
        let device = DeviceInfo { multiprocessors, ..h200 };
        let options = PlanOptions { splits, ..PlanOptions::default() };
        let cases = latent_by_wgmma(latent(&SIZES[..1], 500), &device);
        let sim = Sim::default().with_device(device).with_options(options);
        parity(&format!("sim, latent float8 keys, splits {splits:?}"), 16, cases, &sim);
    }
}

/// A call that appends nothing may have more tokens than keys, causal or not.
#[test]
fn tokens_without_a_key() {
    parity("cpu, reads", 400, latent_reads(any_dtype(), &SIZES, 40), &Cpu::default());
    let sim = Unchecked(Sim::default(), PlanOptions::default());
    parity("sim, reads", 60, latent_reads(any_dtype(), SMALL, 10), &sim);
    for splits in [None, Some(3)] {
        let sim = Unchecked(Sim::default(), PlanOptions { splits, ..PlanOptions::default() });
        let reads = latent_reads(half_dtype(), &SIZES[..1], 40);
        parity(&format!("sim, reads in place, splits {splits:?}"), 12, reads, &sim);
    }
}

/// With all keys divided among the CTAs by the lengths on the device: few CTAs have several whole
/// sequences each, many have parts of one.
#[test]
fn steps_divided_by_lengths() {
    let merges = ["gqa_latent_merge_parts_f16", "gqa_latent_merge_parts_bf16"];
    for (multiprocessors, merge) in [1, 2, 3, 5, 7, 132].into_iter().zip(merges.iter().cycle()) {
        let h200 = DeviceInfo::known("h200").expect("a known device");
        let device = DeviceInfo { multiprocessors, ..h200 };
        let options = PlanOptions { force: Some(merge), ..latent_options() };
        let cases = latent_divided(latent(&SIZES[..1], 900), &options, &device);
        let sim = Sim::default().with_device(device).with_options(options);
        parity(&format!("sim, latent divided among {multiprocessors}"), 12, cases, &sim);
    }
}

/// Lengths around whole tiles and none at all, one of them long: CTAs with no work, with one tile,
/// and with several sequences.
#[test]
fn steps_divided_by_uneven_lengths() {
    let merges = ["gqa_latent_merge_parts_bf16", "gqa_latent_merge_parts_f16"];
    let steps = [0, 62, 63, 64, 128, 699, 0, 300, 5].map(|past| [past, 1]);
    let several = [[3, 3], [0, 0], [700, 2], [61, 3], [64, 1], [0, 3]];
    for (sequences, multiprocessors) in [(&steps[..], [1, 4, 40, 132]), (&several, [2, 6, 50, 132])]
    {
        for (count, merge) in multiprocessors.into_iter().flat_map(|n| merges.map(|m| (n, m))) {
            let h200 = DeviceInfo::known("h200").expect("a known device");
            let device = DeviceInfo { multiprocessors: count, ..h200 };
            let options = PlanOptions { force: Some(merge), ..latent_options() };
            // A row tile needs an SM of its own.
            let rows = 64 * count as usize / sequences.iter().map(|s| s[1]).max().unwrap_or(1);
            let is_of = move |case: &LatentCase| {
                (case.dtype == DType::BF16) == merge.ends_with("bf16") && case.heads.query <= rows
            };
            let cases = latent_ragged(sequences.to_vec()).prop_filter("not for it", is_of);
            let sim = Sim::default().with_device(device).with_options(options);
            parity(&format!("sim, latent divided among {count}"), 1, cases, &sim);
        }
    }
}
