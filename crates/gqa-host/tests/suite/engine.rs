//! Calls described by an engine equal those of the operators.

use crate::step;
use gqa_host::backend::{Backend, cpu::Cpu};
use gqa_host::engine::{Dense, External, Heads, LatentHeads, Layer, Paged, Rope};
use gqa_host::op::{Bounds, GroupQueryAttention, PagedAttention, PagedShapes, Shapes};
use gqa_host::plan::{DeviceInfo, PlanOptions, Planner, TensorId};
use gqa_host::reference::Reference;
use gqa_host::{
    CacheBinding, DType, Layout, Phase, Problem, QuantFormat, Quantization, RowStrides, Scales,
    Sink, TensorDesc,
};

const HEADS: Heads = Heads { query: 32, kv: 8, size: 128 };

fn layer() -> Layer {
    Layer::new(DType::BF16, HEADS)
}

#[test]
fn a_decode_step_is_the_operators() {
    let bf16 = |shape| TensorDesc { dtype: DType::BF16, shape };
    let (new, cache) = (bf16(&[2, 1, 8 * 128]), bf16(&[2, 8, 4096, 128]));
    let rotations = bf16(&[8192, 64]);
    let shapes = Shapes {
        key: Some(new),
        value: Some(new),
        past_key: Some(cache),
        past_value: Some(cache),
        cos_cache: Some(rotations),
        sin_cache: Some(rotations),
        ..Shapes::new(bf16(&[2, 1, 32 * 128]), TensorDesc { dtype: DType::I32, shape: &[2] }, 4096)
    };
    let operator = GroupQueryAttention::new(32, 8).do_rotary(true).local_window_size(100);
    let want = operator.problem_from_shapes(&shapes, CacheBinding::Shared).unwrap();
    let layer = layer().rope(Rope::new(128, 8192)).window(100);
    assert_eq!(layer.dense(Dense::decode(2, 4096)).unwrap(), want);
}

#[test]
fn a_padded_chunk_is_the_operators() {
    let bf16 = |shape| TensorDesc { dtype: DType::BF16, shape };
    let (new, cache) = (bf16(&[2, 16, 8 * 128]), bf16(&[2, 8, 4096, 128]));
    let lengths = TensorDesc { dtype: DType::I32, shape: &[2] };
    let shapes = Shapes {
        key: Some(new),
        value: Some(new),
        past_key: Some(cache),
        past_value: Some(cache),
        query_seqlens: Some(lengths),
        ..Shapes::new(bf16(&[2, 16, 32 * 128]), lengths, 4096)
    };
    let operator = GroupQueryAttention::new(32, 8);
    let want = operator.problem_from_shapes(&shapes, CacheBinding::Shared).unwrap();
    assert_eq!(layer().dense(Dense::chunk(2, 16, 4096).padded()).unwrap(), want);
    let spec = TensorId::QuerySeqlens.spec(&want).unwrap();
    assert_eq!((spec.dtype, &spec.shape[..]), (DType::I32, &[2][..]));
    for call in [Dense::prefill(2, 16, 4096), Dense::decode(2, 4096)] {
        let padded = layer().dense(call.padded()).unwrap();
        assert_eq!(padded.phase, Phase::PaddedChunk);
    }
    let error = layer().bidirectional().dense(Dense::chunk(2, 16, 4096).padded()).unwrap_err();
    let allowed = "none, except without a cache, or in causal calls over one that is not paged";
    assert_eq!(error.to_string(), format!("query_seqlens: got one; allowed: {allowed}"));
}

#[test]
fn what_a_call_is_shows_in_its_phase() {
    let phase = |call| layer().dense(call).unwrap().phase;
    assert_eq!(phase(Dense::prefill(1, 100, 4096)), Phase::FirstPrompt);
    assert_eq!(phase(Dense::chunk(1, 100, 4096)), Phase::SubsequentPrompt);
    assert_eq!(phase(Dense::decode(1, 4096)), Phase::TokenGeneration);
}

#[test]
fn everything_that_a_layer_may_have_is_taken() {
    for format in QuantFormat::ALL {
        let layer = layer()
            .scale(0.1)
            .softcap(30.0)
            .window(512)
            .sink(Sink::PerHead)
            .rope(Rope::new(64, 8192).interleaved())
            .qk_norm(1e-5)
            .quantized(Quantization { format, scales: Scales::PerHead });
        let dense = layer.dense(Dense::chunk(2, 4, 4096).longest(1000).packed()).unwrap();
        assert_eq!((dense.total_len, dense.packed), (1000, true));
        let call = Paged::new(3, 20, [64, 16, 30]).most_tokens(8).longest(300).slot_mapping();
        let paged = layer.paged(call).unwrap();
        assert_eq!((paged.q_len, paged.total_len, paged.batch), (8, 300, 3));
        assert_eq!(paged.key_cache_dtype(), layer.cache_dtype());
        assert!(paged.pages.is_some_and(|pages| pages.slots && pages.tokens == 20));
    }
    let call = Dense::prefill(2, 50, 64).layout(Layout::Bnsh).log_sum_exp().float32_output();
    let problem = layer().bidirectional().dense(call.bias(false, true)).unwrap();
    assert_eq!(problem.bias_shape(), Some([1, 32, 50, 50]));
    assert!(problem.lse && !problem.causal && problem.out_dtype == DType::F32);
    let shared = layer().dense(Dense::decode(1, 64).nothing_new()).unwrap();
    assert_eq!(shared.new_len, 0);
}

#[test]
fn strides_that_kernels_cannot_take_are_refused() {
    let refused = |call: Dense| layer().dense(call).unwrap_err().to_string();
    let strides = |batch, head, row| RowStrides { batch, head, row };
    let call = Dense::chunk(2, 3, 64);
    let (ok, odd) = (strides(99 * 8, 128, 4096), strides(0, 128, 4097));
    assert!(layer().dense(call.query_strides(ok).key_value_strides(ok)).is_ok());
    // A tensor that is read may be broadcast.
    assert!(layer().dense(call.query_strides(strides(0, 0, 0))).is_ok());
    for (call, names) in [
        (call.query_strides(odd), "query: "),
        (call.key_value_strides(odd), "key: "),
        (call.output_strides(odd), "output: "),
        (call.output_strides(strides(0, 128, 4096)), "output: "),
        (call.output_strides(strides(3 * 4096, 120, 4096)), "output: "),
        (call.query_strides(strides(usize::MAX / 32 * 16, 128, 4096)), "query: "),
        (call.packed().query_strides(ok), "query: "),
    ] {
        let error = refused(call);
        assert!(error.starts_with(names) && error.contains("allowed: "), "{error}");
    }
    assert!(layer().dense(call.output_strides(strides(3 * 4096, 128, 4096))).is_ok());
    let call = Paged::decode(3, [16, 16, 8]);
    assert!(layer().paged(call.query_strides(ok).key_value_strides(ok)).is_ok());
    for (call, names) in [
        (call.query_strides(odd), "query: "),
        (call.key_value_strides(odd), "key: "),
        (call.packed().query_strides(ok), "query: "),
    ] {
        let error = layer().paged(call).unwrap_err().to_string();
        assert!(error.starts_with(names) && error.contains("allowed: "), "{error}");
    }
}

#[test]
fn trees_of_drafts_are_calls_of_up_to_64_new_tokens() {
    let cache = [1000, 16, 100];
    let paged = |tokens| Paged::new(2, 2 * tokens, cache).most_tokens(tokens).tree_mask();
    let dense = |tokens| Dense::chunk(2, tokens, 1600).tree_mask();
    for problem in [layer().paged(paged(64)).unwrap(), layer().dense(dense(64)).unwrap()] {
        assert!(problem.tree_mask && !problem.causal);
    }
    for (layer, tokens, names) in [
        (layer(), 65, "tree_mask: got 65 new tokens"),
        (layer().bidirectional(), 16, "causal: "),
        (layer().window(100), 16, "window: "),
    ] {
        for error in
            [layer.paged(paged(tokens)).unwrap_err(), layer.dense(dense(tokens)).unwrap_err()]
        {
            let error = error.to_string();
            assert!(error.starts_with(names) && error.contains("allowed: "), "{error}");
        }
    }
    let error = layer().dense(dense(16).bias(true, true)).unwrap_err().to_string();
    assert!(error.starts_with("attention_bias: "), "{error}");
}

#[test]
fn trees_of_drafts_take_decode_kernels_or_a_mask_over_all_keys() {
    let kernels = |device: &str, problem| {
        let planner = Planner::new(DeviceInfo::known(device).unwrap(), PlanOptions::default());
        let plan = planner.plan(&problem).unwrap();
        let names = plan.launches().iter().map(|launch| launch.entry().name).collect::<Vec<_>>();
        (plan.workspace_bytes(), names)
    };
    let dense = |layer: Layer, tokens| layer.dense(Dense::chunk(2, tokens, 1600).tree_mask());
    let call = Paged::new(2, 16, [1000, 16, 100]).most_tokens(8).tree_mask();
    let paged = layer().paged(call).unwrap();
    assert_eq!(kernels("h200", dense(layer(), 4).unwrap()).1, ["gqa_decode_bf16_d128_r16"]);
    assert_eq!(kernels("h200", dense(layer(), 16).unwrap()).1, ["gqa_decode_bf16_d128_r64"]);
    assert_eq!(kernels("h200", paged.clone()).1, ["gqa_decode_bf16_d128_r32"]);
    assert_eq!(kernels("a100", dense(layer(), 4).unwrap()).1, ["gqa_decode_bf16_d128_r16"]);
    let of_size = |size| Layer::new(DType::BF16, Heads { size, ..HEADS });
    let other = kernels("h200", dense(of_size(80), 16).unwrap()).1;
    assert_eq!(other, ["gqa_decode_bf16_d80_r64"]);
    let wide = |tokens| dense(of_size(320), tokens).unwrap();
    for (device, problem) in [("h200", wide(16)), ("a100", wide(4)), ("v100", paged)] {
        let (bytes, names) = kernels(device, problem);
        assert!(names.contains(&"gqa_tree_mask_rows"), "{device}: {names:?}");
        assert!(bytes >= 2 * 4 * 1600, "{device}: {bytes}");
    }
}

#[test]
fn what_is_in_a_paged_cache_already_is_read_only() {
    let call = Paged::new(3, 20, [64, 16, 30]).most_tokens(8).appended();
    for (layer, call, names) in [
        (layer(), call.packed(), "packed"),
        (layer(), call.slot_mapping(), "slot_mapping"),
        (layer().qk_norm(1e-6), call, "qk_norm"),
    ] {
        let error = layer.paged(call).unwrap_err().to_string();
        assert!(error.starts_with(names) && error.contains("allowed: "), "{error}");
    }
    // In the last call there are fewer tokens than sequences.
    for (rotated, new) in
        [(false, [1, 1, 1]), (true, [3, 7, 2]), (false, [0, 9, 4]), (true, [0, 1, 0])]
    {
        for problem in step::paged::problems(rotated, new) {
            for backend in [&Cpu::default() as &dyn Backend, &Reference] {
                let [want, key, value] = step::paged::run(&problem, new, backend);
                let caches = [key.clone(), value.clone()];
                let got = step::paged::run_over(&problem.appended(), new, caches, backend);
                assert!(got == [want, key, value], "{}: {new:?}", backend.name());
            }
        }
    }
}

#[test]
fn senseless_numbers_are_refused_by_name() {
    let refused = |heads, call| Layer::new(DType::BF16, heads).dense(call).unwrap_err().to_string();
    let heads = |query, kv, size| Heads { query, kv, size };
    let step = Dense::decode(1, 4096);
    for (heads, call, names) in [
        (heads(0, 8, 128), step, "heads.query: got 0; allowed: 1 to 65535"),
        (heads(32, 0, 128), step, "heads.kv: got 0; allowed: 1 to 65535"),
        (heads(30, 8, 128), step, "heads.kv: got 8; allowed: a divisor of heads.query = 30"),
        (heads(32, 3, 128), step, "heads.kv: got 3; allowed: a divisor of heads.query = 32"),
        (heads(usize::MAX, 8, 128), step, "heads.query: "),
        (heads(32, 8, 0), step, "heads.size: got 0; allowed: a multiple of 8 from 8 to 65536"),
        (heads(32, 8, 7), step, "heads.size: "),
        (heads(32, 8, usize::MAX), step, "heads.size: "),
        (
            HEADS,
            step.longest(5000),
            "longest: got 5000; allowed: 1 to 4096, the capacity of the cache",
        ),
        (HEADS, Dense::chunk(1, 9, 64).longest(8), "longest: got 8; allowed: 9 to 64, "),
        (HEADS, Dense::chunk(1, 65, 64), "capacity: got 64; allowed: 65 rows or more"),
        (HEADS, step.nothing_new().packed(), "query: "),
    ] {
        let error = refused(heads, call);
        assert!(error.starts_with(names), "{error}");
    }
    let three = Layer::new(DType::F32, heads(32, 3, 64));
    for error in [
        three.paged(Paged::decode(1, [8, 16, 8])).unwrap_err(),
        three.external(External::new(1, 1, 8)).unwrap_err(),
    ] {
        assert!(error.to_string().starts_with("heads.kv: got 3; "), "{error}");
    }
    let window = layer().window(0).dense(step).unwrap_err().to_string();
    assert_eq!(window, "window: got 0; allowed: 1 or more keys, the query's own included");
    let error = layer().sink(Sink::Zero).paged(Paged::decode(1, [8, 16, 8])).unwrap_err();
    assert!(error.to_string().starts_with("sink: got Sink::Zero"), "{error}");
}

#[test]
fn a_latent_layer_is_the_operators_layout() {
    let heads = LatentHeads { query: 128, size: 576, values: 512 };
    let layer = |heads| Layer::latent(DType::BF16, heads, 0.07);
    let turned = layer(heads).rope(Rope::new(64, 4096).offset(512).interleaved());
    let bf16 = |shape| TensorDesc { dtype: DType::BF16, shape };
    let i32 = |shape| TensorDesc { dtype: DType::I32, shape };
    let angles = Some(bf16(&[4096, 32]));
    let shapes = PagedShapes {
        query: bf16(&[20, 128 * 576]),
        key: Some(bf16(&[20, 576])),
        value: None,
        key_cache: bf16(&[100, 64, 1, 576]),
        value_cache: None,
        cumulative_sequence_length: i32(&[4]),
        past_seqlens: i32(&[3]),
        block_table: i32(&[3, 30]),
        cos_cache: angles,
        sin_cache: angles,
        slot_mapping: None,
        head_sink: None,
        q_norm_weight: None,
        k_norm_weight: None,
        k_scale: None,
        v_scale: None,
        bounds: Bounds { query_rows: 8, keys: 300 },
    };
    let operator = PagedAttention::new(128, 1)
        .kv_cache_layout("LATENT")
        .v_head_size(512)
        .scale(0.07)
        .do_rotary(true)
        .rotary_offset(512)
        .rotary_interleaved(true);
    let call = Paged::new(3, 20, [100, 64, 30]).most_tokens(8).longest(300);
    let want = operator.problem_from_shapes(&shapes).unwrap();
    assert_eq!(turned.paged(call).unwrap(), want);
    // Strides of the new rows are those of key alone.
    let strides = RowStrides { batch: 0, head: 0, row: 1024 };
    let strided = turned.paged(call.key_value_strides(strides)).unwrap().strided;
    assert_eq!((strided.key, strided.value), (Some(strides), None));
    for (layer, names) in [
        (layer(LatentHeads { values: 584, ..heads }), "heads.values: got 584; allowed: "),
        (layer(LatentHeads { values: 0, ..heads }), "heads.values: got 0; allowed: "),
        (layer(LatentHeads { size: 580, ..heads }), "heads.size: got 580; allowed: "),
        (layer(LatentHeads { query: 0, ..heads }), "heads.query: got 0; allowed: "),
        (layer(heads).qk_norm(1e-6), "qk_norm: got one; allowed: none, in a latent call"),
        (turned.clone().rope(Rope::new(64, 4096).offset(513)), "rope.offset: got 513; "),
    ] {
        let calls = [layer.paged(call), layer.dense(Dense::decode(1, 512))];
        for error in calls.map(|problem| problem.unwrap_err().to_string()) {
            assert!(error.starts_with(names), "{error}");
        }
    }
    for problem in [
        layer(heads).paged(call.packed()),
        layer(heads).dense(Dense::chunk(1, 4, 64).packed()),
        layer(heads)
            .external(External::new(1, 4, 64))
            .map(|_| layer(heads))
            .and_then(|layer| layer.rope(Rope::new(64, 64)).external(External::new(1, 4, 64))),
    ] {
        let error = problem.unwrap_err().to_string();
        assert!(error.contains("; allowed: "), "{error}");
    }
}

/// Values are a part of the keys, and have their scales.
#[test]
fn a_quantized_latent_cache_has_one_tensor_of_scales() {
    let layer = |scales| {
        let heads = LatentHeads { query: 128, size: 576, values: 512 };
        let how = Quantization { format: QuantFormat::Float8, scales };
        Layer::latent(DType::BF16, heads, 0.07).quantized(how)
    };
    let shapes = |problem: &Problem| {
        let spec = |id: TensorId| id.spec(problem).map(|spec| (spec.dtype, spec.shape));
        [TensorId::PresentKey, TensorId::KScale, TensorId::KRowScale].map(spec)
    };
    let call = Paged::new(3, 20, [100, 64, 30]);
    let of_all = layer(Scales::PerTensor).paged(call).unwrap();
    let cache = Some((DType::F8E4M3, vec![100, 64, 1, 576]));
    assert_eq!(shapes(&of_all), [cache.clone(), Some((DType::F32, vec![1])), None]);
    let of_rows = layer(Scales::PerToken).paged(call).unwrap();
    assert_eq!(shapes(&of_rows), [cache, None, Some((DType::F32, vec![100, 64, 1]))]);
    for problem in [of_all, of_rows] {
        for id in [TensorId::PresentValue, TensorId::VScale, TensorId::VRowScale] {
            assert_eq!(id.spec(&problem), None);
        }
    }
}

#[test]
fn bounds_of_paged_calls_that_contradict_each_other_are_refused() {
    // 12 new tokens of 4 sequences of up to 8 blocks of 16 rows.
    let call = Paged::new(4, 12, [100, 16, 8]);
    for (call, want) in [
        (call.most_tokens(50), "most_tokens: got 50; allowed: up to 12, the tokens of the call"),
        (call.longest(129), "longest: got 129; allowed: up to 128, the rows of 8 blocks of 16"),
        (
            call.most_tokens(9).longest(8),
            "most_tokens: got 9; allowed: up to 8, the longest sequence after the call",
        ),
    ] {
        assert_eq!(layer().paged(call).unwrap_err().to_string(), want);
    }
    for call in [
        // Bounds that are not given, or as large as possible.
        call.most_tokens(12).longest(128),
        call.most_tokens(0).longest(0),
        // Tokens that belong to no sequence, and sequences without new tokens.
        call.most_tokens(1),
        Paged::new(20, 12, [100, 16, 8]),
    ] {
        layer().paged(call).unwrap();
    }
    // A sequence whose tokens are already cached may have fewer keys than tokens. Kernels have as
    // many rows for these as for keys.
    let problem = layer().paged(call.most_tokens(9).longest(8).appended()).unwrap();
    assert_eq!((problem.q_len, problem.capacity), (9, 9));
}
