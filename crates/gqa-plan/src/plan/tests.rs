//! Tables of which kernels a call gets; and checks that the arguments of launches stay inside the
//! tensors.

use super::*;
use crate::engine::{Heads, Layer, Paged};
use crate::problem::{
    Alignment, Bias, CacheBinding, CallKind, Layout, Pages, Phase, Problem, ProblemFields, QkNorm,
    QkOutput, QuantFormat, Quantization, Rotary, RowStrides, Scales, Sink,
};
use gqa_kernels::attention::{hopper, latent};
use gqa_kernels::concept::pages::LOG_CONTIGUOUS;
use gqa_kernels::params::{
    AttentionParams, DecodeParams, DecodeScheduleParams, Float8OperandsParams, Float8Params,
    HopperParams, LatentParams, MaskedParams, PageSteps, PagedDecodeParams, PagedGapsParams,
    PagedHopperParams, PagedParams, PagedPrefillParams, PagedTiledParams, PrefillParams,
    PrologueParams, QuantizeOutputParams, QuantizedHopperParams, QuantizedPagedHopperParams,
    RollingBiasParams, RollingParams, Strides, TreeMaskParams, overlap,
};
use gqa_kernels::prologue::dequantize;
use gqa_kernels::registry::{Entry, Role};
use gqa_tensor::{DType, TensorView};

/// A Llama-3-8B layer: `s` new rows after `past`, shared cache of 8192 rows.
const QK_NORM: QkNorm = QkNorm { q_epsilon: 1e-6, k_epsilon: 1e-5 };

fn llama(s: usize, past: usize) -> Problem {
    let fields = ProblemFields {
        batch: 1,
        q_heads: 32,
        kv_heads: 8,
        head_size: 128,
        v_head_size: 128,
        q_len: s,
        new_len: s,
        total_len: past + s,
        past_capacity: (past + s).max(8192),
        capacity: (past + s).max(8192),
        phase: match (past, s) {
            (0, _) => Phase::FirstPrompt,
            (_, 1) => Phase::TokenGeneration,
            _ => Phase::SubsequentPrompt,
        },
        cache: CacheBinding::Shared,
        rotary: Some(ROTARY),
        scale: 0.088,
        causal: true,
        ..ProblemFields::plain("GroupQueryAttention", DType::F16)
    };
    Problem::new(fields).unwrap()
}

const ROTARY: Rotary =
    Rotary { dim: 128, offset: 0, interleaved: false, max_positions: 8192, explicit: None };

fn with(problem: Problem, change: impl FnOnce(&mut ProblemFields)) -> Problem {
    problem
        .derive(|mut call| {
            change(&mut call);
            (call.v_head_size, call.v_dtype) = (call.head_size, call.dtype);
            if ![DType::F32, DType::F8E4M3].contains(&call.out_dtype) {
                call.out_dtype = call.dtype;
            }
            // Whole heads rotate, of sizes that can.
            let size = call.head_size;
            call.rotary = call.rotary.filter(|_| size.is_multiple_of(16));
            call.rotary = call.rotary.map(|rotary| Rotary { dim: rotary.dim.min(size), ..rotary });
            if let Some(pages) = &mut call.pages {
                (call.past_capacity, call.capacity) = (call.total_len, call.total_len);
                pages.per_sequence =
                    pages.per_sequence.max(call.total_len.div_ceil(pages.block_size));
            }
            call
        })
        .unwrap()
}

/// attention_bias shared by the whole batch and all heads.
fn bias(batch: bool, head: bool, columns: usize) -> Option<Bias> {
    Some(Bias { batch, head, row: false, columns, boolean: false })
}

fn device(name: &str) -> DeviceInfo {
    DeviceInfo::known(name).unwrap()
}

/// Name of a launch's kernel without prefix and, where it ends the name, element type.
fn kernel(launch: &Launch) -> &'static str {
    let name = launch.entry.name.trim_start_matches("gqa_");
    let suffixes = ["_f32", "_f16", "_bf16"];
    suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
}

/// Kernels of a plan.
fn kernels(problem: &Problem, options: &PlanOptions) -> Vec<&'static str> {
    let plan = plan(problem, &device("h200"), options).unwrap();
    plan.launches.iter().map(kernel).collect()
}

fn attention(problem: &Problem, name: &str, options: &PlanOptions) -> Family {
    let plan = plan(problem, &device(name), options).unwrap();
    plan.launches
        .iter()
        .map(|launch| launch.entry.family)
        .find(|family| *family != Family::Prologue)
        .unwrap()
}

fn rejection(problem: &Problem, name: &str, options: &PlanOptions, family: Family) -> String {
    let plan = plan(problem, &device(name), options).unwrap();
    let decision = plan.decisions.iter().find(|decision| decision.family == family).unwrap();
    decision.outcome.as_ref().unwrap_err().to_string()
}

fn float32(rows: usize, past: usize) -> Problem {
    with(llama(rows, past), |p| p.dtype = DType::F32)
}

#[test]
fn flash_attention_wherever_it_can() {
    let off = PlanOptions::default();
    let with_bias = |p: &mut ProblemFields| p.bias = bias(true, true, p.total_len);
    for (what, problem, device, want) in [
        ("prompt", llama(4096, 0), "h200", Family::Hopper),
        ("prompt", llama(4096, 0), "a100", Family::Tiled),
        ("prompt", llama(4096, 0), "rtx4090", Family::Tiled),
        ("prompt", llama(4096, 0), "v100", Family::General),
        ("prompt", llama(4096, 0), "t4", Family::Tiled),
        ("bfloat16", with(llama(64, 0), |p| p.dtype = DType::BF16), "t4", Family::General),
        ("head size 256", with(llama(512, 0), |p| p.head_size = 256), "t4", Family::General),
        ("chunk", llama(512, 2048), "h200", Family::Hopper),
        ("token", llama(1, 4096), "h200", Family::Decode),
        ("token", llama(1, 4096), "a100", Family::Decode),
        ("token", llama(1, 4096), "rtx4090", Family::Decode),
        (
            "token of head size 72",
            with(llama(1, 4096), |p| p.head_size = 72),
            "h200",
            Family::Decode,
        ),
        ("token", llama(1, 4096), "v100", Family::General),
        ("token", llama(1, 4096), "t4", Family::SplitKv),
        ("speculative tokens", llama(4, 4096), "h200", Family::Decode),
        ("more speculative tokens", llama(16, 4096), "h200", Family::Decode),
        ("a short chunk", llama(32, 4096), "h200", Family::Decode),
        ("a longer chunk", llama(33, 4096), "h200", Family::Hopper),
        (
            "short chunks of many sequences",
            with(llama(24, 1000), |p| p.batch = 16),
            "h200",
            Family::TiledTma,
        ),
        (
            "more new rows than a tile has",
            with(llama(20, 4096), |p| (p.head_size, p.q_heads) = (192, p.kv_heads)),
            "h200",
            Family::SplitKv,
        ),
        ("bfloat16", with(llama(64, 0), |p| p.dtype = DType::BF16), "h200", Family::Hopper),
        ("float32", float32(64, 0), "h200", Family::TiledF32),
        ("float32", float32(64, 0), "a100", Family::TiledF32),
        ("float32", float32(64, 0), "b200", Family::TiledF32),
        ("float32", float32(64, 0), "t4", Family::General),
        ("float32 token", float32(1, 64), "h200", Family::TiledF32),
        (
            "float32, head size 192",
            with(float32(64, 0), |p| p.head_size = 192),
            "h200",
            Family::TiledF32,
        ),
        (
            "float32, head size 200",
            with(float32(64, 0), |p| p.head_size = 200),
            "h200",
            Family::General,
        ),
        (
            "float32, bias",
            with(float32(64, 0), |p| p.bias = bias(true, true, 64)),
            "h200",
            Family::General,
        ),
        ("head size 256", with(llama(512, 0), |p| p.head_size = 256), "h200", Family::Hopper),
        ("head size 8", with(llama(512, 0), |p| p.head_size = 8), "h200", Family::Hopper),
        ("head size 264", with(llama(64, 0), |p| p.head_size = 264), "h200", Family::TiledWide),
        ("head size 264", with(llama(64, 0), |p| p.head_size = 264), "t4", Family::General),
        ("head size 512", with(llama(64, 0), |p| p.head_size = 512), "rtx4090", Family::TiledWide),
        (
            "a token of head size 512",
            with(llama(1, 64), |p| p.head_size = 512),
            "a100",
            Family::TiledWide,
        ),
        ("bias", with(llama(64, 0), with_bias), "h200", Family::HopperMasked),
        ("bias, few rows", with(llama(16, 0), with_bias), "h200", Family::HopperMasked),
        (
            "bias, few rows of many sequences",
            with(with(llama(16, 0), with_bias), |p| p.batch = 32),
            "h200",
            Family::TiledMasked,
        ),
        ("bias", with(llama(64, 0), with_bias), "a100", Family::TiledMasked),
        ("bias, a token", with(llama(1, 64), with_bias), "h200", Family::SplitKvMasked),
        ("bias, a token", with(llama(1, 8191), with_bias), "rtx4090", Family::SplitKvMasked),
        ("bias", with(llama(64, 0), with_bias), "v100", Family::General),
        (
            "bias, head size 264",
            with(with(llama(64, 0), with_bias), |p| p.head_size = 264),
            "h200",
            Family::General,
        ),
        (
            "scores",
            with(llama(64, 0), |p| p.output_qk = QkOutput::AfterSoftmax),
            "h200",
            Family::General,
        ),
        (
            "window, softcap, sink",
            with(llama(512, 0), |p| {
                (p.window, p.softcap, p.sink) = (Some(128), Some(30.0), Sink::PerHead);
            }),
            "h200",
            Family::Hopper,
        ),
        ("few rows", llama(63, 0), "h200", Family::Hopper),
        ("64 rows of a group", with(llama(16, 0), |p| p.batch = 32), "h200", Family::Decode),
        (
            "few rows of many sequences",
            with(llama(24, 0), |p| p.batch = 32),
            "h200",
            Family::TiledTma,
        ),
        ("negative scale", with(llama(512, 0), |p| p.scale = -0.1), "h200", Family::TiledTma),
        ("a prompt on Blackwell", llama(512, 0), "b200", Family::Blackwell),
        ("negative scale", with(llama(512, 0), |p| p.scale = -0.1), "b200", Family::TiledTma),
        ("bias", with(llama(512, 0), with_bias), "b200", Family::TiledMasked),
        ("not causal", with(llama(512, 0), |p| p.causal = false), "h200", Family::Hopper),
    ] {
        assert_eq!(attention(&problem, device, &off), want, "{what} on {device}");
    }
}

#[test]
fn steps_of_data_center_blackwell_have_tensor_memory() {
    let off = PlanOptions::default();
    let step = |batch, tokens| with(llama(tokens, 4096), |p| p.batch = batch);
    let of_size = |size| {
        with(step(1, 1), |p| {
            (p.head_size, p.v_head_size) = (size, size);
            p.rotary = p.rotary.map(|rotary| Rotary { dim: 32, ..rotary });
        })
    };
    let append = "unpack_qkv_with_rope_and_append_kv";
    for (problem, cluster, want) in [
        (step(1, 1), 8, "blackwell_decode_f16_d128"),
        (step(4, 32), 4, "blackwell_decode_f16_d128"),
        (step(18, 2), 1, "blackwell_decode_f16_d128"),
        (of_size(64), 8, "blackwell_decode_f16_d64"),
        (of_size(80), 8, "blackwell_decode_f16_d128"),
        // Two and three tiles of keys.
        (llama(1, 255), 2, "blackwell_decode_f16_d128"),
        (llama(1, 300), 2, "blackwell_decode_f16_d128"),
        (with(step(1, 1), |p| p.window = Some(200)), 2, "blackwell_decode_f16_d128"),
    ] {
        for name in ["b200", "b300"] {
            let launches = plan(&problem, &device(name), &off).unwrap().launches;
            assert_eq!(launches.iter().map(kernel).collect::<Vec<_>>(), [append, want]);
            assert_eq!(launches[1].cluster, cluster, "{problem:?}");
        }
    }
    let codes = |p: Problem| quantized(p, QuantFormat::Float8);
    let blocks = over_blocks(8, 1, 500);
    let kernels = |p: &Problem| {
        let launches = plan(p, &device("b200"), &off).unwrap().launches;
        launches.iter().map(kernel).collect::<Vec<_>>()
    };
    let appended = ["append_quantized", "rotary_embedding", "blackwell_decode_f8_f16_d128"];
    assert_eq!(kernels(&codes(step(1, 1))), appended);
    assert_eq!(kernels(&blocks), ["paged_append", "blackwell_decode_paged_f16_d128"]);
    let appended = ["paged_append_quantized", "blackwell_decode_paged_f8_f16_d128"];
    assert_eq!(kernels(&codes(blocks.clone())), appended);
    // Keys are not divided by lengths.
    let many = equal(over_blocks(16, 1, 8000));
    assert_eq!(plan(&many, &device("b200"), &off).unwrap().launches[1].cluster, 1);
    let wide = with(step(1, 1), |p| p.out_dtype = DType::F32);
    assert_eq!(kernels(&wide), [append, "blackwell_decode_f16_d128"]);
    let why = |p: &Problem, name, family| rejection(p, name, &off, family);
    let plain = |p: &Problem| why(p, "b200", Family::BlackwellDecode);
    let paged = |p: &Problem| why(p, "b200", Family::BlackwellDecodePaged);
    assert_eq!(plain(&step(1, 33)), "132 packed query rows are over 128");
    assert_eq!(plain(&codes(step(1, 21))), "84 packed query rows are over 80");
    assert_eq!(plain(&step(19, 1)), "152 row tiles, each reading all keys, are over 148");
    assert_eq!(
        plain(&quantized(step(1, 1), QuantFormat::Int8)),
        "does not take a KV cache of int8"
    );
    let uneven = with_pages(over_blocks(8, 2, 500), |pages| Pages { one_each: false, ..pages });
    assert_eq!(paged(&uneven), "does not take cos_cache");
    let still = with(uneven, |p| p.rotary = None);
    assert_eq!(kernels(&still), ["paged_append", "blackwell_decode_paged_f16_d128"]);
    let of_thor = why(&step(1, 1), "thor", Family::BlackwellDecode);
    assert_eq!(of_thor, "is not compiled for compute capability 11.0");
}

/// What is planned where kernels with tensor memory are not trusted.
fn without_tensor_memory() -> PlanOptions {
    let families = [Family::BlackwellDecode, Family::BlackwellDecodePaged];
    PlanOptions { distrusted: families.into(), ..PlanOptions::default() }
}

#[test]
fn blackwell_has_the_decode_steps_that_need_no_wgmma() {
    let off = without_tensor_memory();
    let step = |batch, tokens| with(llama(tokens, 4096), |p| p.batch = batch);
    for (batch, tokens, name, want) in [
        (1, 1, "b200", "decode_f16_d128_r8"),
        (1, 8, "b200", "decode_f16_d128_r32"),
        (8, 9, "b200", "decode_f16_d128_r64_mma"),
        (8, 16, "b200", "decode_f16_d128_r64_mma"),
        // Two tiles of 32 rows, whose keys fit the L2 cache.
        (1, 16, "b200", "decode_f16_d128_r32"),
        (1, 16, "h200", "decode_f16_d128_r64"),
        // Half of 64 rows would stay empty.
        (8, 8, "rtx5090", "decode_padded_f16_d128_r16_w4"),
        (8, 16, "rtx5090", "decode_f16_d128_r64_mma_w4"),
        // No room for blocks of eight warps.
        (1, 1, "rtx5090", "decode_f16_d128_r8_w4"),
        (1, 4, "gb10", "decode_padded_f16_d128_r16_w4"),
    ] {
        let plan = plan(&step(batch, tokens), &device(name), &off).unwrap();
        let kernels: Vec<_> = plan.launches.iter().map(kernel).collect();
        assert_eq!(kernels, [want], "{batch} x {tokens} tokens on {name}");
    }
    let forced = PlanOptions { force: Some("gqa_decode_f16_d128_r64"), ..off };
    let refused = plan(&step(1, 16), &device("b200"), &forced).unwrap_err().to_string();
    assert!(refused.contains("needs wgmma, which compute capability 10.0 lacks"), "{refused}");
}

#[test]
fn heads_of_128_take_long_tiles_where_two_blocks_fit() {
    let prompt = llama(2048, 0);
    for (name, want) in [
        ("a100", "tiled_f16_d128_k64"),
        ("orin", "tiled_f16_d128_k64"),
        ("l4", "tiled_f16_d128"),
        ("rtx5090", "tiled_f16_d128"),
        ("t4", "tiled_f16_d128"),
    ] {
        let plan = plan(&prompt, &device(name), &PlanOptions::default()).unwrap();
        assert_eq!(plan.launches.last().map(kernel), Some(want), "{name}");
    }
}

#[test]
fn prompts_of_data_center_blackwell_have_tensor_memory() {
    let off = PlanOptions::default();
    let prompt = |size| with(llama(2048, 0), |p| (p.head_size, p.v_head_size) = (size, size));
    for (size, want) in [
        (64, Some("blackwell_f16_d64")),
        (72, Some("blackwell_f16_d128")),
        (128, Some("blackwell_f16_d128")),
        (136, None),
    ] {
        for name in ["b200", "b300"] {
            let launches = plan(&prompt(size), &device(name), &off).unwrap().launches;
            let kernel = launches.last().map(kernel).filter(|name| name.starts_with("blackwell"));
            assert_eq!(kernel, want, "{size} on {name}");
        }
    }
    let unrotated = |p: Problem| equal(with(p, |p| p.rotary = None));
    let layer = Layer::new(DType::F16, Heads { query: 16, kv: 16, size: 192 });
    let packed = layer.paged(Paged::in_rows(2, 4000, 4000).value_size(128)).unwrap();
    for (problem, name, want) in [
        (unrotated(over_blocks(4, 512, 1000)), "b200", Family::BlackwellPaged),
        (unrotated(over_blocks(4, 100, 1000)), "b200", Family::TiledPaged),
        (unrotated(over_blocks(4, 512, 1000)), "thor", Family::TiledPaged),
        (packed, "b300", Family::BlackwellPaged),
    ] {
        assert_eq!(attention(&problem, name, &off), want, "{problem:?} on {name}");
    }
    let why = |name, family| rejection(&prompt(128), name, &off, family);
    assert_eq!(why("thor", Family::Blackwell), "is not compiled for compute capability 11.0");
    assert_eq!(why("a100", Family::Blackwell), "needs compute capability 10.0, the device has 8.0");
    assert_eq!(
        rejection(&llama(127, 0), "b200", &off, Family::Blackwell),
        "127 query rows are under 128"
    );
}

#[test]
fn prompts_without_wgmma_have_keys_by_tma() {
    // As where kernels with tensor memory are not trusted.
    let off = PlanOptions { distrusted: [Family::Blackwell].into(), ..PlanOptions::default() };
    let prompt = |size| with(llama(2048, 0), |p| (p.head_size, p.v_head_size) = (size, size));
    let attention_kernel = |problem: &Problem, name: &str| {
        let launches = plan(problem, &device(name), &off).unwrap().launches;
        launches.last().map(kernel).unwrap()
    };
    for (size, by_tma, otherwise) in [
        (64, "tiled_f16_d64", "tiled_f16_d64"),
        (80, "tiled_f16_d80", "tiled_f16_d80"),
        (96, "tiled_f16_d96", "tiled_f16_d96"),
        (112, "tiled_tma_f16_d128", "tiled_f16_d128"),
        (128, "tiled_tma_f16_d128", "tiled_f16_d128"),
        (160, "tiled_f16_d160", "tiled_f16_d160"),
        (192, "tiled_tma_f16_d192", "tiled_f16_d192"),
        (224, "tiled_f16_d224", "tiled_f16_d224"),
        (256, "tiled_tma_f16_d256", "tiled_f16_d256"),
    ] {
        for name in ["b200", "b300", "thor"] {
            assert_eq!(attention_kernel(&prompt(size), name), by_tma, "{size} on {name}");
        }
        for name in ["rtx5090", "gb10", "rtx4090"] {
            assert_eq!(attention_kernel(&prompt(size), name), otherwise, "{size} on {name}");
        }
    }
    let why = |size, name| rejection(&prompt(size), name, &off, Family::TiledTma);
    assert_eq!(why(96, "b200"), "has no tile for head size 96");
    assert_eq!(why(128, "a100"), "needs TMA, which compute capability 8.0 lacks");
    let refused = why(128, "rtx5090");
    assert!(refused.starts_with("a CTA needs 102480 bytes of shared memory"), "{refused}");
    // CTAs of 128 rows that would leave SMs idle.
    let short = with(prompt(256), |p| (p.q_len, p.new_len, p.total_len) = (256, 256, 256));
    assert_eq!(attention(&short, "b200", &off), Family::Tiled);
    let why = rejection(&short, "b200", &off, Family::TiledTma);
    assert_eq!(why, "1024 query rows are under 1280");
    assert_eq!(attention(&with(short, |p| p.batch = 2), "b200", &off), Family::TiledTma);
}

#[test]
fn a_token_step_is_one_launch_without_clusters_too() {
    let off = PlanOptions::default();
    let float32 = |p: Problem| with(p, |p| p.out_dtype = DType::F32);
    let eight = |p: Problem| with(p, |p| p.batch = 8);
    let of_heads = |size, p: Problem| with(p, |p| (p.head_size, p.rotary) = (size, None));
    for (problem, name, want) in [
        (llama(1, 8191), "a100", "decode_f16_d128_r8"),
        (eight(llama(1, 8191)), "a100", "decode_f16_d128_r8"),
        // The fewest row tiles; but two full-size CTAs of 16 rows instead of a half-SM CTA of 32
        // where the L2 cache holds the keys.
        (llama(4, 4096), "a100", "decode_f16_d128_r16"),
        (llama(8, 4096), "a100", "decode_f16_d128_r16"),
        (with(llama(8, 8184), |p| p.batch = 4), "a100", "decode_f16_d128_r32_w4"),
        (llama(16, 4096), "a100", "decode_f16_d128_r16"),
        (eight(llama(16, 4096)), "a100", "decode_f16_d128_r64_mma"),
        (eight(llama(16, 4096)), "rtx4090", "decode_f16_d128_r64_mma_w4"),
        (of_heads(64, eight(llama(16, 4096))), "rtx4090", "decode_f16_d64_r64_mma"),
        (of_heads(96, eight(llama(16, 4096))), "rtx3090", "decode_f16_d96_r64_mma"),
        (of_heads(256, eight(llama(16, 4096))), "a100", "decode_f16_d256_r64_mma_w4"),
        // Other head sizes are padded.
        (of_heads(72, llama(1, 8191)), "a100", "decode_padded_f16_d128_r16_w4"),
        (of_heads(224, llama(1, 8191)), "rtx4090", "decode_padded_f16_d256_r8_w4"),
        (llama(1, 8191), "rtx4090", "decode_f16_d128_r8_w4"),
        (float32(llama(1, 8191)), "a100", "decode_f16_d128_r8"),
        (float32(llama(1, 8191)), "l4", "decode_f16_d128_r8_w4"),
        (quantized(llama(1, 8191), CODES[0]), "a100", "decode_q8_f16_d128_r8"),
        (quantized(llama(1, 8191), CODES[1]), "rtx3090", "decode_i4_f16_d128_r8"),
        (quantized(llama(1, 8191), CODES[2]), "rtx5090", "decode_q8_f16_d128_r16_w4"),
        (over_blocks(8, 1, 500), "a100", "decode_f16_d128_r8"),
        (over_blocks(8, 4, 500), "rtx3090", "decode_padded_f16_d128_r16_w4"),
        (quantized(over_blocks(8, 1, 500), CODES[0]), "l4", "decode_q8_f16_d128_r16_w4"),
    ] {
        let plan = plan(&problem, &device(name), &off).unwrap();
        let kernels: Vec<_> = plan.launches.iter().map(kernel).collect();
        assert_eq!(kernels, [want], "{name}");
        let launch = &plan.launches[0];
        let blackwell = name == "rtx5090";
        assert!(blackwell || !launch.programmatic && launch.cluster == 1, "{name}");
    }
    // Half of the SMs saturate memory; splits are merged through counters, one per head.
    let alone = plan(&llama(1, 8191), &device("a100"), &off).unwrap();
    assert_eq!((alone.launches[0].grid, alone.counters), ([7, 8, 1], 8));
    let clusters = PlanOptions { cluster: Some(2), ..PlanOptions::default() };
    let why = rejection(&llama(1, 4096), "a100", &clusters, Family::Decode);
    assert_eq!(why, "needs thread-block clusters, which compute capability 8.0 lacks");
}

#[test]
fn wide_heads_take_tiles_that_hold_their_rows_and_fit() {
    for (rows, name, want) in [
        (1, "h200", (16, 64)),
        (4, "a100", (16, 64)),
        (4, "rtx4090", (16, 32)),
        (5, "h200", (32, 64)),
        (5, "a100", (32, 32)),
        (9, "h200", (64, 64)),
        (9, "a100", (64, 32)),
        (9, "rtx4090", (32, 32)),
        (4096, "b200", (64, 64)),
    ] {
        let problem = with(llama(rows, 1000), |p| p.head_size = 504);
        let plan = plan(&problem, &device(name), &PlanOptions::default()).unwrap();
        let is_wide = |launch: &&Launch| launch.entry.family == Family::TiledWide;
        let entry = plan.launches.iter().find(is_wide).unwrap().entry;
        assert_eq!((entry.rows, entry.keys), want, "{rows} rows on {name}");
    }
}

/// Contiguous or in blocks, on Hopper; other GPUs, and calls with more, have `tiled_wide`.
#[test]
fn heads_of_512_have_a_kernel_for_few_rows_and_one_for_many() {
    let off = PlanOptions::default();
    let wide = |p: Problem| with(p, |p| (p.head_size, p.rotary) = (512, None));
    let kernels_of = |p: &Problem| kernels(p, &off);
    assert_eq!(kernels_of(&wide(llama(1, 4096))), ["decode_f16_d512_r8"]);
    assert_eq!(kernels_of(&wide(over_blocks(4, 2, 4096))), ["decode_f16_d512_r8"]);
    assert_eq!(attention(&wide(llama(1, 4096)), "b200", &off), Family::Decode);
    // Three tokens of four heads are twelve rows.
    let merged = ["hopper_wide", "latent_merge"];
    assert_eq!(kernels_of(&wide(llama(3, 4096)))[1..], merged);
    assert_eq!(kernels_of(&wide(llama(4096, 0)))[1..], merged[..1]);
    assert_eq!(kernels_of(&wide(over_blocks(1, 3, 4096))), ["paged_append", merged[0], merged[1]]);
    assert_eq!(kernels_of(&wide(over_blocks(2, 2048, 0))), ["paged_append", merged[0]]);
    assert_eq!(kernels_of(&wide(over_blocks(1, 3, 4096)).appended()), merged);
    let of = |sequences| kernels_of(&wide(over_blocks(sequences, 3, 2048)).appended());
    assert_eq!(of(33), merged[..1]);
    // One wave of CTAs and a few more.
    assert_eq!(of(17), merged);
    // Of long sequences it splits the keys even where most must be short.
    let few_rows = with(wide(over_blocks(4, 3, 60_000)).appended(), |p| {
        p.pages = p.pages.map(|pages| Pages { blocks: 8_000 / pages.block_size, ..pages });
    });
    assert_eq!(kernels_of(&few_rows), merged);
    let rotary = Some(ROTARY);
    let rotated = with(over_blocks(3, 3, 4096), |p| (p.head_size, p.rotary) = (512, rotary));
    assert_eq!(kernels_of(&equal(rotated.clone()))[..2], ["paged_append", "hopper_wide"]);
    let gathered = ["paged_append", "paged_gather"];
    for change in [
        |p: &mut ProblemFields| p.sink = Sink::PerHead,
        |p: &mut ProblemFields| p.window = Some(100),
    ] {
        assert_eq!(kernels_of(&with(wide(over_blocks(1, 3, 4096)), change))[..2], gathered);
        let dense = with(wide(llama(3, 4096)), change);
        assert_eq!(attention(&dense, "h200", &off), Family::TiledWide);
    }
    assert_eq!(attention(&wide(llama(3, 4096)), "b200", &off), Family::TiledWide);
}

/// Two CTAs with neighbouring row tiles share their copies.
#[test]
fn row_tiles_of_heads_of_512_are_clusters() {
    let launch = |p: &Problem, options: &PlanOptions| {
        let plan = plan(p, &device("h200"), options).unwrap();
        let is_wide = |launch: &&Launch| launch.entry.family == Family::HopperWide;
        let launch = plan.launches.iter().find(is_wide).unwrap();
        (launch.cluster, launch.grid)
    };
    let wide = |s, past| with(llama(s, past), |p| p.head_size = 512);
    let off = PlanOptions::default();
    assert_eq!(launch(&wide(16, 0), &off), (1, [8, 1, 1]));
    assert_eq!(launch(&wide(33, 0), &off), (2, [8 * 4, 1, 1]));
    assert_eq!(launch(&wide(1024, 0), &off), (2, [8 * 64, 1, 1]));
    let alone = PlanOptions { cluster: Some(1), ..PlanOptions::default() };
    assert_eq!(launch(&wide(33, 0), &alone), (1, [8 * 3, 1, 1]));
}

#[test]
fn heads_of_512_stay_inside_their_tensors() {
    let call = |s, past, batch| {
        with(llama(s, past), |p| (p.head_size, p.batch, p.lse) = (512, batch, past % 2 == 0))
    };
    for (s, past, batch) in [(3, 700, 1), (3, 64, 40), (8, 3000, 2), (200, 0, 3), (70, 130, 1)] {
        for problem in [call(s, past, batch), equal(paged(&call(s, past, batch)))] {
            for splits in [None, Some(5)] {
                let options = PlanOptions { splits, ..PlanOptions::default() };
                let plan = plan(&problem, &device("h200"), &options).unwrap();
                let families: Vec<_> = plan.launches.iter().map(|l| l.entry.family).collect();
                assert!(families.contains(&Family::HopperWide), "{families:?}");
                plan.launches.iter().for_each(|launch| check(&plan, launch));
            }
        }
    }
}

#[test]
fn long_prompts_take_tiles_of_more_rows() {
    for (size, rows, causal, want) in [
        // Six tiles of 192 rows compute a third more masked scores than eight of 128 rows.
        (64, 1024, true, 128),
        (64, 2048, true, 192),
        (64, 2048, false, 192),
        // Those of 192 rows have 96 keys.
        (80, 2048, true, 128),
        (80, 8192, true, 192),
        (96, 2048, true, 128),
        (96, 8192, true, 192),
    ] {
        let prompt = with(llama(rows, 0), |p| {
            (p.head_size, p.causal, p.rotary) = (size, causal, None);
        });
        let rows_of = |problem: &Problem| {
            let plan = plan(problem, &device("h200"), &PlanOptions::default()).unwrap();
            plan.launches.last().unwrap().entry.rows
        };
        assert_eq!(rows_of(&prompt), want, "{rows} rows of {size}, causal {causal}");
        let with_lse = if size == 64 { 128 } else { want };
        assert_eq!(rows_of(&with(prompt, |p| p.lse = true)), with_lse, "log-sum-exp, {size}");
    }
}

/// Queries, keys and values of one call, without a cache; values of another head size than keys.
fn of_sizes(head_size: usize, v_head_size: usize, s: usize) -> Problem {
    let change = |p: ProblemFields| ProblemFields {
        head_size,
        v_head_size,
        cache: CacheBinding::External,
        rotary: None,
        past_capacity: 0,
        capacity: s,
        ..p
    };
    llama(s, 0).derive(change).unwrap()
}

#[test]
fn values_unlike_keys_take_the_tile_with_the_fewest_columns() {
    let name = |p: &Problem| kernels(p, &PlanOptions::default()).join(" ");
    for ([keys, values], want) in [
        ([192, 128], "hopper_f16_d192_v128"),
        ([184, 120], "hopper_f16_d192_v128"),
        ([192, 136], "hopper_f16_d192"),
        ([192, 192], "hopper_f16_d192"),
        ([136, 128], "hopper_f16_d160"),
        ([128, 128], "hopper_f16_d128"),
        ([128, 64], "hopper_f16_d128"),
        ([64, 128], "hopper_f16_d128"),
        ([320, 128], "general"),
        ([192, 100], "general"),
    ] {
        let long = of_sizes(keys, values, 2048);
        assert_eq!(name(&long), want, "{keys}, {values}");
    }
    let call = of_sizes(192, 128, 2048);
    let change = |change: fn(ProblemFields) -> ProblemFields| name(&call.derive(change).unwrap());
    assert_eq!(change(|p| ProblemFields { lse: true, ..p }), "hopper_f16_d192_v128");
    let padded = change(|p| ProblemFields { phase: Phase::PaddedChunk, ..p });
    assert_eq!(padded, "hopper_f16_d192_v128");
    let biased = change(|p| ProblemFields { bias: bias(true, true, 2048), ..p });
    assert_eq!(biased, "hopper_masked_f16_d256");
    // No family with tiles of few rows takes them, nor one that splits keys.
    assert_eq!(name(&of_sizes(192, 128, 1)), "hopper_f16_d192_v128");
    assert_eq!(name(&of_sizes(64, 32, 4096)), "hopper_f16_d64_r128");
    let options = PlanOptions { splits: Some(2), ..PlanOptions::default() };
    assert_eq!(kernels(&call, &options), ["hopper_f16_d192_v128"]);
    let options = PlanOptions { force: Some("gqa_hopper_f16_d96"), ..PlanOptions::default() };
    let error = plan(&of_sizes(96, 64, 2048), &device("h200"), &options).unwrap_err();
    let why = "hopper does not take values of type float16 and size 64 with these keys";
    assert!(error.to_string().ends_with(why), "{error}");
}

/// Tiles of fewer rows have registers left to rotate queries, which saves a launch.
#[test]
fn many_keys_that_all_rows_see_take_larger_tiles() {
    let everywhere = |rows| with(llama(rows, 0), |p| p.causal = false);
    let keys = |p: &Problem| {
        let plan = plan(p, &device("h200"), &PlanOptions::default()).unwrap();
        plan.launches.last().unwrap().entry.keys
    };
    assert_eq!(keys(&everywhere(8192)), 176);
    assert_eq!(keys(&everywhere(8191)), 128);
    assert_eq!(keys(&llama(16384, 0)), 128);
    assert_eq!(keys(&with(everywhere(16384), |p| p.softcap = Some(30.0))), 128);
    assert_eq!(keys(&with(everywhere(16384), |p| p.head_size = 112)), 176);
}

#[test]
fn prompts_that_rotate_take_tiles_of_few_rows_for_longer() {
    for (size, rows, want) in [(64, 2048, 128), (80, 2048, 128), (96, 2048, 128), (64, 4096, 192)] {
        let prompt = with(llama(rows, 0), |p| {
            (p.head_size, p.v_head_size) = (size, size);
            p.rotary = Some(Rotary { dim: size, ..ROTARY });
        });
        let plan = plan(&prompt, &device("h200"), &PlanOptions::default()).unwrap();
        assert_eq!(plan.launches.last().unwrap().entry.rows, want, "{rows} rows of {size}");
    }
}

/// At head size 64 the other kernels of `hopper` sum rounded weights.
#[test]
fn a_log_sum_exp_of_head_size_64_is_exact() {
    for (lse, want) in [(false, "hopper_f16_d64_r128"), (true, "hopper_f16_d64_lse")] {
        let prompt = with(llama(512, 0), |p| (p.head_size, p.lse) = (64, lse));
        let plan = plan(&prompt, &device("h200"), &PlanOptions::default()).unwrap();
        assert_eq!(plan.launches.last().unwrap().entry.name, format!("gqa_{want}"));
    }
}

#[test]
fn many_short_sequences_take_two_blocks_to_a_multiprocessor() {
    let entry = |batch, total: usize, options: &PlanOptions| {
        let step = with(llama(1, total - 1), |p| p.batch = batch);
        plan(&step, &device("h200"), options).unwrap().launches[0].entry.name
    };
    let planned = |batch, total| entry(batch, total, &PlanOptions::default());
    assert_eq!(planned(32, 512), "gqa_decode_f16_d128_r8_w4");
    assert_eq!(planned(32, 8192), "gqa_decode_f16_d128_r8");
    assert_eq!(planned(16, 512), "gqa_decode_f16_d128_r8");
    let codes = |batch, total: usize| {
        let step = with(llama(1, total - 1), |p| p.batch = batch);
        let plan = plan(&quantized(step, CODES[0]), &device("h200"), &PlanOptions::default());
        plan.unwrap().launches[0].entry.name
    };
    assert_eq!(codes(32, 512), "gqa_decode_q8_f16_d128_r16_w4");
    assert_eq!(codes(128, 2048), "gqa_decode_q8_f16_d128_r8");
    // An option that forces the cluster size means full-SM CTAs.
    let alone = PlanOptions { cluster: Some(1), ..PlanOptions::default() };
    assert_eq!(entry(32, 512, &alone), "gqa_decode_f16_d128_r8");
}

/// Over a contiguous cache lengths divide the keys where the caller expects short sequences and
/// there are many; few sequences keep their clusters.
#[test]
fn a_mean_length_divides_the_keys_of_many_sequences() {
    let call = |batch, mean| {
        with(llama(1, 4095), |p| {
            p.batch = batch;
            p.mean_len = mean;
        })
    };
    let on = |p: &Problem, options: &PlanOptions| plan(p, &device("h200"), options).unwrap();
    let step = |batch, mean| on(&call(batch, mean), &PlanOptions::default());
    let parts = |plan: &Plan| step_of(&plan.launches[0].params).parts;
    assert_eq!(parts(&step(64, None)), 0, "nothing says that lengths differ");
    let divided = step(64, Some(1000));
    // Two CTAs on each of 132 SMs, for 8 KV heads.
    assert_eq!(divided.launches[0].entry.name, "gqa_decode_f16_d128_r8_w4");
    assert_eq!((parts(&divided), divided.launches[0].grid), (33, [8, 64 + 33, 1]));
    let step_params = step_of(&divided.launches[0].params);
    assert_eq!(step_params.ahead, 0, "a part may append rows that another one loads");
    assert!(divided.schedule().is_none());
    let division = divided.division(None, &[999; 64]).unwrap().unwrap();
    assert_eq!((division.tiles[0], division.parts.len()), (32, 64));
    for batch in [1, 2, 8] {
        let plan = step(batch, Some(100));
        assert_eq!(parts(&plan), 0, "{batch}");
        assert_eq!(plan.launches[0].params, step(batch, None).launches[0].params, "{batch}");
    }
    let forced = PlanOptions { splits: Some(1), ..PlanOptions::default() };
    assert_eq!(parts(&on(&call(64, Some(1000)), &forced)), 0);
}

/// A decode step, of a launch's parameters.
fn step_of(params: &[u8]) -> DecodeParams {
    bytemuck::pod_read_unaligned::<PagedDecodeParams>(params).decode
}

#[test]
fn keys_are_asked_for_ahead_where_that_is_safe_and_pays() {
    let params = |p: &Problem, options: &PlanOptions| -> DecodeParams {
        let plan = plan(p, &DeviceInfo::h200(), options).unwrap();
        assert_eq!(plan.launches[0].entry.family, Family::Decode);
        step_of(&plan.launches[0].params)
    };
    let planned = |p: &Problem| params(p, &PlanOptions::default());
    let step = |past| llama(1, past);
    assert_eq!(planned(&step(8000)).ahead, 1);
    assert_eq!(planned(&step(1000)).ahead, 0, "hardly more than the first keys");
    assert_eq!(planned(&with(step(8000), |p| p.window = Some(4096))).ahead, 0);
    let parts = PlanOptions { cluster: Some(2), splits: Some(4), ..PlanOptions::default() };
    assert_eq!(params(&step(8000), &parts).ahead, 0, "another cluster reads what one appends");
    assert_eq!(params(&with(step(8000), |p| p.new_len = 0), &parts).ahead, 1);
    assert_eq!(planned(&step(8000)).overlap, overlap::NONE);
    assert_eq!(planned(&with(step(8000), |p| p.prefetch_cache = true)).overlap, overlap::CACHE);
    let normed = with(step(8000), |p| p.qk_norm = Some(QK_NORM));
    let normed = plan(&normed, &DeviceInfo::h200(), &PlanOptions::default()).unwrap();
    let params = step_of(&normed.launches[1].params);
    assert_eq!(params.overlap, overlap::CACHE, "the launch ahead writes scratch");
    let separate =
        with(step(8000), |p| (p.prefetch_cache, p.cache) = (true, CacheBinding::Separate));
    let plan = plan(&separate, &DeviceInfo::h200(), &PlanOptions::default()).unwrap();
    let (attention, ahead) = plan.launches.split_last().unwrap();
    assert_eq!((attention.entry.family, ahead.is_empty()), (Family::Decode, false));
    let params = step_of(&attention.params);
    assert_eq!(params.overlap, overlap::NONE, "the launch ahead writes the cache");
}

#[test]
fn refusals_name_their_reason() {
    let off = PlanOptions::default();
    let no_flash = PlanOptions { disable_flash_attention: true, ..off.clone() };
    let no_decode = PlanOptions { disable_flash_decode: true, ..off.clone() };
    let scores = |p: &mut ProblemFields| p.output_qk = QkOutput::BeforeSoftmax;
    let with_bias = |p: &mut ProblemFields| p.bias = bias(false, true, p.total_len);
    for (problem, device, options, family, want) in [
        (float32(64, 0), "h200", &off, Family::Tiled, "does not take float32"),
        (
            with(llama(64, 0), |p| p.head_size = 264),
            "h200",
            &off,
            Family::TiledF32,
            "does not take float16",
        ),
        (
            with(float32(64, 0), |p| p.head_size = 200),
            "h200",
            &off,
            Family::TiledF32,
            "head size 200 is over 192",
        ),
        (
            float32(64, 0),
            "t4",
            &off,
            Family::TiledF32,
            "needs compute capability 8.0, the device has 7.5",
        ),
        (
            float32(64, 0),
            "h200",
            &no_flash,
            Family::TiledF32,
            "switched off by GQA_DISABLE_FLASH_ATTENTION",
        ),
        (
            with(llama(64, 0), with_bias),
            "h200",
            &off,
            Family::Hopper,
            "does not take attention_bias",
        ),
        (llama(64, 0), "h200", &off, Family::HopperMasked, "not needed"),
        (llama(64, 0), "a100", &off, Family::HopperMasked, "there is no attention_bias"),
        (
            with(llama(64, 0), with_bias),
            "a100",
            &off,
            Family::HopperMasked,
            "needs compute capability 9.0",
        ),
        (
            with(with(llama(16, 0), with_bias), |p| p.batch = 32),
            "h200",
            &off,
            Family::HopperMasked,
            "16 query rows are under 64",
        ),
        (
            with(llama(64, 0), with_bias),
            "h200",
            &no_flash,
            Family::HopperMasked,
            "switched off by GQA_DISABLE_FLASH_ATTENTION",
        ),
        (with(llama(1, 64), scores), "h200", &off, Family::SplitKv, "does not take output_qk"),
        (
            with(llama(64, 0), |p| p.head_size = 320),
            "h200",
            &off,
            Family::Tiled,
            "head size 320 is over 256",
        ),
        (
            with(with(llama(64, 0), with_bias), |p| p.head_size = 320),
            "h200",
            &off,
            Family::TiledWide,
            "does not take attention_bias",
        ),
        (
            with(llama(64, 0), |p| p.dtype = DType::BF16),
            "t4",
            &off,
            Family::Tiled,
            "needs compute capability 8.0, the device has 7.5",
        ),
        (
            with(llama(64, 0), |p| p.head_size = 256),
            "t4",
            &off,
            Family::Tiled,
            "needs compute capability 8.0, the device has 7.5",
        ),
        (
            llama(64, 0),
            "h200",
            &no_flash,
            Family::Tiled,
            "switched off by GQA_DISABLE_FLASH_ATTENTION",
        ),
        (
            llama(1, 64),
            "h200",
            &no_flash,
            Family::SplitKv,
            "switched off by GQA_DISABLE_FLASH_ATTENTION",
        ),
        (
            llama(1, 64),
            "h200",
            &no_decode,
            Family::SplitKv,
            "switched off by GQA_DISABLE_FLASH_DECODE",
        ),
        (llama(512, 0), "h200", &off, Family::SplitKv, "2048 packed query rows are over 64"),
        (llama(512, 0), "h200", &off, Family::General, "not needed"),
    ] {
        let got = rejection(&problem, device, options, family);
        assert!(got.contains(want), "{got:?} is not {want:?}");
    }
}

#[test]
fn a_block_that_does_not_fit_is_refused() {
    let tiny = DeviceInfo { shared_bytes: 8 << 10, ..device("h200") };
    let problem = with(llama(512, 0), |p| p.head_size = 256);
    let error = plan(&problem, &tiny, &PlanOptions::default()).unwrap_err().to_string();
    assert!(error.contains("a CTA needs") && error.contains("the device has 8192"), "{error}");
}

#[test]
fn a_device_without_multiprocessors_is_refused() {
    let few = |pages| Pages { tokens: 512 + 31, ..pages };
    let mixed = with_pages(over_blocks(32, 512, 2048), few);
    for problem in [mixed, over_blocks(8, 512, 0), llama(1, 4096)] {
        for multiprocessors in [0, u32::MAX] {
            let device = DeviceInfo { multiprocessors, ..device("h200") };
            let error = plan(&problem, &device, &PlanOptions::default()).unwrap_err().to_string();
            assert!(error.contains("device.multiprocessors"), "{error}");
            assert!(error.contains(&multiprocessors.to_string()), "{error}");
        }
        let smallest = DeviceInfo { multiprocessors: 1, ..device("h200") };
        plan(&problem, &smallest, &PlanOptions::default()).unwrap();
    }
}

#[test]
fn options_that_no_kernel_takes_are_refused_by_name() {
    let step = llama(1, 4096);
    let refused =
        |options| plan(&step, &device("h200"), &options).map(|_| ()).unwrap_err().to_string();
    for n in [0, 129, u32::MAX] {
        let error = refused(PlanOptions { splits: Some(n), ..PlanOptions::default() });
        assert!(error.contains("options.splits: got "), "{error}");
    }
    for n in [0, 3, 32, u32::MAX] {
        let error = refused(PlanOptions { cluster: Some(n), ..PlanOptions::default() });
        assert!(error.contains("options.cluster: got "), "{error}");
    }
}

#[test]
fn the_prologue_is_as_short_as_the_call_allows() {
    const ALL: &str = "unpack_qkv_with_rope_and_append_kv";
    let off = PlanOptions::default();
    let separate = |p: &mut ProblemFields| {
        let past = p.total_len - p.new_len;
        (p.cache, p.past_capacity, p.capacity) = (CacheBinding::Separate, past, p.total_len)
    };
    let no_rotary = |p: &mut ProblemFields| p.rotary = None;
    let nothing_new = |p: &mut ProblemFields| p.new_len = 0;
    let interleaved = |p: &mut ProblemFields| {
        p.rotary = Some(Rotary { interleaved: true, ..ROTARY });
    };
    let explicit =
        |p: &mut ProblemFields| p.rotary = Some(Rotary { explicit: Some(512), ..ROTARY });
    let base = || llama(512, 64);
    let small = |p: &mut ProblemFields| {
        (p.head_size, p.v_head_size) = (64, 64);
        p.rotary = Some(Rotary { dim: 64, ..ROTARY });
    };
    // `hopper` rotates queries with implicit positions.
    let elsewhere = || with(base(), explicit);
    for (what, problem, want) in [
        ("shared, rotary", base(), vec!["concat_kv_in_place"]),
        ("packed too", with(base(), |p| p.packed = true), vec!["concat_kv_in_place"]),
        ("shared, interleaved", with(base(), interleaved), vec!["concat_kv_in_place"]),
        ("shared, positions given", elsewhere(), vec![ALL]),
        ("packed too", with(elsewhere(), |p| p.packed = true), vec![ALL]),
        ("three warpgroups", with(llama(4096, 0), small), vec![ALL]),
        ("parts of the keys", llama(64, 4096), vec![ALL]),
        ("shared", with(base(), no_rotary), vec!["concat_kv_in_place"]),
        ("separate, rotary", with(base(), separate), vec!["concat_new_to_past_kv"]),
        (
            "separate, positions given",
            with(elsewhere(), separate),
            vec!["concat_new_to_past_kv", "rotary_embedding"],
        ),
        ("separate", with(with(base(), separate), no_rotary), vec!["concat_new_to_past_kv"]),
        ("nothing new, rotary", with(base(), nothing_new), vec![]),
        ("nothing new, positions given", with(elsewhere(), nothing_new), vec!["rotary_embedding"]),
        ("nothing new", with(with(base(), nothing_new), no_rotary), vec![]),
        (
            "nothing new, separate",
            with(with(elsewhere(), nothing_new), separate),
            vec!["concat_new_to_past_kv", "rotary_embedding"],
        ),
    ] {
        let got = kernels(&problem, &off);
        let before = got.iter().take_while(|name| !name.starts_with("hopper")).copied();
        assert_eq!(before.collect::<Vec<_>>(), want, "{what}");
    }
}

/// One more launch, before all others, whose output they read; also where attention does the rest
/// itself.
#[test]
fn normalisation_comes_first() {
    let norm = |p: &mut ProblemFields| p.qk_norm = Some(QK_NORM);
    let unfused = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    for base in [
        llama(1, 64),
        llama(512, 64),
        llama(64, 4096),
        with(llama(1, 64), |p| p.packed = true),
        with(llama(512, 64), |p| p.packed = true),
        with(llama(1, 64), |p| p.rotary = None),
        with(llama(512, 0), |p| {
            (p.cache, p.past_capacity, p.capacity) = (CacheBinding::Separate, 0, 512)
        }),
        with(llama(1, 64), |p| p.new_len = 0),
    ] {
        for options in [&PlanOptions::default(), &unfused] {
            let normed = with(base.clone(), norm);
            let plan = plan(&normed, &device("h200"), options).unwrap();
            let names: Vec<_> = plan.launches.iter().map(kernel).collect();
            assert_eq!((names[0], &names[1..]), ("qk_norm", &kernels(&base, options)[..]));
            let arguments = plan.launches[1..].iter().flat_map(|launch| &launch.args);
            let given =
                |id| move |arg: &&Arg| matches!(arg, Arg::Tensor { id: it, .. } if *it == id);
            assert_eq!(arguments.clone().filter(given(TensorId::Key)).count(), 0, "{names:?}");
            // Packed, values are still there.
            let queries = arguments.filter(given(TensorId::Query)).count();
            assert_eq!(queries, usize::from(base.packed), "{names:?}");
        }
    }
}

#[test]
fn unfused_every_duty_is_a_launch() {
    let unfused = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let separate = |p: &mut ProblemFields| p.cache = CacheBinding::Separate;
    for (what, problem, want) in [
        (
            "chunk, packed",
            with(llama(512, 64), |p| p.packed = true),
            vec![
                "unpack_qkv",
                "seqlens_to_pos_ids",
                "rotary_embedding",
                "rotary_embedding",
                "concat_kv_in_place",
            ],
        ),
        (
            "prompt",
            llama(512, 0),
            vec!["rotary_embedding", "rotary_embedding", "concat_kv_in_place"],
        ),
        (
            "positions given",
            with(llama(512, 64), |p| p.rotary = Some(Rotary { explicit: Some(512), ..ROTARY })),
            vec!["rotary_embedding", "rotary_embedding", "concat_kv_in_place"],
        ),
        ("no rotary", with(llama(512, 64), |p| p.rotary = None), vec!["concat_kv_in_place"]),
        (
            "separate",
            with(llama(512, 64), separate),
            vec![
                "seqlens_to_pos_ids",
                "rotary_embedding",
                "rotary_embedding",
                "concat_new_to_past_kv",
            ],
        ),
    ] {
        let mut got = kernels(&problem, &unfused);
        got.pop();
        assert_eq!(got, want, "{what}");
    }
}

#[test]
fn positions_are_honoured_generated_or_implied() {
    let explicit =
        |p: &mut ProblemFields| p.rotary = Some(Rotary { explicit: Some(600), ..ROTARY });
    for (problem, fused, want) in [
        (with(llama(512, 64), explicit), true, Some(Positions::Explicit)),
        (with(llama(512, 64), explicit), false, Some(Positions::Explicit)),
        (llama(512, 64), true, Some(Positions::Implicit)),
        (llama(512, 64), false, Some(Positions::Generated)),
        (llama(512, 0), false, Some(Positions::Implicit)),
        (llama(1, 64), false, Some(Positions::Implicit)),
        (with(llama(1, 64), |p| p.rotary = None), true, None),
    ] {
        assert_eq!(positions(&problem, fused), want);
    }
}

#[test]
fn the_keys_of_a_long_sequence_are_split_and_merged() {
    let long = plan(&llama(1, 8000), &device("t4"), &PlanOptions::default()).unwrap();
    let names: Vec<_> = long.launches.iter().map(kernel).collect();
    assert!(names.len() == 3 && names[2].starts_with("combine"), "{names:?}");
    let params: &AttentionParams = bytemuck::from_bytes(&long.launches[1].params);
    assert!(params.splits > 1 && long.launches[1].grid[1] == params.splits);
    // One CTA per SM already: splits gain nothing.
    let wide = with(llama(1, 100), |p| p.batch = 512);
    assert_eq!(plan(&wide, &device("t4"), &PlanOptions::default()).unwrap().launches.len(), 2);
    let seven = PlanOptions { splits: Some(7), ..PlanOptions::default() };
    let forced = plan(&wide, &device("t4"), &seven).unwrap();
    assert_eq!(forced.launches[1].grid[1], 7);
}

#[test]
fn work_tiles_that_leave_a_hopper_idle_are_cut() {
    let off = PlanOptions::default();
    let names = |problem: &Problem| kernels(problem, &off);
    let short = llama(100, 8000);
    assert_eq!(names(&short)[1..], ["hopper_split_f16_d128", "combine"]);
    let plan = plan(&short, &device("h200"), &off).unwrap();
    let params: &AttentionParams = bytemuck::from_bytes(&plan.launches[1].params);
    // One tile of 128 rows for each of 32 heads.
    assert_eq!((params.splits, plan.launches[1].grid), (4, [128, 1, 1]));
    assert_eq!(names(&llama(100, 0))[1..], ["hopper_f16_d128"]);
    let force = Some("gqa_hopper_split_f16_d128");
    let forced = kernels(&llama(100, 0), &PlanOptions { force, ..PlanOptions::default() });
    assert_eq!(forced[1..], ["hopper_split_f16_d128", "combine"]);
    // Lengths may differ.
    let batch = |p| with(p, |p: &mut ProblemFields| p.batch = 4);
    let divided = ["hopper_paged_split_f16_d128", "hopper_paged_merge"];
    assert_eq!(names(&batch(llama(64, 8000)))[1..], divided);
    let unequal = with(batch(short), |p| p.mean_len = Some(2000));
    assert_eq!(names(&unequal)[1..], divided);
    for other in [llama(100, 0), llama(100, 900), llama(100, 8000), llama(200, 8000)] {
        assert_eq!(names(&batch(other))[1..], ["hopper_f16_d128"]);
    }
    let exact = with(batch(llama(100, 8000)), |p| p.lse = true);
    assert_eq!(names(&exact)[1..], ["hopper_f16_d128"]);
}

#[test]
fn output_in_float32_is_written_by_kernels_that_have_it() {
    let off = PlanOptions::default();
    let wide = |problem| with(problem, |p| p.out_dtype = DType::F32);
    let names = |problem: &Problem, name: &str| -> Vec<_> {
        let plan = plan(problem, &device(name), &off).unwrap();
        plan.launches.iter().map(kernel).collect()
    };
    assert_eq!(names(&wide(llama(1, 8000)), "h200"), ["decode_f16_d128_r8"]);
    let prompt = wide(llama(2048, 0));
    assert_eq!(names(&prompt, "h200")[1..], ["hopper_split_f16_d128", "combine"]);
    assert_eq!(names(&prompt, "a100")[1..], ["split_kv_f16_d128", "combine"]);
    assert_eq!(names(&prompt, "v100")[1..], ["general"]);
    // Too few rows for `hopper`, too many for `decode`.
    let few = wide(with(llama(40, 8000), |p| p.kv_heads = 4));
    assert_eq!(names(&few, "h200")[1..], ["split_kv_f16_d128", "combine"]);
    let biased = with(prompt.clone(), |p| p.bias = bias(true, true, 2048));
    assert_eq!(names(&biased, "h200")[1..], ["split_kv_masked_f16_d128", "combine"]);
    let one = PlanOptions { splits: Some(1), ..PlanOptions::default() };
    let merged = plan(&prompt, &device("a100"), &one).unwrap();
    assert_eq!(merged.launches[1].grid[1], 2, "one part alone is rounded");
    let whole = PlanOptions { disable_flash_decode: true, ..PlanOptions::default() };
    let why = rejection(&biased, "h200", &whole, Family::HopperMasked);
    assert_eq!(why, "does not write output in float32");
    let force = PlanOptions { force: Some(find("gqa_tiled_f16_d128")), ..PlanOptions::default() };
    let error = plan(&wide(llama(1, 8000)), &device("h200"), &force).unwrap_err().to_string();
    assert!(error.contains("tiled does not write output in float32"), "{error}");
}

#[test]
fn quantized_output_is_written_or_rounded_behind_attention() {
    let off = PlanOptions::default();
    let float8 = |problem| with(problem, |p| p.out_dtype = DType::F8E4M3);
    let names = |problem: &Problem, name: &str| -> Vec<_> {
        let plan = plan(problem, &device(name), &off).unwrap();
        plan.launches.iter().for_each(|launch| check(&plan, launch));
        plan.launches.iter().map(kernel).collect()
    };
    let behind = "quantize_output";
    assert_eq!(names(&float8(llama(1, 8000)), "h200"), ["decode_f16_d128_r8"]);
    let prompt = float8(llama(2048, 0));
    assert_eq!(names(&prompt, "h200")[1..], ["hopper_f16_d128"]);
    assert_eq!(names(&prompt, "a100")[1..], ["tiled_f16_d128_k64", behind]);
    let float32 = with(prompt.clone(), |p| p.dtype = DType::F32);
    assert_eq!(names(&float32, "h200")[1..], ["tiled_f32_d128", behind]);
    // Parts of the keys are merged in the element type.
    let parts = float8(llama(64, 4096));
    assert_eq!(names(&parts, "h200")[1..], ["hopper_split_f16_d128", "combine", behind]);
    let masked = with(prompt.clone(), |p| p.bias = bias(true, true, 2048));
    assert_eq!(names(&masked, "h200")[1..], ["hopper_masked_f16_d128", behind]);
    let codes = float8(quantized(llama(1, 4096), QuantFormat::Int8));
    assert_eq!(names(&codes, "h200"), ["decode_q8_f16_d128_r8", behind]);
    let sliding = names(&float8(sliding(1, 5000)), "h200");
    assert_eq!(sliding.last(), Some(&"decode_f16_d128_r8"));
    let with_lse = with(prompt, |p| p.lse = true);
    assert_eq!(names(&with_lse, "h200")[1..], ["hopper_f16_d128", behind]);
}

#[test]
fn a_token_step_on_hopper_is_one_launch() {
    let h200 = device("h200");
    let planned = |problem: &Problem, options: PlanOptions| plan(problem, &h200, &options).unwrap();
    let token = planned(&llama(1, 8000), PlanOptions::default());
    assert_eq!(token.launches.len(), 1, "{}", token.explain());
    assert_eq!((token.launches[0].cluster, token.workspace_bytes, token.counters), (8, 0, 0));
    // A separate cache is copied first; disabling the shared cache makes it separate.
    let separate = with(llama(1, 8000), |p| p.cache = CacheBinding::Separate);
    assert!(planned(&separate, PlanOptions::default()).launches.len() > 1);
    let unfused = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    assert!(planned(&llama(1, 8000), unfused).launches.len() > 1);
    // Clusters that share a head's keys are merged through counters, one for each of their CTAs.
    let shared = PlanOptions { cluster: Some(4), splits: Some(3), ..PlanOptions::default() };
    let shared = planned(&llama(1, 8000), shared);
    assert_eq!((shared.launches[0].grid, shared.counters), ([3 * 4, 8, 1], 4 * 8));
}

#[test]
fn force_is_that_kernel_or_an_error() {
    let force = |name: &'static str| PlanOptions { force: Some(name), ..PlanOptions::default() };
    let find_family = |family, dtype| {
        let wanted = |entry: &&Entry| entry.family == family && entry.name.ends_with(dtype);
        gqa_kernels::registry::entries().find(wanted).unwrap().name
    };
    let general = find_family(Family::General, "_f16");
    assert_eq!(attention(&llama(512, 0), "h200", &force(general)), Family::General);
    let why = rejection(&llama(512, 0), "h200", &force(general), Family::Tiled);
    assert_eq!(why, format!("GQA_FORCE={general}"));
    let error = |problem: &Problem, name| {
        plan(problem, &device("h200"), &force(name)).unwrap_err().to_string()
    };
    let wrong_type = error(&llama(512, 0), find_family(Family::General, "_bf16"));
    let bf16 = find_family(Family::General, "_bf16");
    let reason = format!("GQA_FORCE={bf16}, but general does not take float16");
    assert_eq!(wrong_type, format!("no kernel takes this call: {reason}"));
    let not_launched = error(&llama(512, 0), find("gqa_concat_kv_in_place_f16"));
    assert!(not_launched.contains("unpack_qkv_with_rope_and_append_kv"), "{not_launched}");
}

fn find(name: &str) -> &'static str {
    gqa_kernels::registry::find(name).unwrap().name
}

#[test]
fn what_is_switched_off_leaves_the_unfused_kernels() {
    let off = PlanOptions {
        disable_flash_attention: true,
        disable_memory_efficient_attention: true,
        ..PlanOptions::default()
    };
    let unfused = ["concat_kv_in_place", "unfused_scores", "unfused_softmax", "unfused_values"];
    assert_eq!(kernels(&with(llama(1, 64), |p| p.rotary = None), &off), unfused);
    let double = with(llama(1, 64), |p| p.dtype = DType::F64);
    let error = plan(&double, &device("h200"), &off).unwrap_err().to_string();
    assert_eq!(
        error,
        "no kernel takes this call: blackwell_decode switched off by GQA_DISABLE_FLASH_ATTENTION; \
         decode_quantized switched off by GQA_DISABLE_FLASH_ATTENTION; \
         decode switched off by GQA_DISABLE_FLASH_ATTENTION; split_kv switched off by GQA_DISABLE_FLASH_ATTENTION; \
         split_kv_masked switched off by GQA_DISABLE_FLASH_ATTENTION; \
         hopper_float8 switched off by GQA_DISABLE_FLASH_ATTENTION; \
         hopper_quantized switched off by GQA_DISABLE_FLASH_ATTENTION; \
         hopper_paged switched off by GQA_DISABLE_FLASH_ATTENTION; \
         hopper switched off by GQA_DISABLE_FLASH_ATTENTION; \
         hopper_masked switched off by GQA_DISABLE_FLASH_ATTENTION; \
         hopper_wide switched off by GQA_DISABLE_FLASH_ATTENTION; \
         blackwell switched off by GQA_DISABLE_FLASH_ATTENTION; \
         tiled_tma switched off by GQA_DISABLE_FLASH_ATTENTION; \
         tiled switched off by GQA_DISABLE_FLASH_ATTENTION; \
         tiled_masked switched off by GQA_DISABLE_FLASH_ATTENTION; \
         tiled_f32 switched off by GQA_DISABLE_FLASH_ATTENTION; \
         tiled_wide switched off by GQA_DISABLE_FLASH_ATTENTION; \
         latent_mma switched off by GQA_DISABLE_FLASH_ATTENTION; \
         general switched off by GQA_DISABLE_MEMORY_EFFICIENT_ATTENTION; \
         unfused does not take float64"
    );
}

#[test]
fn costs_are_those_of_the_visible_pairs() {
    let prompt = Cost::of(&llama(4, 0));
    assert_eq!(prompt.flops, 4.0 * 32.0 * 128.0 * 10.0);
    let windowed = Cost::of(&with(llama(4, 6), |p| p.window = Some(8)));
    assert_eq!(windowed.flops, 4.0 * 32.0 * 128.0 * (7.0 + 8.0 * 3.0));
    let token = Cost::of(&llama(1, 4095));
    let row = 128.0 * 2.0;
    assert_eq!(token.bytes, 2.0 * 32.0 * row + 2.0 * 8.0 * row * (1.0 + 1.0 + 4095.0));
    assert!(token.is_memory_bound(DType::F16, &DeviceInfo::h200()));
    assert!(!Cost::of(&llama(4096, 0)).is_memory_bound(DType::F16, &DeviceInfo::h200()));
}

/// Row by row this took half a minute for 2^30 rows.
#[test]
fn planning_takes_no_longer_for_more_rows() {
    let rows = 1 << 25;
    let started = std::time::Instant::now();
    let cost = Cost::of(&with(llama(rows, 0), |p| {
        (p.window, p.causal, p.right_window) = (Some(8), false, Some(0));
    }));
    assert_eq!(cost.flops, 4.0 * 32.0 * 128.0 * (8.0 * rows as f64 - 28.0));
    assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
}

#[test]
fn the_explanation_tells_the_whole_plan() {
    let text = plan(&llama(1, 4096), &device("h200"), &PlanOptions::default())
        .unwrap()
        .explain()
        .to_string();
    for part in [
        "token generation",
        "32 query heads over 8 KV heads",
        "chosen",
        "not needed",
        "query",
        "workspace",
        "roofline",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

/// All combinations of a few values of everything that a plan depends on.
fn problems() -> impl Iterator<Item = Problem> {
    let shapes = [(1, 40, 0), (3, 1, 70), (2, 9, 33), (1, 200, 0), (2, 3, 900)];
    let kinds = 0..(shapes.len() * 64);
    kinds.map(move |kind| {
        let (batch, s, past) = shapes[kind / 64];
        let bit = |i: usize| kind >> i & 1 == 1;
        with(llama(s, past), |p| {
            p.batch = batch;
            (p.q_heads, p.kv_heads) = if bit(0) { (6, 2) } else { (8, 8) };
            p.head_size = [160, 40, 264][usize::from(bit(1)) << usize::from(kind % 3 == 1)];
            p.rotary =
                bit(2).then_some(Rotary { dim: 32, explicit: bit(3).then_some(s + 2), ..ROTARY });
            p.packed = bit(4);
            p.lse = bit(5);
            let separate = bit(3) ^ bit(5);
            p.cache = if separate { CacheBinding::Separate } else { CacheBinding::Shared };
            p.past_capacity = if separate { past } else { past + s + 5 };
            p.capacity = if separate { past + s } else { past + s + 5 };
            p.dtype = [DType::F16, DType::BF16, DType::F32][kind % 3];
            p.out_dtype = if kind % 8 == 5 { DType::F32 } else { p.dtype };
            p.bias = bias(bit(0), bit(1), past + s).filter(|_| kind % 5 == 1);
            p.output_qk = if kind % 7 == 1 { QkOutput::AfterSoftmax } else { QkOutput::None };
            p.sink = if kind % 4 == 3 { Sink::PerHead } else { Sink::None };
            if kind % 11 == 0 && !p.packed {
                p.layout = Layout::Bnsh;
            }
            if kind % 13 == 0 && past > 0 && !p.packed {
                p.new_len = 0;
            }
            if kind % 6 > 2 {
                let format = CODES[kind % 3];
                p.quantized = Some(Quantization { format, scales: SCALES[kind / 3 % 3] });
                // Quantized heads in blocks are whole vectors.
                p.head_size = [64, 128, 40, 264, 96, 192][kind / 2 % 6];
                if kind % 4 == 1 {
                    p.head_size = p.head_size.next_multiple_of(32);
                }
                p.float8_products = true;
                let rotates = p.head_size % 16 == 0;
                let rotary = p.rotary.filter(|_| rotates);
                p.rotary = rotary.map(|rotary| Rotary { dim: 16, ..rotary });
            }
            if kind % 4 == 2 && p.output_qk == QkOutput::None && p.new_len > 0 {
                let rows = [1, 7, 50, 600][kind / 4 % 4];
                (p.slides, p.window, p.prefetch_cache) = (true, Some(rows), true);
                (p.past_capacity, p.capacity) = (rows + kind % 3, rows + kind % 3);
                p.head_size = if p.quantized.is_some() { 64 } else { p.head_size };
            }
            if kind % 5 == 2 && p.head_size % 8 == 0 {
                p.out_dtype = DType::F8E4M3;
            }
            if kind % 4 == 1 && p.output_qk == QkOutput::None {
                (p.v_head_size, p.v_dtype) = (p.head_size, p.dtype);
                *p = (*paged(&Problem::new(p.clone()).unwrap())).clone();
            }
            if kind % 3 == 2 && p.cache == CacheBinding::Shared && !p.slides {
                let of_rows = |how| Quantization { scales: Scales::PerToken, ..how };
                p.quantized = p.quantized.map(of_rows);
            }
            if kind % 7 == 3 && s <= 64 && p.window.is_none() && p.output_qk == QkOutput::None {
                (p.tree_mask, p.causal, p.bias) = (true, false, None);
            }
        })
    })
}

/// Other head sizes use the next larger kernel with padding, also with 99 KB of shared memory;
/// except for quantized rows that are not multiples of a vector.
#[test]
fn a_step_pads_heads_that_have_no_kernel_of_their_own() {
    let off = without_tensor_memory();
    let of_size = |p: Problem, size| {
        with(p, |p| {
            p.head_size = size;
            p.rotary = p.rotary.map(|rotary| Rotary { dim: 32, ..rotary });
        })
    };
    for size in [80, 96, 112, 160, 192, 224] {
        let tile = if size < 128 { "d128_r16_w4" } else { "d256_r8_w4" };
        let paged = of_size(over_blocks(8, 1, 500), size);
        let mut steps = vec![(paged.clone(), format!("decode_padded_f16_{tile}"))];
        for (format, name) in CODES.into_iter().zip(["q8", "i4", "q8", "i4"]) {
            if name != "i4" || size % 32 == 0 {
                let step = of_size(quantized(llama(1, 4096), format), size);
                steps.push((step, format!("decode_padded_{name}_f16_{tile}")));
                let step = quantized(paged.clone(), format);
                steps.push((step, format!("decode_padded_{name}_f16_{tile}")));
            }
        }
        for (problem, want) in &steps {
            for name in ["h100", "b300", "thor", "a100", "orin", "rtx4090", "gb10"] {
                let plan = plan(problem, &device(name), &off).unwrap();
                let kernels: Vec<_> = plan.launches.iter().map(kernel).collect();
                assert_eq!(kernels, [want], "head size {size} on {name}");
            }
        }
    }
    let halves = of_size(quantized(llama(1, 4096), QuantFormat::Int4), 80);
    let why = rejection(&halves, "h200", &off, Family::DecodeQuantized);
    assert_eq!(why, "has no tile for head size 80");
}

const CODES: [QuantFormat; 4] = QuantFormat::ALL;
const SCALES: [Scales; 3] = [Scales::PerTensor, Scales::PerHead, Scales::PerChannel];

fn quantized(problem: Problem, format: QuantFormat) -> Problem {
    with(problem, |p| p.quantized = Some(Quantization { format, scales: Scales::PerTensor }))
}

/// With 72 full-size CTAs, some pairs of SMs would have two and some one.
#[test]
fn nine_long_sequences_of_8_bits_take_clusters_of_four() {
    let cluster = |format, past| {
        let p = with(quantized(llama(1, past), format), |p| p.batch = 9);
        plan(&p, &device("h200"), &PlanOptions::default()).unwrap().launches[0].cluster
    };
    for format in CODES {
        let long = if format.bits() == 4 { 1 } else { 4 };
        assert_eq!([cluster(format, 1023), cluster(format, 8191)], [1, long], "{format:?}");
    }
}

#[test]
fn a_step_reads_codes_where_it_can() {
    let off = PlanOptions::default();
    for (format, kernel) in CODES.into_iter().zip(["q8", "i4", "q8", "i4"]) {
        let step = quantized(llama(1, 4096), format);
        assert_eq!(kernels(&step, &off), [format!("decode_{kernel}_f16_d128_r8")]);
        let normed = with(step.clone(), |p| p.qk_norm = Some(QK_NORM));
        assert_eq!(kernels(&normed, &off).len(), 2);
    }
    let step = |change: fn(&mut ProblemFields)| with(quantized(llama(1, 4096), CODES[0]), change);
    let by = |kernel: &str, p: &Problem, why: &str| {
        let kernels = kernels(p, &off);
        assert!(kernels.contains(&kernel), "{kernels:?}");
        assert_eq!(rejection(p, "h200", &off, Family::DecodeQuantized), why);
    };
    let apart = step(|p| p.cache = CacheBinding::Separate);
    by("quantize_kv", &apart, "past and present are not one cache");
    let staged = |p: &Problem, why: &str| by("append_dequantized", p, why);
    staged(&step(|p| p.head_size = 72), "has no tile for head size 72");
    staged(&step(|p| p.out_dtype = DType::F32), "does not write output in float32");
    staged(&step(|p| p.dtype = DType::F32), "does not take float32");
    staged(&quantized(llama(1024, 0), CODES[0]), "4096 packed query rows are over 128");
    assert_eq!(
        rejection(&llama(1, 4096), "h200", &off, Family::DecodeQuantized),
        "the KV cache is not quantized"
    );
    let t4 = rejection(&step(|_| ()), "t4", &off, Family::DecodeQuantized);
    assert_eq!(t4, "needs compute capability 8.0, the device has 7.5");
}

#[test]
fn rows_with_scales_of_their_own_are_read_by_decode_alone() {
    let off = PlanOptions::default();
    let of_rows = |problem: Problem, format| {
        let how = Quantization { format, scales: Scales::PerToken };
        with(problem, |p| p.quantized = Some(how))
    };
    for (format, kernel) in CODES.into_iter().zip(["q8", "i4", "q8", "i4"]) {
        let step = of_rows(llama(1, 4096), format);
        assert_eq!(kernels(&step, &off), [format!("decode_{kernel}_f16_d128_r8")]);
        let paged = of_rows(over_blocks(8, 1, 500), format);
        assert_eq!(kernels(&paged, &off), [format!("decode_{kernel}_f16_d128_r8")]);
    }
    let of_size = |size| {
        with(of_rows(llama(3, 4096), CODES[0]), |p| (p.head_size, p.v_head_size) = (size, size))
    };
    assert_eq!(kernels(&of_size(80), &off), ["decode_padded_q8_f16_d128_r16_w4"]);
    assert_eq!(kernels(&of_size(192), &off), ["decode_padded_q8_f16_d256_r8_w4"]);
    assert_eq!(kernels(&of_size(256), &off), ["decode_q8_f16_d256_r16"]);
    let prompt = of_rows(llama(512, 7680), CODES[2]);
    let prompt = with(prompt, |p| p.float8_products = true);
    assert!(kernels(&prompt, &off).contains(&"append_dequantized_rows"));
    for family in [Family::HopperQuantized, Family::HopperFloat8] {
        let why = rejection(&prompt, "h200", &off, family);
        assert_eq!(why, "does not take per-token scales");
    }
}

#[test]
fn products_of_float8_where_they_are_allowed() {
    let off = PlanOptions::default();
    let apart = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let prompt = with(quantized(llama(512, 7680), CODES[2]), |p| p.float8_products = true);
    let attends = ["float8_operands", "hopper_float8_f16_d128"];
    assert_eq!(kernels(&prompt, &off), attends);
    assert_eq!(kernels(&with(prompt.clone(), |p| p.head_size = 80), &off), attends);
    let wide = with(prompt.clone(), |p| (p.head_size, p.v_head_size) = (256, 256));
    assert_eq!(kernels(&wide, &off), [attends[0], "hopper_float8_f16_d256"]);
    let normed = with(prompt.clone(), |p| p.qk_norm = Some(QK_NORM));
    assert_eq!(kernels(&normed, &off), ["qk_norm", attends[0], attends[1]]);
    let separate = with(prompt.clone(), |p| p.cache = CacheBinding::Separate);
    let before = |p, options, kernel| {
        let kernels = kernels(p, options);
        assert_eq!(kernels[kernels.len() - 3..], [kernel, attends[0], attends[1]]);
    };
    before(&separate, &off, "quantize_kv");
    before(&prompt, &apart, "append_dequantized");
    let refused = |change: fn(&mut ProblemFields), why: &str| {
        let problem = with(prompt.clone(), change);
        assert_eq!(rejection(&problem, "h200", &off, Family::HopperFloat8), why);
    };
    refused(|p| p.float8_products = false, "the call does not allow float8 products");
    refused(|p| p.quantized = None, "the KV cache is not quantized");
    for size in [64, 88, 192, 272] {
        let problem = with(prompt.clone(), |p| p.head_size = size);
        let got = rejection(&problem, "h200", &off, Family::HopperFloat8);
        assert_eq!(got, format!("has no tile for head size {size}"));
    }
    refused(|p| p.lse = true, "does not take lse");
    refused(|p| p.softcap = Some(30.0), "does not take softcap");
    refused(|p| p.scale = -1.0, "scale -1 is not positive");
    refused(|p| p.out_dtype = DType::F32, "does not write output in float32");
    refused(|p| p.dtype = DType::F32, "does not take float32");
    let int8 = with(prompt.clone(), |p| {
        p.quantized = Some(Quantization { format: CODES[0], scales: Scales::PerTensor });
    });
    let why = rejection(&int8, "h200", &off, Family::HopperFloat8);
    assert_eq!(why, "does not take a KV cache of int8");
    let a100 = rejection(&prompt, "a100", &off, Family::HopperFloat8);
    assert_eq!(a100, "needs compute capability 9.0, the device has 8.0");
}

#[test]
fn products_of_float8_where_they_pay() {
    let off = PlanOptions::default();
    let prompt = |size, rows, past| {
        with(quantized(llama(rows, past), CODES[2]), |p| {
            p.float8_products = true;
            (p.head_size, p.v_head_size) = (size, size);
        })
    };
    let taken = |p: &Problem| kernels(p, &off)[0] == "float8_operands";
    let why = |p: &Problem| rejection(p, "h200", &off, Family::HopperFloat8);
    assert!(taken(&prompt(128, 512, 7680)) && taken(&prompt(256, 512, 3584)));
    assert_eq!(why(&prompt(128, 512, 7679)), "8191 keys are under 8192");
    assert_eq!(why(&prompt(256, 512, 3583)), "4095 keys are under 4096");
    // Rows that read the quantized cache directly, or leave half of the SMs idle.
    let batch = with(prompt(128, 256, 7936), |p| (p.batch, p.dtype) = (8, DType::BF16));
    assert_eq!(why(&batch), "1024 query rows are under 1025");
    assert_eq!(kernels(&batch, &off)[1..], ["hopper_quantized_f8_bf16_d128"]);
    let splits = "does not split keys; this call needs 2 splits";
    assert_eq!(why(&prompt(256, 256, 7936)), splits);
    assert!(taken(&prompt(256, 384, 7808)));
    let force = Some("gqa_hopper_float8_f16_d128");
    let forced = PlanOptions { force, ..PlanOptions::default() };
    assert_eq!(kernels(&prompt(128, 512, 512), &forced)[0], "float8_operands");
}

/// One kernel takes several formats, of which its parameters name one.
#[test]
fn launches_are_told_what_a_cache_holds() {
    for format in CODES {
        let first = |p: Problem| {
            let plan = plan(&quantized(p, format), &device("h200"), &PlanOptions::default());
            plan.unwrap().launches[0].params.clone()
        };
        let step = step_of(&first(llama(1, 4096)));
        let steps: PagedDecodeParams = bytemuck::pod_read_unaligned(&first(over_blocks(8, 1, 500)));
        let prompt: PrologueParams = bytemuck::pod_read_unaligned(&first(llama(1024, 0)));
        let prompts = first(equal(over_blocks(8, 1024, 512)));
        let prompts: PagedParams = bytemuck::pod_read_unaligned(&prompts);
        let told = [step.format, steps.decode.format, prompt.format, prompts.format];
        assert_eq!(told, [format as u32; 4], "{format}");
    }
}

#[test]
fn codes_become_numbers_behind_all_that_appends() {
    let off = PlanOptions::default();
    let kernels_of = |p: &Problem| kernels(p, &off);
    let prompt = quantized(llama(1024, 0), CODES[1]);
    let rotated = with(prompt.clone(), |p| p.rotary = Some(ROTARY));
    let attention = "hopper_f16_d128";
    assert_eq!(kernels_of(&prompt), ["append_dequantized", attention]);
    assert_eq!(kernels_of(&rotated), ["append_dequantized", attention]);
    let separate = with(prompt, |p| p.cache = CacheBinding::Separate);
    assert_eq!(kernels_of(&separate), ["concat_kv_in_place", "quantize_kv", attention]);
    let complete = with(quantized(llama(1024, 1024), CODES[1]), |p| p.new_len = 0);
    assert_eq!(kernels_of(&complete), ["append_dequantized", attention]);
    // Attention reads scratch memory only.
    let plan = plan(&rotated, &device("h200"), &off).unwrap();
    let reads_cache = |launch: &&Launch| {
        let is_present = |arg: &Arg| match arg {
            Arg::Tensor { id, .. } | Arg::Map(TensorMap { id: Some(id), .. }) => id.is_present(),
            _ => false,
        };
        launch.args.iter().any(is_present)
    };
    let readers: Vec<_> = plan.launches.iter().filter(reads_cache).map(kernel).collect();
    assert_eq!(readers, ["append_dequantized"]);
}

/// A call with a rolling cache of 1024 rows and a window of 1000.
fn sliding(s: usize, past: usize) -> Problem {
    with(llama(s, past), |p| {
        (p.slides, p.window) = (true, Some(1000));
        (p.past_capacity, p.capacity) = (1024, 1024);
    })
}

#[test]
fn rows_move_around_the_call() {
    let off = PlanOptions::default();
    let kernels_of = |p: Problem| kernels(&p, &off);
    let step = "decode_f16_d128_r8";
    assert_eq!(kernels_of(sliding(1, 2000)), ["rolling_kv", step]);
    assert_eq!(
        kernels_of(sliding(512, 2000)),
        [
            "rolling_lengths",
            "concat_new_to_past_kv",
            "rotary_embedding",
            "hopper_f16_d128",
            "rolling_kv"
        ]
    );
    assert_eq!(
        kernels_of(sliding(2048, 0)),
        ["concat_new_to_past_kv", "hopper_f16_d128", "rolling_kv"]
    );
    let biased = with(sliding(1, 2000), |p| p.bias = bias(true, true, 2001));
    assert_eq!(kernels_of(biased)[..2], ["rolling_kv", "rolling_bias"]);
    // As long as every sequence fits the cache, the call is an ordinary one.
    assert_eq!(kernels_of(sliding(1, 1023)), [step]);
    assert_eq!(kernels_of(sliding(512, 512)), kernels_of(llama(512, 512)));
    let codes = quantized(sliding(1, 2000), CODES[0]);
    assert_eq!(kernels_of(codes), ["rolling_kv", "decode_q8_f16_d128_r8"]);
}

#[test]
fn a_step_of_a_sliding_cache_is_planned_for_the_cache() {
    let plan = plan(&sliding(1, 100_000), &device("h200"), &PlanOptions::default()).unwrap();
    assert_eq!(plan.positions, Some(Positions::Slid));
    let step = step_of(&plan.launches[1].params);
    assert_eq!((step.attention.capacity, step.attention.window), (1024, 1000));
    let within = planned(&sliding(1, 100_000), 1);
    assert_eq!(within, planned(&sliding(1, 5000), 1));
}

/// The call on a paged KV cache of 64 rows.
fn paged(p: &Problem) -> Problem {
    let per_sequence = p.total_len.div_ceil(64) + 1;
    let tokens = if p.q_len == 1 { p.batch } else { p.q_len + p.batch };
    let pages = Pages {
        tokens,
        blocks: p.batch * per_sequence,
        block_size: 64,
        per_sequence,
        slots: false,
        counts_new: false,
        one_each: p.q_len == 1,
        scheduled: false,
        consecutive: false,
    };
    p.derive(|call| ProblemFields {
        pages: Some(pages),
        new_len: p.q_len,
        past_capacity: p.total_len,
        capacity: p.total_len,
        phase: if p.q_len == 1 { Phase::TokenGeneration } else { Phase::SubsequentPrompt },
        cache: CacheBinding::Shared,
        layout: Layout::Bsnh,
        bias: None,
        out_dtype: p.dtype,
        rotary: p.rotary.map(|rotary| Rotary { explicit: None, ..rotary }),
        ..call
    })
    .unwrap()
}

/// `past` keys and `s` tokens of each of `batch` sequences, on a paged KV cache.
fn over_blocks(batch: usize, s: usize, past: usize) -> Problem {
    paged(&with(llama(s, past), |p| p.batch = batch))
}

/// All sequences have as many tokens.
fn equal(p: Problem) -> Problem {
    let tokens = p.batch * p.q_len;
    with(p, |p| p.pages = p.pages.map(|pages| Pages { tokens, ..pages }))
}

fn with_pages(p: Problem, change: impl FnOnce(Pages) -> Pages) -> Problem {
    with(p, |p| p.pages = p.pages.map(change))
}

#[test]
fn blocks_are_read_where_they_are() {
    let kernels_of = |p: Problem| kernels(&p, &PlanOptions::default());
    assert_eq!(kernels_of(over_blocks(8, 1, 500)), ["decode_f16_d128_r8"]);
    let normed = |p: Problem| with(p, |p| p.qk_norm = Some(QK_NORM));
    assert_eq!(kernels_of(normed(over_blocks(8, 1, 500))), ["qk_norm", "decode_f16_d128_r8"]);
    let codes = quantized(over_blocks(8, 1, 500), CODES[0]);
    assert_eq!(kernels_of(codes), ["decode_q8_f16_d128_r8"]);
    let prompt = ["paged_append", "hopper_paged_f16_d128"];
    assert_eq!(kernels_of(over_blocks(1, 512, 512)), prompt);
    assert_eq!(kernels_of(equal(over_blocks(8, 512, 512))), prompt);
    assert_eq!(kernels_of(normed(equal(over_blocks(8, 512, 0))))[1..], prompt);
    let slots = |p| with_pages(p, |pages| Pages { slots: true, ..pages });
    assert_eq!(kernels_of(slots(equal(over_blocks(8, 512, 512)))), prompt);
    assert_eq!(kernels_of(over_blocks(8, 2, 500)), ["decode_f16_d128_r8"]);
    let slotted = ["paged_append", "decode_f16_d128_r8"];
    assert_eq!(kernels_of(slots(over_blocks(8, 1, 500))), slotted);
    // Without an append no launch precedes attention, unless queries rotate.
    let appended = |p: Problem| p.appended();
    assert_eq!(kernels_of(appended(over_blocks(8, 1, 500))), slotted[1..]);
    assert_eq!(kernels_of(appended(equal(over_blocks(8, 512, 512)))), prompt[1..]);
    let gathered = |rotary| {
        let p = with(over_blocks(8, 1, 500), |p| p.rotary = rotary);
        kernels_of(appended(with_pages(p, |pages| Pages { block_size: 48, ..pages })))
    };
    assert_eq!(gathered(None)[0], "paged_gather");
    assert_eq!(gathered(Some(ROTARY))[..2], ["paged_append", "paged_gather"]);
    // With many sequences, reading keys per query head is faster than gathering them.
    assert_eq!(kernels_of(equal(over_blocks(8, 40, 500))), prompt);
    let wide = |p: Problem, size| with(p, |p| (p.head_size, p.v_head_size) = (size, size));
    let padded = ["decode_padded_f16_d128_r16_w4"];
    assert_eq!(kernels_of(wide(over_blocks(8, 1, 500), 80)), padded);
    let [step, prompt] = ["decode_padded_f16_d256_r8_w4", "hopper_paged_f16_d256"];
    let mixed = kernels_of(wide(over_blocks(8, 64, 500), 248));
    assert_eq!(mixed, [step, "paged_append", prompt]);
}

/// Where the cache has all rows, QK-norm is for queries alone: there are no keys.
#[test]
fn queries_over_blocks_are_normalised_without_keys() {
    let call = with(over_blocks(2, 3, 900), |p| (p.new_len, p.qk_norm) = (0, Some(QK_NORM)));
    let plan = plan(&call, &device("h200"), &PlanOptions::default()).unwrap();
    assert_eq!(plan.launches[0].entry.role, Role::QkNorm);
    plan.launches.iter().for_each(|launch| check(&plan, launch));
}

#[test]
fn tokens_beside_a_prompt_have_a_kernel_of_their_own() {
    let mixed = |tokens: usize| {
        let pages = |p| with(p, |p| p.pages = p.pages.map(|pages| Pages { tokens, ..pages }));
        pages(over_blocks(32, 512, 2048))
    };
    let off = PlanOptions::default();
    let [step, prompt] = ["decode_f16_d128_r8_w4", "hopper_paged_f16_d128"];
    assert_eq!(kernels(&mixed(512 + 31), &off), ["paged_append", prompt, step, prompt]);
    let plan = plan(&mixed(512 + 31), &device("h200"), &off).unwrap();
    let [_, first, step, last] = &plan.launches[..] else { panic!("four launches") };
    let few: &PagedDecodeParams = bytemuck::from_bytes(&step.params);
    // Two tokens of four heads fill its rows; the cache already holds the keys.
    assert_eq!((few.decode.attention.q_len, few.longest, few.decode.new_len), (2, 512, 0));
    // Each of these overlaps the one ahead of it.
    assert_eq!([first, step, last].map(|launch| launch.overlaps), [false, true, true]);
    assert_eq!([first, step, last].map(|launch| launch.programmatic), [false, true, true]);
    assert!([first, step, last].iter().all(|launch| !launch.concurrent));
    assert_eq!(few.decode.overlap, overlap::ALL);
    // Half of the SMs saturate memory.
    assert_eq!((first.grid[0], last.grid[0]), (66, 132 - 66));
    for (launch, helps) in [(first, 0), (last, 1)] {
        let many: &PagedHopperParams = bytemuck::from_bytes(&launch.params);
        assert_eq!((many.hopper.attention.q_len, many.least), (512, 3));
        assert_eq!((many.primary, many.secondary, many.is_secondary), (66, 132 - 66, helps));
    }
    // Four tokens per sequence fill sixteen rows, eight fill 32.
    for (tokens, step) in [(4, "decode_padded_f16_d128_r16_w4"), (8, "decode_f16_d128_r32_w4")] {
        let several = mixed(512 + 31 * tokens);
        assert_eq!(kernels(&several, &off), ["paged_append", prompt, step, prompt]);
    }
    // One SM has no room for two kernels, and no launch is empty.
    let single = DeviceInfo { multiprocessors: 1, ..device("h200") };
    let plan = super::plan(&mixed(512 + 31), &single, &off).unwrap();
    assert!(plan.launches.iter().all(|launch| !launch.overlaps && launch.grid[0] > 0));
    // If no sequence can be short, no kernel serves short ones.
    let prompts = ["paged_append", "hopper_paged_f16_d128"];
    assert_eq!(kernels(&mixed(32 * 512 - 500), &off), prompts);
    let disabled = PlanOptions { disable_flash_decode: true, ..PlanOptions::default() };
    assert_eq!(kernels(&mixed(512 + 31), &disabled), prompts);
}

/// Sequences of few tokens are decode steps, unless the numbers say that each has several.
#[test]
fn single_tokens_take_the_smallest_row_tile() {
    let kernel = |tokens: usize| {
        let p = with_pages(over_blocks(44, 128, 384), |pages| Pages { tokens, ..pages });
        let all = kernels(&p, &PlanOptions::default());
        all.into_iter().find(|name| name.contains("decode"))
    };
    assert_eq!(kernel(40 + 4 * 128), Some("decode_f16_d128_r8_w4"));
    assert_eq!(kernel(40 + 4 * 100), Some("decode_f16_d128_r8_w4"));
    assert_eq!(kernel(41 * 3 + 3 * 128), Some("decode_padded_f16_d128_r16_w4"));
}

/// A cache without room for as many keys of every sequence says that lengths differ.
#[test]
fn lengths_divide_the_keys_of_steps() {
    let step = |batch: usize, keys: usize, mean: usize| {
        let p = over_blocks(batch, 1, keys - 1);
        with_pages(p, |pages| Pages { blocks: batch * mean.div_ceil(64), ..pages })
    };
    let parts = |p: &Problem, options: &PlanOptions| {
        let plan = plan(p, &device("h200"), options).unwrap();
        let [launch] = &plan.launches[..] else { panic!("one launch") };
        let params: &PagedDecodeParams = bytemuck::from_bytes(&launch.params);
        (params.decode.parts, launch.grid, plan.counters)
    };
    let off = PlanOptions::default();
    // 33 places for blocks of each KV head, of which 8 sequences take one each or several.
    let few = parts(&step(8, 8192, 2048), &off);
    assert_eq!(few, (33, [8, 33, 1], 8 * 2 * 33));
    // More sequences than places, and parts of split ones.
    let many = parts(&step(64, 30_000, 4000), &off);
    assert_eq!(many, (33, [8, 64 + 33, 1], 8 * 2 * 33));
    // All may be as long as the longest, keys are few, there is nothing to divide, or the caller
    // says how.
    let forced = PlanOptions { splits: Some(2), ..PlanOptions::default() };
    let others = [
        (step(8, 8192, 8192), &off),
        (step(8, 1024, 300), &off),
        (step(1, 8192, 8192), &off),
        (step(8, 8192, 2048), &forced),
    ];
    for (i, (p, options)) in others.iter().enumerate() {
        assert_eq!(parts(p, options).0, 0, "call {i}");
    }
    // If dividing can lose little time, keys are divided whatever the size of the cache.
    assert_eq!(parts(&step(32, 32_768, 32_768), &off).0, 33);
}

/// One launch divides the work of a long sequence, and of those beside it.
#[test]
fn a_long_sequence_beside_a_prompt_is_split() {
    let beside = |steps: usize, keys: usize| {
        let p = over_blocks(1 + steps, 512, keys - 512);
        with_pages(p, |pages| Pages { tokens: 512 + steps, ..pages })
    };
    let off = PlanOptions::default();
    let split = ["paged_append", "hopper_paged_split_f16_d128", "hopper_paged_merge"];
    assert_eq!(kernels(&beside(1, 32_768), &off), split);
    assert_eq!(kernels(&beside(31, 32_768), &off), split);
    // Many steps are done sooner by a kernel of their own, unless one of them is very long.
    assert_ne!(kernels(&beside(31, 2048), &off), split);
    let plan = plan(&beside(1, 32_768), &device("h200"), &off).unwrap();
    let p: &PagedHopperParams = bytemuck::from_bytes(&plan.launches[1].params);
    assert_eq!((p.tile_heads, p.ctas, p.shortest, p.keys), (4, 132, 2, 128));
    let grids = [1, 2].map(|launch| plan.launches[launch].grid);
    assert_eq!(grids, [[132, 1, 1], [132, 8, 1]]);
    // No more CTAs than there may be pieces of two key tiles of 34, in row tiles of 16 tokens: the
    // device may find all tokens in one sequence, or as many in each as the longest has.
    let ctas = |tokens: usize| {
        let p = with(over_blocks(2, 20, 4096), |p| (p.q_heads, p.kv_heads) = (8, 1));
        let p = with_pages(p, |pages| Pages { tokens, ..pages });
        bytemuck::from_bytes::<PagedHopperParams>(&planned(&p, 1).1).ctas
    };
    assert_eq!([21, 40].map(ctas), [3 * 17, 4 * 17]);
    // Scratch memory is bounded by the SMs, however long sequences may be.
    let workspace = plan.workspace_bytes;
    assert!((16 << 20..18 << 20).contains(&workspace), "{workspace} bytes");
}

/// Query heads share row tiles that few tokens would leave almost empty.
#[test]
fn few_tokens_fill_row_tiles_of_several_heads() {
    let heads = |group: usize, tokens: usize| {
        let p = with(over_blocks(4, tokens, 8192), |p| p.q_heads = group * p.kv_heads);
        let plan = plan(&p, &device("h200"), &PlanOptions::default()).unwrap();
        let launch = plan.launches.iter().find(|launch| kernel(launch).contains("split")).unwrap();
        bytemuck::from_bytes::<PagedHopperParams>(&launch.params).tile_heads
    };
    assert_eq!(heads(8, 40), 8);
    assert_eq!(heads(7, 40), 7);
    assert_eq!(heads(5, 100), 5);
}

/// Unless all heads run at a time and have few keys.
#[test]
fn few_keys_are_read_by_every_head() {
    let chunk = |keys: usize| {
        let p = with(over_blocks(1, 22, keys - 22), |p| p.q_heads = 64);
        kernels(&p, &PlanOptions::default()).into_iter().find(|name| name.contains("hopper"))
    };
    let [one, several] = ["hopper_paged_f16_d128", "hopper_paged_split_f16_d128"];
    assert_eq!([512, 513].map(chunk), [Some(one), Some(several)]);
}

/// A separate launch costs less than a few row tiles with one token each.
#[test]
fn few_sequences_come_apart_from_a_prompt() {
    let mixed = |steps: usize, keys: usize| {
        let p = over_blocks(steps + 1, 64, keys - 64);
        with_pages(p, |pages| Pages { tokens: steps + 64, ..pages })
    };
    let off = PlanOptions::default();
    let rest = ["paged_append", "hopper_paged_f16_d128"];
    assert_eq!(kernels(&mixed(1, 512), &off), rest);
    assert_eq!(kernels(&mixed(6, 364), &off)[1..], rest);
}

/// Where nothing is appended, prefill overlaps the decode kernel that begins first: in two streams
/// it would take all SMs before that.
#[test]
fn prefill_overlaps_decode_that_is_the_first_launch() {
    let mixed = |steps: usize, tokens: usize| {
        let p = over_blocks(1 + steps, tokens, 512);
        let p = with_pages(p, |pages| Pages { tokens: tokens + steps, ..pages });
        let p = with(p, |p| (p.new_len, p.rotary) = (0, None));
        let plan = plan(&p, &device("h200"), &PlanOptions::default()).unwrap();
        plan.launches.iter().for_each(|launch| check(&plan, launch));
        plan
    };
    let [one, many] = ["decode_f16_d128_r8_w4", "hopper_paged_f16_d128"];
    for (steps, tokens, step) in [(8, 1024, one), (2, 4096, "decode_f16_d128_r8")] {
        let plan = mixed(steps, tokens);
        assert_eq!(plan.launches.iter().map(kernel).collect::<Vec<_>>(), [step, many]);
        let [few, prompt] = &plan.launches[..] else { panic!("two launches") };
        // No clusters, which would let the next launch start only when they end.
        assert_eq!((few.cluster, few.concurrent, few.overlaps), (1, false, false));
        assert!(prompt.overlaps && prompt.programmatic && !prompt.concurrent);
        let p: &PagedHopperParams = bytemuck::from_bytes(&prompt.params);
        assert_eq!((p.primary, p.secondary, p.is_secondary), (0, 132, 1));
        assert_eq!(prompt.grid, [132, 1, 1]);
    }
}

/// With few keys the decode kernel starts first. It appends its own rows, except by slot_mapping.
#[test]
fn decode_begins_first_in_short_mixed_batches() {
    let p = with_pages(over_blocks(32, 512, 2048), |pages| Pages { tokens: 512 + 31, ..pages });
    let short = with(p, |p| p.total_len = 540);
    let slots = with_pages(short.clone(), |pages| Pages { slots: true, ..pages });
    let off = PlanOptions::default();
    let [append, prompt] = ["paged_append", "hopper_paged_f16_d128"];
    let step = "decode_f16_d128_r8_w4";
    assert_eq!(kernels(&short, &off), [step, append, prompt]);
    assert_eq!(kernels(&slots, &off), [append, step, prompt]);
    for (problem, [step, append], numbers) in [(short, [0, 1], (2, 3)), (slots, [1, 0], (0, 0))] {
        let launches = plan(&problem, &device("h200"), &off).unwrap().launches;
        let concurrent = [step, append, 2].map(|launch| launches[launch].concurrent);
        assert_eq!((concurrent, launches[step].programmatic), ([true, false, false], false));
        let few: &PagedDecodeParams = bytemuck::from_bytes(&launches[step].params);
        let appended: &PagedParams = bytemuck::from_bytes(&launches[append].params);
        assert_eq!((few.decode.new_len, appended.least), numbers);
    }
}

/// Half-SM CTAs where they have few keys or are many, unless an option overrides it.
#[test]
fn decode_beside_prefill_is_in_halves_of_sms() {
    let mixed = |steps: usize, total: usize| {
        let tokens = 128 + steps;
        with(over_blocks(steps + 1, 128, total - 128), |p| {
            p.pages = p.pages.map(|pages| Pages { tokens, ..pages });
        })
    };
    let off = PlanOptions::default();
    let [half, whole] = ["decode_f16_d128_r8_w4", "decode_f16_d128_r8"];
    let rest = ["paged_append", "hopper_paged_f16_d128"];
    assert_eq!(kernels(&mixed(8, 512), &off), [half, rest[0], rest[1]]);
    assert_eq!(kernels(&mixed(4, 1100), &off), [half, rest[0], rest[1]]);
    assert_eq!(kernels(&mixed(2, 4100), &off)[1], "hopper_paged_split_f16_d128");
    let alone = PlanOptions { cluster: Some(1), ..PlanOptions::default() };
    assert_eq!(kernels(&mixed(8, 512), &alone), [whole, rest[0], rest[1]]);
}

#[test]
fn blocks_are_gathered() {
    let off = PlanOptions::default();
    let rejections = |p: &Problem, [step, prompt]: [&str; 2]| {
        assert_eq!(kernels(p, &off)[..2], ["paged_append", "paged_gather"]);
        assert_eq!(rejection(p, "h200", &off, Family::Decode), step);
        assert_eq!(rejection(p, "h200", &off, Family::HopperPaged), prompt);
    };
    let new = "17 new rows are over 16";
    let wide = with(over_blocks(1, 17, 500), |p| (p.head_size, p.v_head_size) = (192, 192));
    assert_eq!(rejection(&wide, "h200", &off, Family::Decode), new);
    assert_eq!(kernels(&wide, &off)[1], "hopper_paged_split_f16_d192");
    let odd = |p| with_pages(p, |pages| Pages { block_size: 48, ..pages });
    let why = "the block size 48 is not a power of two of 16 or more";
    rejections(&odd(over_blocks(8, 1, 500)), [why, why]);
    rejections(&odd(over_blocks(8, 512, 512)), [why, why]);
    assert_eq!(
        kernels(&odd(over_blocks(8, 512, 512)), &off),
        ["paged_append", "paged_gather", "hopper_f16_d128", "paged_scatter", "paged_gaps"]
    );
    let unfused = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    let why = rejection(&over_blocks(8, 512, 0), "h200", &unfused, Family::HopperPaged);
    assert_eq!(why, "switched off by GQA_DISABLE_FUSED_KV");
    let codes = |s| quantized(over_blocks(8, s, 512), CODES[0]);
    assert_eq!(kernels(&codes(2), &off), ["decode_q8_f16_d128_r8"]);
}

/// The work of few tokens after many quantized keys is divided as well, and keys are converted on
/// their way.
#[test]
fn few_tokens_after_quantized_keys_are_divided() {
    let off = PlanOptions::default();
    let divided = |kernel| ["paged_append_quantized", kernel, "hopper_paged_merge"];
    let of = |dtype, how| quantized(with(over_blocks(1, 33, 512), |p| p.dtype = dtype), how);
    let of_halves = divided("hopper_paged_quantized_split_f16_d128");
    assert_eq!(kernels(&of(DType::F16, CODES[0]), &off), of_halves);
    let of_float8 = divided("hopper_paged_quantized_split_f8_bf16_d128");
    assert_eq!(kernels(&of(DType::BF16, CODES[2]), &off), of_float8);
    // One launch takes the decode steps beside it, too, unless these have very many keys.
    let beside = |steps: usize, keys: usize| {
        let mixed = quantized(over_blocks(1 + steps, 256, keys), CODES[0]);
        kernels(&with_pages(mixed, |pages| Pages { tokens: 256 + steps, ..pages }), &off)
    };
    assert_eq!(beside(2, 2000), of_halves);
    let apart = beside(31, 30_000);
    assert_eq!(apart[0], "decode_q8_f16_d128_r16_w4");
    assert_eq!(apart[1..], of_halves);
}

/// Of a quantized cache the keys of long prompts are copied, which then are divided; those of
/// sequences of few tokens stay as they are.
#[test]
fn long_quantized_sequences_are_copied_and_divided() {
    let off = PlanOptions::default();
    let divided = [
        "paged_append_quantized",
        "paged_dequantize",
        "hopper_paged_split_f16_d128",
        "hopper_paged_merge",
        "paged_gaps",
    ];
    let mixed = quantized(over_blocks(32, 512, 30_000), CODES[0]);
    let mixed = with_pages(mixed, |pages| Pages { tokens: 512 + 31, ..pages });
    let plan = plan(&mixed, &device("h200"), &off).unwrap();
    let [step, others @ ..] = &plan.launches[..] else { panic!("launches") };
    assert_eq!(kernel(step), "decode_q8_f16_d128_r16_w4");
    assert!(step.concurrent && others.iter().all(|launch| !launch.concurrent));
    assert_eq!(others.iter().map(kernel).collect::<Vec<_>>(), divided);
    let many: &PagedHopperParams = bytemuck::from_bytes(&others[2].params);
    let few: &PagedDecodeParams = bytemuck::from_bytes(&step.params);
    assert_eq!(many.least, few.decode.attention.q_len + 1);
}

/// For chunks of few rows, each row tile converts the quantized values.
#[test]
fn chunks_read_quantized_blocks() {
    let off = PlanOptions::default();
    let append = "paged_append_quantized";
    let chunks = |how, rows| quantized(equal(over_blocks(8, rows, 2048)), how);
    let kernel = "hopper_paged_quantized_f16_d128";
    assert_eq!(kernels(&chunks(CODES[0], 256), &off), [append, kernel]);
    assert_eq!(kernels(&chunks(CODES[1], 256), &off), [append, kernel]);
    let refused = |p: &Problem, why: &str| {
        assert_eq!(rejection(p, "h200", &off, Family::HopperPagedQuantized), why);
        assert_eq!(kernels(p, &off)[1..2], ["paged_dequantize"]);
    };
    refused(&chunks(CODES[0], 257), "1028 packed query rows are over 1024");
    let small = with(chunks(CODES[0], 256), |p| (p.head_size, p.v_head_size) = (96, 96));
    refused(&small, "has no tile for head size 96");
    let large = with(chunks(CODES[0], 256), |p| (p.head_size, p.v_head_size) = (256, 256));
    refused(&large, "head size 256 is over 128");
    let force = Some("gqa_hopper_paged_quantized_f16_d128");
    let forced = PlanOptions { force, ..PlanOptions::default() };
    assert_eq!(kernels(&chunks(CODES[0], 257), &forced), [append, kernel]);
}

/// The same over a contiguous cache, to which a launch appends quantized values.
#[test]
fn chunks_read_quantized_caches() {
    let off = PlanOptions::default();
    let chunk = |rows| quantized(llama(rows, 7680), CODES[0]);
    let chunks = |rows| with(chunk(rows), |p| p.batch = 8);
    let kernel = "hopper_quantized_f16_d128";
    assert_eq!(kernels(&chunks(128), &off), ["append_quantized", kernel]);
    let refused = |p: &Problem, why: &str| {
        assert_eq!(rejection(p, "h200", &off, Family::HopperQuantized), why);
    };
    refused(&chunks(256), "1024 packed query rows are over 512");
    refused(&chunk(128), "does not split keys; this call needs 4 splits");
    let asked =
        PlanOptions { splits: Some(3), disable_flash_decode: true, ..PlanOptions::default() };
    assert!(kernels(&chunk(512), &asked).contains(&"hopper_split_f16_d128"));
    refused(&llama(512, 7680), "the KV cache is not quantized");
    let apart = with(chunks(128), |p| p.cache = CacheBinding::Separate);
    refused(&apart, "past and present are not one cache");
}

/// Float8 keys are multiplied directly if queries are bfloat16, so that more chunks read the cache
/// in place.
#[test]
fn chunks_are_multiplied_by_keys_of_float8() {
    let off = PlanOptions::default();
    let of = |dtype, p| quantized(with(p, |p| (p.dtype, p.batch) = (dtype, 8)), CODES[2]);
    let chunks = |dtype, rows| of(dtype, llama(rows, 7680));
    let [bf16, f16] = ["hopper_quantized_f8_bf16_d128", "hopper_quantized_f16_d128"];
    assert_eq!(kernels(&chunks(DType::BF16, 256), &off)[1..], [bf16]);
    assert_eq!(kernels(&chunks(DType::F16, 128), &off)[1..], [f16]);
    assert_eq!(kernels(&chunks(DType::F16, 256), &off)[1..], ["hopper_f16_d128"]);
    let why = rejection(&chunks(DType::BF16, 257), "h200", &off, Family::HopperQuantized);
    assert_eq!(why, "1028 packed query rows are over 1024");
    let blocks = |rows| of(DType::BF16, equal(over_blocks(8, rows, 2048)));
    assert_eq!(kernels(&blocks(512), &off)[1..], ["hopper_paged_quantized_f8_bf16_d128"]);
    let prompt = ["hopper_paged_bf16_d128", "paged_gaps"];
    assert_eq!(kernels(&blocks(513), &off)[2..], prompt);
}

/// On GPUs without wgmma, for any lengths, and with log-sum-exps.
#[test]
fn blocks_are_read_where_they_are_without_wgmma() {
    let off = PlanOptions::default();
    let on = |name: &str, p: &Problem, options: &PlanOptions| -> Vec<_> {
        plan(p, &device(name), options).unwrap().launches.iter().map(kernel).collect()
    };
    let prompt = ["paged_append", "tiled_paged_f16_d128"];
    let wide = |p: Problem, size| with(p, |p| (p.head_size, p.v_head_size) = (size, size));
    let by_tensor_memory = ["paged_append", "blackwell_paged_f16_d128"];
    for name in ["b200", "b300"] {
        // Nothing rotates queries ahead of it.
        let ragged = over_blocks(8, 512, 512);
        assert_eq!(on(name, &ragged, &off), prompt, "{name}");
        let ragged = with(ragged, |p| p.rotary = None);
        let codes = quantized(ragged.clone(), CODES[0]);
        let lse = with(ragged.clone(), |p| p.lse = true);
        assert_eq!(on(name, &ragged, &off), by_tensor_memory, "{name}");
        assert_eq!(on(name, &lse, &off), by_tensor_memory, "{name}");
        assert_eq!(on(name, &ragged.appended(), &off), by_tensor_memory[1..], "{name}");
        let [append, dequantize] = ["paged_append_quantized", "paged_dequantize"];
        let launches = [append, dequantize, by_tensor_memory[1], "paged_gaps"];
        assert_eq!(on(name, &codes, &off), launches, "{name}");
    }
    for name in ["a100", "rtx3090", "rtx4090", "rtx5090"] {
        assert_eq!(on(name, &over_blocks(8, 512, 512), &off), prompt, "{name}");
        let lse = with(over_blocks(8, 512, 512), |p| p.lse = true);
        assert_eq!(on(name, &lse, &off), prompt, "{name}");
        let large = wide(over_blocks(8, 512, 512), 248);
        assert_eq!(on(name, &large, &off)[1..], ["tiled_paged_f16_d256"], "{name}");
    }
    let appended = over_blocks(8, 512, 512).appended();
    assert_eq!(on("a100", &appended, &off), prompt[1..]);
    let odd = with_pages(over_blocks(8, 512, 512), |pages| Pages { block_size: 48, ..pages });
    assert_eq!(on("a100", &odd, &off)[1], "paged_gather");
    let codes = quantized(over_blocks(8, 512, 512), CODES[0]);
    let [append, dequantize] = ["paged_append_quantized", "paged_dequantize"];
    let launches = [append, dequantize, "tiled_paged_f16_d128", "paged_gaps"];
    assert_eq!(on("a100", &codes, &off), launches);
    // One decode step per sequence and a prefill; no other launch shares the tile queue.
    let mixed = with_pages(over_blocks(64, 512, 8192), |pages| Pages { tokens: 575, ..pages });
    let [append, tiled] = prompt;
    assert_eq!(on("a100", &mixed, &off), ["decode_f16_d128_r8", append, tiled]);
    let many = plan(&mixed, &device("a100"), &off).unwrap().launches;
    let many: &PagedTiledParams = bytemuck::from_bytes(&many[2].params);
    assert_eq!((many.tokens, many.least, many.log_block_size), (575, 3, 6));
    // The Hopper kernel does not take every call either.
    let scaled = with(over_blocks(8, 512, 512), |p| p.scale = -1.0);
    assert_eq!(on("h200", &scaled, &off), prompt);
    let why = rejection(&scaled, "h200", &off, Family::HopperPaged);
    assert_eq!(why, "scale -1 is not positive");
    let why = rejection(&scaled, "h200", &off, Family::Decode);
    assert_eq!(why, "2048 packed query rows are over 128");
    // Splits of the keys fill more SMs where rows are few.
    let few = with(over_blocks(1, 40, 8000), |p| p.q_heads = p.kv_heads);
    let why = rejection(&few, "a100", &off, Family::TiledPaged);
    assert!(why.starts_with("does not split keys"), "{why}");
    let lse = with(over_blocks(8, 512, 512), |p| p.lse = true);
    assert_eq!(on("h200", &lse, &off)[1..], ["paged_append", "hopper_paged_f16_d128"]);
    let few = with(over_blocks(8, 40, 512), |p| (p.q_heads, p.lse) = (64, true));
    let why = rejection(&few, "h200", &off, Family::TiledPaged);
    assert_eq!(why, "kernels with wgmma are faster over gathered rows");
    let force = Some("gqa_tiled_paged_f16_d128");
    let forced = PlanOptions { force, ..PlanOptions::default() };
    assert_eq!(on("h200", &over_blocks(8, 512, 512), &forced), prompt);
    let switched = PlanOptions { disable_flash_attention: true, ..PlanOptions::default() };
    let why = rejection(&over_blocks(8, 512, 0), "a100", &switched, Family::TiledPaged);
    assert_eq!(why, "switched off by GQA_DISABLE_FLASH_ATTENTION");
}

/// Kernels compute as many tokens of a sequence as its blocks have rows, so that no plan is made
/// for more.
#[test]
fn tokens_have_rows_in_their_blocks() {
    let layer = Layer::new(DType::F32, Heads { query: 2, kv: 2, size: 64 });
    for (call, want) in [
        // A tree of 5 drafts over blocks for 2 rows.
        (
            Paged::new(1, 5, [2, 2, 1]).most_tokens(5).total_lengths().appended().tree_mask(),
            "most_tokens: got 5; allowed: up to 2, the rows of 1 blocks of 2",
        ),
        (
            Paged::decode(2, [2, 16, 0]),
            "blocks_per_sequence: got 0; allowed: 1 or more, as there are tokens",
        ),
    ] {
        assert_eq!(layer.paged(call).unwrap_err().to_string(), want);
    }
    // Of several sequences, where nothing is said of the longest.
    let several = layer.paged(Paged::new(4, 12, [100, 4, 1])).unwrap();
    assert_eq!((several.q_len, several.capacity), (4, 4));
}

/// A call of `sequences` sequences of `[tokens, keys]` over packed keys and values.
fn in_rows(sequences: usize, [tokens, keys]: [usize; 2], values: usize) -> Paged {
    Paged::in_rows(sequences, sequences * tokens, sequences * keys)
        .most_tokens(tokens)
        .longest(keys)
        .value_size(values)
}

/// Packed keys and values are read where they are.
#[test]
fn packed_keys_stay_where_they_are() {
    let off = PlanOptions::default();
    let layer = |size| Layer::new(DType::BF16, Heads { query: 16, kv: 16, size });
    let names = |name: &str, p: &Problem| -> Vec<_> {
        plan(p, &device(name), &off).unwrap().launches.iter().map(kernel).collect()
    };
    let latent = ["hopper_paged_bf16_d192_v128"];
    for (call, causal) in [
        (in_rows(32, [512, 512], 128), true),
        (in_rows(32, [512, 512], 128).log_sum_exp(), true),
        (in_rows(8, [2048, 4096], 128), false),
        (in_rows(8, [2048, 100], 128).log_sum_exp(), false),
        (in_rows(8, [1, 4096], 128), true),
    ] {
        let layer = if causal { layer(192) } else { layer(192).bidirectional() };
        assert_eq!(names("h200", &layer.paged(call).unwrap()), latent, "{call:?}");
    }
    for (size, lse, kernel) in [
        (64, false, "hopper_paged_bf16_d64"),
        (64, true, "hopper_paged_bf16_d64_lse"),
        (128, true, "hopper_paged_bf16_d128"),
        (256, true, "hopper_paged_bf16_d256"),
    ] {
        let call = in_rows(8, [2048, 2048], size);
        let call = if lse { call.log_sum_exp() } else { call };
        let problem = layer(size).bidirectional().paged(call).unwrap();
        assert_eq!(names("h200", &problem), [kernel], "{size}");
    }
    let alike = layer(128).paged(in_rows(8, [512, 512], 128)).unwrap();
    let copied = names("a100", &alike);
    assert_eq!(copied[..2], ["paged_append", "paged_gather"], "{copied:?}");
    let why = rejection(&alike, "a100", &off, Family::TiledPaged);
    assert_eq!(why, "does not read packed keys and values");
    let unlike = layer(192).paged(in_rows(8, [512, 512], 128)).unwrap();
    let error = plan(&unlike, &device("a100"), &off).unwrap_err().to_string();
    assert!(error.contains("values that lie unlike their keys"), "{error}");
    assert!(error.contains("hopper_paged needs compute capability 9.0"), "{error}");
}

/// A box of a key tile begins anywhere in the rows of all sequences.
#[test]
fn packed_keys_are_one_block() {
    let part = |row| RowStrides { batch: 0, head: 320, row };
    let call = in_rows(4, [512, 600], 128).row_strides([part(5120), part(5120)]);
    let layer = Layer::new(DType::BF16, Heads { query: 16, kv: 16, size: 192 });
    let problem = layer.paged(call).unwrap();
    let plan = plan(&problem, &device("h200"), &PlanOptions::default()).unwrap();
    let launch = &plan.launches[0];
    let map =
        |name| match launch.entry.arguments.iter().zip(&launch.args).find(|(n, _)| **n == name) {
            Some((_, Arg::Map(map))) => *map,
            found => panic!("{found:?}"),
        };
    let (k, v) = (map("k"), map("v"));
    assert_eq!((k.size, v.size), ([192, 2400, 16, 1], [128, 2400, 16, 1]));
    assert_eq!((k.stride, k.tile), ([10240, 640, 0], [128, 1]));
    let p: &PagedHopperParams = bytemuck::from_bytes(&launch.params);
    assert_eq!((p.log_block_size, p.per_sequence, p.blocks), (31, 1, 2400));
    let table = plan.tensors.iter().find(|(id, _)| *id == TensorId::BlockTable);
    assert_eq!(table.map(|(_, spec)| spec.shape.clone()), Some(vec![4, 1]));
}

/// For prefills, dequantized values are written to new blocks, whatever the block size of the
/// cache.
#[test]
fn codes_in_blocks_become_numbers_in_blocks() {
    let off = PlanOptions::default();
    let codes = |p| quantized(p, CODES[0]);
    let [append, numbers] = ["paged_append_quantized", "paged_dequantize"];
    let [prompt, gaps] = ["hopper_paged_f16_d128", "paged_gaps"];
    let prompts = [append, numbers, prompt, gaps];
    assert_eq!(kernels(&codes(equal(over_blocks(8, 1024, 512))), &off), prompts);
    let odd = with_pages(codes(equal(over_blocks(8, 512, 512))), |pages| Pages {
        block_size: 48,
        ..pages
    });
    assert_eq!(kernels(&odd, &off), prompts);
    let mixed = with_pages(codes(over_blocks(32, 1024, 8192)), |pages| Pages {
        tokens: 1024 + 31,
        ..pages
    });
    let step = "decode_q8_f16_d128_r16_w4";
    let plan = plan(&mixed, &device("h200"), &off).unwrap();
    assert_eq!(kernels(&mixed, &off), [append, numbers, prompt, step, prompt, gaps]);
    // Only sequences of prompts are dequantized.
    let paged: &PagedParams = bytemuck::from_bytes(&plan.launches[1].params);
    let many: &PagedHopperParams = bytemuck::from_bytes(&plan.launches[2].params);
    assert_eq!((paged.least, many.least), (3, 3));
    assert_eq!((many.log_block_size, many.per_sequence, many.blocks), (8, 36, 1152));
    assert!(plan.launches[3].overlaps && plan.launches[4].overlaps);
}

/// Grid and parameters of a launch.
fn planned(problem: &Problem, launch: usize) -> ([u32; 3], Vec<u8>) {
    let plan = plan(problem, &device("h200"), &PlanOptions::default()).unwrap();
    (plan.launches[launch].grid, plan.launches[launch].params.clone())
}

#[test]
fn arguments_lie_inside_their_tensors() {
    let devices = ["h200", "a100", "v100"].map(device);
    let options = [
        PlanOptions::default(),
        PlanOptions { disable_fused_kv: true, splits: Some(5), ..PlanOptions::default() },
        PlanOptions {
            disable_flash_attention: true,
            disable_memory_efficient_attention: true,
            ..PlanOptions::default()
        },
    ];
    let mut launches = 0;
    for problem in problems() {
        for (device, options) in devices.iter().zip(&options) {
            let plan = plan(&problem, device, options).unwrap();
            plan.launches.iter().for_each(|launch| check(&plan, launch));
            plan.schedule.iter().for_each(|launch| check(&plan, launch));
            launches += plan.launches.len();
        }
    }
    assert!(launches > 1500, "{launches}");
}

/// What decides the bits of a sequence's results: kernels, clusters, and parts of the keys.
fn deciding(p: &Problem, gpu: &str) -> Option<Vec<(&'static str, u32, u32)>> {
    let plan = plan(p, &device(gpu), &PlanOptions::default()).ok()?;
    let attends = plan.launches().iter().filter(|launch| launch.entry.role.leads());
    let deciding = |launch: &Launch| {
        let is_step = launch.entry.name.contains("decode");
        let partials = launch.entry.arguments.iter().position(|name| *name == "partial_out");
        let splits = match partials.map(|number| launch.args[number]) {
            Some(Arg::Workspace { .. }) if is_step => launch.grid[0] / launch.cluster,
            _ => 1,
        };
        (launch.entry.name, launch.cluster, splits)
    };
    Some(attends.map(deciding).collect())
}

/// The kernels of a batch-invariant call do not depend on how many sequences there are, nor over a
/// paged KV cache on their bounds.
#[test]
fn batch_invariant_kernels_are_those_of_any_batch() {
    let invariant = |p: Problem| with(p, |p| p.batch_invariant = true);
    for gpu in ["h200", "a100", "rtx-4090"] {
        for codes in [None, Some(CODES[0])] {
            let of = |p: Problem| match codes {
                Some(how) => quantized(p, how),
                None => p,
            };
            let paged = |batch, s, past| deciding(&invariant(of(over_blocks(batch, s, past))), gpu);
            let (step, prompt) = (paged(1, 1, 100).unwrap(), paged(1, 70, 100).unwrap());
            assert!(
                step.len() == 1 && prompt.len() == 2 && prompt.contains(&step[0]),
                "{prompt:?}"
            );
            for (batch, past) in [(2, 0), (3, 40_000), (64, 2100), (700, 300)] {
                assert_eq!(paged(batch, 1, past).as_ref(), Some(&step), "{gpu} {batch} x {past}");
                assert_eq!(paged(batch, 3, past).as_ref(), Some(&prompt), "{gpu} {batch} x {past}");
                let long = paged(batch, 2000, past);
                assert_eq!(long.as_ref(), Some(&prompt), "{gpu} {batch} x {past}");
            }
            for (s, past) in [(1, 100), (1, 8191), (4, 4000), (16, 500), (100, 900), (3000, 0)] {
                let dense = |batch| {
                    let p = with(llama(s, past), |p| p.batch = batch);
                    deciding(&invariant(of(p)), gpu).unwrap()
                };
                for batch in [2, 9, 64, 500] {
                    assert_eq!(dense(batch), dense(1), "{gpu} {s} after {past}, {batch}");
                }
            }
        }
    }
    // Without batch invariance the kernels would differ.
    let usual = |batch| {
        let p = with(llama(1, 8191), |p| p.batch = batch);
        deciding(&p, "h200")
    };
    assert_ne!(usual(1), usual(64));
    assert_ne!(
        deciding(&over_blocks(1, 1, 100), "h200"),
        deciding(&over_blocks(64, 1, 2100), "h200")
    );
    let error = |p: Problem| {
        let planned = plan(&invariant(p), &device("h200"), &PlanOptions::default());
        planned.unwrap_err().to_string()
    };
    let odd = with_pages(over_blocks(8, 1, 500), |pages| Pages { block_size: 48, ..pages });
    let trees = with(over_blocks(8, 1, 500), |p| (p.tree_mask, p.causal) = (true, false));
    for p in [odd, trees] {
        let told = error(p);
        assert!(told.starts_with("batch_invariant: got true; allowed: false"), "{told}");
    }
}

/// The kernel that makes a schedule, and those that read it, stay within it; other plans have none.
#[test]
fn schedules_belong_to_steps_that_divide_keys() {
    let step = |batch, keys: usize, mean: usize| {
        let blocks = batch * mean.div_ceil(64);
        let p = over_blocks(batch, 1, keys - 1);
        with_pages(p, |pages| Pages { blocks, scheduled: true, ..pages })
    };
    let codes = CODES.map(|how| quantized(step(8, 65_536, 2048), how));
    let divided = [step(8, 8192, 2048), step(65, 30_000, 4000)].into_iter().chain(codes);
    let off = PlanOptions::default();
    for p in divided {
        let plan = plan(&p, &device("h200"), &off).unwrap();
        let [launch] = &plan.launches[..] else { panic!("one launch") };
        let schedule = plan.schedule().unwrap();
        let is_read = |arg: &Arg| matches!(arg, Arg::Tensor { id: TensorId::Schedule, .. });
        assert!(launch.args.iter().any(is_read) && schedule.args.iter().any(is_read));
        [launch, schedule].into_iter().for_each(|launch| check(&plan, launch));
    }
    let without = with_pages(step(8, 8192, 2048), |pages| Pages { scheduled: false, ..pages });
    let whole = [step(8, 1024, 300), step(1, 8192, 8192), without, over_blocks(8, 128, 384)];
    for p in whole {
        let plan = plan(&p, &device("h200"), &off).unwrap();
        assert!(plan.schedule().is_none());
        plan.launches.iter().for_each(|launch| check(&plan, launch));
    }
}

/// So do those of kernels that split prefill, unless decode steps beside them divide keys.
#[test]
fn schedules_belong_to_prefill_that_is_divided() {
    let scheduled = |p| with_pages(p, |pages| Pages { scheduled: true, ..pages });
    let made = |p: &Problem| plan(p, &device("h200"), &PlanOptions::default()).unwrap();
    let is_read = |arg: &Arg| matches!(arg, Arg::Tensor { id: TensorId::Schedule, .. });
    for p in [over_blocks(4, 40, 8192), quantized(over_blocks(4, 40, 8192), CODES[0])] {
        let plan = made(&scheduled(p.clone()));
        let schedule = plan.schedule().unwrap();
        assert!(kernel(schedule).contains("hopper_paged_schedule"));
        let mut read = plan.launches.iter().filter(|launch| launch.args.iter().any(is_read));
        assert!(kernel(read.next().unwrap()).contains("split") && read.next().is_none());
        plan.launches.iter().chain([schedule]).for_each(|launch| check(&plan, launch));
        assert!(made(&p).schedule().is_none());
    }
}

/// Where schedules are checked, one of other lengths is an error, and so is a changed word.
#[test]
fn a_stale_schedule_of_prefill_is_found() {
    let p = with_pages(over_blocks(4, 40, 8192), |pages| Pages { scheduled: true, ..pages });
    let device = DeviceInfo { multiprocessors: 3, ..device("h200") };
    let plan = plan(&p, &device, &PlanOptions::default()).unwrap();
    let params = plan.schedule().unwrap().params();
    let params: PagedHopperParams = bytemuck::pod_read_unaligned(params);
    let (starts, lengths) = ([0, 40, 41, 41, 43], [5000, 1, 0, 130]);
    let made = |lengths: &[i32]| -> Vec<i32> {
        let words = hopper::made(&starts, lengths, &params, 0).unwrap();
        words.into_iter().map(|word| word as i32).collect()
    };
    let check = |words: &[i32]| {
        let given = [
            (TensorId::Schedule, words),
            (TensorId::SeqlensK, &lengths),
            (TensorId::CumulativeSequenceLength, &starts),
        ];
        let views = given.into_iter().map(|(id, words)| (id, TensorView::I32(words)));
        plan.check_schedule(&views.collect())
    };
    let mut right = made(&lengths);
    check(&right).unwrap();
    let told = check(&made(&[5000, 2, 0, 130])).unwrap_err().to_string();
    assert!(told.starts_with("schedule: got another word 18; allowed: "), "{told}");
    right[30] ^= 1;
    assert!(check(&right).is_err());
    // No kernel reads what is behind the ranges.
    right[30] ^= 1;
    *right.last_mut().unwrap() ^= 1;
    check(&right).unwrap();
}

/// Compares the bytes that each argument's strides and counts reach with its size.
fn check(plan: &Plan, launch: &Launch) {
    let [x, y, z] = launch.grid;
    assert!(x > 0 && x <= i32::MAX as u32 && (1..=65535).contains(&y) && (1..=65535).contains(&z));
    assert_eq!(launch.params.len(), launch.entry.params_bytes);
    let (role, kernel) = (launch.entry.role, launch.entry.name);
    let element = match launch.entry.dtype {
        gqa_kernels::num::DType::F32 => 4,
        _ => 2,
    };
    for (name, arg) in launch.entry.arguments.iter().zip(&launch.args) {
        let has = match *arg {
            Arg::Null => continue,
            Arg::Tensor { id, offset } => {
                let spec = id.spec(&plan.problem);
                let none = || panic!("{kernel} {name}: there is no {id:?}\n{:?}", plan.problem);
                reached(&plan.problem, id, &spec.unwrap_or_else(none)) - offset
            }
            Arg::Map(map) => {
                let of =
                    |id: TensorId| reached(&plan.problem, id, &id.spec(&plan.problem).unwrap());
                let bytes = map.id.map_or(plan.workspace_bytes, of);
                assert!(map.offset + map.bytes <= bytes && map.offset % 16 == 0);
                assert!(map.stride.iter().all(|stride| stride % 16 == 0));
                continue;
            }
            Arg::Counters { count } => {
                assert!(count <= plan.counters);
                count * 4
            }
            Arg::Workspace { offset, bytes } => {
                assert!(offset % 256 == 0 && offset + bytes <= plan.workspace_bytes);
                bytes
            }
        };
        let needs = match launch.entry.family {
            Family::Prologue if role == Role::QuantizeOutput => {
                let p: &QuantizeOutputParams = bytemuck::from_bytes(&launch.params);
                let values = |rows| reach(rows, [p.batch, p.q_heads, p.q_len], p.eighths * 8);
                match *name {
                    "rows" => values(p.rows) * element,
                    "out_f8" => values(p.out),
                    _ => 4,
                }
            }
            Family::Prologue if role == Role::QuantizeKv => {
                quantize_reach(name, &plan.problem, bytemuck::from_bytes(&launch.params), element)
            }
            Family::Prologue
                if matches!(
                    role,
                    Role::AppendQuantized | Role::AppendDequantized | Role::AppendDequantizedRows
                ) =>
            {
                let p = bytemuck::from_bytes(&launch.params);
                append_quantized_reach(name, &plan.problem, p, element)
            }
            Family::Prologue if role == Role::PagedDequantize => {
                dequantize_reach(name, &plan.problem, bytemuck::from_bytes(&launch.params), element)
            }
            Family::Prologue if role == Role::PagedGaps => {
                let p: &PagedGapsParams = bytemuck::from_bytes(&launch.params);
                paged_reach(name, &plan.problem, &p.paged, element)
            }
            Family::Prologue if kernel.starts_with("gqa_paged_") => {
                paged_reach(name, &plan.problem, bytemuck::from_bytes(&launch.params), element)
            }
            Family::Prologue if role == Role::TreeMaskRows => {
                let p: &TreeMaskParams = bytemuck::from_bytes(&launch.params);
                let rows = (p.batch * p.q_len) as usize;
                match *name {
                    "tree_mask" if p.tokens > 0 => p.tokens as usize * 8,
                    "tree_mask" => rows * 8,
                    "mask" => rows * p.columns as usize,
                    "starts" => (p.batch + 1) as usize * 4,
                    _ => p.batch as usize * 4,
                }
            }
            Family::Prologue if role == Role::RollingBias => {
                rolling_bias_reach(name, bytemuck::from_bytes(&launch.params), element)
            }
            Family::Prologue if kernel.starts_with("gqa_rolling_") => {
                rolling_reach(name, bytemuck::from_bytes(&launch.params))
            }
            Family::Prologue => prologue_reach(name, bytemuck::from_bytes(&launch.params), element),
            Family::General
            | Family::HopperMasked
            | Family::SplitKvMasked
            | Family::TiledMasked
            | Family::Unfused => {
                let p: &MaskedParams = bytemuck::from_bytes(&launch.params);
                masked_reach(name, p, element)
            }
            Family::DecodeQuantized if ["k", "v"].contains(name) => {
                quantized_reach(&plan.problem, launch)
            }
            Family::DecodeQuantized if name.ends_with("_scale") => scales_of(&plan.problem, arg),
            Family::Decode if role == Role::Schedule => schedule_reach(name, launch),
            Family::Decode | Family::DecodeQuantized => {
                let paged: &PagedDecodeParams = bytemuck::from_bytes(&launch.params);
                match paged.log_block_size {
                    LOG_CONTIGUOUS => step_reach(name, &paged.decode, launch, element),
                    _ => decode_paged_reach(name, launch, element),
                }
            }
            Family::BlackwellDecode | Family::BlackwellDecodePaged
                if ["k_scale", "v_scale"].contains(name) =>
            {
                scales_of(&plan.problem, arg)
            }
            Family::BlackwellDecodePaged => decode_paged_reach(name, launch, element),
            Family::BlackwellDecode => decode_reach(name, launch, element),
            Family::HopperPaged => hopper_paged_reach(name, launch, element),
            Family::BlackwellPaged => blackwell_paged_reach(name, launch, element),
            Family::Blackwell => {
                let p: &PrefillParams = bytemuck::from_bytes(&launch.params);
                prefill_reach(name, p, element)
            }
            Family::TiledPaged => tiled_paged_reach(name, launch, element),
            Family::HopperWide | Family::Latent | Family::LatentMma => {
                latent_reach(name, launch, element)
            }
            Family::HopperQuantized | Family::HopperPagedQuantized if name.ends_with("_scale") => {
                scales_of(&plan.problem, arg)
            }
            Family::HopperPagedQuantized => {
                let paged =
                    bytemuck::from_bytes::<QuantizedPagedHopperParams>(&launch.params).paged;
                let params = bytemuck::bytes_of(&paged).to_vec();
                hopper_paged_reach(name, &Launch { params, ..launch.clone() }, element)
            }
            Family::HopperQuantized => {
                let p: &QuantizedHopperParams = bytemuck::from_bytes(&launch.params);
                rotating_reach(name, &p.hopper, element)
            }
            Family::HopperFloat8 => float8_reach(name, &plan.problem, launch, element),
            Family::Hopper if launch.entry.arguments.contains(&"cos") => {
                rotating_reach(name, bytemuck::from_bytes(&launch.params), element)
            }
            _ => attention_reach(name, bytemuck::from_bytes(&launch.params), element),
        };
        assert!(
            needs <= has,
            "{} {name}: {needs} bytes of {has} ({arg})\n{:?}",
            launch.entry.name,
            plan.problem
        );
    }
}

/// Bytes up to the end of a tensor's last row.
fn reached(problem: &Problem, id: TensorId, spec: &TensorSpec) -> usize {
    spec.strides.map_or(spec.bytes(), |strides| {
        strides.extent(id.row_dims(problem)).unwrap() * spec.dtype.size()
    })
}

/// Elements up to the end of the last row of the cache, of `width` elements a head.
fn pages_reach(steps: PageSteps, head: u64, [blocks, heads, rows]: [u32; 3], width: u32) -> usize {
    let [batch, row] = [steps.block, steps.row].map(|step| u64::from(step) * u64::from(steps.unit));
    reach(Strides { batch, head, row }, [blocks, heads, rows], width)
}

/// Elements up to the end of the last row.
fn reach(strides: Strides, [batch, heads, rows]: [u32; 3], width: u32) -> usize {
    if batch * heads * rows == 0 {
        0
    } else {
        strides.at(batch - 1, heads - 1, rows - 1) + width as usize
    }
}

fn prologue_reach(name: &str, p: &PrologueParams, element: usize) -> usize {
    let rows = |strides, heads, rows| reach(strides, [p.batch, heads, rows], p.head_size) * element;
    let angles = p.rotary.max_positions as usize * (p.rotary.dim / 2) as usize * element;
    match name {
        "q" => rows(p.q, p.q_heads, p.q_len),
        "q_out" => rows(p.q_out, p.q_heads, p.q_len),
        "k" => rows(p.k, p.kv_heads, p.new_len),
        "v" => rows(p.v, p.value_heads, p.new_len),
        "k_out" | "v_out" => rows(p.kv_out, p.kv_heads, p.new_len),
        "present_k" | "present_v" => rows(p.kv_out, p.kv_heads, p.capacity),
        "past_k" | "past_v" => rows(p.past, p.kv_heads, p.past_capacity),
        "cos" | "sin" => angles,
        "position_ids" => ((p.batch - 1) * p.rotary.position_stride + p.q_len) as usize * 8,
        "seqlens_k" | "query_seqlens" => p.batch as usize * 4,
        "q_norm_weight" | "k_norm_weight" => p.head_size as usize * element,
        "past" => rows(p.past, p.kv_heads, p.past_capacity),
        "new" => rows(p.k, p.kv_heads, p.capacity - p.past_capacity),
        "present" => rows(p.kv_out, p.kv_heads, p.capacity),
        other => panic!("{other}"),
    }
}

fn append_quantized_reach(
    name: &str,
    problem: &Problem,
    p: &PrologueParams,
    element: usize,
) -> usize {
    match name {
        "k" | "v" => prologue_reach(name, p, element),
        "k_numbers" => quantize_reach("k", problem, p, element),
        "v_numbers" => quantize_reach("v", problem, p, element),
        other => quantize_reach(other, problem, p, element),
    }
}

fn quantize_reach(name: &str, problem: &Problem, p: &PrologueParams, element: usize) -> usize {
    let per_byte = problem.quantized.unwrap().codes_per_element();
    let numbers = |strides, rows| reach(strides, [p.batch, p.kv_heads, rows], p.head_size);
    match name {
        "k" | "v" => numbers(p.kv_out, p.capacity) * element,
        "present_k" | "present_v" => numbers(p.kv_out, p.capacity) / per_byte,
        "past_k" | "past_v" => numbers(p.past, p.past_capacity) / per_byte,
        // Also with gathered rows.
        "k_scale" | "v_scale" if problem.has_row_scales() => {
            (p.batch * p.kv_heads * p.capacity) as usize * 4
        }
        "k_scale" | "v_scale" => scales_reach(problem),
        other => prologue_reach(other, p, element),
    }
}

fn rolling_reach(name: &str, p: &RollingParams) -> usize {
    let rows = |rows: u32| (p.batch * p.kv_heads * rows * p.row_vectors) as usize * 16;
    match name {
        "from_k" | "from_v" => rows(p.from_rows),
        "to_k" | "to_v" => rows(p.capacity),
        "seqlens_k" | "query_seqlens" | "lengths" => p.batch as usize * 4,
        "position_ids" => (p.batch * p.q_len) as usize * 8,
        other => panic!("{other}"),
    }
}

fn dequantize_reach(name: &str, problem: &Problem, p: &PagedParams, element: usize) -> usize {
    let blocks = p.batch * dequantize::blocks_of_sequence(p.capacity);
    match name {
        "k" | "v" => (blocks * dequantize::BLOCK * p.kv_heads * p.head_size) as usize * element,
        "table" => blocks as usize * 4,
        other => paged_reach(other, problem, p, element),
    }
}

fn paged_reach(name: &str, problem: &Problem, p: &PagedParams, element: usize) -> usize {
    let tokens = |strides, heads| reach(strides, [1, heads, p.tokens], p.head_size) * element;
    let rows = |rows: u32, heads: u32| (rows * heads * p.row_vectors) as usize * 16;
    match name {
        "q" => tokens(p.q, p.q_heads),
        "k" => tokens(p.k, p.kv_heads),
        "v" => tokens(p.v, p.value_heads),
        "cos" | "sin" => p.rotary.max_positions as usize * (p.rotary.dim / 2) as usize * element,
        "starts" => (p.batch + 1) as usize * 4,
        "past_seqlens" | "lengths" => p.batch as usize * 4,
        "block_table" => (p.batch * p.per_sequence) as usize * 4,
        "slot_mapping" => p.tokens as usize * 4,
        "tree_mask" => p.tokens as usize * 8,
        "head_sink" => p.q_heads as usize * element,
        "q_out" | "rows" => rows(p.batch * p.q_len, p.q_heads),
        "k_cache" | "v_cache" | "k_codes" | "v_codes" => {
            let [.., width] = problem.key_cache_shape(0);
            let row = (width * problem.key_cache_dtype().size()) as u32;
            let dims = [p.blocks, problem.kv_heads as u32, p.block_size];
            pages_reach(p.steps, p.head_bytes.into(), dims, row)
        }
        "k_scale" | "v_scale" => scales_reach(problem),
        "present_k" | "present_v" => rows(p.batch * p.capacity, p.kv_heads),
        "present_k_scale" | "present_v_scale" => (p.batch * p.kv_heads * p.capacity) as usize * 4,
        "out" => (p.tokens * p.q_heads * p.v_head_size) as usize * problem.dtype.size(),
        "row_lse" => (p.batch * p.q_heads * p.q_len) as usize * 4,
        "lse" => (p.q_heads * p.tokens) as usize * 4,
        other => panic!("{other}"),
    }
}

fn rolling_bias_reach(name: &str, p: &RollingBiasParams, element: usize) -> usize {
    let rows = [p.slide.batch, p.heads, p.slide.q_len];
    match name {
        "bias" => reach(p.bias, rows, p.columns) * element,
        "bias_out" => rows.iter().product::<u32>() as usize * p.columns_out as usize * element,
        other => rolling_reach(other, &p.slide),
    }
}

/// Scales as a launch has them, which may be those of gathered rows.
fn scales_of(p: &Problem, arg: &Arg) -> usize {
    match arg {
        Arg::Workspace { .. } if p.has_row_scales() => p.batch * p.kv_heads * p.capacity * 4,
        _ => scales_reach(p),
    }
}

fn scales_reach(problem: &Problem) -> usize {
    let of_rows = problem.row_scales_shape().map(|shape| shape.iter().product());
    4 * problem.scales().or(of_rows).unwrap()
}

fn quantized_reach(problem: &Problem, launch: &Launch) -> usize {
    let paged: &PagedDecodeParams = bytemuck::from_bytes(&launch.params);
    let a = &paged.decode.attention;
    assert_eq!(paged.decode.scales, problem.quantized.unwrap().scales as u32);
    let width = a.head_size / problem.quantized.unwrap().codes_per_element() as u32;
    if paged.log_block_size == LOG_CONTIGUOUS {
        assert_eq!([paged.steps.row, paged.steps.unit], [1, a.k.row as u32]);
        return reach(a.k, [a.batch, a.kv_heads, a.capacity], width);
    }
    let dims = [paged.blocks, a.kv_heads, 1 << paged.log_block_size];
    pages_reach(paged.steps, a.k.head, dims, width)
}

fn masked_reach(name: &str, masked: &MaskedParams, element: usize) -> usize {
    let p = &masked.attention;
    let values =
        |strides, heads, rows| reach(strides, [p.batch, heads, rows], masked.v_head_size) * element;
    let columns = masked.columns.min(p.qk_columns);
    let bias = reach(p.bias, [p.batch, p.q_heads, p.q_len], columns);
    match name {
        "v" => values(p.v, p.kv_heads, p.capacity),
        "out" => values(p.out, p.q_heads, p.q_len),
        "out_f32" => values(p.out, p.q_heads, p.q_len) / element * 4,
        "out_f8" => values(p.out, p.q_heads, p.q_len) / element,
        "out_scale" => 4,
        "mask" => bias,
        "bias" => bias * element,
        "scores" => (p.batch * p.q_heads * p.q_len) as usize * p.qk_columns as usize * 4,
        other => attention_reach(other, p, element),
    }
}

fn schedule_reach(name: &str, launch: &Launch) -> usize {
    let p: &DecodeScheduleParams = bytemuck::from_bytes(&launch.params);
    assert!(p.keys >= 8 && p.shortest >= 2);
    match name {
        "starts" | "past_seqlens" | "schedule" => of_step(name, &p.step),
        _ => panic!("{name}"),
    }
}

/// Bytes of the tensors that a decode step and its schedule have in common.
fn of_step(name: &str, step: &PagedDecodeParams) -> usize {
    let a = &step.decode.attention;
    let (sequences, slots) = (a.batch as usize, step.decode.parts as usize);
    match name {
        "starts" => (sequences + 1) * 4,
        "past_seqlens" | "seqlens_k" => sequences * 4,
        _ => (8 + sequences.next_multiple_of(4) + 4 * (sequences + slots)) * 4,
    }
}

fn decode_paged_reach(name: &str, launch: &Launch, element: usize) -> usize {
    let paged: &PagedDecodeParams = bytemuck::from_bytes(&launch.params);
    let (p, a) = (&paged.decode, &paged.decode.attention);
    let dims = [paged.blocks, a.kv_heads, 1 << paged.log_block_size];
    let tokens = |strides, heads| reach(strides, [1, heads, paged.tokens], a.head_size) * element;
    match name {
        "k" | "v" => pages_reach(paged.steps, a.k.head, dims, a.head_size) * element,
        "starts" | "past_seqlens" | "seqlens_k" | "schedule" => of_step(name, paged),
        "block_table" => (a.batch * paged.per_sequence) as usize * 4,
        "q" => tokens(a.q, a.q_heads),
        "out" => tokens(a.out, a.q_heads),
        "out_f32" => tokens(a.out, a.q_heads) / element * 4,
        "out_f8" => tokens(a.out, a.q_heads) / element,
        "lse" => (a.q_heads * paged.tokens) as usize * 4,
        "tree_mask" => paged.tokens as usize * 8,
        "new_k" => tokens(p.new_k, a.kv_heads),
        "new_v" => tokens(p.new_v, a.kv_heads),
        _ => step_reach(name, p, launch, element),
    }
}

fn decode_reach(name: &str, launch: &Launch, element: usize) -> usize {
    step_reach(name, bytemuck::from_bytes(&launch.params), launch, element)
}

fn step_reach(name: &str, p: &DecodeParams, launch: &Launch, element: usize) -> usize {
    let a = &p.attention;
    let rows = |strides, rows| reach(strides, [a.batch, a.kv_heads, rows], a.head_size) * element;
    let columns = p.clusters / a.batch;
    let [owners, results] = if p.parts > 0 {
        let places = columns * 2 * p.parts;
        let most = if 2 * a.batch <= p.parts { p.parts } else { a.batch + p.parts };
        assert_eq!(launch.grid, [a.kv_heads, most, columns / a.kv_heads]);
        assert_eq!(launch.cluster, 1);
        [places, places]
    } else {
        assert_eq!(launch.grid[0], launch.cluster * p.splits);
        assert_eq!(launch.grid[1] * launch.grid[2], p.clusters);
        [p.clusters * launch.cluster, p.clusters * p.splits]
    };
    let [owners, results] = [owners, results].map(|count| count as usize);
    match name {
        "new_k" => rows(p.new_k, p.new_len),
        "new_v" => rows(p.new_v, p.new_len),
        "cos" | "sin" => p.rotary.max_positions as usize * (p.rotary.dim / 2) as usize * element,
        "position_ids" => ((a.batch - 1) * p.rotary.position_stride + a.q_len) as usize * 8,
        "partial_out" => results * (p.rows * a.head_size) as usize * 4,
        "partial_states" => results * (launch.cluster * p.rows) as usize * 8,
        "arrivals" => owners * 4,
        "tree_mask" => (a.batch * a.q_len) as usize * 8,
        _ => attention_reach(name, a, element),
    }
}

fn rotating_reach(name: &str, p: &HopperParams, element: usize) -> usize {
    let a = &p.attention;
    let output = reach(a.out, [a.batch, a.q_heads, a.q_len], p.v_head_size);
    match name {
        "out" => output * element,
        "out_f8" => output,
        "cos" | "sin" => p.rotary.max_positions as usize * (p.rotary.dim / 2) as usize * element,
        _ => attention_reach(name, a, element),
    }
}

fn float8_reach(name: &str, problem: &Problem, launch: &Launch, element: usize) -> usize {
    let (a, operands): (AttentionParams, Option<&Float8OperandsParams>) =
        match bytemuck::try_from_bytes::<Float8Params>(&launch.params) {
            Ok(p) => (p.attention, None),
            Err(_) => {
                let p: &Float8OperandsParams = bytemuck::from_bytes(&launch.params);
                (p.attention, Some(p))
            }
        };
    let new = |strides| {
        let rows = operands.map_or(0, |p| p.new_len);
        reach(strides, [a.batch, a.kv_heads, rows], a.head_size) * element
    };
    let rotary = operands.map(|p| p.rotary).unwrap_or_default();
    match name {
        "k" => new(operands.unwrap().new_k),
        "v" => new(operands.unwrap().new_v),
        "cos" | "sin" => rotary.max_positions as usize * (rotary.dim / 2) as usize * element,
        "position_ids" => ((a.batch - 1) * rotary.position_stride + a.q_len) as usize * 8,
        "k_scale" | "v_scale" => scales_reach(problem),
        "k_cache" | "v_cache" => reach(a.k, [a.batch, a.kv_heads, a.capacity], a.head_size),
        "q_codes" => (a.batch * a.q_heads * a.q_len * a.head_size) as usize,
        "row_factors" => (a.batch * a.q_heads * a.q_len) as usize * 4,
        "v_codes" => {
            // Tiles of 128 keys, or of 64 keys with the two halves of the head side by side.
            let keys = if a.head_size > 128 { 64 } else { 128 };
            let columns = 128 * a.capacity.div_ceil(keys);
            (a.batch * a.kv_heads * a.head_size.min(128) * columns) as usize
        }
        _ => attention_reach(name, &a, element),
    }
}

fn hopper_paged_reach(name: &str, launch: &Launch, element: usize) -> usize {
    let p: &PagedHopperParams = bytemuck::from_bytes(&launch.params);
    let a = &p.hopper.attention;
    let [tile_words, start_words] = hopper::schedule_words(p);
    let [columns, states] = hopper::part_elements(p);
    let is_contiguous = p.log_block_size == LOG_CONTIGUOUS;
    match name {
        "row_tiles" => tile_words * 4,
        "range_starts" => start_words * 4,
        "part_columns" => columns * 4,
        "part_states" => states * 8,
        "starts" if is_contiguous => a.batch as usize * 4,
        "out" | "lse" if is_contiguous => rotating_reach(name, &p.hopper, element),
        "out" => reach(a.out, [1, a.q_heads, p.tokens], p.hopper.v_head_size) * element,
        "lse" => (a.q_heads * p.tokens) as usize * 4,
        "starts" => (a.batch + 1) as usize * 4,
        "past_seqlens" => a.batch as usize * 4,
        "block_table" => (a.batch * p.per_sequence) as usize * 4,
        "schedule" => hopper::words_read(a.batch as usize, p.ctas) * 4,
        _ => rotating_reach(name, &p.hopper, element),
    }
}

fn blackwell_paged_reach(name: &str, launch: &Launch, element: usize) -> usize {
    let p: &PagedPrefillParams = bytemuck::from_bytes(&launch.params);
    let a = &p.prefill.attention;
    match name {
        "out" => reach(a.out, [1, a.q_heads, p.tokens], p.prefill.v_head_size) * element,
        "lse" => (a.q_heads * p.tokens) as usize * 4,
        "starts" => (a.batch + 1) as usize * 4,
        "past_seqlens" => a.batch as usize * 4,
        "block_table" => (a.batch * p.per_sequence) as usize * 4,
        _ => prefill_reach(name, &p.prefill, element),
    }
}

fn prefill_reach(name: &str, p: &PrefillParams, element: usize) -> usize {
    let a = &p.attention;
    match name {
        "out" => reach(a.out, [a.batch, a.q_heads, a.q_len], p.v_head_size) * element,
        _ => attention_reach(name, a, element),
    }
}

fn latent_reach(name: &str, launch: &Launch, element: usize) -> usize {
    let p: &LatentParams = bytemuck::from_bytes(&launch.params);
    let a = &p.attention;
    let rows = |strides, size| reach(strides, [p.entries, a.q_heads, p.tokens], size) * element;
    let (out, lse) = latent::partial_elements(p);
    match name {
        "q" => rows(a.q, a.head_size),
        "out" => rows(a.out, latent::VALUE_SIZE),
        "lse" => (p.entries * a.q_heads * p.tokens) as usize * 4,
        "starts" => (a.batch + 1) as usize * 4,
        "past_seqlens" | "query_seqlens" => a.batch as usize * 4,
        "block_table" => (a.batch * p.per_sequence) as usize * 4,
        "partial_out" => out * 4,
        "partial_lse" => lse * 4,
        "range_starts" => latent::start_words(p) * 4,
        "k_scale" => 4,
        "k" => {
            let rows = if p.log_block_size == latent::CONTIGUOUS {
                a.capacity
            } else {
                1 << p.log_block_size
            };
            let cell = if launch.entry.formats.is_empty() { element } else { 1 };
            reach(a.k, [p.blocks, 1, rows], a.head_size) * cell
        }
        _ => panic!("{name}"),
    }
}

fn tiled_paged_reach(name: &str, launch: &Launch, element: usize) -> usize {
    let p: &PagedTiledParams = bytemuck::from_bytes(&launch.params);
    let a = &p.attention;
    let rows = |strides, heads, rows| reach(strides, [1, heads, rows], a.head_size) * element;
    match name {
        "k" | "v" => {
            let dims = [p.blocks, a.kv_heads, 1 << p.log_block_size];
            pages_reach(p.steps, a.k.head, dims, a.head_size) * element
        }
        "q" => rows(a.q, a.q_heads, p.tokens),
        "out" => rows(a.out, a.q_heads, p.tokens),
        "lse" => (a.q_heads * p.tokens) as usize * 4,
        "cos" | "sin" => p.rotary.max_positions as usize * (p.rotary.dim / 2) as usize * element,
        "starts" => (a.batch + 1) as usize * 4,
        "past_seqlens" => a.batch as usize * 4,
        "block_table" => (a.batch * p.per_sequence) as usize * 4,
        _ => attention_reach(name, a, element),
    }
}

fn attention_reach(name: &str, p: &AttentionParams, element: usize) -> usize {
    let rows = |strides, heads, rows| reach(strides, [p.batch, heads, rows], p.head_size) * element;
    let all = (p.batch * p.q_heads * p.q_len) as usize;
    match name {
        "q" => rows(p.q, p.q_heads, p.q_len),
        "out" => rows(p.out, p.q_heads, p.q_len),
        "out_f32" => rows(p.out, p.q_heads, p.q_len) / element * 4,
        "out_f8" => rows(p.out, p.q_heads, p.q_len) / element,
        "out_scale" => 4,
        "k" | "v" => rows(p.k, p.kv_heads, p.capacity),
        "head_sink" => p.q_heads as usize * element,
        "lse" => all * 4,
        "output_qk" => all * p.qk_columns as usize * element,
        "partial_out" => all * (p.splits * p.head_size) as usize * 4,
        "partial_lse" => all * p.splits as usize * 4,
        "counter" => 4,
        "seqlens_k" | "query_seqlens" => p.batch as usize * 4,
        other => panic!("{other}"),
    }
}

/// A field of a call set to anything.
fn set(p: &mut ProblemFields, field: usize, value: usize) {
    let types = [DType::F32, DType::F16, DType::BF16, DType::F64, DType::F8E4M3, DType::I32];
    let size = value % 300;
    let some = |on: usize| (value & 7 > on).then_some(size);
    match field {
        0 => p.computes = [CallKind::Attention, CallKind::Cache, CallKind::Rotation][value % 3],
        1 => {
            (p.dtype, p.v_dtype, p.out_dtype) =
                (types[value % 4], types[value % 4], types[value % 4])
        }
        2 => p.v_dtype = types[value % 4],
        3 => p.out_dtype = types[value % 5],
        4 => p.batch = value % 5,
        5 => p.q_heads = value % 20,
        6 => p.kv_heads = value % 10,
        7 => (p.head_size, p.v_head_size) = (size, size),
        8 => p.v_head_size = size,
        9 => p.q_len = size,
        10 => p.new_len = size,
        11 => p.total_len = size,
        12 => p.past_capacity = size,
        13 => p.capacity = size,
        14 => {
            p.phase = [
                Phase::FirstPrompt,
                Phase::SubsequentPrompt,
                Phase::TokenGeneration,
                Phase::PaddedChunk,
            ][value % 4]
        }
        15 => p.alignment = [Alignment::Phase, Alignment::Past(size), Alignment::End][value % 3],
        16 => {
            p.cache =
                [CacheBinding::Shared, CacheBinding::Separate, CacheBinding::External][value % 3]
        }
        17 => p.slides = !p.slides,
        18 => {
            p.pages = (value % 4 > 0).then_some(Pages {
                tokens: size,
                blocks: value % 50,
                block_size: [0, 1, 16, 24, 64][value % 5],
                per_sequence: value % 20,
                slots: value % 7 == 1,
                counts_new: value % 3 == 1,
                one_each: value % 11 == 1,
                scheduled: value % 2 == 1,
                consecutive: value % 10 == 1,
            })
        }
        19 => {
            let (format, scales) = (CODES[value % 3], SCALES[value / 3 % SCALES.len()]);
            p.quantized = (value % 4 > 0).then_some(Quantization { format, scales });
        }
        20 => p.packed = !p.packed,
        21 => p.layout = [Layout::Bsnh, Layout::Bnsh][value % 2],
        22 => p.qk_norm = (value % 2 > 0).then_some(QK_NORM),
        23 => p.rotary = some(2).map(|dim| Rotary { dim, explicit: some(4), ..ROTARY }),
        24 => p.window = some(1),
        25 => p.right_window = some(3),
        26 => p.causal = !p.causal,
        27 => p.sink = [Sink::None, Sink::Zero, Sink::PerHead][value % 3],
        28 => p.bias = bias(value & 1 == 1, value & 2 == 2, size),
        29 => p.tree_mask = !p.tree_mask,
        30 => p.output_qk = [QkOutput::None, QkOutput::Scaled, QkOutput::AfterSoftmax][value % 3],
        31 => p.lse = !p.lse,
        32 => {
            let (head, row) = ([8, 64, 4096][value % 3], [64, 128, 512][value / 3 % 3]);
            let batch = [64, 8192, 8208, 1 << 20][value / 9 % 4];
            p.strided.pages = Some(RowStrides { batch, head, row });
        }
        33 => {
            (p.latent, p.kv_heads) = (!p.latent, 1);
            p.v_head_size = p.head_size.saturating_sub(value % 10 * 8);
            (p.packed, p.quantized, p.qk_norm) = (false, None, None);
        }
        34 => p.rotary = p.rotary.map(|rotary| Rotary { offset: value % 20 * 8, ..rotary }),
        35 => p.batch_invariant = !p.batch_invariant,
        _ => p.float8_products = !p.float8_products,
    }
}

/// A latent call: `s` new rows after `past`, of 576 elements or of `size`, whose values are all but
/// the last 64.
fn latent_of(size: usize, s: usize, past: usize) -> ProblemFields {
    ProblemFields {
        latent: true,
        q_heads: 128,
        kv_heads: 1,
        head_size: size,
        v_head_size: size - 64,
        rotary: Some(Rotary { dim: 64, offset: size - 64, ..ROTARY }),
        ..(*llama(s, past)).clone()
    }
}

/// Latent calls over caches of all kinds, some of them quantized.
fn latents() -> impl Iterator<Item = Problem> {
    let shapes = [(1, 40, 0), (3, 1, 70), (2, 9, 33), (2, 3, 900)];
    (0..shapes.len() * 24).map(move |kind| {
        let (batch, s, past) = shapes[kind / 24];
        let size = [576, 80, 256][kind % 3];
        let mut p = ProblemFields { batch, q_heads: 16, ..latent_of(size, s, past) };
        (p.dtype, p.lse) = ([DType::F16, DType::BF16, DType::F32][kind / 2 % 3], kind % 5 == 0);
        (p.v_dtype, p.out_dtype) = (p.dtype, p.dtype);
        let scales = if kind % 4 == 1 { Scales::PerChannel } else { Scales::PerToken };
        let how = Quantization { format: QuantFormat::Float8, scales };
        p.quantized = (kind % 4 != 3 && kind % 7 < 3).then_some(how);
        match kind % 4 {
            0 => (p.past_capacity, p.capacity) = (past + s + 5, past + s + 5),
            1 => {
                (p.cache, p.past_capacity, p.capacity) = (CacheBinding::Separate, past, past + s);
                p.bias = bias(true, false, past + s);
            }
            2 => return paged(&Problem::new(p).unwrap()),
            _ => {
                (p.cache, p.rotary) = (CacheBinding::External, None);
                (p.new_len, p.past_capacity, p.capacity) = (past + s, 0, past + s);
            }
        }
        Problem::new(p).unwrap()
    })
}

/// There is no tensor of values that any other could read.
#[test]
fn latent_calls_have_kernels_that_read_values_in_keys() {
    for problem in latents() {
        assert_eq!(TensorId::PresentValue.spec(&problem), None);
        for name in ["h200", "b200", "a100", "v100"] {
            let plan = plan(&problem, &device(name), &PlanOptions::default()).unwrap();
            for Decision { family, outcome } in &plan.decisions {
                let takes = matches!(
                    family,
                    Family::General | Family::Unfused | Family::Latent | Family::LatentMma
                );
                let declines = matches!(outcome, Err(Rejection::Latent));
                assert!(takes || declines, "{family:?}: {outcome:?}");
            }
            plan.launches.iter().for_each(|launch| check(&plan, launch));
        }
    }
    let kernels =
        |call: ProblemFields| kernels(&Problem::new(call).unwrap(), &PlanOptions::default());
    let dense = kernels(latent_of(576, 1, 500));
    let merged = ["latent_mma_f16_r16", "latent_merge"];
    assert_eq!(dense, ["unpack_qkv_with_rope_and_append_kv", merged[0], merged[1]]);
    let sink = ProblemFields { sink: Sink::PerHead, ..latent_of(576, 1, 500) };
    let unfused = ["unfused_scores", "unfused_softmax", "unfused_values"];
    assert_eq!(kernels(sink)[1..], unfused);
    let small = kernels(latent_of(256, 1, 500));
    assert_eq!(small, ["unpack_qkv_with_rope_and_append_kv", "general"]);
    let in_blocks = |past| paged(&Problem::new(latent_of(576, 1, past)).unwrap());
    assert_eq!(kernels((*in_blocks(500)).clone()), ["paged_append", merged[0], merged[1]]);
    let paged = in_blocks(9000);
    let in_place = kernels((*paged).clone());
    assert_eq!(in_place, ["paged_append", "latent", "latent_merge"]);
    let nowhere = paged.pages.map(|pages| Pages { blocks: 0, ..pages });
    let empty = kernels(ProblemFields { pages: nowhere, ..(*paged).clone() });
    assert!(!empty.contains(&"latent"), "{empty:?}");
    let appended = kernels(ProblemFields { rotary: None, ..(*paged.appended()).clone() });
    assert_eq!(appended, ["latent", "latent_merge"]);
    let float8 = |format, scales| {
        let quantized = Some(Quantization { format, scales });
        kernels(ProblemFields { quantized, ..(*paged).clone() })
    };
    let converted = float8(QuantFormat::Float8, Scales::PerTensor);
    assert_eq!(converted, ["paged_append_quantized", "latent_float8", "latent_merge"]);
    for (format, scales) in
        [(QuantFormat::Float8, Scales::PerToken), (QuantFormat::Int8, Scales::PerTensor)]
    {
        let slow = float8(format, scales);
        assert_eq!(&slow[..2], ["paged_append_quantized", "paged_gather"]);
    }
    let paged = kernels(ProblemFields { sink: Sink::PerHead, ..(*paged).clone() });
    assert_eq!(
        (&paged[..2], paged.last()),
        (&["paged_append", "paged_gather"][..], Some(&"paged_gaps"))
    );
}

/// Where there is no `wgmma`, and over blocks that TMA does not load.
#[test]
fn latent_steps_have_a_kernel_on_other_gpus() {
    let after = |past, q_heads, s| {
        let call = ProblemFields { q_heads, rotary: None, ..latent_of(576, s, past) };
        paged(&Problem::new(call).unwrap()).appended()
    };
    let call = |q_heads, s| after(4000, q_heads, s);
    let attention = |p: &Problem, name: &str| {
        let plan = plan(p, &device(name), &PlanOptions::default()).unwrap();
        plan.launches.iter().for_each(|launch| check(&plan, launch));
        plan.launches.iter().map(|launch| launch.entry.name).collect::<Vec<_>>()
    };
    let few = ["gqa_latent_mma_f16_r16", "gqa_latent_merge_f16"];
    let narrow = ["gqa_latent_mma_f16_r16_w4", few[1]];
    let many = ["gqa_latent_mma_f16_r32", few[1]];
    for name in ["h200", "a100", "b200"] {
        assert_eq!(attention(&call(16, 1), name), few, "{name}");
    }
    // Tiles of few rows while they are few, of sequences or of keys.
    assert_eq!(attention(&call(128, 1), "h200"), few);
    assert_eq!(attention(&call(128, 2), "h200")[0], "gqa_latent_f16");
    assert_eq!(attention(&after(9000, 128, 1), "h200")[0], "gqa_latent_f16");
    let many_sequences =
        ProblemFields { batch: 256, q_heads: 16, rotary: None, ..latent_of(576, 1, 4000) };
    let many_sequences = paged(&Problem::new(many_sequences).unwrap()).appended();
    assert_eq!(attention(&many_sequences, "h200"), few[..1]);
    for name in ["rtx3090", "rtx4090", "rtx5090"] {
        assert_eq!(attention(&call(16, 1), name), narrow, "{name}");
    }
    for name in ["a100", "rtx3090", "rtx4090", "b200", "rtx5090"] {
        assert_eq!(attention(&call(16, 2), name), many, "{name}");
        assert_eq!(attention(&call(128, 1), name), many, "{name}");
    }
    let small = |p: &Problem| {
        let pages = p.pages.map(|pages| Pages { block_size: 8, ..pages });
        Problem::new(ProblemFields { pages, ..(**p).clone() }).unwrap()
    };
    assert_eq!(attention(&small(&after(7, 16, 1)), "h200"), few[..1]);
    let how = Quantization { format: QuantFormat::Float8, scales: Scales::PerTensor };
    let float8 = |q_heads| {
        let p = call(q_heads, 1);
        Problem::new(ProblemFields { quantized: Some(how), ..(*p).clone() }).unwrap()
    };
    for name in ["h200", "a100"] {
        assert_eq!(attention(&float8(16), name)[0], "gqa_latent_mma_f8_f16_r16", "{name}");
    }
    // `wgmma` multiplies queries in bfloat16 as sums of two float8 values.
    let dtype = DType::BF16;
    let in_bf16 = |batch, q_heads, past, name| {
        let (v_dtype, out_dtype) = (dtype, dtype);
        let call = latent_of(576, 1, past);
        let call =
            ProblemFields { batch, q_heads, rotary: None, dtype, v_dtype, out_dtype, ..call };
        let p = paged(&Problem::new(call).unwrap()).appended();
        let p = ProblemFields { quantized: Some(how), ..(*p).clone() };
        attention(&Problem::new(p).unwrap(), name)[0]
    };
    let by_wgmma = "gqa_latent_mma_f8_bf16_r16_wgmma";
    assert_eq!(in_bf16(1, 16, 4000, "b200"), "gqa_latent_mma_f8_bf16_r16");
    for (batch, q_heads, past, wanted) in [
        (1, 16, 4000, by_wgmma),
        (128, 32, 4000, by_wgmma),
        (4, 64, 8000, by_wgmma),
        (1, 128, 8000, by_wgmma),
        (16, 64, 4000, "gqa_latent_float8_bf16"),
        (4, 128, 8000, "gqa_latent_float8_bf16"),
    ] {
        assert_eq!(in_bf16(batch, q_heads, past, "h200"), wanted, "{batch}, {q_heads}, {past}");
    }
    assert_eq!(attention(&float8(64), "h200")[0], "gqa_latent_float8_f16");
    assert_eq!(attention(&float8(64), "rtx4090")[0], "gqa_latent_mma_f8_f16_r32");
}

/// As many as measured fastest on an H200 (`docs/results/2026-11-30-h200-e/latent.md`).
#[test]
fn latent_steps_split_keys() {
    let planned = |batch, q_heads, keys: usize, dtype, quantized| {
        let (v_dtype, out_dtype) = (dtype, dtype);
        let call = latent_of(576, 1, keys - 1);
        let call =
            ProblemFields { batch, q_heads, rotary: None, dtype, v_dtype, out_dtype, ..call };
        let problem = paged(&Problem::new(call).unwrap()).appended();
        let problem = Problem::new(ProblemFields { quantized, ..(*problem).clone() }).unwrap();
        let plan = plan(&problem, &device("h200"), &PlanOptions::default()).unwrap();
        plan.launches[0].grid[1]
    };
    let splits = |batch, q_heads, keys| planned(batch, q_heads, keys, DType::F16, None);
    let how = Quantization { format: QuantFormat::Float8, scales: Scales::PerTensor };
    let of_float8 = |batch, q_heads, keys| planned(batch, q_heads, keys, DType::BF16, Some(how));
    assert_eq!(splits(1, 128, 8192), 32);
    assert_eq!(splits(1, 64, 8192), 32);
    assert_eq!(splits(1, 128, 1024), 16);
    assert_eq!(splits(4, 128, 8192), 16);
    assert_eq!(splits(16, 128, 4096), 4);
    assert_eq!(splits(128, 64, 4096), 1);
    assert_eq!(of_float8(1, 16, 8192), 64);
    assert_eq!(of_float8(16, 16, 4096), 8);
    assert_eq!(of_float8(128, 16, 4096), 2);
    assert_eq!(of_float8(16, 32, 4096), 8);
    assert_eq!(of_float8(4, 64, 8192), 16);
    assert_eq!(of_float8(1, 128, 8192), 16);
}

/// Where sequences are much shorter than the longest one, as the size of the cache says, lengths on
/// the device divide their keys.
#[test]
fn latent_steps_of_other_lengths_are_divided() {
    let planned = |q_heads, blocks_for_each: usize, options: &PlanOptions| {
        let call = ProblemFields { batch: 64, q_heads, rotary: None, ..latent_of(576, 1, 15_999) };
        let call = paged(&Problem::new(call).unwrap()).appended();
        let pages = call.pages.map(|pages| Pages { blocks: 64 * blocks_for_each, ..pages });
        let call = Problem::new(ProblemFields { pages, ..(*call).clone() }).unwrap();
        let plan = plan(&call, &device("h200"), options).unwrap();
        plan.launches.iter().for_each(|launch| check(&plan, launch));
        plan.launches.iter().map(|launch| (launch.entry.name, launch.grid)).collect::<Vec<_>>()
    };
    let default = PlanOptions::default();
    let in_splits = PlanOptions { splits: Some(3), ..PlanOptions::default() };
    let [few, all] = [4096_usize, 16_000].map(|keys| keys.div_ceil(64));
    for (q_heads, row_tiles) in [(16, 1), (64, 1), (128, 2)] {
        let launches = planned(q_heads, few, &default);
        assert_eq!(launches[0], ("gqa_latent_divided_f16", [row_tiles, 132 / row_tiles, 1]));
        assert_eq!(launches[1].0, "gqa_latent_merge_parts_f16");
        for (options, blocks) in [(&default, all), (&in_splits, few)] {
            let launches = planned(q_heads, blocks, options);
            assert!(launches.iter().all(|(name, _)| !name.contains("divided")), "{q_heads}");
        }
    }
}

/// A cache without blocks has nothing that TMA could load.
#[test]
fn caches_without_blocks_are_planned() {
    for (s, past) in [(1, 700), (512, 700), (64, 7)] {
        let call = paged(&llama(s, past));
        let nowhere = call.pages.map(|pages| Pages { blocks: 0, ..pages });
        let call = Problem::new(ProblemFields { pages: nowhere, ..(*call).clone() }).unwrap();
        for name in ["h200", "a100", "v100"] {
            let plan = plan(&call, &device(name), &PlanOptions::default()).unwrap();
            plan.launches.iter().for_each(|launch| check(&plan, launch));
        }
    }
}

/// Kernels that rotate rotate from a head's first element on.
#[test]
fn elements_that_rotate_may_be_behind_others() {
    for (s, past) in [(1, 700), (300, 700), (512, 0)] {
        let from = |offset| {
            let whole = (*llama(s, past)).clone();
            let rotary = Some(Rotary { dim: 64, offset, ..ROTARY });
            Problem::new(ProblemFields { rotary, ..whole }).unwrap()
        };
        let plan = plan(&from(64), &device("h200"), &PlanOptions::default()).unwrap();
        assert_eq!(kernel(&plan.launches[0]), "unpack_qkv_with_rope_and_append_kv");
        let why = rejection(&from(64), "h200", &PlanOptions::default(), Family::Tiled);
        assert_eq!(why, "does not take rotary_offset");
        assert_ne!(attention(&from(0), "h200", &PlanOptions::default()), Family::General);
    }
}

#[test]
fn latent_calls_that_cannot_be_are_refused_by_name() {
    let refused = |change: fn(&mut ProblemFields)| {
        let mut call = latent_of(576, 4, 500);
        change(&mut call);
        Problem::new(call).unwrap_err().to_string()
    };
    for (got, want) in [
        (refused(|p| p.kv_heads = 2), "heads.kv: got 2; allowed: 1, in a latent call"),
        (
            refused(|p| p.v_head_size = 584),
            "heads.values: got 584; allowed: a multiple of 8 from 8 to heads.size = 576",
        ),
        (refused(|p| p.v_head_size = 0), "heads.values: got 0; "),
        (refused(|p| p.v_head_size = 508), "heads.values: got 508; "),
        (
            refused(|p| p.head_size = 580),
            "heads.size: got 580; allowed: a multiple of 8, in a latent call",
        ),
        (
            refused(|p| p.v_dtype = DType::F32),
            "dtype: got keys of float16, values of float32; allowed: float32, float16 or bfloat16",
        ),
        (
            refused(|p| (p.dtype, p.v_dtype, p.out_dtype) = (DType::F64, DType::F64, DType::F64)),
            "dtype: got keys of float64, values of float64; ",
        ),
        (refused(|p| p.packed = true), "packed: got true; allowed: false, in a latent call"),
        (refused(|p| p.slides = true), "slides: got true; "),
        (refused(|p| p.qk_norm = Some(QK_NORM)), "qk_norm: got one; allowed: none"),
        (refused(|p| p.computes = CallKind::Rotation), "heads.query: "),
        (
            refused(|p| p.strided.value = Some(RowStrides { batch: 0, head: 0, row: 0 })),
            "value: got strides; allowed: none",
        ),
        (
            refused(|p| p.rotary = Some(Rotary { dim: 64, offset: 520, ..ROTARY })),
            "rope.offset: got 520; allowed: a multiple of 8 up to heads.size - rope.dim = 512",
        ),
        (
            refused(|p| p.rotary = Some(Rotary { dim: 64, offset: 4, ..ROTARY })),
            "rope.offset: got 4; ",
        ),
    ] {
        assert!(got.starts_with(want), "{got}");
    }
}

/// Which rows are padding is known only on the device: the kernels are those of a chunk, or of a
/// decode step.
#[test]
fn padded_chunks_are_planned_as_chunks() {
    for name in ["h200", "b200", "a100", "v100"] {
        let device = device(name);
        for (rows, past) in [(1, 700), (4, 700), (300, 700), (2048, 6000)] {
            for dtype in [DType::F16, DType::F32] {
                let chunk = with(llama(rows, past), |p| p.dtype = dtype);
                let padded = with(chunk.clone(), |p| p.phase = Phase::PaddedChunk);
                let [chunk, padded] = [chunk, padded]
                    .map(|call| plan(&call, &device, &PlanOptions::default()).unwrap());
                let entries = |plan: &Plan| -> Vec<_> {
                    plan.launches.iter().map(|launch| launch.entry.name).collect()
                };
                assert_eq!(entries(&padded), entries(&chunk), "{name}, {rows} rows");
                let of_pointers = |launch: &Launch| {
                    let names = launch.entry.arguments.iter().zip(&launch.args);
                    names
                        .filter(|(name, arg)| **name == "query_seqlens" && **arg == Arg::Null)
                        .count()
                };
                assert!(padded.launches.iter().all(|launch| of_pointers(launch) == 0));
            }
        }
    }
    let step = with(llama(1, 700), |p| p.phase = Phase::PaddedChunk);
    let plan = plan(&step, &device("h200"), &PlanOptions::default()).unwrap();
    assert_eq!(plan.launches.len(), 1);
}

/// The scales would have to roll, too, also in a call that only updates the cache.
#[test]
fn rolling_caches_have_no_scales_of_rows() {
    for phase in [Phase::SubsequentPrompt, Phase::PaddedChunk] {
        for computes in [CallKind::Attention, CallKind::Cache] {
            let mut fields = (*quantized(llama(9, 33), CODES[0])).clone();
            (fields.phase, fields.computes) = (phase, computes);
            (fields.rotary, fields.slides) = (None, true);
            (fields.past_capacity, fields.capacity) = (47, 47);
            assert!(Problem::new(fields.clone()).is_ok());
            fields.quantized =
                fields.quantized.map(|how| Quantization { scales: Scales::PerToken, ..how });
            let error = Problem::new(fields).unwrap_err().to_string();
            assert!(error.contains("scales per token"), "{error}");
        }
    }
}

/// A call may be described field by field. If it passes the checks, it can be planned, and its
/// launches stay inside of its tensors.
#[test]
fn whatever_passes_its_check_stays_inside_its_tensors() {
    use proptest::prelude::*;
    let (calls, device) =
        (problems().chain(latents()).collect::<Vec<_>>(), ["h200", "a100", "v100"].map(device));
    let changes = proptest::collection::vec((0..37usize, 0..100_000usize), 1..5);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20_000) };
    let (planned, passed) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let tried = runner.run(&(0..calls.len(), changes), |(call, changes)| {
        let mut fields = (*calls[call]).clone();
        changes.into_iter().for_each(|(field, value)| set(&mut fields, field, value));
        let Ok(problem) = Problem::new(fields) else { return Ok(()) };
        passed.set(passed.get() + 1);
        for device in &device {
            let Ok(plan) = plan(&problem, device, &PlanOptions::default()) else { continue };
            plan.launches.iter().for_each(|launch| check(&plan, launch));
            planned.set(planned.get() + 1);
        }
        Ok(())
    });
    tried.unwrap_or_else(|error| panic!("{error}"));
    assert!(planned.get() > 3000, "{} of {} were planned", planned.get(), passed.get());
}
