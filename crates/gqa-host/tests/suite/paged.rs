//! Every rule of PagedAttention: the message names the argument, the value and the allowed values.

use gqa_host::op::{Bounds, PagedAttention, PagedCache, PagedInputs, PagedShapes, QuantType};
use gqa_host::{
    DType, Pages, Phase, Problem, QuantFormat, Quantization, Result, Scales, Tensor, TensorDesc,
};
use ndarray::{Array, Array1};

/// A legal call to damage: sequences of 3 and 1 new tokens after 2 and 6 rows, 4 query heads over 2
/// KV heads of size 16, blocks of 4 rows.
struct Call {
    op: PagedAttention,
    query: Tensor,
    key: Option<Tensor>,
    value: Option<Tensor>,
    starts: Tensor,
    past: Tensor,
    table: Tensor,
    tables: Option<[Tensor; 2]>,
    slots: Option<Tensor>,
    head_sink: Option<Tensor>,
    metadata: Option<Tensor>,
    scales: [Option<Tensor>; 2],
    cache: PagedCache,
}

const PER_CHANNEL: QuantType = QuantType::PerChannel;

fn float(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::F32, shape)
}

fn ints(values: &[i32]) -> Tensor {
    Array1::from(values.to_vec()).into()
}

fn table(rows: usize, values: &[i32]) -> Tensor {
    Array::from_shape_vec((rows, values.len() / rows), values.to_vec()).unwrap().into()
}

impl Call {
    fn new() -> Self {
        Self {
            op: PagedAttention::new(4, 2),
            query: float(&[4, 64]),
            key: Some(float(&[4, 32])),
            value: Some(float(&[4, 32])),
            starts: ints(&[0, 3, 4]),
            past: ints(&[2, 6]),
            table: table(2, &[4, 0, -9, 3, 1, 99]),
            tables: None,
            slots: None,
            head_sink: None,
            metadata: None,
            scales: [None, None],
            cache: PagedCache {
                key: float(&[5, 4, 2, 16]),
                value: Some(float(&[5, 4, 2, 16])),
                scales: None,
            },
        }
    }

    fn rotary() -> Self {
        let op = PagedAttention::new(4, 2).do_rotary(true);
        Self { op, tables: Some([float(&[7, 8]), float(&[7, 8])]), ..Self::new() }
    }

    /// 8-bit values with a scale for each channel.
    fn codes() -> Self {
        let op = Self::new().op.k_quant_type(PER_CHANNEL).v_quant_type(PER_CHANNEL);
        let cache = || Tensor::zeros(DType::I8, &[5, 4, 2, 16]);
        let scale = || Some(Array::from_elem((2, 1, 16), 0.5f32).into());
        Self {
            op,
            scales: [scale(), scale()],
            cache: PagedCache { key: cache(), value: Some(cache()), scales: None },
            ..Self::new()
        }
    }

    fn slots(self, values: &[i32]) -> Self {
        Self { slots: Some(ints(values)), ..self }
    }

    fn problem(&self) -> Result<Problem> {
        let inputs = PagedInputs {
            key: self.key.as_ref(),
            value: self.value.as_ref(),
            cos_cache: self.tables.as_ref().map(|[cos, _]| cos),
            sin_cache: self.tables.as_ref().map(|[_, sin]| sin),
            slot_mapping: self.slots.as_ref(),
            head_sink: self.head_sink.as_ref(),
            k_scale: self.scales[0].as_ref(),
            v_scale: self.scales[1].as_ref(),
            attention_metadata: self.metadata.as_ref(),
            ..PagedInputs::new(&self.query, &self.starts, &self.past, &self.table)
        };
        self.op.problem(&inputs, &self.cache)
    }
}

#[track_caller]
fn refuses(call: Call, text: &str) {
    match call.problem() {
        Ok(_) => panic!("accepted, want {text}"),
        Err(error) => assert_eq!(error.to_string(), text),
    }
}

#[track_caller]
fn accepts(call: Call) -> Problem {
    call.problem().unwrap()
}

#[test]
fn legal_calls_become_problems() {
    let p = accepts(Call::new());
    assert_eq!((p.batch, p.q_len, p.total_len), (2, 3, 7));
    assert_eq!((p.phase, p.packed, p.causal), (Phase::SubsequentPrompt, false, true));
    let pages = Pages {
        tokens: 4,
        blocks: 5,
        block_size: 4,
        per_sequence: 3,
        slots: false,
        counts_new: false,
        one_each: false,
        scheduled: false,
        consecutive: false,
    };
    assert_eq!(p.pages, Some(pages));
    assert_eq!(p.output_shape(), [4, 64]);
    let packed = accepts(Call { query: float(&[4, 128]), key: None, value: None, ..Call::new() });
    assert!(packed.packed);
    let single = Call { starts: ints(&[0, 1, 2]), query: float(&[2, 64]), ..Call::new() };
    let new = || Some(float(&[2, 32]));
    let p = accepts(Call { key: new(), value: new(), ..single });
    assert_eq!((p.q_len, p.phase), (1, Phase::TokenGeneration));
    assert_eq!(accepts(Call::rotary()).rotary.unwrap().dim, 16);
    let window = |size, causal| {
        let op = PagedAttention::new(4, 2).local_window_size(size).is_causal(causal);
        accepts(Call { op, ..Call::new() })
    };
    assert_eq!((window(3, 0).window, window(3, 0).causal), (Some(3), false));
    assert_eq!(window(7, 1).window, None);
}

#[test]
fn attributes() {
    let with = |op: fn(PagedAttention) -> PagedAttention| {
        let call = Call::new();
        Call { op: op(call.op.clone()), ..call }
    };
    refuses(with(|_| PagedAttention::new(0, 1)), "num_heads: got 0; allowed: 1 to 65535");
    refuses(
        with(|_| PagedAttention::new(4, 3)),
        "num_heads: got 4; allowed: a multiple of kv_num_heads = 3",
    );
    refuses(with(|op| op.scale(f32::NAN)), "scale: got NaN; allowed: a finite number");
    refuses(with(|op| op.is_causal(2)), "is_causal: got 2; allowed: 0 or 1");
    refuses(
        with(|op| op.local_window_size(0)),
        "local_window_size: got 0; allowed: 1 or more, or -1 for no window",
    );
    refuses(
        with(|op| op.qk_norm_epsilon(0.0)),
        "qk_norm_epsilon: got 0; allowed: a finite number greater than 0",
    );
    refuses(
        with(|op| op.do_rotary(true)),
        "cos_cache: got no input; allowed: cos_cache and sin_cache, which do_rotary = 1 needs",
    );
}

#[test]
fn tokens() {
    let query = |shape: &[usize]| Call { query: float(shape), ..Call::new() };
    refuses(
        query(&[4, 60]),
        "query: got (4, 60); allowed: a last dimension of num_heads = 4 times a head_size that is a multiple of 8 from 8 to 65536",
    );
    refuses(
        query(&[1, 4, 64]),
        "cumulative_sequence_length: got [0, 3, 4]; allowed: 3 integers from 0 to num_tokens = 1",
    );
    refuses(
        Call { query: Tensor::zeros(DType::F64, &[4, 64]), ..Call::new() },
        "query: got float64; allowed: float32, float16 or bfloat16",
    );
    refuses(
        Call { value: None, ..Call::new() },
        "value: got no input; allowed: a tensor, as key is given",
    );
    refuses(
        Call { key: Some(float(&[3, 32])), ..Call::new() },
        "key: got (3, 32); allowed: (num_tokens = 4, kv_num_heads * head_size = 32)",
    );
    refuses(
        Call { head_sink: Some(float(&[2])), ..Call::new() },
        "head_sink: got (2); allowed: (num_heads = 4)",
    );
}

#[test]
fn lengths() {
    let starts = |values: &[i32]| Call { starts: ints(values), ..Call::new() };
    refuses(
        starts(&[0, 3, 5]),
        "cumulative_sequence_length: got [0, 3, 5]; allowed: 3 integers from 0 to num_tokens = 4",
    );
    refuses(
        starts(&[0, 4]),
        "cumulative_sequence_length: got [0, 4]; allowed: 3 integers from 0 to num_tokens = 4",
    );
    refuses(
        starts(&[0, 5, 4]),
        "cumulative_sequence_length: got 4 behind 5 at 2; allowed: integers in ascending order",
    );
    accepts(starts(&[0, 4, 4]));
    refuses(
        Call { past: ints(&[2, -1]), ..Call::new() },
        "past_seqlens: got -1 for batch entry 1; allowed: 0 or more",
    );
    refuses(
        Call { past: ints(&[10, 6]), ..Call::new() },
        "past_seqlens: got 10 for batch entry 0, which has 3 new tokens; allowed: up to 12 rows in total, the size of its blocks",
    );
    refuses(
        Call { past: Tensor::zeros(DType::I64, &[2]), ..Call::new() },
        "past_seqlens: got int64; allowed: int32",
    );
    let metadata = |values: &[i32]| Call { metadata: Some(ints(values)), ..Call::new() };
    accepts(metadata(&[3, 7]));
    accepts(metadata(&[0, 0, 5]));
    refuses(
        metadata(&[2, 7]),
        "attention_metadata: got [2, 7]; allowed: 0, or at least 3 and 7, the largest number of new tokens and the longest sequence",
    );
    refuses(metadata(&[3]), "attention_metadata: got (1); allowed: (2) or (3)");
    accepts(metadata(&[3, 7, 7]));
    for least in [8, -1] {
        refuses(
            metadata(&[3, 7, least]),
            &format!(
                "attention_metadata: got [3, 7, {least}]; allowed: 0, or up to 7, the longest \
                 sequence, as the least it may have"
            ),
        );
    }
}

#[test]
fn without_tokens_nothing_is_looked_up() {
    let none = || Call {
        query: float(&[0, 64]),
        key: Some(float(&[0, 32])),
        value: Some(float(&[0, 32])),
        starts: ints(&[0, 0, 0]),
        table: table(2, &[-1, 7, -1, -1, -1, -1]),
        ..Call::new()
    };
    let p = accepts(none());
    assert!(p.is_empty());
    assert_eq!(p.output_shape(), [0, 64]);
    let no_sequences = || Call {
        starts: ints(&[0]),
        past: ints(&[]),
        table: Array::from_shape_vec((0, 3), Vec::<i32>::new()).unwrap().into(),
        ..none()
    };
    assert!(accepts(no_sequences()).is_empty());
    refuses(
        Call { past: ints(&[2, 13]), ..none() },
        "past_seqlens: got 13 for batch entry 1, which has 0 new tokens; allowed: up to 12 rows in total, the size of its blocks",
    );
    refuses(
        Call { query: float(&[1, 64]), starts: ints(&[1]), ..no_sequences() },
        "cumulative_sequence_length: got [1]; allowed: 1 integers from 0 to num_tokens = 1",
    );
}

#[test]
fn blocks() {
    // Blocks outside of the cache hold nothing.
    for outside in [-1, 5, i32::MIN, i32::MAX] {
        accepts(Call { table: table(2, &[4, outside, -9, 3, 1, 99]), ..Call::new() });
        accepts(Call { table: table(2, &[4, 0, -9, outside, 1, 99]), ..Call::new() });
    }
    refuses(
        Call { table: table(1, &[4, 0, 1]), ..Call::new() },
        "block_table: got (1, 3); allowed: (batch_size = 2, max_blocks_per_sequence >= 1)",
    );
    let window = |op: PagedAttention, values: &[i32]| Call {
        op: op.local_window_size(3),
        table: table(2, values),
        ..Call::new()
    };
    // Token 0 of sequence 1 is at position 6 and attends to rows 4 to 6, all in the second block.
    accepts(window(Call::new().op, &[4, 0, -9, -1, 1, 99]));
    accepts(window(Call::new().op.is_causal(0), &[4, 0, -9, i32::MAX, 1, 99]));
    // The data of a sequence without tokens are not read.
    let idle = Call { starts: ints(&[0, 4, 4]), past: ints(&[2, 6]), ..Call::new() };
    accepts(Call { table: table(2, &[4, 0, -9, -1, 99, -1]), ..idle });
    let cache = |key: &[usize], value: &[usize]| {
        let cache = PagedCache { key: float(key), value: Some(float(value)), scales: None };
        Call { cache, ..Call::new() }
    };
    refuses(
        cache(&[5, 4, 2, 8], &[5, 4, 2, 8]),
        "key_cache: got (5, 4, 2, 8); allowed: (num_blocks >= 1, block_size >= 1, kv_num_heads = 2, head_size = 16)",
    );
    refuses(
        cache(&[5, 4, 2, 16], &[5, 8, 2, 16]),
        "value_cache: got (5, 8, 2, 16); allowed: (num_blocks = 5, block_size = 4, kv_num_heads = 2, head_size = 16)",
    );
    let slots = |values: &[i32]| Call::new().slots(values);
    assert!(accepts(slots(&[-1, 3, 19, 0])).pages.unwrap().slots);
    refuses(
        slots(&[0, 20, 1, 2]),
        "slot_mapping: got 20 at 1; allowed: -1 to 19, the last row of key_cache",
    );
    refuses(slots(&[0, 1]), "slot_mapping: got (2); allowed: (num_tokens = 4)");
    refuses(
        Call { tables: Some([float(&[6, 8]), float(&[6, 8])]), ..Call::rotary() },
        "past_seqlens: got 6 for batch entry 1, which has 1 new tokens; allowed: up to 6 rows in total, those of cos_cache",
    );
    refuses(
        Call { tables: Some([float(&[0, 8]), float(&[0, 8])]), ..Call::rotary() },
        "cos_cache: got (0, 8); allowed: (max_positions >= 1, rotary_dim / 2)",
    );
}

#[test]
fn new_tokens_have_rows_of_their_own() {
    let tables = |values: &[i32]| Call { table: table(2, values), ..Call::new() };
    // Sequence 0 writes rows 2 to 4, sequence 1 row 6.
    refuses(
        Call { past: ints(&[1, 6]), ..tables(&[4, 0, -9, 3, 4, 99]) },
        "block_table: got row 18 of the cache for new token 2 of batch entry 0 and for \
         token 6 of batch entry 1; allowed: a cache row of its own for each new token",
    );
    refuses(
        tables(&[4, 0, -9, 0, 1, 99]),
        "block_table: got row 0 of the cache for new token 4 of batch entry 0 and for \
         token 0 of batch entry 1; allowed: a cache row of its own for each new token",
    );
    refuses(
        tables(&[4, 4, -9, 3, 1, 99]),
        "block_table: got row 16 of the cache for new token 4 of batch entry 0 and for \
         token 0 of batch entry 0; allowed: a cache row of its own for each new token",
    );
    // A prefix of both; all written before any is read; before the window.
    accepts(Call { past: ints(&[4, 6]), ..tables(&[3, 0, -9, 3, 1, 99]) });
    accepts(Call { past: ints(&[4, 4]), ..tables(&[3, 0, -9, 3, 0, 99]) }.slots(&[0, 1, 2, 3]));
    accepts(Call { op: Call::new().op.local_window_size(2), ..tables(&[4, 0, -9, 0, 1, 99]) });
    refuses(
        Call::new().slots(&[-1, 3, -1, 3]),
        "slot_mapping: got row 3 of the cache for new token 3 of batch entry 0 and for \
         token 6 of batch entry 1; allowed: a cache row of its own for each new token",
    );
}

#[test]
fn codes() {
    let call = Call::codes;
    let per_channel = |format| Some(Quantization { format, scales: Scales::PerChannel });
    assert_eq!(accepts(call()).quantized, per_channel(QuantFormat::Int8));
    let named = |name: &str| Call { op: call().op.k_cache_dtype(name), ..call() };
    accepts(named("int8"));
    refuses(named("int4"), "k_cache_dtype: got \"int4\"; allowed: \"int8\", as key_cache is int8");
    refuses(
        Call { op: call().op.v_quant_type(QuantType::None), ..call() },
        "v_quant_type: got NONE; allowed: PER_CHANNEL, as k_quant_type",
    );
    refuses(
        Call { scales: [call().scales[0].clone(), None], ..call() },
        "v_scale: got no input; allowed: 32 elements, as k_quant_type is PER_CHANNEL",
    );
    refuses(
        Call { cache: Call::new().cache, ..call() },
        "key_cache: got float32; allowed: int8, float8e4m3fn or uint8, as k_quant_type is PER_CHANNEL",
    );
    refuses(
        Call { op: Call::new().op, ..call() },
        "k_scale: got a tensor; allowed: no input, as k_quant_type is NONE",
    );
    refuses(
        Call { op: Call::new().op, scales: [None, None], ..call() },
        "key_cache: got int8; allowed: float32, the type of query",
    );
    let mut scale = Array::from_elem(32, 0.5f32);
    scale[7] = 0.0;
    refuses(
        Call { scales: [call().scales[0].clone(), Some(scale.into())], ..call() },
        "v_scale: got 0 at element 7; allowed: finite numbers other than 0, none subnormal",
    );
    let bytes = |size: usize| {
        let cache = || Tensor::zeros(DType::U8, &[5, 4, 2, size / 2]);
        let scale = || Some(Array::from_elem(2 * size, 0.5f32).into());
        let new = || Some(float(&[4, 2 * size]));
        Call {
            op: call().op.k_cache_dtype("int4").v_cache_dtype("int4"),
            query: float(&[4, 4 * size]),
            key: new(),
            value: new(),
            scales: [scale(), scale()],
            cache: PagedCache { key: cache(), value: Some(cache()), scales: None },
            ..call()
        }
    };
    assert_eq!(accepts(bytes(32)).quantized, per_channel(QuantFormat::Int4));
    let floats = |value: &str| {
        let call = bytes(32);
        Call { op: call.op.k_cache_dtype("float4e2m1").v_cache_dtype(value), ..call }
    };
    assert_eq!(accepts(floats("float4e2m1")).quantized, per_channel(QuantFormat::Float4));
    refuses(
        floats("int4"),
        "v_cache_dtype: got \"int4\"; allowed: \"float4e2m1\", as k_cache_dtype",
    );
    refuses(
        named("float4e2m1"),
        "k_cache_dtype: got \"float4e2m1\"; allowed: \"int8\", as key_cache is int8",
    );
    refuses(
        bytes(16),
        "query: got head_size 16; allowed: a head_size that is a multiple of 32, 16 bytes of quantized values",
    );
    refuses(
        Call { op: call().op, ..bytes(32) },
        "k_cache_dtype: got \"\"; allowed: \"int4\" or \"float4e2m1\", as key_cache is uint8",
    );
}

#[test]
fn scales_of_rows_are_the_caches() {
    let how = QuantType::PerToken;
    let call = |scales: Option<&[usize]>| {
        let call = Call::codes();
        let scales = scales.map(|shape| [float(shape), float(shape)]);
        Call {
            op: call.op.k_quant_type(how).v_quant_type(how),
            scales: [None, None],
            cache: PagedCache { scales, ..call.cache },
            ..Call::new()
        }
    };
    let p = accepts(call(Some(&[5, 4, 2])));
    assert_eq!(p.quantized.map(|how| how.scales), Some(Scales::PerToken));
    assert_eq!(p.row_scales_shape(), Some([5, 4, 2]));
    let dims = "(num_blocks = 5, block_size = 4, kv_num_heads = 2)";
    refuses(call(Some(&[5, 2, 4])), &format!("k_scale: got (5, 2, 4); allowed: {dims}"));
    refuses(
        call(None),
        &format!("k_scale: got no input; allowed: {dims}, as k_quant_type is PER_TOKEN"),
    );
    refuses(
        Call { scales: Call::codes().scales, ..call(Some(&[5, 4, 2])) },
        "k_scale: got a tensor; allowed: no input: the cache has its scales where k_quant_type is PER_TOKEN",
    );
    let scales = call(Some(&[5, 4, 2])).cache.scales;
    refuses(
        Call { cache: PagedCache { scales, ..Call::codes().cache }, ..Call::codes() },
        "k_scale: got scales of the cache; allowed: none, as k_quant_type is PER_CHANNEL",
    );
}

#[test]
fn shapes_alone() {
    fn desc(dtype: DType, shape: &[usize]) -> TensorDesc<'_> {
        TensorDesc { dtype, shape }
    }
    let cache = desc(DType::BF16, &[64, 16, 2, 64]);
    let shapes = |bounds| PagedShapes {
        query: desc(DType::BF16, &[3, 512]),
        key: None,
        value: None,
        key_cache: cache,
        value_cache: Some(cache),
        cumulative_sequence_length: desc(DType::I32, &[4]),
        past_seqlens: desc(DType::I32, &[3]),
        block_table: desc(DType::I32, &[3, 20]),
        cos_cache: None,
        sin_cache: None,
        slot_mapping: None,
        head_sink: None,
        q_norm_weight: None,
        k_norm_weight: None,
        k_scale: None,
        v_scale: None,
        bounds,
    };
    let op = PagedAttention::new(4, 2);
    let sizes = |bounds| {
        let p = op.problem_from_shapes(&shapes(bounds)).unwrap();
        (p.q_len, p.total_len)
    };
    assert_eq!(sizes(Bounds::default()), (3, 320));
    assert_eq!(sizes(Bounds { query_rows: 1, keys: 100 }), (1, 100));
    assert_eq!(sizes(Bounds { query_rows: 9, keys: 1000 }), (3, 320));
    // Sequences may be shorter than their blocks, and so may cos_cache.
    let tables = Some(desc(DType::BF16, &[50, 32]));
    let rotates = PagedAttention::new(4, 2).do_rotary(true);
    let few = PagedShapes { cos_cache: tables, sin_cache: tables, ..shapes(Bounds::default()) };
    assert_eq!(rotates.problem_from_shapes(&few).unwrap().total_len, 320);
    // A step reads little of a table, but the table's full size counts.
    let refusal = |table: &[usize], tokens: usize| {
        let (query, starts) = ([tokens, 512], [table[0] + 1]);
        let bounds = Bounds { query_rows: 1, keys: 100 };
        let shapes = PagedShapes {
            query: desc(DType::BF16, &query),
            cumulative_sequence_length: desc(DType::I32, &starts),
            past_seqlens: desc(DType::I32, &table[..1]),
            block_table: desc(DType::I32, table),
            ..shapes(bounds)
        };
        op.problem_from_shapes(&shapes).unwrap_err().to_string()
    };
    let rows = "rows; allowed: up to 2147483647 in all";
    assert_eq!(refusal(&[1 << 16, 1 << 16], 3), format!("block_table: got (65536, 65536) {rows}"));
    assert_eq!(refusal(&[1 << 16, 1], 1 << 30), format!("query: got (1073807360, 4) {rows}"));
}

/// 4 query heads of 80 elements. The leading 64 of a row are its value, the last 16 rotate.
fn latent() -> Call {
    let op = PagedAttention::new(4, 1)
        .kv_cache_layout("LATENT")
        .v_head_size(64)
        .scale(0.125)
        .do_rotary(true)
        .rotary_offset(64);
    Call {
        op,
        query: float(&[4, 320]),
        key: Some(float(&[4, 80])),
        value: None,
        tables: Some([float(&[7, 8]), float(&[7, 8])]),
        cache: PagedCache { key: float(&[5, 4, 1, 80]), value: None, scales: None },
        ..Call::new()
    }
}

#[test]
fn the_latent_layout_has_one_cache() {
    let p = accepts(latent());
    assert_eq!((p.latent, p.kv_heads, p.head_size, p.v_head_size), (true, 1, 80, 64));
    assert_eq!((p.scale, p.rotary.unwrap().offset), (0.125, 64));
    assert_eq!(p.output_shape(), [4, 256]);
    let with = |op: fn(PagedAttention) -> PagedAttention| {
        let call = latent();
        Call { op: op(call.op.clone()), ..call }
    };
    // Values of whole rows have the default scale, too.
    let p = accepts(with(|op| op.v_head_size(0).scale(0.0)));
    assert_eq!((p.v_head_size, p.scale as f32), (80, 80f32.sqrt().recip()));
    for (call, text) in [
        (
            with(|op| op.kv_cache_layout("PACKED")),
            "kv_cache_layout: got \"PACKED\"; allowed: \"SEPARATE\" or \"LATENT\"",
        ),
        (
            with(|op| op.kv_cache_layout("SEPARATE")),
            "v_head_size: got 64; allowed: 0, as kv_cache_layout is SEPARATE",
        ),
        (
            with(|op| op.kv_cache_layout("SEPARATE").v_head_size(0)),
            "value_cache: got no input; allowed: a tensor, as kv_cache_layout is SEPARATE",
        ),
        (
            with(|op| op.v_head_size(88)),
            "v_head_size: got 88; allowed: 0, or a multiple of 8 up to head_size = 80",
        ),
        (
            with(|op| op.v_head_size(-8)),
            "v_head_size: got -8; allowed: 0, or a multiple of 8 up to head_size = 80",
        ),
        (
            with(|op| op.scale(0.0)),
            "scale: got 0; allowed: a scale other than 0, as v_head_size = 64 is not head_size = 80",
        ),
        (
            with(|op| op.rotary_offset(72)),
            "rotary_offset: got 72; allowed: a multiple of 8 from 0 to head_size - rotary_dim = 64",
        ),
        (
            with(|op| op.rotary_offset(-8)),
            "rotary_offset: got -8; allowed: a multiple of 8 from 0 to head_size - rotary_dim = 64",
        ),
        (
            with(|op| op.k_quant_type(QuantType::PerTensor)),
            "k_quant_type: got PER_TENSOR; allowed: NONE, as kv_cache_layout is LATENT",
        ),
        (
            with(|op| op.v_cache_dtype("float32")),
            "v_cache_dtype: got \"float32\"; allowed: \"\", as kv_cache_layout is LATENT",
        ),
        (
            Call { key: None, ..latent() },
            "key: got no input; allowed: a tensor, as kv_cache_layout is LATENT",
        ),
        (
            Call { value: Some(float(&[4, 80])), ..latent() },
            "value: got a tensor; allowed: no input, as kv_cache_layout is LATENT",
        ),
        (
            Call {
                cache: PagedCache { value: Some(float(&[5, 4, 1, 80])), ..latent().cache },
                ..latent()
            },
            "value_cache: got a tensor; allowed: no input, as kv_cache_layout is LATENT",
        ),
        (
            Call { key: Some(float(&[4, 64])), ..latent() },
            "key: got (4, 64); allowed: (num_tokens = 4, kv_num_heads * head_size = 80)",
        ),
        (
            Call { cache: Call::new().cache, ..latent() },
            "value_cache: got a tensor; allowed: no input, as kv_cache_layout is LATENT",
        ),
    ] {
        refuses(call, text);
    }
    let two = PagedAttention::new(4, 2).kv_cache_layout("LATENT").v_head_size(64).scale(0.125);
    refuses(
        Call { op: two, ..latent() },
        "kv_num_heads: got 2; allowed: 1, as kv_cache_layout is LATENT",
    );
}

/// Of caches of keys and values, too, other elements than the first may rotate.
#[test]
fn rotary_offset_is_an_attribute_of_both_layouts() {
    let call = Call { query: float(&[4, 128]), key: Some(float(&[4, 64])), ..Call::rotary() };
    let key = float(&[5, 4, 2, 32]);
    let call = Call {
        op: call.op.clone().rotary_offset(16),
        value: Some(float(&[4, 64])),
        cache: PagedCache { key: key.clone(), value: Some(key), scales: None },
        ..call
    };
    let rotary = accepts(call).rotary.unwrap();
    assert_eq!((rotary.dim, rotary.offset), (16, 16));
}
