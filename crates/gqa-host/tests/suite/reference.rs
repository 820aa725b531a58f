//! The reference against results computed by hand.

use gqa_host::backend::Io;
use gqa_host::op::{GroupQueryAttention, Inputs, KvCache, Outputs, QuantType};
use gqa_host::reference::{Reference, exact};
use gqa_host::{CacheBinding, DType, Layout, QuantFormat, Tensor};
use ndarray::Array;

/// Size of a head; only its first element is used, unless it is rotated.
const SIZE: usize = 16;

/// Heads of [`SIZE`] elements with these first elements, the rest 0.
fn heads(shape: &[usize], first: &[f32]) -> Tensor {
    let mut values = vec![0.0; first.len() * SIZE];
    values.iter_mut().step_by(SIZE).zip(first).for_each(|(to, &x)| *to = x);
    float(shape, &values)
}

fn float(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_f32(DType::F32, shape, values).unwrap()
}

fn ints(values: &[i32]) -> Tensor {
    Tensor::from(Array::from(values.to_vec()))
}

/// The first element of every head.
fn first(tensor: &Tensor) -> Vec<f64> {
    tensor.to_f64().into_iter().step_by(SIZE).collect()
}

#[track_caller]
fn near(got: &[f64], want: &[f64]) {
    let close = |(got, want): (&f64, &f64)| got == want || (got - want).abs() < 1e-6;
    assert!(
        got.len() == want.len() && got.iter().zip(want).all(close),
        "got {got:?}, want {want:?}"
    );
}

/// Logarithms: as scores they make the weights proportional to the numbers.
fn ln(numbers: &[f32]) -> Vec<f32> {
    numbers.iter().map(|x| x.ln()).collect()
}

/// One head, scale 1.
fn one_head() -> GroupQueryAttention {
    GroupQueryAttention::new(1, 1).scale(1.0).log_sum_exp(true)
}

/// A prefill of one sequence and one head. Queries are 1, so that keys are scores.
struct Prompt {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqlens_k: Tensor,
    total: Tensor,
}

impl Prompt {
    fn new(keys: &[f32], values: &[f32]) -> Self {
        let rows = keys.len();
        let shape = [1, rows, SIZE];
        Self {
            query: heads(&shape, &vec![1.0; rows]),
            key: heads(&shape, keys),
            value: heads(&shape, values),
            seqlens_k: ints(&[rows as i32 - 1]),
            total: ints(&[rows as i32]),
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        let inputs = Inputs::new(&self.query, &self.seqlens_k, &self.total);
        Inputs { key: Some(&self.key), value: Some(&self.value), ..inputs }
    }

    fn run(&self, op: &GroupQueryAttention) -> Outputs {
        op.run(&self.inputs(), &Reference).unwrap()
    }
}

#[test]
fn weights_are_proportional_to_exponentials() {
    let out = Prompt::new(&ln(&[1.0, 2.0, 3.0]), &[6.0, 12.0, 24.0]).run(&one_head());
    // Row 1: (1·6 + 2·12) / 3. Row 2: (1·6 + 2·12 + 3·24) / 6.
    near(&first(&out.output), &[6.0, 10.0, 17.0]);
    near(&out.lse.unwrap().to_f64(), &[0.0, 3f64.ln(), 6f64.ln()]);
    near(&first(&out.present_value), &[6.0, 12.0, 24.0]);
}

#[test]
fn scale_softcap_and_bias_come_in_that_order() {
    let prompt = Prompt::new(&[1.0, 3.0], &[1.0, 1.0]);
    let bias = float(&[1, 1, 2, 2], &[0.5, 0.0, -1.0, 2.0]);
    let op = one_head().scale(2.0).softcap(4.0).qk_output(1);
    let inputs = Inputs { attention_bias: Some(&bias), ..prompt.inputs() };
    let out = op.run(&inputs, &Reference).unwrap();
    let capped = |x: f64| 4.0 * (x / 4.0).tanh();
    let want = [capped(2.0) + 0.5, 0.0, capped(2.0) - 1.0, capped(6.0) + 2.0];
    near(&out.output_qk.unwrap().to_f64(), &want);
}

#[test]
fn scale_is_by_head_size_unless_given() {
    let op = GroupQueryAttention::new(1, 1).qk_output(1);
    let out = Prompt::new(&[8.0], &[1.0]).run(&op);
    near(&out.output_qk.unwrap().to_f64(), &[2.0]);
}

#[test]
fn the_window_counts_the_query_itself() {
    let prompt = Prompt::new(&[0.0; 4], &[1.0, 2.0, 4.0, 8.0]);
    near(&first(&prompt.run(&one_head().local_window_size(2)).output), &[1.0, 1.5, 3.0, 6.0]);
    near(&first(&prompt.run(&one_head().local_window_size(1)).output), &[1.0, 2.0, 4.0, 8.0]);
    near(&first(&prompt.run(&one_head().causal(0)).output), &[3.75; 4]);
}

#[test]
fn sinks_join_the_denominator_only() {
    let prompt = Prompt::new(&ln(&[1.0, 2.0]), &[8.0, 8.0]);
    let out = prompt.run(&one_head().smooth_softmax(true).qk_output(2));
    near(&first(&out.output), &[4.0, 6.0]);
    near(&out.output_qk.unwrap().to_f64(), &[0.5, 0.0, 0.25, 0.5]);
    near(&out.lse.unwrap().to_f64(), &[2f64.ln(), 4f64.ln()]);
    // A sink of weight 5 takes precedence over smooth_softmax; scale and softcap do not change it.
    let sink = float(&[1], &ln(&[5.0]));
    let inputs = Inputs { head_sink: Some(&sink), ..prompt.inputs() };
    let out = one_head().smooth_softmax(true).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[8.0 / 6.0, 3.0]);
}

#[test]
fn a_row_that_sees_nothing_is_zero() {
    let prompt = Prompt::new(&[1.0, 1.0], &[1.0, 1.0]);
    let bias = float(&[1, 1, 2, 2], &[f32::NEG_INFINITY; 4]);
    let inputs = Inputs { attention_bias: Some(&bias), ..prompt.inputs() };
    let out = one_head().qk_output(2).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[0.0, 0.0]);
    near(&out.output_qk.unwrap().to_f64(), &[0.0; 4]);
    near(&out.lse.unwrap().to_f64(), &[f64::NEG_INFINITY; 2]);
    let sink = float(&[1], &[3.0]);
    let out = one_head().run(&Inputs { head_sink: Some(&sink), ..inputs }, &Reference).unwrap();
    near(&first(&out.output), &[0.0, 0.0]);
    near(&out.lse.unwrap().to_f64(), &[3.0, 3.0]);
    let sink = float(&[1], &[f32::NEG_INFINITY]);
    let out = one_head().run(&Inputs { head_sink: Some(&sink), ..inputs }, &Reference).unwrap();
    near(&out.lse.unwrap().to_f64(), &[f64::NEG_INFINITY; 2]);
}

/// Sequences of 1 and 2 tokens in a prompt of 3 rows; what is behind is NaN.
#[test]
fn a_bias_of_minus_infinity_hides_a_score_that_is_no_number() {
    let prompt = Prompt::new(&[f32::NAN, 1.0], &[1.0, 5.0]);
    let bias = float(&[1, 1, 2, 2], &[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0]);
    let inputs = Inputs { attention_bias: Some(&bias), ..prompt.inputs() };
    let out = one_head().run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[0.0, 5.0]);
}

#[test]
fn padding_is_zero_and_never_seen() {
    let nan = f32::NAN;
    let value = heads(&[2, 3, SIZE], &[1.0, nan, nan, 2.0, 4.0, nan]);
    let query = heads(&[2, 3, SIZE], &[0.0, nan, nan, 0.0, 0.0, nan]);
    let (last, total) = (ints(&[0, 1]), ints(&[3]));
    let inputs =
        Inputs { key: Some(&value), value: Some(&value), ..Inputs::new(&query, &last, &total) };
    let op = one_head().smooth_softmax(true);
    for (mode, scores) in [(1, 0.0), (2, 0.5)] {
        let out = op.clone().qk_output(mode).run(&inputs, &Reference).unwrap();
        near(&first(&out.output), &[0.5, 0.0, 0.0, 1.0, 2.0, 0.0]);
        let infinite = f64::NEG_INFINITY;
        near(
            &out.lse.unwrap().to_f64(),
            &[2f64.ln(), infinite, infinite, 2f64.ln(), 3f64.ln(), infinite],
        );
        near(&first(&out.present_value), &[1.0, 0.0, 0.0, 2.0, 4.0, 0.0]);
        let scores_of_the_second =
            [scores, 0.0, 0.0, scores / 1.5, scores / 1.5, 0.0, 0.0, 0.0, 0.0];
        near(&out.output_qk.unwrap().to_f64()[9..], &scores_of_the_second);
    }
    let out = op.causal(0).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[0.5, 0.0, 0.0, 2.0, 2.0, 0.0]);
}

/// Two sequences with 2 and 1 past rows get two new rows each. All scores are 0.
struct Chunk {
    query: Tensor,
    value: Tensor,
    past: Tensor,
    last: Tensor,
    total: Tensor,
}

impl Chunk {
    fn new(capacity: usize) -> Self {
        let mut past = vec![f32::NAN; 2 * capacity];
        past[..2].copy_from_slice(&[1.0, 2.0]);
        past[capacity] = 10.0;
        Self {
            query: heads(&[2, 2, SIZE], &[0.0; 4]),
            value: heads(&[2, 2, SIZE], &[3.0, 6.0, 20.0, 30.0]),
            past: heads(&[2, 1, capacity, SIZE], &past),
            last: ints(&[3, 2]),
            total: ints(&[4]),
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        let inputs = Inputs::new(&self.query, &self.last, &self.total);
        Inputs { key: Some(&self.value), value: Some(&self.value), ..inputs }
    }

    fn cache(&self) -> KvCache {
        KvCache { key: self.past.clone(), value: self.past.clone(), scales: None }
    }
}

#[test]
fn chunks_end_at_their_sequences_length() {
    let chunk = Chunk::new(2);
    let inputs =
        Inputs { past_key: Some(&chunk.past), past_value: Some(&chunk.past), ..chunk.inputs() };
    let out = one_head().run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[2.0, 3.0, 15.0, 20.0]);
    near(&first(&out.present_value), &[1.0, 2.0, 3.0, 6.0, 10.0, 20.0, 30.0, 0.0]);
    let out = one_head().causal(0).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[3.0, 3.0, 20.0, 20.0]);
    let out = one_head().local_window_size(2).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[2.5, 4.5, 15.0, 25.0]);
}

/// Of two new rows each, the first sequence has one token and the second none: what is padding may
/// be NaN, and stays out of the cache.
#[test]
fn rows_behind_a_chunks_tokens_are_padding() {
    let (nan, tokens) = (f32::NAN, ints(&[1, 0]));
    let mut chunk = Chunk::new(4);
    (chunk.last, chunk.total) = (ints(&[2, 0]), ints(&[4]));
    chunk.query = heads(&[2, 2, SIZE], &[0.0, nan, nan, nan]);
    chunk.value = heads(&[2, 2, SIZE], &[3.0, nan, nan, nan]);
    let inputs = Inputs { query_seqlens: Some(&tokens), ..chunk.inputs() };
    let past = Inputs { past_key: Some(&chunk.past), past_value: Some(&chunk.past), ..inputs };
    let out = one_head().run(&past, &Reference).unwrap();
    near(&first(&out.output), &[2.0, 0.0, 0.0, 0.0]);
    near(&first(&out.present_value), &[1.0, 2.0, 3.0, 0.0, 10.0, 0.0, 0.0, 0.0]);
    let mut cache = chunk.cache();
    let out = one_head().run_in_place(&inputs, &mut cache, &Reference).unwrap();
    near(&first(&out.output), &[2.0, 0.0, 0.0, 0.0]);
    let got = first(&cache.value);
    near(&got[..3], &[1.0, 2.0, 3.0]);
    assert!(got[3].is_nan() && got[4] == 10.0 && got[5..].iter().all(|x| x.is_nan()));
}

#[test]
fn a_shared_cache_is_appended_in_place() {
    let chunk = Chunk::new(5);
    let mut cache = chunk.cache();
    let out = one_head().run_in_place(&chunk.inputs(), &mut cache, &Reference).unwrap();
    near(&first(&out.output), &[2.0, 3.0, 15.0, 20.0]);
    let got = first(&cache.value);
    near(&got[..4], &[1.0, 2.0, 3.0, 6.0]);
    near(&got[5..8], &[10.0, 20.0, 30.0]);
    assert!(got[4].is_nan() && got[8].is_nan() && got[9].is_nan());
    assert!(out.present_key.is_empty());
}

#[test]
fn nothing_new_is_appended_where_the_cache_is_complete() {
    let value = heads(&[1, 1, 4, SIZE], &[1.0, 2.0, 3.0, f32::NAN]);
    let (query, none) = (heads(&[1, 2, SIZE], &[0.0; 2]), float(&[1, 0, SIZE], &[]));
    let (last, total) = (ints(&[2]), ints(&[3]));
    let inputs = Inputs {
        key: Some(&none),
        value: Some(&none),
        past_key: Some(&value),
        past_value: Some(&value),
        ..Inputs::new(&query, &last, &total)
    };
    let out = one_head().run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[1.5, 2.0]);
    near(&first(&out.present_value), &[1.0, 2.0, 3.0, 0.0]);
}

/// Position p turns by p quarters: cosine and sine of row p are those of p·90°.
fn quarters(half: usize) -> (Tensor, Tensor) {
    let rows = |table: [f32; 4]| {
        let values: Vec<f32> = table.iter().flat_map(|&x| vec![x; half]).collect();
        float(&[4, half], &values)
    };
    (rows([1.0, 0.0, -1.0, 0.0]), rows([0.0, 1.0, 0.0, -1.0]))
}

fn ramp(from: f32, count: usize) -> Vec<f32> {
    (0..count).map(|i| from + i as f32).collect()
}

#[test]
fn rotation_pairs_halves_or_neighbours() {
    let (cos, sin) = quarters(8);
    // Heads of 32 of which 16 rotate, by a quarter: (a, b) becomes (-b, a).
    let key = float(&[1, 1, 32], &ramp(1.0, 32));
    let (last, total) = (ints(&[0]), ints(&[1]));
    let position = Tensor::from(Array::from_elem((1, 1), 1i64));
    let inputs = Inputs {
        key: Some(&key),
        value: Some(&key),
        cos_cache: Some(&cos),
        sin_cache: Some(&sin),
        position_ids: Some(&position),
        ..Inputs::new(&key, &last, &total)
    };
    let present =
        |op: GroupQueryAttention| op.run(&inputs, &Reference).unwrap().present_key.to_f64();
    let halves = present(one_head().do_rotary(true));
    let want: Vec<f64> =
        (9..17).map(|x| -f64::from(x)).chain((1..9).chain(17..33).map(f64::from)).collect();
    near(&halves, &want);
    let neighbours = present(one_head().do_rotary(true).rotary_interleaved(true));
    near(&neighbours[..6], &[-2.0, 1.0, -4.0, 3.0, -6.0, 5.0]);
    near(&neighbours[16..18], &[17.0, 18.0]);
    near(&present(one_head()), &key.to_f64());
}

#[test]
fn rows_are_normalised_before_they_rotate() {
    // Half of the elements are 4, the others -4: with an epsilon of 9 the root mean square of the
    // key is 5, with one of 48 that of the query 8.
    let row: Vec<f32> = (0..16).map(|i| if i % 2 == 0 { 4.0 } else { -4.0 }).collect();
    let weights: Vec<f32> = (0..16).map(|i| if i < 8 { 5.0 } else { 10.0 }).collect();
    let (cos, sin) = quarters(8);
    let (key, weight) = (float(&[1, 1, 16], &row), float(&[16], &weights));
    let twice: Vec<f32> = weights.iter().map(|weight| 3.2 * weight).collect();
    let query_weight = float(&[16], &twice);
    let (last, total) = (ints(&[0]), ints(&[1]));
    let position = Tensor::from(Array::from_elem((1, 1), 1i64));
    let inputs = Inputs {
        key: Some(&key),
        value: Some(&key),
        cos_cache: Some(&cos),
        sin_cache: Some(&sin),
        position_ids: Some(&position),
        q_norm_weight: Some(&query_weight),
        k_norm_weight: Some(&weight),
        ..Inputs::new(&key, &last, &total)
    };
    let op =
        one_head().do_rotary(true).q_norm_epsilon(48.0).k_norm_epsilon(9.0).qk_output(1).scale(1.0);
    let out = op.run(&inputs, &Reference).unwrap();
    // Normalised 4, -4, … and then 8, -8, …; a quarter turn makes of (a, b) (-b, a). The value is
    // what it was.
    let halves = [[-8.0, 8.0], [4.0, -4.0]];
    let want: Vec<f64> = halves.iter().flat_map(|half| half.repeat(4)).collect();
    near(&out.present_key.to_f64(), &want);
    near(&out.present_value.to_f64(), &key.to_f64());
    // The query is twice the key.
    near(&out.output_qk.unwrap().to_f64(), &[2.0 * (8.0 * 64.0 + 8.0 * 16.0)]);
}

/// A step of one head of 8 elements behind one row of quantized values; the new key and the new
/// value are `row`.
fn quantized_step(past: Tensor, format: QuantFormat, scales: [&[f32]; 2], row: &[f32]) -> Outputs {
    let row = float(&[1, 1, 8], row);
    let [k_scale, v_scale] = scales.map(|scale| float(&[scale.len()], scale));
    let (last, total) = (ints(&[1]), ints(&[2]));
    let how = if scales[0].len() > 1 { QuantType::PerChannel } else { QuantType::PerTensor };
    let inputs = Inputs {
        key: Some(&row),
        value: Some(&row),
        past_key: Some(&past),
        past_value: Some(&past),
        k_scale: Some(&k_scale),
        v_scale: Some(&v_scale),
        ..Inputs::new(&row, &last, &total)
    };
    let op = one_head()
        .k_quant_type(how)
        .v_quant_type(how)
        .kv_cache_bit_width(format.bits().into())
        .float4_cache(format == QuantFormat::Float4);
    op.qk_output(1).scale(1.0).run(&inputs, &Reference).unwrap()
}

#[test]
fn codes_are_numbers_divided_by_their_scale() {
    let past = || Tensor::from(Array::from_shape_vec((1, 1, 1, 8), vec![1i8; 8]).unwrap());
    // Ties round to the even quantized value, and results are clamped.
    let row = [0.25, 0.75, -0.25, -0.75, 1.0, 100.0, -100.0, 63.25];
    let out = quantized_step(past(), QuantFormat::Int8, [&[0.5], &[0.25]], &row);
    let keys = [0.0, 2.0, 0.0, -2.0, 2.0, 127.0, -128.0, 126.0];
    let values = [1.0, 3.0, -1.0, -3.0, 4.0, 127.0, -128.0, 127.0];
    near(&out.present_key.to_f64(), &[[1.0; 8], keys].concat());
    near(&out.present_value.to_f64(), &[[1.0; 8], values].concat());
    // Attention uses the dequantized keys and values.
    let query_key: f64 = row.iter().zip(keys).map(|(&q, k)| f64::from(q) * k * 0.5).sum();
    near(&out.output_qk.unwrap().to_f64()[1..], &[query_key]);
    near(&out.output.to_f64(), &values.map(|value| value * 0.25));
    // A scale for each element.
    let scales: Vec<f32> = (1..=8).map(|i| i as f32).collect();
    let out = quantized_step(past(), QuantFormat::Int8, [&scales, &scales], &[8.0; 8]);
    let want = [8.0, 4.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0];
    near(&out.present_key.to_f64()[8..], &want);
}

#[test]
fn codes_of_four_bits_lie_two_to_a_byte() {
    let past = Tensor::from(Array::from_shape_vec((1, 1, 1, 4), vec![0x98u8; 4]).unwrap());
    let row = [-8.0, 7.0, -9.0, 9.0, 0.5, 1.5, -0.5, 1.0];
    let out = quantized_step(past, QuantFormat::Int4, [&[1.0], &[1.0]], &row);
    assert_eq!(out.present_key.bytes(), [0x98, 0x98, 0x98, 0x98, 0xf0, 0xf0, 0xa8, 0x98]);
    // 0 and 1 in turn were there.
    near(&out.output_qk.unwrap().to_f64()[..1], &[7.0 + 9.0 + 1.5 + 1.0]);
}

#[test]
fn four_bit_floats_round_to_even_and_saturate() {
    // 0.5 and -6 in turn were there.
    let past = Tensor::from(Array::from_shape_vec((1, 1, 1, 4), vec![0xf1u8; 4]).unwrap());
    for (row, want) in [
        // Midpoints: 0, 1, 1, 2 and 2, 4, 4, 6.
        ([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5], [0x20, 0x42, 0x64, 0x76]),
        ([-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -5.5], [0xa8, 0xca, 0xec, 0xfe]),
        ([0.5, 1.5, 3.0, 6.0, 7.0, -7.0, 1e3, -1e3], [0x31, 0x75, 0xf7, 0xf7]),
    ] {
        let out = quantized_step(past.clone(), QuantFormat::Float4, [&[1.0], &[1.0]], &row);
        assert_eq!(out.present_key.bytes(), [&[0xf1; 4][..], &want].concat());
        let query_key: f64 =
            row.chunks(2).map(|x| f64::from(x[0]) * 0.5 - f64::from(x[1]) * 6.0).sum();
        near(&out.output_qk.unwrap().to_f64()[..1], &[query_key]);
    }
}

#[test]
fn codes_of_eight_bit_floats_have_three_bits_of_mantissa() {
    let past = Tensor::zeros(DType::F8E4M3, &[1, 1, 1, 8]);
    let row = [1.0, 1.0625, 1.1875, -17.0, 1000.0, -1000.0, 0.001_953_125, 0.0];
    let out = quantized_step(past, QuantFormat::Float8, [&[1.0], &[1.0]], &row);
    let want = [1.0, 1.0, 1.25, -16.0, 448.0, -448.0, 0.001_953_125, 0.0];
    near(&out.present_key.to_f64()[8..], &want);
}

#[test]
fn positions_follow_the_past_unless_given() {
    let (cos, sin) = quarters(8);
    let row = heads(&[2, 1, SIZE], &[1.0, 1.0]);
    let past = heads(&[2, 1, 3, SIZE], &[0.0; 6]);
    let (last, total) = (ints(&[2, 1]), ints(&[3]));
    let inputs = Inputs {
        key: Some(&row),
        value: Some(&row),
        past_key: Some(&past),
        past_value: Some(&past),
        cos_cache: Some(&cos),
        sin_cache: Some(&sin),
        ..Inputs::new(&row, &last, &total)
    };
    let op = one_head().do_rotary(true).qk_output(1);
    let out = op.run(&inputs, &Reference).unwrap();
    // Sequence 0: a half turn at row 2. Sequence 1: a quarter turn at row 1, which leaves 0 in the
    // first element.
    near(&first(&out.present_key), &[0.0, 0.0, -1.0, 0.0, 0.0, 0.0]);
    near(
        &out.present_key.to_f64()[4 * SIZE..4 * SIZE + 9],
        &[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    );
    // The query turns with its key.
    near(&out.output_qk.unwrap().to_f64(), &[0.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
    let ids = Tensor::from(Array::from_shape_vec((2, 2), vec![0i64, 99, 2, 99]).unwrap());
    let out = op.run(&Inputs { position_ids: Some(&ids), ..inputs }, &Reference).unwrap();
    near(&first(&out.present_key), &[0.0, 0.0, 1.0, 0.0, -1.0, 0.0]);
}

#[test]
fn query_heads_share_neighbouring_kv_heads() {
    let query = heads(&[1, 1, 4 * SIZE], &[1.0; 4]);
    let kv = heads(&[1, 1, 2 * SIZE], &[5.0, 7.0]);
    let (last, total) = (ints(&[0]), ints(&[1]));
    let inputs = Inputs { key: Some(&kv), value: Some(&kv), ..Inputs::new(&query, &last, &total) };
    let out = GroupQueryAttention::new(4, 2).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[5.0, 5.0, 7.0, 7.0]);
    // Packed: all queries, all keys, all values.
    let packed = heads(&[1, 1, 8 * SIZE], &[1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 5.0, 7.0]);
    let inputs = Inputs::new(&packed, &last, &total);
    let out = GroupQueryAttention::new(4, 2).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[5.0, 5.0, 7.0, 7.0]);
    near(&first(&out.present_key), &[2.0, 3.0]);
}

#[test]
fn bias_broadcasts_over_sequences_and_heads() {
    let query = heads(&[2, 1, 2 * SIZE], &[0.0; 4]);
    let kv = heads(&[2, 1, SIZE], &[0.0; 2]);
    let (last, total) = (ints(&[0, 0]), ints(&[1]));
    let inputs = Inputs { key: Some(&kv), value: Some(&kv), ..Inputs::new(&query, &last, &total) };
    let scores = |shape, values: &[f32]| {
        let bias = float(shape, values);
        let op = GroupQueryAttention::new(2, 1).qk_output(1);
        let inputs = Inputs { attention_bias: Some(&bias), ..inputs };
        op.run(&inputs, &Reference).unwrap().output_qk.unwrap().to_f64()
    };
    near(&scores(&[2, 2, 1, 1], &[1.0, 2.0, 3.0, 4.0]), &[1.0, 2.0, 3.0, 4.0]);
    near(&scores(&[1, 2, 1, 1], &[1.0, 2.0]), &[1.0, 2.0, 1.0, 2.0]);
    near(&scores(&[2, 1, 1, 1], &[1.0, 2.0]), &[1.0, 1.0, 2.0, 2.0]);
    near(&scores(&[1, 1, 1, 1], &[7.0]), &[7.0; 4]);
}

#[test]
fn heads_may_come_before_rows() {
    let key = heads(&[1, 2, 2, SIZE], &[0.0; 4]);
    let value = heads(&[1, 2, 2, SIZE], &[1.0, 3.0, 10.0, 30.0]);
    let (last, total) = (ints(&[1]), ints(&[2]));
    let inputs =
        Inputs { key: Some(&key), value: Some(&value), ..Inputs::new(&key, &last, &total) };
    let op = GroupQueryAttention::new(2, 2);
    let out = op.clone().layout(Layout::Bnsh).run(&inputs, &Reference).unwrap();
    near(&first(&out.output), &[1.0, 2.0, 10.0, 20.0]);
    assert_eq!(out.output.shape(), [1, 2, 2, SIZE]);
    let key = heads(&[1, 2, 2 * SIZE], &[0.0; 4]);
    let value = heads(&[1, 2, 2 * SIZE], &[1.0, 10.0, 3.0, 30.0]);
    let inputs =
        Inputs { key: Some(&key), value: Some(&value), ..Inputs::new(&key, &last, &total) };
    let rows_first = op.run(&inputs, &Reference).unwrap();
    near(&first(&rows_first.output), &[1.0, 10.0, 2.0, 20.0]);
    assert_eq!(rows_first.present_value, out.present_value);
}

/// 1 + 2⁻¹¹ is between two float16 values: the cache holds it rounded to even, and attention uses
/// that.
#[test]
fn rotated_rows_are_rounded_and_outputs_once() {
    let half =
        |shape: &[usize], values: &[f32]| Tensor::from_f32(DType::F16, shape, values).unwrap();
    let ulp = f32::powi(2.0, -10);
    let mut row = vec![0.0; SIZE];
    (row[0], row[8]) = (1.0, ulp);
    let row = half(&[1, 1, SIZE], &row);
    let (cos, sin) = (half(&[1, 8], &[1.0; 8]), half(&[1, 8], &[-0.5; 8]));
    let (last, total) = (ints(&[0]), ints(&[1]));
    let inputs = Inputs {
        key: Some(&row),
        value: Some(&row),
        cos_cache: Some(&cos),
        sin_cache: Some(&sin),
        ..Inputs::new(&row, &last, &total)
    };
    let op = one_head().do_rotary(true).qk_output(1);
    let problem = op.problem(&inputs, CacheBinding::Separate).unwrap();
    let mut outputs = Outputs::new(&problem).unwrap();
    let exact = {
        let mut io: Io<'_> = outputs.io(&inputs);
        exact(&problem, &mut io).unwrap()
    };
    // 1·1 + 2⁻¹⁰·½ rounds to 1; -½·1 + 2⁻¹⁰ is exact.
    let second = -0.5 + f64::from(ulp);
    near(&outputs.present_key.to_f64()[..9], &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, second]);
    assert_eq!(exact.output_qk, [1.0 + second * second]);
    assert_eq!(exact.lse, exact.output_qk);
    assert_eq!(exact.output[0], 1.0);
}
