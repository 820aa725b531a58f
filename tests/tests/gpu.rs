//! The kernels on a GPU against the f64 reference: random calls through the planner.

mod replay;

use gqa_host::DType;
use gqa_host::backend::cuda::Cuda;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_kernels::registry::Family;
use gqa_tests::{
    AttentionCase, Case, DECODE_KERNELS, PREFILL_KERNELS, Parity, any_dtype, attention_case,
    biased_prompts, case, every_entry, float8_kernels, float8_prompts, half_dtype, heads_in,
    heads_up_to, identical, is_of_attention, packed_rows, paged, paged_concurrent, paged_crowds,
    paged_mixed, paged_prompts, paged_reads, paged_steps, parity, prompts, prompts_of_wide_scores,
    prompts_over_float8, quantized, quantized_output, quantized_prompts, quantized_steps,
    reads_with_gaps, rotated_prompts, sequences, sliding, slow_device, steps, tall_steps,
    tree_steps, trees, turned_float8_prompts, wide, wide_paged, with_some_lse,
};
use proptest::prelude::*;
use replay::{AsGraph, Made, Replay};

fn cuda(options: PlanOptions) -> Cuda {
    Cuda::new(options).expect("a GPU")
}

fn run<C: Parity + 'static>(
    name: &str,
    cases: u32,
    strategy: impl Strategy<Value = C> + 'static,
    options: PlanOptions,
) {
    parity(name, cases, strategy, &cuda(options));
}

#[test]
#[ignore = "needs a GPU"]
fn as_planned() {
    run("cuda", 3000, case(any_dtype(), heads_up_to(256), 80), PlanOptions::default());
}

#[test]
#[ignore = "needs a GPU"]
fn long_sequences() {
    run("cuda, long", 150, case(half_dtype(), heads_up_to(128), 1500), PlanOptions::default());
}

/// Prefills and chunks long enough for the Hopper family, on a Hopper GPU.
#[test]
#[ignore = "needs a GPU"]
fn prompts_as_planned() {
    run("cuda, prompts", 1000, prompts(256, 400), PlanOptions::default());
}

#[test]
#[ignore = "needs a GPU"]
fn rotated_prompts_as_planned() {
    run("cuda, rotated prompts", 500, rotated_prompts(256, 400), PlanOptions::default());
}

#[test]
#[ignore = "needs a GPU"]
fn prompts_of_wide_scores_as_planned() {
    for spread in [3.0, 9.0] {
        let prompts = prompts_of_wide_scores(800, spread);
        run("cuda, prompts, wide scores", 300, prompts, PlanOptions::default());
    }
}

/// Tiles of 176 keys, which the planner uses only beyond thousands of keys.
#[test]
#[ignore = "needs a GPU"]
fn prompts_in_large_tiles() {
    for (dtype, kernel) in
        [(DType::BF16, "gqa_hopper_bf16_d128_k176"), (DType::F16, "gqa_hopper_f16_d128_k176")]
    {
        let of = move |case| Case { dtype, ..case };
        let options = || PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        run("cuda, large tiles", 300, rotated_prompts(128, 800).prop_map(of), options());
        run("cuda, large tiles", 200, prompts(128, 800).prop_map(of), options());
        let wide = prompts_of_wide_scores(800, 9.0).prop_map(of);
        run("cuda, large tiles, wide scores", 100, wide, options());
    }
}

#[test]
#[ignore = "needs a GPU"]
fn prompts_in_parts() {
    for splits in [2, 7] {
        let splits = Some(splits);
        let options = PlanOptions { disable_flash_decode: true, splits, ..PlanOptions::default() };
        run("cuda, prompts in parts", 300, prompts(256, 800), options);
    }
}

/// Decode steps, on a Hopper GPU.
#[test]
#[ignore = "needs a GPU"]
fn steps_as_planned() {
    run("cuda, steps", 2000, steps(1500), PlanOptions::default());
}

/// Kernels that fit a GeForce RTX 5090.
#[test]
#[ignore = "needs a GPU"]
fn steps_in_little_shared_memory() {
    let gpu = cuda(PlanOptions::default());
    let geforce = DeviceInfo::known("rtx5090").expect("a known device");
    let info = DeviceInfo { sm: gpu.device().info().sm, ..geforce };
    let gpu = gpu.with_device(info);
    parity("cuda, little shared memory", 600, steps(1500), &gpu);
    parity("cuda, little shared memory, paged", 300, paged_steps(steps(40), 1500), &gpu);
}

/// Plans and kernels for GPUs without clusters.
#[test]
#[ignore = "needs a GPU"]
fn steps_as_planned_for_ampere_and_ada() {
    for (name, cases) in [("a100", 400), ("rtx4090", 100)] {
        let device = DeviceInfo::known(name).expect("a known device");
        let gpu = cuda(PlanOptions::default()).with_device(device);
        parity(&format!("cuda, {name}"), cases, steps(1500), &gpu);
        parity(&format!("cuda, {name}, codes"), cases, quantized_steps(1500), &gpu);
        parity(&format!("cuda, {name}, blocks"), cases, paged_steps(steps(40), 1500), &gpu);
        let codes = paged_steps(quantized(steps(40)), 1500);
        parity(&format!("cuda, {name}, blocks, quantized"), cases, codes, &gpu);
        parity(&format!("cuda, {name}, trees"), cases, tree_steps(1500), &gpu);
    }
}

/// Prefills of any length, also with a bias or a mask, on `tiled` and `tiled_masked`.
#[test]
#[ignore = "needs a GPU"]
fn prompts_as_planned_for_ampere_and_ada() {
    for (name, cases) in [("a100", 500), ("rtx4090", 200)] {
        let device = DeviceInfo::known(name).expect("a known device");
        let gpu = cuda(PlanOptions::default()).with_device(device);
        parity(&format!("cuda, {name}, prompts"), cases, prompts(256, 800), &gpu);
        let any = case(half_dtype(), heads_up_to(256), 80);
        parity(&format!("cuda, {name}"), cases, any, &gpu);
        parity(&format!("cuda, {name}, bias"), cases, biased_prompts(256, 400), &gpu);
        let masked = (attention_case(half_dtype(), 256, 100), 1..=400usize)
            .prop_map(|(case, rows)| case.for_masked_flash(rows));
        parity(&format!("cuda, {name}, masks"), cases, masked, &gpu);
    }
}

/// `tiled_tma` on Hopper, for calls that `hopper` does not support; with one SM, short prefills
/// fill it.
#[test]
#[ignore = "needs a GPU"]
fn prompts_of_negative_scale() {
    let one_sm = DeviceInfo { multiprocessors: 1, ..DeviceInfo::h200() };
    let gpu = cuda(PlanOptions::default()).with_device(one_sm);
    let negative = |case| Case { scale: -0.1, ..case };
    parity("cuda, negative scale", 500, prompts(256, 800).prop_map(negative), &gpu);
}

/// Kernels for GPUs whose tensor cores support float16 only, with half the depth.
#[test]
#[ignore = "needs a GPU"]
fn calls_as_planned_for_turing() {
    let gpu = cuda(PlanOptions::default()).with_device(DeviceInfo::known("t4").expect("known"));
    let f16 = || Just(DType::F16).boxed();
    parity("cuda, t4", 500, case(f16(), heads_up_to(192), 200), &gpu);
    parity("cuda, t4, paged", 200, paged(case(f16(), heads_up_to(128), 40), 200), &gpu);
    let masked = (attention_case(f16(), 128, 100), 1..=400usize)
        .prop_map(|(case, rows)| case.for_masked_flash(rows));
    parity("cuda, t4, masks", 200, masked, &gpu);
}

/// More than 32 packed query rows: by warpgroups, in up to two row tiles.
#[test]
#[ignore = "needs a GPU"]
fn tall_steps_as_planned() {
    run("cuda, tall steps", 600, tall_steps(1500), PlanOptions::default());
}

#[test]
#[ignore = "needs a GPU"]
fn steps_in_clusters() {
    for (cluster, splits) in [(16, 1), (8, 2), (4, 3), (1, 7)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        run(
            "cuda, clusters",
            250,
            steps(800),
            PlanOptions { cluster, splits, ..PlanOptions::default() },
        );
    }
}

/// Quantized caches: by kernels that read them directly, and by all others over dequantized copies.
#[test]
#[ignore = "needs a GPU"]
fn quantized_caches() {
    let steps = || quantized_steps(1500);
    run("cuda, codes", 1500, steps(), PlanOptions::default());
    for (cluster, splits) in [(16, 1), (4, 3), (1, 7)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let options = PlanOptions { cluster, splits, ..PlanOptions::default() };
        run("cuda, codes in clusters", 200, steps(), options);
    }
    sequences("cuda, steps, quantized", 50, 12, quantized_steps(500), || {
        cuda(PlanOptions::default())
    });
    let cases = quantized(case(any_dtype(), heads_up_to(256), 80));
    run("cuda, quantized", 1000, cases, PlanOptions::default());
    run("cuda, quantized prompts", 300, quantized(prompts(256, 400)), PlanOptions::default());
}

/// Prefills by the kernels that convert quantized values to float16 (except float8 keys), and by no
/// other kernels.
#[test]
#[ignore = "needs a GPU"]
fn quantized_prompts_on_their_way() {
    for (dtype, kernels) in [
        (DType::BF16, ["gqa_hopper_quantized_bf16_d128", "gqa_hopper_paged_quantized_bf16_d128"]),
        (DType::F16, ["gqa_hopper_quantized_f16_d128", "gqa_hopper_paged_quantized_f16_d128"]),
        (DType::BF16, ["gqa_hopper_quantized_bf16_d64", "gqa_hopper_paged_quantized_bf16_d64"]),
    ] {
        let of = move |case| Case { dtype, ..case };
        on_their_way(kernels, |prompts| quantized_prompts(prompts).prop_map(of).boxed());
    }
    for kernels in [
        ["gqa_hopper_quantized_f8_bf16_d128", "gqa_hopper_paged_quantized_f8_bf16_d128"],
        ["gqa_hopper_quantized_f8_bf16_d64", "gqa_hopper_paged_quantized_f8_bf16_d64"],
    ] {
        on_their_way(kernels, prompts_over_float8);
    }
}

fn on_their_way(
    kernels: [&'static str; 2],
    cases: impl Fn(BoxedStrategy<Case>) -> BoxedStrategy<Case>,
) {
    let most = if kernels[0].ends_with("64") { 64 } else { 128 };
    let [dense, paged] =
        kernels.map(|kernel| PlanOptions { force: Some(kernel), ..PlanOptions::default() });
    run("cuda, quantized on their way", 300, cases(prompts(most, 800)), dense.clone());
    run("cuda, quantized and rotated", 300, cases(rotated_prompts(most, 800)), dense.clone());
    if most == 128 {
        let wide = cases(prompts_of_wide_scores(800, 9.0));
        run("cuda, quantized, wide scores", 100, wide, dense);
    }
    let blocks = paged_prompts(cases(prompts(most, 100)), 600);
    run("cuda, quantized blocks on their way", 300, blocks, paged);
}

/// Float8 products, by the kernels for them and no others.
#[test]
#[ignore = "needs a GPU"]
fn float8_products() {
    for (dtype, tile, kernel) in float8_kernels() {
        let options = PlanOptions { force: Some(kernel), ..PlanOptions::default() };
        let prompts = float8_prompts(tile, 800).prop_map(move |case| Case { dtype, ..case });
        run("cuda, float8 products", 100, prompts, options.clone());
        let apart = cuda(PlanOptions { disable_fused_kv: true, ..options.clone() });
        let prompts =
            turned_float8_prompts(tile, 800).prop_map(move |case| Case { dtype, ..case }).boxed();
        identical("cuda, float8 operands", 100, prompts, [&cuda(options), &apart]);
    }
}

/// Rolling KV caches: by every kernel, over several steps, and with more rows than a CTA of
/// `rolling_kv` moves at once.
#[test]
#[ignore = "needs a GPU"]
fn sliding_caches() {
    let off = PlanOptions::default;
    run("cuda, sliding", 500, sliding(case(any_dtype(), heads_up_to(256), 80), 50), off());
    run("cuda, sliding steps", 100, sliding(steps(900), 700), off());
    run("cuda, sliding steps over codes", 60, sliding(quantized_steps(900), 700), off());
    run("cuda, sliding prompts", 60, sliding(prompts(256, 300), 200), off());
    run("cuda, sliding, with a bias", 40, sliding(biased_prompts(256, 300), 200), off());
    let cases = sliding(case(half_dtype(), heads_up_to(256), 40), 20);
    sequences("cuda, sliding sequences", 20, 12, cases, || cuda(off()));
    let codes = sliding(quantized_steps(40), 20);
    sequences("cuda, sliding sequences, quantized", 20, 12, codes, || cuda(off()));
}

/// Paged caches: by the kernels that read them directly, and by all others over gathered rows.
#[test]
#[ignore = "needs a GPU"]
fn paged_caches() {
    let off = PlanOptions::default;
    run("cuda, blocks", 500, paged_steps(steps(40), 1500), off());
    run("cuda, blocks, quantized", 500, paged_steps(quantized(steps(40)), 1500), off());
    run("cuda, paged", 500, paged(case(any_dtype(), heads_up_to(256), 40), 80), off());
}

/// Decode steps over blocks by clusters of CTAs, and by splits.
#[test]
#[ignore = "needs a GPU"]
fn paged_caches_in_clusters() {
    for (cluster, splits) in [(16, 1), (4, 3), (1, 7)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let options = PlanOptions { cluster, splits, ..PlanOptions::default() };
        let elements = paged_steps(steps(40), 1500);
        run("cuda, blocks in clusters", 100, elements, options.clone());
        let codes = paged_steps(quantized(steps(40)), 1500);
        run("cuda, blocks of codes in clusters", 100, codes, options);
    }
}

/// Prompts over blocks.
#[test]
#[ignore = "needs a GPU"]
fn prompts_over_paged_caches() {
    let off = PlanOptions::default;
    let prompts = paged_prompts(case(half_dtype(), heads_up_to(256), 40), 300);
    run("cuda, paged prompts", 500, prompts, off());
    let codes = paged_prompts(quantized(case(half_dtype(), heads_up_to(128), 40)), 300);
    run("cuda, paged prompts, quantized", 500, codes, off());
}

/// Blocks read in place by the kernels of a GPU without wgmma, alone and after decode steps.
fn paged_prompts_planned_for(name: &str) {
    let device = DeviceInfo::known(name).expect("a known device");
    let gpu = cuda(PlanOptions::default()).with_device(device);
    let prompts = paged_prompts(case(half_dtype(), heads_up_to(256), 40), 300);
    parity(&format!("cuda, {name}, paged prompts"), 500, with_some_lse(prompts), &gpu);
    let codes = paged_prompts(quantized(case(half_dtype(), heads_up_to(128), 40)), 300);
    let codes = with_some_lse(codes);
    parity(&format!("cuda, {name}, paged prompts, quantized"), 200, codes, &gpu);
    let mixed = with_some_lse(paged_mixed(steps(40), 1500));
    parity(&format!("cuda, {name}, mixed batches"), 300, mixed, &gpu);
}

#[test]
#[ignore = "needs a GPU"]
fn paged_prompts_as_planned_for_ampere() {
    paged_prompts_planned_for("a100");
}

#[test]
#[ignore = "needs a GPU"]
fn paged_prompts_as_planned_for_ada() {
    paged_prompts_planned_for("rtx4090");
}

/// Calls that append nothing, possibly with more tokens than keys.
#[test]
#[ignore = "needs a GPU"]
fn tokens_without_a_key() {
    let sizes = [64, 128, 256];
    let calls = |tokens| paged_reads(half_dtype(), &sizes, tokens);
    for name in ["h200", "a100"] {
        let device = DeviceInfo::known(name).expect("a known device");
        let gpu = cuda(PlanOptions::default()).with_device(device);
        parity(&format!("cuda, {name}, reads of blocks"), 500, calls(8), &gpu);
        parity(&format!("cuda, {name}, reads of blocks, prompts"), 300, calls(300), &gpu);
    }
    let any = paged_reads(any_dtype(), &[16, 80], 40);
    run("cuda, reads of blocks by general kernels", 200, any, PlanOptions::default());
}

/// Packed keys and values, with NaN between sequences and after them.
#[test]
#[ignore = "needs a GPU"]
fn packed_keys_and_values() {
    let alike = packed_rows(half_dtype(), &[[64, 64], [128, 128], [256, 256]], 700);
    run("cuda, packed", 300, alike.clone(), PlanOptions::default());
    run("cuda, packed, rows outside", 100, reads_with_gaps(alike), PlanOptions::default());
    let unlike = [[192, 128], [168, 104], [128, 64], [64, 128]];
    let unlike = packed_rows(half_dtype(), &unlike, 700);
    run("cuda, packed, unlike values", 300, unlike, PlanOptions::default());
}

/// A tree mask: by the decode family, and by all others as a mask over all keys.
#[test]
#[ignore = "needs a GPU"]
fn trees_of_drafts() {
    run("cuda, trees", 1000, tree_steps(1500), PlanOptions::default());
    for (cluster, splits) in [(16, 1), (4, 3), (1, 7)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let options = PlanOptions { cluster, splits, ..PlanOptions::default() };
        run("cuda, trees in clusters", 200, tree_steps(1500), options);
    }
    let any = trees(any_dtype(), heads_up_to(256), 300);
    run("cuda, any trees", 400, any, PlanOptions::default());
}

/// Decode steps and a prefill in one call, by two kernels, sequential and concurrent.
#[test]
#[ignore = "needs a GPU"]
fn mixed_batches() {
    let off = PlanOptions::default;
    run("cuda, mixed batches", 300, paged_mixed(steps(40), 1500), off());
    run("cuda, mixed batches, quantized", 300, paged_mixed(quantized(steps(40)), 1500), off());
    run("cuda, many sequences", 100, paged_crowds(steps(40), 300), off());
}

/// Whether the GPU is a Hopper, where kernels for mixed batches can run concurrently.
fn on_hopper() -> bool {
    let is_hopper = cuda(PlanOptions::default()).device().info().sm == DeviceInfo::h200().sm;
    if !is_hopper {
        println!("SKIPPED: concurrent launches of mixed batches are for a Hopper");
    }
    is_hopper
}

/// GPUs for which mixed batches are planned as concurrent launches, with the kernels that come
/// first.
fn concurrent_plans() -> [(DeviceInfo, [Family; 2]); 2] {
    let small = DeviceInfo { multiprocessors: 2, ..DeviceInfo::h200() };
    [(slow_device(132), PREFILL_KERNELS), (small, DECODE_KERNELS)]
}

#[test]
#[ignore = "needs a GPU"]
fn concurrent_launches_of_mixed_batches() {
    if !on_hopper() {
        return;
    }
    for (device, first) in concurrent_plans() {
        let cases = |steps| paged_concurrent(paged_mixed(steps, 1500), &device, first);
        let codes = cases(quantized(steps(40)));
        let gpu = cuda(PlanOptions::default()).with_device(device.clone());
        parity("cuda, concurrent launches of mixed batches", 300, cases(steps(40)), &gpu);
        parity("cuda, concurrent launches of mixed batches, quantized", 300, codes, &gpu);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn concurrent_launches_in_graphs() {
    if !on_hopper() {
        return;
    }
    let gpu = cuda(PlanOptions::default());
    for (device, first) in concurrent_plans() {
        let cases = || paged_concurrent(paged_mixed(steps(40), 1500), &device, first);
        for made in [Made::Captured, Made::Recorded] {
            let graphs = AsGraph::on(gpu.device(), device.clone(), made);
            parity("cuda, concurrent launches in graphs", 100, cases(), &graphs);
        }
    }
}

/// float32 output by the prefill kernels, which `prompts` leaves out.
#[test]
#[ignore = "needs a GPU"]
fn float32_output() {
    let wide = |case| Case { float32_output: true, ..case };
    run("cuda, float32", 200, prompts(256, 300).prop_map(wide), PlanOptions::default());
    run("cuda, float32", 200, biased_prompts(256, 300).prop_map(wide), PlanOptions::default());
}

/// Output in float8e4m3fn times a scale.
#[test]
#[ignore = "needs a GPU"]
fn quantized_outputs() {
    let run = |name, cases| run(name, 300, cases, PlanOptions::default());
    run("cuda, decode, quantized output", quantized_output(steps(2000)).boxed());
    run("cuda, prefill, quantized output", quantized_output(prompts(256, 300)).boxed());
    let any = quantized_output(case(any_dtype(), heads_up_to(256), 200));
    run("cuda, quantized output", any.boxed());
}

#[test]
#[ignore = "needs a GPU"]
fn the_cache_is_carried_from_step_to_step() {
    sequences("cuda, steps", 100, 12, steps(500), || cuda(PlanOptions::default()));
}

/// One graph per sequence, captured at its first token for the whole cache.
#[test]
#[ignore = "needs a GPU"]
fn a_graph_captured_once_serves_a_thousand_tokens() {
    // Small, because the reference computes every token as well.
    let tokens = steps(20).prop_map(|case| Case {
        q_len: 1,
        past: case.past.iter().map(|past| 1 + past % 20).collect(),
        kv_heads: 1,
        group: 1 + case.group % 4,
        head_size: 64,
        rotary: case.rotary.filter(|(sixteenths, ..)| *sixteenths <= 4),
        ..case
    });
    let cuda = cuda(PlanOptions::default());
    sequences("cuda, graph", 2, 1000, tokens.boxed(), || Replay::on(cuda.device()));
}

#[test]
#[ignore = "needs a GPU"]
fn memory_efficient() {
    let options = PlanOptions { disable_flash_attention: true, ..PlanOptions::default() };
    run("cuda, general", 1000, case(any_dtype(), heads_up_to(256), 100), options);
}

#[test]
#[ignore = "needs a GPU"]
fn without_split_kv() {
    let options = PlanOptions { disable_flash_decode: true, ..PlanOptions::default() };
    run("cuda, no split_kv", 600, case(half_dtype(), heads_up_to(256), 300), options);
}

/// `tiled_f32`, for calls without further features.
#[test]
#[ignore = "needs a GPU"]
fn float32_as_planned() {
    let cases = case(Just(DType::F32).boxed(), heads_up_to(192), 400);
    run("cuda, float32", 1500, cases, PlanOptions::default());
}

#[test]
#[ignore = "needs a GPU"]
fn separate_prologue() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    run("cuda, unfused", 600, case(any_dtype(), heads_up_to(128), 60), options);
}

#[test]
#[ignore = "needs a GPU"]
fn seven_splits() {
    let options = PlanOptions { splits: Some(7), ..PlanOptions::default() };
    run("cuda, 7 splits", 600, case(half_dtype(), heads_up_to(256), 600), options);
}

#[test]
#[ignore = "needs a GPU"]
fn large_heads() {
    let heads = heads_in(264..=512);
    run("cuda, large heads", 300, case(any_dtype(), heads, 60), PlanOptions::default());
}

/// `tiled_wide`, as planned and with split keys.
#[test]
#[ignore = "needs a GPU"]
fn wide_heads() {
    let cases = |rows| case(half_dtype(), heads_in(264..=512), rows);
    run("cuda, wide heads", 600, cases(300), PlanOptions::default());
    let options = PlanOptions { splits: Some(5), ..PlanOptions::default() };
    run("cuda, wide heads, 5 parts", 300, cases(400), options);
    let flash = attention_case(half_dtype(), 512, 300).prop_map(AttentionCase::for_flash);
    run("cuda, Attention, wide heads", 300, flash, PlanOptions::default());
}

/// Heads of 512, with as many splits as suit the device, and with some.
#[test]
#[ignore = "needs a GPU"]
fn heads_of_512() {
    for splits in [None, Some(3)] {
        let options = PlanOptions { splits, ..PlanOptions::default() };
        run("cuda, heads of 512", 300, wide(600), options.clone());
        run("cuda, heads of 512 over blocks", 300, wide_paged(600), options);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn attention_as_planned() {
    run("cuda, Attention", 3000, attention_case(any_dtype(), 160, 100), PlanOptions::default());
}

/// Calls that flash attention takes.
#[test]
#[ignore = "needs a GPU"]
fn attention_flash() {
    let flash = attention_case(half_dtype(), 256, 300).prop_map(AttentionCase::for_flash);
    run("cuda, Attention, flash", 1000, flash, PlanOptions::default());
}

/// And with a mask or a bias.
#[test]
#[ignore = "needs a GPU"]
fn attention_masked_flash() {
    let masked = (attention_case(half_dtype(), 256, 100), 1..=400usize)
        .prop_map(|(case, rows)| case.for_masked_flash(rows));
    run("cuda, Attention, masked flash", 1000, masked, PlanOptions::default());
    run("cuda, bias", 500, biased_prompts(256, 400), PlanOptions::default());
}

/// The same in float32: `tiled_f32`.
#[test]
#[ignore = "needs a GPU"]
fn attention_flash_float32() {
    let flash =
        attention_case(Just(DType::F32).boxed(), 192, 300).prop_map(AttentionCase::for_flash);
    run("cuda, Attention, flash, float32", 1000, flash, PlanOptions::default());
}

#[test]
#[ignore = "needs a GPU"]
fn attention_memory_efficient() {
    let options = PlanOptions { disable_flash_attention: true, ..PlanOptions::default() };
    run("cuda, Attention, general", 1500, attention_case(any_dtype(), 512, 120), options);
}

#[test]
#[ignore = "needs a GPU"]
fn attention_unfused() {
    let options = PlanOptions {
        disable_flash_attention: true,
        disable_memory_efficient_attention: true,
        ..PlanOptions::default()
    };
    run("cuda, Attention, unfused", 1500, attention_case(any_dtype(), 300, 120), options);
}

#[test]
#[ignore = "needs a GPU"]
fn every_kernel() {
    let cuda = cuda(PlanOptions::default());
    let device = cuda.device();
    every_entry(
        "cuda, each kernel",
        4,
        device.info(),
        is_of_attention,
        |_| true,
        |options| Box::new(Cuda::on(device.clone(), options).expect("it was there")),
    );
}
