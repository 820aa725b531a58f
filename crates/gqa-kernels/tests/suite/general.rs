//! The general attention kernel on the simulator, against attention as it is defined.

use crate::support::{
    CACHE, Layout, Random, Rows, entry, optional, places, query_seqlens, some_tokens, start, unit,
    wide, with_type,
};
use bytemuck::Zeroable;
use gqa_kernels::attention::general;
use gqa_kernels::num::{DType, Element};
use gqa_kernels::params::{
    AttentionParams, MaskedParams, Strides, alignment, qk_output, sink, vectors,
};
use gqa_sim::Arg;
use proptest::prelude::*;

/// attention_bias of a call.
#[derive(Clone, Copy, Debug)]
struct Bias {
    one_batch: bool,
    one_head: bool,
    /// Some entries hide their key.
    hides: Hides,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Hides {
    Nothing,
    /// With -inf, whole rows among them.
    Infinity,
    /// With the lowest finite number, whole rows among them.
    Lowest,
}

/// One call.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    kv_heads: u32,
    group: u32,
    head_size: u32,
    q_len: u32,
    totals: Vec<u32>,
    spare: u32,
    first_prompt: bool,
    tokens: Option<Vec<u32>>,
    causal: bool,
    window: u32,
    scale: f32,
    softcap: f32,
    sink: u32,
    bias: Option<Bias>,
    want_lse: bool,
    qk_output: u32,
    layout: Layout,
    blocks: u32,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let dtype = prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let heads = (1..=2u32, 1..=9u32, prop_oneof![4 => 1..=16u32, 1 => 1..=64u32]);
    let lengths = (
        prop_oneof![1 => Just(1u32), 3 => 1..=20u32],
        any::<bool>(),
        prop::collection::vec(0..=90u32, 1..=2),
    );
    let mask = (any::<bool>(), prop_oneof![Just(0), 1..=40u32], 0..=3u32);
    let hides = prop_oneof![Just(Hides::Nothing), Just(Hides::Infinity), Just(Hides::Lowest)];
    let bias = prop::option::of((any::<bool>(), any::<bool>(), hides));
    let score = (
        prop_oneof![Just(1.0f32), Just(-0.7), Just(3.0)],
        prop_oneof![2 => Just(0.0f32), 1 => Just(2.0), 1 => Just(50.0)],
        prop_oneof![Just(sink::NONE), Just(sink::ZERO), Just(sink::PER_HEAD)],
        bias,
    );
    let qk = prop_oneof![
        Just(qk_output::NONE),
        Just(qk_output::BEFORE_SOFTMAX),
        Just(qk_output::AFTER_SOFTMAX)
    ];
    let rest =
        (any::<bool>(), qk, any::<bool>(), prop_oneof![Just(0), Just(8)], 1..=9u32, any::<u64>());
    (dtype, heads, lengths, mask, score, rest).prop_map(
        |(dtype, heads, lengths, mask, score, rest)| {
            let (kv_heads, group, eighths) = heads;
            let (q_len, first_prompt, lengths) = lengths;
            let ((causal, window, spare), (scale, softcap, sink, bias)) = (mask, score);
            let (want_lse, qk_output, bnsh, gap, blocks, seed) = rest;
            let most = if first_prompt { q_len } else { u32::MAX };
            let totals: Vec<_> = lengths.into_iter().map(|length| length.min(most)).collect();
            let tokens = some_tokens(seed, q_len, &totals);
            Case {
                dtype,
                kv_heads,
                group,
                head_size: 8 * eighths,
                q_len,
                totals,
                spare,
                first_prompt: first_prompt && tokens.is_none(),
                tokens,
                causal,
                window: if causal { window } else { 0 },
                scale: scale / (8.0 * eighths as f32).sqrt(),
                softcap,
                sink,
                bias: bias.map(|(one_batch, one_head, hides)| Bias { one_batch, one_head, hides }),
                want_lse,
                qk_output,
                layout: Layout { bnsh, gap },
                blocks,
                seed,
            }
        },
    )
}

/// Everything a launch reads and, poisoned, everything it writes.
struct Tensors<T> {
    q: Rows<T>,
    k: Rows<T>,
    v: Rows<T>,
    bias: Rows<T>,
    seqlens_k: Vec<i32>,
    query_seqlens: Option<Vec<i32>>,
    head_sink: Vec<T>,
    out: Rows<T>,
    lse: Vec<f32>,
    output_qk: Vec<T>,
}

impl Case {
    fn batch(&self) -> u32 {
        self.totals.len() as u32
    }

    fn q_heads(&self) -> u32 {
        self.kv_heads * self.group
    }

    /// Columns of bias and output_qk.
    fn columns(&self) -> u32 {
        self.totals.iter().copied().max().unwrap_or(0).max(1)
    }

    fn q_shape(&self) -> [u32; 4] {
        [self.batch(), self.q_heads(), self.q_len, self.head_size]
    }

    fn past(&self, b: u32) -> u32 {
        let tokens = self.tokens.as_ref().map_or(self.q_len, |tokens| tokens[b as usize]);
        if self.first_prompt { 0 } else { self.totals[b as usize].saturating_sub(tokens) }
    }

    fn tensors<T: Element>(&self) -> Tensors<T> {
        let random = &mut Random::new(self.seed);
        let cache = [self.batch(), self.kv_heads, self.columns() + self.spare, self.head_size];
        let (mut k, mut v) = (Rows::nan(cache, CACHE), Rows::nan(cache, CACHE));
        for [b, h, j] in places(cache) {
            if j < self.totals[b as usize] {
                k.row_mut(b, h, j).fill_with(|| random.value());
                v.row_mut(b, h, j).fill_with(|| random.value());
            }
        }
        let rows = (self.batch() * self.q_heads() * self.q_len) as usize;
        Tensors {
            q: Rows::random(self.q_shape(), self.layout, random),
            k,
            v,
            bias: self.bias_rows(random),
            seqlens_k: self.totals.iter().map(|&total| total as i32 - 1).collect(),
            query_seqlens: query_seqlens(&self.tokens),
            head_sink: random.values(self.q_heads() as usize),
            out: Rows::nan(self.q_shape(), self.layout),
            lse: vec![f32::NAN; rows],
            output_qk: vec![T::from_f32(f32::NAN); rows * self.columns() as usize],
        }
    }

    fn bias_rows<T: Element>(&self, random: &mut Random) -> Rows<T> {
        let Some(Bias { one_batch, one_head, hides }) = self.bias else {
            return Rows::nan([0; 4], CACHE);
        };
        let extent = |one: bool, n: u32| if one { 1 } else { n };
        let shape = [
            extent(one_batch, self.batch()),
            extent(one_head, self.q_heads()),
            self.q_len,
            self.columns(),
        ];
        let mut bias = Rows::random(shape, CACHE, random);
        let hidden = match hides {
            Hides::Nothing => return bias,
            Hides::Infinity => T::from_f32(f32::NEG_INFINITY),
            Hides::Lowest => lowest(),
        };
        for [b, h, s] in places(shape) {
            let share = [0.0, 0.3, 1.0][random.below(3) as usize];
            for x in bias.row_mut(b, h, s).iter_mut().filter(|_| random.unit() < share) {
                *x = hidden;
            }
        }
        bias
    }

    fn masked<T: Element>(&self, t: &Tensors<T>) -> MaskedParams {
        MaskedParams {
            attention: self.params(t),
            v_head_size: self.head_size,
            alignment: alignment::PHASE,
            position: 0,
            left: self.window.checked_sub(1).unwrap_or(u32::MAX),
            right: if self.causal { 0 } else { u32::MAX },
            columns: if self.bias.is_some() { self.columns() } else { u32::MAX },
            vectors: vectors::KEYS | vectors::VALUES,
            reserved: 0,
        }
    }

    fn params<T: Element>(&self, t: &Tensors<T>) -> AttentionParams {
        let bias = self.bias.map_or(Strides::default(), |bias| Strides {
            batch: if bias.one_batch { 0 } else { t.bias.strides.batch },
            head: if bias.one_head { 0 } else { t.bias.strides.head },
            row: t.bias.strides.row,
        });
        AttentionParams {
            q: t.q.strides,
            k: t.k.strides,
            v: t.v.strides,
            out: t.out.strides,
            bias,
            batch: self.batch(),
            q_heads: self.q_heads(),
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            q_len: self.q_len,
            capacity: self.columns() + self.spare,
            first_prompt: self.first_prompt.into(),
            causal: self.causal.into(),
            window: self.window,
            sink: self.sink,
            qk_output: self.qk_output,
            qk_columns: self.columns(),
            splits: 1,
            scale: self.scale,
            softcap: self.softcap,
            ..Zeroable::zeroed()
        }
    }

    fn launch<T: Element>(&self, t: &mut Tensors<T>) -> Result<(), TestCaseError> {
        let p = self.masked(t);
        let or_null = |wanted: bool, arg| if wanted { arg } else { Arg::null() };
        start(
            entry("general", T::DTYPE),
            self.blocks.min(general::grid(&p.attention)[0]),
            self.seed,
            &[
                Arg::read(&t.q.data),
                Arg::read(&t.k.data),
                Arg::read(&t.v.data),
                Arg::read(&t.seqlens_k),
                optional(&t.query_seqlens),
                or_null(self.bias.is_some(), Arg::read(&t.bias.data)),
                Arg::null(),
                or_null(self.sink == sink::PER_HEAD, Arg::read(&t.head_sink)),
                Arg::write(&mut t.out.data),
                Arg::null(),
                or_null(self.want_lse, Arg::write(&mut t.lse)),
                or_null(self.qk_output != qk_output::NONE, Arg::write(&mut t.output_qk)),
                Arg::params(&p),
            ],
        )
    }
}

fn lowest<T: Element>() -> T {
    T::from_f32(match T::DTYPE {
        DType::F32 => f32::MIN,
        DType::F16 => -65504.0,
        DType::BF16 => f32::from_bits(0xff7f_0000),
    })
}

/// One row as it is defined, in f64.
struct Want {
    /// First visible key.
    first: u32,
    scores: Vec<f64>,
    weights: Vec<f64>,
    lse: f64,
    /// How far off f32 may be in a score that has a weight.
    score_error: f64,
}

fn row<T: Element>(case: &Case, t: &Tensors<T>, [b, head, s]: [u32; 3]) -> Want {
    let (total, position) = (case.totals[b as usize], case.past(b) + s);
    if position >= total {
        return Want {
            first: 0,
            scores: vec![],
            weights: vec![],
            lse: f64::NEG_INFINITY,
            score_error: 0.0,
        };
    }
    let end = if case.causal { position + 1 } else { total };
    let first = if case.window > 0 { end.saturating_sub(case.window) } else { 0 };
    let terms: Vec<_> = (first..end).map(|j| score(case, t, [b, head, s], j)).collect();
    let scores: Vec<f64> = terms.iter().map(|(score, _)| *score).collect();

    let sink = match case.sink {
        sink::NONE => f64::NEG_INFINITY,
        sink::ZERO => 0.0,
        _ => wide(t.head_sink[head as usize]),
    };
    let max = scores.iter().copied().fold(sink, f64::max);
    if max == f64::NEG_INFINITY {
        let weights = vec![0.0; scores.len()];
        return Want { first, scores, weights, lse: max, score_error: 0.0 };
    }
    let sum = scores.iter().map(|x| (x - max).exp()).sum::<f64>() + (sink - max).exp();
    let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp() / sum).collect();
    let error =
        |((_, error), weight): (&(f64, f64), &f64)| if *weight > 1e-12 { *error } else { 0.0 };
    let score_error = terms.iter().zip(&weights).map(error).fold(0.0, f64::max);
    Want { first, scores, weights, lse: max + sum.ln(), score_error }
}

/// Score of a key, and how far off f32 may be.
fn score<T: Element>(case: &Case, t: &Tensors<T>, [b, head, s]: [u32; 3], j: u32) -> (f64, f64) {
    let (query, key) = (t.q.row(b, head, s), t.k.row(b, head / case.group, j));
    let products = query.iter().zip(key).map(|(q, k)| wide(*q) * wide(*k));
    let (dot, size) = products.fold((0.0, 0.0), |(dot, size), x: f64| (dot + x, size + x.abs()));
    let (scale, cap) = (f64::from(case.scale), f64::from(case.softcap));
    let mut x = scale * dot;
    if cap > 0.0 {
        x = cap * (x / cap).tanh();
    }
    if let Some(bias) = case.bias {
        let (b, head) = (if bias.one_batch { 0 } else { b }, if bias.one_head { 0 } else { head });
        x += wide(t.bias.row(b, head, s)[j as usize]);
    }
    // A number that swallows everything added to it is exact.
    let rounding = if x.abs() > 1e30 { 0.0 } else { 4.0 * x.abs() };
    (x, 0.5f64.powi(24) * (8.0 * scale.abs() * size + rounding + 8.0))
}

fn near<T: Element>(
    what: &str,
    at: impl std::fmt::Debug,
    got: f64,
    want: f64,
    tolerance: f64,
) -> Result<(), TestCaseError> {
    let same = got == wide(T::from_f32(want as f32)) || (got.is_nan() && want.is_nan());
    let tolerance = tolerance + 1.01 * unit::<T>() * want.abs();
    prop_assert!(
        same || (got - want).abs() <= tolerance,
        "{what} {at:?}: got {got}, want {want} within {tolerance}"
    );
    Ok(())
}

fn check<T: Element>(case: &Case, t: &Tensors<T>) -> Result<(), TestCaseError> {
    for (index, at) in places(case.q_shape()).enumerate() {
        let want = row(case, t, at);
        check_out(case, t, at, &want)?;
        if case.want_lse {
            let tolerance = want.score_error + 1e-6 * (1.0 + want.lse.abs());
            near::<f32>("lse", at, f64::from(t.lse[index]), want.lse, tolerance)?;
        }
        if case.qk_output != qk_output::NONE {
            check_scores(case, &t.output_qk[index * case.columns() as usize..], at, &want)?;
        }
    }
    prop_assert!(t.out.gaps_are_nan(case.q_shape()), "a gap between rows of out was written");
    Ok(())
}

fn check_out<T: Element>(
    case: &Case,
    t: &Tensors<T>,
    [b, head, s]: [u32; 3],
    want: &Want,
) -> Result<(), TestCaseError> {
    let got = t.out.row(b, head, s);
    for e in 0..case.head_size as usize {
        let term = |(j, weight): (u32, &f64)| weight * wide(t.v.row(b, head / case.group, j)[e]);
        let terms: Vec<f64> = (want.first..).zip(&want.weights).map(term).collect();
        let size: f64 = terms.iter().map(|x| x.abs()).sum();
        near::<T>(
            "out",
            [b, head, s, e as u32],
            wide(got[e]),
            terms.iter().sum(),
            size * (2.0 * want.score_error + 2e-6) + 1e-7,
        )?;
    }
    Ok(())
}

fn check_scores<T: Element>(
    case: &Case,
    got: &[T],
    at: [u32; 3],
    want: &Want,
) -> Result<(), TestCaseError> {
    let (values, tolerance) = match case.qk_output {
        qk_output::BEFORE_SOFTMAX => (&want.scores, 1e-4),
        _ => (&want.weights, 2.0 * want.score_error + 2e-6),
    };
    for j in 0..case.columns() {
        let index = j.checked_sub(want.first).map(|j| j as usize);
        let value = index.and_then(|j| values.get(j)).copied().unwrap_or(0.0);
        near::<T>("output_qk", (at, j), wide(got[j as usize]), value, tolerance)?;
    }
    Ok(())
}

fn run<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    let mut t = case.tensors::<T>();
    case.launch(&mut t)?;
    check(case, &t)
}

/// Two query rows of two heads each that share a KV head, after a past of 40 keys.
fn chunk() -> Case {
    Case {
        dtype: DType::F16,
        kv_heads: 1,
        group: 2,
        head_size: 40,
        q_len: 2,
        totals: vec![42],
        spare: 3,
        first_prompt: false,
        tokens: None,
        causal: true,
        window: 0,
        scale: 0.2,
        softcap: 0.0,
        sink: sink::NONE,
        bias: None,
        want_lse: true,
        qk_output: qk_output::NONE,
        layout: CACHE,
        blocks: 1,
        seed: 5,
    }
}

#[test]
fn a_value_behind_a_rows_range_cannot_reach_it() {
    let case = chunk();
    let mut t = case.tensors::<f32>();
    for cache in [&mut t.k, &mut t.v] {
        cache.row_mut(0, 0, 41).fill(f32::NAN);
    }
    case.launch(&mut t).unwrap();
    for head in 0..2 {
        assert!(t.out.row(0, head, 0).iter().all(|x| x.is_finite()));
        assert!(t.out.row(0, head, 1).iter().all(|x| x.is_nan()));
        assert!(t.lse[2 * head as usize].is_finite() && t.lse[2 * head as usize + 1].is_nan());
    }
}

#[test]
fn a_nan_in_a_query_stays_in_its_row() {
    let case = Case { qk_output: qk_output::AFTER_SOFTMAX, ..chunk() };
    let mut t = case.tensors::<f32>();
    t.q.row_mut(0, 1, 0)[3] = f32::NAN;
    case.launch(&mut t).unwrap();
    for [_, head, s] in places(case.q_shape()) {
        let poisoned = (head, s) == (1, 0);
        assert!(t.out.row(0, head, s).iter().all(|x| x.is_nan() == poisoned));
        assert_eq!(t.lse[(2 * head + s) as usize].is_nan(), poisoned);
        let row = &t.output_qk[(2 * head + s) as usize * 42..][..41];
        assert!(row.iter().all(|x| x.is_nan() == poisoned));
    }
}

#[test]
fn a_sink_alone_is_the_log_sum() {
    let bias = Some(Bias { one_batch: true, one_head: true, hides: Hides::Nothing });
    let case = Case { sink: sink::PER_HEAD, bias, ..chunk() };
    let mut t = case.tensors::<f32>();
    t.bias.data.fill(f32::NEG_INFINITY);
    case.launch(&mut t).unwrap();
    assert!(t.out.data.iter().all(|x| *x == 0.0));
    for head in 0..2 {
        let (got, want) = (t.lse[2 * head], t.head_sink[head]);
        assert!((got - want).abs() < 1e-6, "{got} {want}");
    }
}

#[test]
fn lengths_outside_the_buffers_are_clamped() {
    for bias in [None, Some(Bias { one_batch: true, one_head: true, hides: Hides::Nothing })] {
        for length in [i32::MIN, -1, i32::MAX] {
            let case = Case { bias, ..chunk() };
            let mut t = case.tensors::<f32>();
            t.seqlens_k = vec![length];
            case.launch(&mut t).unwrap();
            assert_eq!(length < 0, t.out.data.iter().all(|x| *x == 0.0));
        }
    }
}

#[test]
fn the_grid_has_a_block_for_each_tile_of_rows() {
    let p = chunk().params(&chunk().tensors::<f32>());
    assert_eq!(general::grid(&p), [1, 1, 1]);
    let p = AttentionParams { batch: 3, q_heads: 32, kv_heads: 8, q_len: 100, ..p };
    assert_eq!(general::grid(&p), [3 * 8 * (4 * 100u32).div_ceil(general::ROWS), 1, 1]);
    let p = AttentionParams { batch: u32::MAX, q_len: u32::MAX / 4, ..p };
    assert_eq!(general::grid(&p), [i32::MAX as u32, 1, 1]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn any_call(case in case()) {
        with_type!(case.dtype, run(&case))?;
    }
}
