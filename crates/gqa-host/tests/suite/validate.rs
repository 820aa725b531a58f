//! Every rule of the operator: the message names the argument, the value and the allowed values.

use gqa_host::op::{GroupQueryAttention, Inputs, KvCache, Outputs, QuantType, Shapes};
use gqa_host::{
    Bias, CacheBinding, DType, Error, Layout, Phase, Problem, QkNorm, QkOutput, QuantFormat,
    Quantization, Result, Scales, Sink, Tensor, TensorDesc,
};
use ndarray::Array;

/// A legal call to damage: batch 2, 4 query heads over 2 KV heads of size 16, 3 new rows after a
/// past of up to 2 rows, without spare cache room.
struct Call {
    op: GroupQueryAttention,
    query: Tensor,
    key: Option<Tensor>,
    value: Option<Tensor>,
    past_key: Option<Tensor>,
    past_value: Option<Tensor>,
    seqlens_k: Tensor,
    query_seqlens: Option<Tensor>,
    total_sequence_length: Tensor,
    cos_cache: Option<Tensor>,
    sin_cache: Option<Tensor>,
    position_ids: Option<Tensor>,
    attention_bias: Option<Tensor>,
    head_sink: Option<Tensor>,
    /// k_scale and v_scale.
    scales: [Option<Tensor>; 2],
    norm_weights: [Option<Tensor>; 2],
}

fn float(shape: &[usize]) -> Tensor {
    Tensor::zeros(DType::F32, shape)
}

fn ints(values: &[i32]) -> Tensor {
    Tensor::from(Array::from(values.to_vec()))
}

fn ids(shape: (usize, usize), values: &[i64]) -> Tensor {
    Tensor::from(Array::from_shape_vec(shape, values.to_vec()).unwrap())
}

impl Call {
    fn new() -> Self {
        Self {
            op: GroupQueryAttention::new(4, 2),
            query: float(&[2, 3, 64]),
            key: Some(float(&[2, 3, 32])),
            value: Some(float(&[2, 3, 32])),
            past_key: Some(float(&[2, 2, 2, 16])),
            past_value: Some(float(&[2, 2, 2, 16])),
            seqlens_k: ints(&[4, 2]),
            query_seqlens: None,
            total_sequence_length: ints(&[5]),
            cos_cache: None,
            sin_cache: None,
            position_ids: None,
            attention_bias: None,
            head_sink: None,
            scales: [None, None],
            norm_weights: [None, None],
        }
    }

    /// With rotation of half of each head.
    fn rotary() -> Self {
        let cache = || Some(float(&[6, 8]));
        let op = GroupQueryAttention::new(4, 2).do_rotary(true);
        Self { op, cos_cache: cache(), sin_cache: cache(), ..Self::new() }
    }

    /// 3 rows and nothing before them.
    fn prompt() -> Self {
        let lengths = (ints(&[2, 1]), ints(&[3]));
        Self {
            past_key: None,
            past_value: None,
            seqlens_k: lengths.0,
            total_sequence_length: lengths.1,
            ..Self::new()
        }
    }

    fn packed() -> Self {
        Self { query: float(&[2, 3, 128]), key: None, value: None, ..Self::new() }
    }

    fn bnsh() -> Self {
        let kv = || Some(float(&[2, 2, 3, 16]));
        let op = GroupQueryAttention::new(4, 2).layout(Layout::Bnsh);
        Self { op, query: float(&[2, 4, 3, 16]), key: kv(), value: kv(), ..Self::new() }
    }

    /// A cache that is long enough already.
    fn static_cache() -> Self {
        let past = || Some(float(&[2, 2, 8, 16]));
        Self { past_key: past(), past_value: past(), ..Self::new() }
    }

    /// Chunks of 3 rows of which 3 and 1 are tokens, after 2 and 2, in a cache of 8 rows.
    fn padded() -> Self {
        let tokens = Some(ints(&[3, 1]));
        Self { query_seqlens: tokens, ..Self::static_cache() }
    }

    /// A quantized cache of that format, with that many scales.
    fn quantized(how: QuantType, bits: i64, dtype: DType, scales: usize) -> Self {
        let past = || Some(Tensor::zeros(dtype, &[2, 2, 2, if bits == 4 { 8 } else { 16 }]));
        let scale = || Some(Tensor::from(Array::from_elem(scales, 0.5f32)));
        let plain = Self::new();
        Self {
            op: plain.op.clone().k_quant_type(how).v_quant_type(how).kv_cache_bit_width(bits),
            past_key: past(),
            past_value: past(),
            scales: [scale(), scale()],
            ..plain
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            key: self.key.as_ref(),
            value: self.value.as_ref(),
            past_key: self.past_key.as_ref(),
            past_value: self.past_value.as_ref(),
            cos_cache: self.cos_cache.as_ref(),
            sin_cache: self.sin_cache.as_ref(),
            position_ids: self.position_ids.as_ref(),
            attention_bias: self.attention_bias.as_ref(),
            head_sink: self.head_sink.as_ref(),
            k_scale: self.scales[0].as_ref(),
            v_scale: self.scales[1].as_ref(),
            query_seqlens: self.query_seqlens.as_ref(),
            q_norm_weight: self.norm_weights[0].as_ref(),
            k_norm_weight: self.norm_weights[1].as_ref(),
            ..Inputs::new(&self.query, &self.seqlens_k, &self.total_sequence_length)
        }
    }

    fn problem(&self) -> Result<Problem> {
        self.op.problem(&self.inputs(), CacheBinding::Separate)
    }

    fn in_place(&self, rows: usize) -> Result<Problem> {
        let cache = || float(&[2, 2, rows, 16]);
        let inputs = Inputs { past_key: None, past_value: None, ..self.inputs() };
        self.op.problem_in_place(&inputs, &KvCache { key: cache(), value: cache(), scales: None })
    }

    fn with(mut self, spoil: impl FnOnce(&mut Self)) -> Self {
        spoil(&mut self);
        self
    }

    fn op(self, change: impl FnOnce(GroupQueryAttention) -> GroupQueryAttention) -> Self {
        Self { op: change(self.op), ..self }
    }
}

/// Asserts the error's whole text.
#[track_caller]
fn refused(result: Result<Problem>, text: &str) {
    match result {
        Ok(_) => panic!("accepted, want {text}"),
        Err(error) => assert_eq!(error.to_string(), text),
    }
}

#[track_caller]
fn refuses(call: Call, text: &str) {
    refused(call.problem(), text);
}

#[track_caller]
fn accepts(call: Call) -> Problem {
    call.problem().unwrap()
}

#[test]
fn legal_calls_become_problems() {
    let p = accepts(Call::new());
    assert_eq!((p.batch, p.q_heads, p.kv_heads, p.head_size, p.group()), (2, 4, 2, 16, 2));
    assert_eq!((p.q_len, p.new_len, p.total_len, p.past_capacity, p.capacity), (3, 3, 5, 2, 5));
    assert_eq!(
        (p.phase, p.packed, p.scale, p.causal),
        (Phase::SubsequentPrompt, false, 0.25, true)
    );
    assert_eq!(
        (p.softcap, p.window, p.sink, p.bias, p.rotary),
        (None, None, Sink::None, None, None)
    );
    assert_eq!((p.output_qk, p.lse, p.dtype), (QkOutput::None, false, DType::F32));
    let p = accepts(Call::prompt());
    assert_eq!((p.phase, p.past_capacity, p.capacity), (Phase::FirstPrompt, 0, 3));
    let p = accepts(Call::packed());
    assert_eq!((p.packed, p.head_size, p.new_len), (true, 16, 3));
    let p = accepts(Call::bnsh());
    assert_eq!((p.layout, p.batch, p.q_len, p.head_size, p.new_len), (Layout::Bnsh, 2, 3, 16, 3));
    assert_eq!(accepts(Call::static_cache()).capacity, 8);
    let rotary = accepts(Call::rotary()).rotary.unwrap();
    assert_eq!(
        (rotary.dim, rotary.max_positions, rotary.explicit, rotary.interleaved),
        (16, 6, None, false)
    );
}

#[test]
fn attributes_become_features() {
    let p = accepts(
        Call::new().op(|op| op.scale(-2.0).softcap(30.0).local_window_size(4).smooth_softmax(true)),
    );
    assert_eq!((p.scale, p.softcap, p.window, p.sink), (-2.0, Some(30.0), Some(4), Sink::Zero));
    let p = accepts(
        Call::new().op(|op| op.softcap(-1.0).local_window_size(i64::MIN).causal(0).qk_output(2)),
    );
    assert_eq!(
        (p.softcap, p.window, p.causal, p.output_qk),
        (None, None, false, QkOutput::AfterSoftmax)
    );
    let p = accepts(
        Call::new().op(|op| op.smooth_softmax(true)).with(|c| c.head_sink = Some(float(&[4]))),
    );
    assert_eq!(p.sink, Sink::PerHead);
    let hides_nothing = Call::new().op(|op| op.local_window_size(i64::MAX));
    assert_eq!(accepts(hides_nothing).window, None);
}

#[test]
fn attributes() {
    let op = |op| Call { op, ..Call::new() };
    refuses(op(GroupQueryAttention::new(0, 2)), "num_heads: got 0; allowed: 1 to 65535");
    refuses(
        op(GroupQueryAttention::new(1 << 62, 2)),
        "num_heads: got 4611686018427387904; allowed: 1 to 65535",
    );
    refuses(op(GroupQueryAttention::new(4, -1)), "kv_num_heads: got -1; allowed: 1 to 65535");
    refuses(
        op(GroupQueryAttention::new(4, 3)),
        "num_heads: got 4; allowed: a multiple of kv_num_heads = 3",
    );
    let op = |change: fn(GroupQueryAttention) -> GroupQueryAttention| Call::new().op(change);
    refuses(op(|op| op.scale(f32::NAN)), "scale: got NaN; allowed: a finite number");
    refuses(op(|op| op.softcap(f32::INFINITY)), "softcap: got inf; allowed: a finite number");
    refuses(op(|op| op.causal(2)), "causal: got 2; allowed: 0 or 1");
    refuses(op(|op| op.qk_output(-1)), "qk_output: got -1; allowed: 0, 1 or 2");
    refuses(
        op(|op| op.local_window_size(0)),
        "local_window_size: got 0; allowed: 1 or more, or -1 for no window",
    );
    refuses(
        op(|op| op.local_window_size(2).causal(0)),
        "local_window_size: got 2 with causal = 0; allowed: -1, or causal = 1",
    );
}

#[test]
fn query() {
    let shape = |shape: &[usize]| Call { query: float(shape), ..Call::new() };
    let integers = Tensor::zeros(DType::I32, &[2, 3, 64]);
    refuses(
        Call { query: integers, ..Call::new() },
        "query: got int32; allowed: float32, float16 or bfloat16",
    );
    let form = "(batch_size, sequence_length, num_heads * head_size)";
    refuses(shape(&[2, 64]), &format!("query: got (2, 64); allowed: {form}"));
    refuses(shape(&[]), &format!("query: got (); allowed: {form}"));
    refuses(
        shape(&[2, 3, 65]),
        "query: got (2, 3, 65); allowed: a last dimension that is a multiple of num_heads = 4",
    );
    let sizes = "a head_size that is a multiple of 8 from 8 to 65536";
    refuses(
        shape(&[2, 3, 48]),
        &format!("query: got (2, 3, 48), so head_size = 12; allowed: {sizes}"),
    );
    refuses(
        shape(&[2, 3, 0]),
        &format!("query: got (2, 3, 0), so head_size = 0; allowed: {sizes}"),
    );
    refuses(
        shape(&[1, 1, 4 * 65544]),
        &format!("query: got (1, 1, 262176), so head_size = 65544; allowed: {sizes}"),
    );
    refuses(
        Call { query: float(&[2, 3, 129]), ..Call::packed() },
        "query: got (2, 3, 129); allowed: a last dimension that is a multiple of (num_heads + 2 * kv_num_heads) = 8",
    );
    refuses(
        Call { query: float(&[2, 2, 3, 16]), ..Call::bnsh() },
        "query: got (2, 2, 3, 16); allowed: (batch_size, num_heads = 4, sequence_length, head_size)",
    );
}

#[test]
fn key_and_value() {
    let key = |shape: &[usize]| Call { key: Some(float(shape)), ..Call::new() };
    let form = "(batch_size = 2, kv_sequence_length = 3 or 0, kv_num_heads * head_size = 32)";
    refuses(key(&[1, 3, 32]), &format!("key: got (1, 3, 32); allowed: {form}"));
    refuses(key(&[2, 2, 32]), &format!("key: got (2, 2, 32); allowed: {form}"));
    refuses(key(&[2, 3, 16]), &format!("key: got (2, 3, 16); allowed: {form}"));
    refuses(key(&[2, 2, 3, 16]), &format!("key: got (2, 2, 3, 16); allowed: {form}"));
    refuses(
        Call { key: Some(float(&[2, 0, 32])), ..Call::prompt() },
        "key: got (2, 0, 32); allowed: (batch_size = 2, kv_sequence_length = 3, kv_num_heads * head_size = 32)",
    );
    refuses(
        Call { key: Some(Tensor::zeros(DType::F16, &[2, 3, 32])), ..Call::new() },
        "key: got float16; allowed: float32, the type of query",
    );
    refuses(
        Call { value: Some(float(&[2, 0, 32])), ..Call::new() },
        "value: got (2, 0, 32); allowed: (batch_size = 2, kv_sequence_length = 3, kv_num_heads * head_size = 32)",
    );
    refuses(
        Call { key: None, ..Call::new() },
        "key: got no input; allowed: a tensor, as value is given",
    );
    refuses(
        Call { value: None, ..Call::new() },
        "value: got no input; allowed: a tensor, as key is given",
    );
    refuses(
        Call { key: None, value: None, ..Call::bnsh() },
        "key: got no input; allowed: key and value: packed QKV is (batch, sequence, heads) only",
    );
    refuses(
        Call { key: Some(float(&[2, 3, 2, 16])), ..Call::bnsh() },
        "key: got (2, 3, 2, 16); allowed: (batch_size = 2, kv_num_heads = 2, kv_sequence_length = 3 or 0, head_size = 16)",
    );
}

#[test]
fn past() {
    let past = |shape: &[usize]| Call { past_key: Some(float(shape)), ..Call::new() };
    let form = "(batch_size = 2, kv_num_heads = 2, past_sequence_length, head_size = 16)";
    for bad in [[1, 2, 2, 16], [2, 4, 2, 16], [2, 2, 2, 8]] {
        let [b, n, p, h] = bad;
        refuses(past(&bad), &format!("past_key: got ({b}, {n}, {p}, {h}); allowed: {form}"));
    }
    refuses(past(&[2, 2, 16]), &format!("past_key: got (2, 2, 16); allowed: {form}"));
    refuses(
        past(&[2, 2, 3, 16]),
        "past_value: got (2, 2, 2, 16); allowed: \
         (batch_size = 2, kv_num_heads = 2, past_sequence_length = 3, head_size = 16)",
    );
    refuses(
        Call { past_value: Some(Tensor::zeros(DType::BF16, &[2, 2, 2, 16])), ..Call::new() },
        "past_value: got bfloat16; allowed: float32, the type of query",
    );
    refuses(
        Call { past_key: None, ..Call::new() },
        "past_key: got no input; allowed: a tensor, as past_value is given",
    );
    refuses(
        Call { past_value: None, ..Call::new() },
        "past_value: got no input; allowed: a tensor, as past_key is given",
    );
}

#[test]
fn total_sequence_length() {
    let total = |total| Call { total_sequence_length: total, ..Call::new() };
    refuses(
        total(Tensor::zeros(DType::I64, &[1])),
        "total_sequence_length: got int64; allowed: int32",
    );
    refuses(total(ints(&[5, 5])), "total_sequence_length: got (2); allowed: one element");
    refuses(total(ints(&[])), "total_sequence_length: got (0); allowed: one element");
    refuses(
        total(ints(&[0])),
        "total_sequence_length: got 0; allowed: 3 or more, the rows of query",
    );
    refuses(total(ints(&[i32::MIN])), "total_sequence_length: got -2147483648; allowed: 0 or more");
    refuses(
        total(ints(&[i32::MAX])),
        "total_sequence_length: got 2147483647; allowed: 5 (past_key and the new rows), or up to 2 (past_key)",
    );
    refuses(
        total(ints(&[2])),
        "total_sequence_length: got 2; allowed: 3 or more, the rows of query",
    );
    refuses(
        Call { total_sequence_length: ints(&[4]), ..Call::prompt() },
        "total_sequence_length: got 4; allowed: 3, as there is no past",
    );
    let shared_kv = Call::static_cache().with(|c| {
        c.key = Some(float(&[2, 0, 32]));
        c.value = Some(float(&[2, 0, 32]));
        c.total_sequence_length = ints(&[9]);
    });
    refuses(shared_kv, "total_sequence_length: got 9; allowed: up to 8, the rows of past_key");
    accepts(total(Tensor::from(Array::from_elem((), 5i32))));
    accepts(Call { total_sequence_length: ints(&[8]), ..Call::static_cache() });
}

#[test]
fn lengths() {
    let lengths = |lengths| Call { seqlens_k: lengths, ..Call::new() };
    refuses(lengths(Tensor::zeros(DType::I64, &[2])), "seqlens_k: got int64; allowed: int32");
    let form = "(batch_size = 2), or with further dimensions of 1";
    for bad in [&[][..], &[1], &[3], &[2, 2], &[0]] {
        let got = bad.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let text = format!("seqlens_k: got ({got}); allowed: {form}");
        refuses(lengths(Tensor::zeros(DType::I32, bad)), &text);
    }
    refuses(
        lengths(ints(&[4, 1])),
        "seqlens_k: got 1 for batch entry 1; allowed: 2 to 4, the last of 3 or more tokens",
    );
    let beyond = "allowed: 2 to 4, the last of at most 5 rows of present_key";
    refuses(lengths(ints(&[5, 2])), &format!("seqlens_k: got 5 for batch entry 0; {beyond}"));
    refuses(
        lengths(ints(&[i32::MAX, 2])),
        &format!("seqlens_k: got 2147483647 for batch entry 0; {beyond}"),
    );
    refuses(
        Call { seqlens_k: ints(&[2, -1]), ..Call::prompt() },
        "seqlens_k: got -1 for batch entry 1; allowed: 0 to 2, the last of 1 or more tokens",
    );
    let prompt_in_long_cache = Call { total_sequence_length: ints(&[3]), ..Call::static_cache() };
    refuses(
        prompt_in_long_cache.with(|c| c.seqlens_k = ints(&[2, 3])),
        "seqlens_k: got 3 for batch entry 1; allowed: 0 to 2, the last of at most 3 tokens of a first prompt",
    );
    for shape in [[2, 1], [1, 2]] {
        let column = Array::from_shape_vec(shape, vec![4, 2]).unwrap();
        accepts(lengths(Tensor::from(column)));
    }
}

/// A sequence longer than total_sequence_length is legal, except where a tensor has
/// total_sequence_length columns or rows.
#[test]
fn lengths_beyond_the_total() {
    let token = || Call {
        query: float(&[2, 1, 64]),
        key: Some(float(&[2, 1, 32])),
        value: Some(float(&[2, 1, 32])),
        seqlens_k: ints(&[3, 1]),
        total_sequence_length: ints(&[2]),
        ..Call::static_cache()
    };
    assert_eq!(accepts(token()).phase, Phase::TokenGeneration);
    let beyond = |what| {
        format!("seqlens_k: got 3 for batch entry 0; allowed: 0 to 1, the last of at most 2 {what}")
    };
    refuses(token().op(|op| op.qk_output(1)), &beyond("columns of output_qk"));
    refuses(
        token().with(|c| c.attention_bias = Some(float(&[1, 1, 1, 2]))),
        &beyond("columns of attention_bias"),
    );
    let cache = || Some(float(&[2, 8]));
    refuses(
        token()
            .op(|op| op.do_rotary(true))
            .with(|c| (c.cos_cache, c.sin_cache) = (cache(), cache())),
        &beyond("rows of cos_cache"),
    );
    // Without rotation, positions are not checked.
    accepts(token().with(|c| (c.cos_cache, c.sin_cache) = (cache(), cache())));
}

#[test]
fn rotary() {
    refuses(
        Call { cos_cache: None, sin_cache: None, ..Call::rotary() },
        "cos_cache: got no input; allowed: cos_cache and sin_cache, which do_rotary = 1 needs",
    );
    refuses(
        Call { sin_cache: None, ..Call::rotary() },
        "sin_cache: got no input; allowed: a tensor, as cos_cache is given",
    );
    let cos = |shape: &[usize]| Call { cos_cache: Some(float(shape)), ..Call::rotary() };
    let form = "(total_sequence_length >= 5, rotary_dim / 2)";
    refuses(cos(&[4, 8]), &format!("cos_cache: got (4, 8); allowed: {form}"));
    refuses(cos(&[6, 1, 8]), &format!("cos_cache: got (6, 1, 8); allowed: {form}"));
    for width in [0, 4, 16] {
        let text = format!(
            "cos_cache: got (6, {width}); allowed: rotary_dim / 2 a multiple of 8 from 8 to 8"
        );
        refuses(cos(&[6, width]), &text);
    }
    let too_short_though_unused = Call { op: GroupQueryAttention::new(4, 2), ..cos(&[4, 8]) };
    refuses(too_short_though_unused, &format!("cos_cache: got (4, 8); allowed: {form}"));
    refuses(
        Call { sin_cache: Some(float(&[7, 8])), ..Call::rotary() },
        "sin_cache: got (7, 8); allowed: (rows of cos_cache = 6, rotary_dim / 2 = 8)",
    );
    refuses(
        Call { sin_cache: Some(Tensor::zeros(DType::F16, &[6, 8])), ..Call::rotary() },
        "sin_cache: got float16; allowed: float32, the type of query",
    );
    let cache = || Some(float(&[6, 8]));
    let heads_of_24 = Call {
        query: float(&[2, 3, 8 * 24]),
        cos_cache: cache(),
        sin_cache: cache(),
        ..Call::packed()
    };
    let heads_of_24 = heads_of_24.with(|c| (c.past_key, c.past_value) = (None, None));
    refuses(
        Call { total_sequence_length: ints(&[3]), ..heads_of_24 },
        "cos_cache: got a tensor, with head_size = 24; allowed: no input, or a head_size that is a multiple of 16",
    );
    let unused = Call { op: GroupQueryAttention::new(4, 2), ..Call::rotary() };
    assert_eq!(accepts(unused).rotary, None);
}

#[test]
fn position_ids() {
    let call = |tensor| Call { position_ids: Some(tensor), ..Call::rotary() };
    refuses(call(Tensor::zeros(DType::I32, &[2, 3])), "position_ids: got int32; allowed: int64");
    let form = "(batch_size = 2, sequence_length >= 3)";
    for bad in [&[6][..], &[1, 3], &[2, 2]] {
        let got = bad.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let text = format!("position_ids: got ({got}); allowed: {form}");
        refuses(call(Tensor::zeros(DType::I64, bad)), &text);
    }
    let last = "allowed: 0 to 5, the last row of cos_cache";
    let text = |got: &str| format!("position_ids: got {got}; {last}");
    refuses(call(ids((2, 3), &[0, 1, 2, 3, 4, 6])), &text("6 at (1, 2)"));
    refuses(call(ids((2, 3), &[0, -1, 2, 3, 4, 5])), &text("-1 at (0, 1)"));
    refuses(call(ids((2, 3), &[0, 1, 1 << 32, 3, 4, 5])), &text("4294967296 at (0, 2)"));
    let unused_column = call(ids((2, 4), &[5, 1, 5, 99, 3, 4, 5, -7]));
    assert_eq!(accepts(unused_column).rotary.unwrap().explicit, Some(4));
    let nothing_rotates = call(ids((2, 3), &[99; 6])).op(|op| op.do_rotary(false));
    accepts(nothing_rotates);
    let cache = || Some(float(&[3, 8]));
    let padding = Call { cos_cache: cache(), sin_cache: cache(), ..Call::prompt() };
    let padding = padding.op(|op| op.do_rotary(true));
    accepts(padding.with(|c| c.position_ids = Some(ids((2, 3), &[0, 1, 2, 2, 1, 99]))));
}

#[test]
fn bias_and_sink() {
    let bias = |shape: &[usize]| Call { attention_bias: Some(float(shape)), ..Call::new() };
    let form =
        "(batch_size = 2 or 1, num_heads = 4 or 1, sequence_length = 3, total_sequence_length = 5)";
    for bad in [[3, 4, 3, 5], [2, 2, 3, 5], [2, 4, 1, 5], [2, 4, 3, 4]] {
        let [b, n, s, t] = bad;
        refuses(bias(&bad), &format!("attention_bias: got ({b}, {n}, {s}, {t}); allowed: {form}"));
    }
    refuses(bias(&[4, 3, 5]), &format!("attention_bias: got (4, 3, 5); allowed: {form}"));
    for (shape, batch, head) in
        [([2, 4, 3, 5], false, false), ([1, 4, 3, 5], true, false), ([2, 1, 3, 5], false, true)]
    {
        let columns = shape[3];
        let want = Bias { batch, head, row: false, columns, boolean: false };
        assert_eq!(accepts(bias(&shape)).bias, Some(want));
    }
    let sink = |tensor| Call { head_sink: Some(tensor), ..Call::new() };
    refuses(sink(float(&[2])), "head_sink: got (2); allowed: (num_heads = 4)");
    refuses(sink(float(&[4, 1])), "head_sink: got (4, 1); allowed: (num_heads = 4)");
    refuses(
        sink(Tensor::zeros(DType::F16, &[4])),
        "head_sink: got float16; allowed: float32, the type of query",
    );
}

#[test]
fn normalisation() {
    let norm = |norm_weights| Call { norm_weights, ..Call::new() };
    let both = |weight: Tensor| [Some(weight.clone()), Some(weight)];
    let op = |op: fn(GroupQueryAttention) -> GroupQueryAttention| norm(both(float(&[16]))).op(op);
    assert_eq!(accepts(Call::new()).qk_norm, None);
    let epsilons = |q_epsilon, k_epsilon| Some(QkNorm { q_epsilon, k_epsilon });
    assert_eq!(accepts(norm(both(float(&[16])))).qk_norm, epsilons(1e-6, 1e-6));
    let p = accepts(op(|op| op.qk_norm_epsilon(1e-5)));
    assert_eq!(p.qk_norm, epsilons(1e-5, 1e-5));
    let p = accepts(op(|op| op.q_norm_epsilon(1e-4)));
    assert_eq!(p.qk_norm, epsilons(1e-4, 1e-6));
    let p = accepts(op(|op| op.k_norm_epsilon(1e-4).qk_norm_epsilon(1e-5)));
    assert_eq!(p.qk_norm, epsilons(1e-5, 1e-4));
    let one = || Some(float(&[16]));
    let missing = "k_norm_weight: got no input; allowed: a tensor, as q_norm_weight is given";
    refuses(norm([one(), None]), missing);
    let missing = "q_norm_weight: got no input; allowed: a tensor, as k_norm_weight is given";
    refuses(norm([None, one()]), missing);
    refuses(norm(both(float(&[8]))), "q_norm_weight: got (8); allowed: (head_size = 16)");
    refuses(
        norm([one(), Some(float(&[1, 16]))]),
        "k_norm_weight: got (1, 16); allowed: (head_size = 16)",
    );
    refuses(
        norm(both(Tensor::zeros(DType::BF16, &[16]))),
        "q_norm_weight: got bfloat16; allowed: float32, the type of query",
    );
    let allowed = "allowed: a finite number greater than 0";
    refuses(op(|op| op.qk_norm_epsilon(0.0)), &format!("qk_norm_epsilon: got 0; {allowed}"));
    refuses(op(|op| op.qk_norm_epsilon(f32::NAN)), &format!("qk_norm_epsilon: got NaN; {allowed}"));
    let infinite = format!("q_norm_epsilon: got inf; {allowed}");
    refuses(op(|op| op.q_norm_epsilon(f32::INFINITY)), &infinite);
    refuses(op(|op| op.k_norm_epsilon(-1.0)), &format!("k_norm_epsilon: got -1; {allowed}"));
}

#[test]
fn quantized_caches() {
    assert_eq!(accepts(Call::new()).quantized, None);
    for (bits, dtype, format) in [
        (8, DType::I8, QuantFormat::Int8),
        (8, DType::F8E4M3, QuantFormat::Float8),
        (4, DType::U8, QuantFormat::Int4),
    ] {
        for (how, scales, count) in [
            (QuantType::PerTensor, Scales::PerTensor, 1),
            (QuantType::PerHead, Scales::PerHead, 2),
            (QuantType::PerChannel, Scales::PerChannel, 32),
        ] {
            let p = accepts(Call::quantized(how, bits, dtype, count));
            assert_eq!(p.quantized, Some(Quantization { format, scales }));
            assert_eq!((p.dtype, p.key_cache_dtype()), (DType::F32, dtype));
            assert_eq!(p.key_cache_shape(5), [2, 2, 5, if bits == 4 { 8 } else { 16 }]);
        }
    }
    let four =
        Call::quantized(QuantType::PerTensor, 4, DType::U8, 1).op(|op| op.float4_cache(true));
    assert_eq!(accepts(four).quantized.map(|how| how.format), Some(QuantFormat::Float4));
    refuses(
        int8(QuantType::PerTensor, 1).op(|op| op.float4_cache(true)),
        "float4_cache: got true with kv_cache_bit_width = 8; allowed: false, or kv_cache_bit_width = 4",
    );
    // A scale may have any shape, and may be given without quantization.
    let scales = || Some(Tensor::from(Array::from_elem((1, 2, 1, 16), 0.5f32)));
    accepts(Call { scales: [scales(), scales()], ..int8(QuantType::PerChannel, 32) });
    accepts(Call { scales: [scales(), None], ..Call::new() });
}

fn int8(how: QuantType, scales: usize) -> Call {
    Call::quantized(how, 8, DType::I8, scales)
}

#[test]
fn attributes_of_quantized_caches() {
    use QuantType::{PerChannel, PerTensor};
    let call = || int8(PerTensor, 1);
    let plain = |op: fn(GroupQueryAttention) -> GroupQueryAttention| Call::new().op(op);
    refuses(
        call().op(|op| op.v_quant_type(PerChannel)),
        "v_quant_type: got PER_CHANNEL; allowed: PER_TENSOR, as k_quant_type",
    );
    refuses(
        call().op(|op| op.v_quant_type(QuantType::None)),
        "v_quant_type: got NONE; allowed: PER_TENSOR, as k_quant_type",
    );
    refuses(
        call().op(|op| op.kv_cache_bit_width(0)),
        "kv_cache_bit_width: got 0; allowed: 8 or 4, as k_quant_type is PER_TENSOR",
    );
    refuses(
        call().op(|op| op.kv_cache_bit_width(5)),
        "kv_cache_bit_width: got 5; allowed: 0, 4 or 8",
    );
    refuses(
        plain(|op| op.kv_cache_bit_width(8)),
        "kv_cache_bit_width: got 8; allowed: 0, as k_quant_type is NONE",
    );
}

#[test]
fn tensors_of_quantized_caches() {
    use QuantType::{PerChannel, PerHead, PerTensor};
    let zeros = |dtype, shape: &[usize]| Some(Tensor::zeros(dtype, shape));
    let call = || int8(PerTensor, 1);
    refuses(
        Call { past_key: None, past_value: None, ..call() },
        "past_key: got no input; allowed: a tensor, whose type is the format of the quantized KV cache",
    );
    refuses(
        Call { past_key: zeros(DType::F32, &[2, 2, 2, 16]), ..call() },
        "past_key: got float32; allowed: int8 or float8e4m3fn, as kv_cache_bit_width is 8",
    );
    refuses(
        call().op(|op| op.kv_cache_bit_width(4)),
        "past_key: got int8; allowed: uint8, as kv_cache_bit_width is 4",
    );
    refuses(
        Call { past_value: zeros(DType::F8E4M3, &[2, 2, 2, 16]), ..call() },
        "past_value: got float8e4m3fn; allowed: int8, the type of past_key",
    );
    refuses(
        Call {
            past_key: zeros(DType::U8, &[2, 2, 2, 16]),
            ..Call::quantized(PerTensor, 4, DType::U8, 1)
        },
        "past_key: got (2, 2, 2, 16); allowed: (batch_size = 2, kv_num_heads = 2, past_sequence_length, head_size / 2 = 8)",
    );
    refuses(
        Call {
            past_key: zeros(DType::I8, &[2, 2, 2, 16]),
            past_value: zeros(DType::I8, &[2, 2, 2, 16]),
            ..Call::new()
        },
        "past_key: got int8; allowed: float32, the type of query",
    );
    let scale = |values: &[f32]| Some(Tensor::from(Array::from(values.to_vec())));
    let scaled = |k_scale| Call { scales: [k_scale, scale(&[1.0])], ..call() };
    refuses(
        scaled(None),
        "k_scale: got no input; allowed: 1 elements, as k_quant_type is PER_TENSOR",
    );
    refuses(
        Call { scales: [scale(&[1.0]), None], ..call() },
        "v_scale: got no input; allowed: 1 elements, as k_quant_type is PER_TENSOR",
    );
    refuses(
        scaled(scale(&[1.0; 32])),
        "k_scale: got (32); allowed: 1 elements, as k_quant_type is PER_TENSOR",
    );
    refuses(
        int8(PerChannel, 16),
        "k_scale: got (16); allowed: 32 elements, as k_quant_type is PER_CHANNEL",
    );
    refuses(
        int8(PerHead, 32),
        "k_scale: got (32); allowed: 2 elements, as k_quant_type is PER_HEAD",
    );
    refuses(scaled(zeros(DType::F16, &[1])), "k_scale: got float16; allowed: float32");
    for (bad, shown) in [(0.0, "0"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let allowed = "finite numbers other than 0, none subnormal";
        refuses(
            scaled(scale(&[bad])),
            &format!("k_scale: got {shown} at element 0; allowed: {allowed}"),
        );
    }
}

#[test]
fn scales_of_rows_are_part_of_a_cache_that_past_and_present_share() {
    let call = || Call { scales: [None, None], ..int8(QuantType::PerToken, 1) };
    let in_place = |call: Call, scales: Option<&[usize]>| {
        let cache = || Tensor::zeros(DType::I8, &[2, 2, 5, 16]);
        let scales = scales.map(|shape| [float(shape), float(shape)]);
        let inputs = Inputs { past_key: None, past_value: None, ..call.inputs() };
        call.op.problem_in_place(&inputs, &KvCache { key: cache(), value: cache(), scales })
    };
    let p = in_place(call(), Some(&[2, 2, 5])).unwrap();
    let how = Quantization { format: QuantFormat::Int8, scales: Scales::PerToken };
    assert_eq!((p.quantized, p.scales(), p.row_scales_shape()), (Some(how), None, Some([2, 2, 5])));
    let others = "NONE, PER_TENSOR, PER_HEAD or PER_CHANNEL";
    refuses(
        int8(QuantType::PerToken, 8),
        &format!(
            "k_quant_type: got PER_TOKEN; allowed: {others}, as past and present are not one cache"
        ),
    );
    let rolls = call().op(|op| op.sliding_window_cache(true).local_window_size(4));
    refused(
        in_place(rolls, Some(&[2, 2, 5])),
        &format!("k_quant_type: got PER_TOKEN; allowed: {others}, as sliding_window_cache is 1"),
    );
    let dims = "(batch_size = 2, kv_num_heads = 2, past_sequence_length = 5)";
    refused(
        in_place(call(), Some(&[2, 5, 2])),
        &format!("k_scale: got (2, 5, 2); allowed: {dims}"),
    );
    refused(
        in_place(call(), None),
        &format!("k_scale: got no input; allowed: {dims}, as k_quant_type is PER_TOKEN"),
    );
    refused(
        in_place(int8(QuantType::PerToken, 20), Some(&[2, 2, 5])),
        "k_scale: got a tensor; allowed: no input: the cache has its scales where k_quant_type is PER_TOKEN",
    );
    refused(
        in_place(int8(QuantType::PerTensor, 1), Some(&[2, 2, 5])),
        "k_scale: got scales of the cache; allowed: none, as k_quant_type is PER_TENSOR",
    );
}

/// A rolling cache of 6 rows with a window of 4, and one new row of each sequence, far from the
/// start.
fn sliding() -> Call {
    let past = || Some(float(&[2, 2, 6, 16]));
    let new = || Some(float(&[2, 1, 32]));
    Call {
        query: float(&[2, 1, 64]),
        key: new(),
        value: new(),
        past_key: past(),
        past_value: past(),
        seqlens_k: ints(&[19, 2]),
        total_sequence_length: ints(&[20]),
        ..Call::new()
    }
    .op(|op| op.local_window_size(4).sliding_window_cache(true))
}

#[test]
fn caches_that_slide() {
    let p = accepts(sliding());
    assert_eq!((p.slides, p.capacity, p.total_len, p.window), (true, 6, 20, Some(4)));
    let inputs = sliding();
    let cache = KvCache { key: float(&[2, 2, 6, 16]), value: float(&[2, 2, 6, 16]), scales: None };
    let inputs = Inputs { past_key: None, past_value: None, ..inputs.inputs() };
    let p = sliding().op.problem_in_place(&inputs, &cache).unwrap();
    assert_eq!((p.cache, p.capacity), (CacheBinding::Shared, 6));
    // A window as long as the cache hides rows too.
    assert_eq!(accepts(sliding().op(|op| op.local_window_size(6))).window, Some(6));
    refuses(
        sliding().op(|op| op.local_window_size(-1)),
        "local_window_size: got -1; allowed: 1 or more, as sliding_window_cache is 1",
    );
    refuses(
        sliding().op(|op| op.local_window_size(7)),
        "past_key: got (2, 2, 6, 16); allowed: local_window_size = 7 rows or more, as sliding_window_cache is 1",
    );
    refuses(
        sliding().op(|op| op.qk_output(2)),
        "qk_output: got 2; allowed: 0, as sliding_window_cache is 1",
    );
    refuses(
        Call { past_key: None, past_value: None, ..sliding() },
        "past_key: got no input; allowed: a tensor, as sliding_window_cache is 1",
    );
    let none = || Some(float(&[2, 0, 32]));
    refuses(
        Call { key: none(), value: none(), ..sliding() },
        "key: got kv_sequence_length = 0; allowed: kv_sequence_length = 1, as sliding_window_cache is 1",
    );
    refuses(
        Call { seqlens_k: ints(&[20, 2]), ..sliding() },
        "seqlens_k: got 20 for batch entry 0; allowed: 0 to 19, the last of at most 20 rows by total_sequence_length",
    );
    // Rows of a prompt are all tokens.
    let prompt = |lengths: &[i32]| Call {
        query: float(&[2, 3, 64]),
        key: Some(float(&[2, 3, 32])),
        value: Some(float(&[2, 3, 32])),
        seqlens_k: ints(lengths),
        total_sequence_length: ints(&[3]),
        ..sliding()
    };
    accepts(prompt(&[2, 2]));
    refuses(
        prompt(&[2, 1]),
        "seqlens_k: got 1 for batch entry 1; allowed: 2 to 2, the last of 3 or more tokens",
    );
    let codes = |width| Some(Tensor::zeros(DType::U8, &[2, 2, 6, width]));
    let int4 = |size: usize| Call {
        query: float(&[2, 1, 4 * size]),
        key: Some(float(&[2, 1, 2 * size])),
        value: Some(float(&[2, 1, 2 * size])),
        past_key: codes(size / 2),
        past_value: codes(size / 2),
        scales: [(); 2].map(|()| Some(Tensor::from(Array::from_elem(1, 0.5f32)))),
        ..sliding().op(|op| {
            op.k_quant_type(QuantType::PerTensor)
                .v_quant_type(QuantType::PerTensor)
                .kv_cache_bit_width(4)
        })
    };
    accepts(int4(32));
    refuses(
        int4(16),
        "past_key: got (2, 2, 6, 8), rows of 8 bytes; allowed: rows of a multiple of 16 bytes, as sliding_window_cache is 1",
    );
}

#[test]
fn cache_in_place() {
    let p = Call::new().in_place(8).unwrap();
    assert_eq!(
        (p.cache, p.capacity, p.past_capacity, p.total_len),
        (CacheBinding::Shared, 8, 8, 5)
    );
    refused(
        Call::new().in_place(4),
        "total_sequence_length: got 5; allowed: up to 4, the rows of past_key",
    );
    let call = Call::new();
    let cache = KvCache { key: float(&[2, 2, 8, 16]), value: float(&[2, 2, 8, 16]), scales: None };
    refused(
        call.op.problem_in_place(&call.inputs(), &cache),
        "past_key: got (2, 2, 2, 16); allowed: no input: the cache given is the past",
    );
    refused(
        Call::prompt().op.problem(&Call::prompt().inputs(), CacheBinding::Shared),
        "past_key: got no input; allowed: the cache that present shares",
    );
}

#[test]
fn nothing_new_to_append() {
    let shared_kv = |rows| {
        Call::static_cache().with(|c| {
            c.key = Some(float(&[2, 0, 32]));
            c.value = Some(float(&[2, 0, 32]));
            c.seqlens_k = ints(&[rows, rows]);
        })
    };
    let p = accepts(shared_kv(7));
    assert_eq!((p.new_len, p.q_len, p.capacity), (0, 3, 8));
    refuses(
        shared_kv(8),
        "seqlens_k: got 8 for batch entry 0; allowed: 2 to 7, the last of at most 8 rows of present_key",
    );
}

/// Scores with more bytes than the address space.
#[test]
fn outputs_that_do_not_fit_are_refused() {
    let query = [1, 1 << 29, 24];
    let desc = |dtype, shape| TensorDesc { dtype, shape };
    let shapes = Shapes::new(desc(DType::F16, &query), desc(DType::I32, &query[..1]), query[1]);
    let op = GroupQueryAttention::new(1, 1).qk_output(1);
    let problem = op.problem_from_shapes(&shapes, CacheBinding::Separate).unwrap();
    assert!(matches!(Outputs::new(&problem), Err(Error::OutOfMemory { .. })));
}

/// Shapes on a device are only integers: sizes beyond any memory must not overflow.
#[test]
fn shapes_alone() {
    fn desc(dtype: DType, shape: &[usize]) -> TensorDesc<'_> {
        TensorDesc { dtype, shape }
    }
    let op = GroupQueryAttention::new(1, 1);
    let prompt = |query: &[usize], total| {
        let shapes = Shapes::new(desc(DType::F16, query), desc(DType::I32, &query[..1]), total);
        op.problem_from_shapes(&shapes, CacheBinding::Separate)
    };
    assert_eq!(prompt(&[2, 7, 24], 7).unwrap().head_size, 8);
    let limits = "dimensions up to 2147483647 and up to 1152921504606846975 elements";
    refused(
        prompt(&[1, 1 << 32, 24], 1 << 32),
        &format!("query: got (1, 4294967296, 24); allowed: {limits}"),
    );
    refused(
        prompt(&[1 << 31, 1 << 31, 24], 1 << 31),
        &format!("query: got (2147483648, 2147483648, 24); allowed: {limits}"),
    );
    refused(
        prompt(&[1 << 20, 1 << 20, 24], 1 << 20),
        "query: got (1048576, 1, 1048576) rows; allowed: up to 2147483647 in all",
    );
    let scores = GroupQueryAttention::new(1, 1).qk_output(1);
    let query = [1, i32::MAX as usize, 24];
    let shapes = Shapes::new(desc(DType::F16, &query), desc(DType::I32, &[1]), query[1]);
    refused(
        scores.problem_from_shapes(&shapes, CacheBinding::Separate),
        &format!("qk_output: got (1, 1, 2147483647, 2147483647); allowed: {limits}"),
    );
    refused(
        prompt(&[1, 1 << 31, 24], 1 << 31),
        &format!("query: got (1, 2147483648, 24); allowed: {limits}"),
    );
}

#[test]
fn padded_chunks() {
    let padded = accepts(Call::padded());
    assert_eq!((padded.phase, padded.capacity), (Phase::PaddedChunk, 8));
    // As many rows as the longest sequence may have are no first prompt.
    let total = |total| Call { total_sequence_length: ints(&[total]), ..Call::padded() };
    let first = Call { seqlens_k: ints(&[2, 0]), ..total(3) };
    assert_eq!(accepts(first).phase, Phase::PaddedChunk);
    // A past that grows, for any bound of lengths.
    let past = |rows| Some(float(&[2, 2, rows, 16]));
    let grown = Call { past_key: past(2), past_value: past(2), ..total(7) };
    assert_eq!(accepts(grown).capacity, 7);
    let tokens = |tokens: &[i32]| Call { query_seqlens: Some(ints(tokens)), ..Call::padded() };
    accepts(tokens(&[0, 0]));
    let lengths = |lengths: &[i32]| Call { seqlens_k: ints(lengths), ..Call::padded() };
    let given = "as query_seqlens is given";
    refuses(
        Call { query_seqlens: Some(Tensor::zeros(DType::I64, &[2])), ..Call::padded() },
        "query_seqlens: got int64; allowed: int32",
    );
    refuses(tokens(&[3]), "query_seqlens: got (1); allowed: (batch_size = 2)");
    refuses(
        Call { query_seqlens: Some(Tensor::zeros(DType::I32, &[2, 1])), ..Call::padded() },
        "query_seqlens: got (2, 1); allowed: (batch_size = 2)",
    );
    refuses(Call::padded().op(|op| op.causal(0)), &format!("causal: got 0; allowed: 1, {given}"));
    refuses(
        Call { past_key: None, past_value: None, ..Call::padded() },
        &format!("past_key: got no input; allowed: a tensor, {given}"),
    );
    refuses(
        Call { key: Some(float(&[2, 0, 32])), value: Some(float(&[2, 0, 32])), ..Call::padded() },
        &format!("key: got kv_sequence_length = 0; allowed: sequence_length = 3, {given}"),
    );
    refuses(total(2), "total_sequence_length: got 2; allowed: 3 or more, the rows of query");
    refuses(
        total(4),
        "seqlens_k: got 4 for batch entry 0; allowed: 0 to 3, the last of at most 4 rows by \
         total_sequence_length",
    );
    refuses(
        lengths(&[4, -1]),
        "seqlens_k: got -1 for batch entry 1; allowed: 0 to 4, the last of 1 or more tokens",
    );
    let rows = |length| format!("the rows of query, and of {length} tokens by seqlens_k");
    refuses(
        tokens(&[4, 1]),
        &format!("query_seqlens: got 4 for batch entry 0; allowed: 0 to 3, {}", rows(5)),
    );
    refuses(
        tokens(&[3, -1]),
        &format!("query_seqlens: got -1 for batch entry 1; allowed: 0 to 3, {}", rows(3)),
    );
    refuses(
        Call { seqlens_k: ints(&[0, 2]), ..tokens(&[2, 1]) },
        &format!("query_seqlens: got 2 for batch entry 0; allowed: 0 to 1, {}", rows(1)),
    );
    let small = |rows, tokens: &[i32], total| Call {
        past_key: past(rows),
        past_value: past(rows),
        query_seqlens: Some(ints(tokens)),
        total_sequence_length: ints(&[total]),
        ..Call::padded()
    };
    refuses(
        small(6, &[1, 1], 6),
        "query_seqlens: got 1 for batch entry 0; allowed: 2 to 3, as 3 rows have to fit behind the \
         past of 5 tokens by seqlens_k, in 6 rows of present_key",
    );
    refuses(
        small(2, &[2, 1], 9),
        "query_seqlens: got 2 for batch entry 0; allowed: 3 to 3, as past_key has 2 rows, of 5 \
         tokens by seqlens_k",
    );
}
