//! A random but legal GroupQueryAttention call, described by small numbers so that proptest can
//! shrink it.

use gqa_host::op::{GroupQueryAttention, QuantType};
use gqa_host::{CacheBinding, DType, Layout, QuantFormat, Quantization, Scales};
use proptest::prelude::*;
use std::ops::RangeInclusive;

/// Where rotary positions come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// past + row.
    Implicit,
    /// position_ids, with this many unused trailing columns.
    Explicit {
        /// Unused columns.
        extra: usize,
    },
}

/// attention_bias and its broadcasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bias {
    /// One for all batch entries.
    pub batch: bool,
    /// One for all heads.
    pub head: bool,
    /// One row in this many is entirely -inf; 0: none.
    pub masked_rows: usize,
}

/// One call. Data follows from `seed`.
#[derive(Clone, Debug)]
pub struct Case {
    /// Type of all floating-point tensors.
    pub dtype: DType,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// A multiple of 8.
    pub head_size: usize,
    /// Query rows.
    pub q_len: usize,
    /// Valid past rows of each batch entry; for a first prompt, the padding rows of each entry
    /// instead.
    pub past: Vec<usize>,
    /// query_seqlens: how many of each entry's rows are tokens, at most `q_len`. The others are
    /// padding on the right.
    pub tokens: Option<Vec<usize>>,
    /// No past: rows start at position 0 and may be padded on the right.
    pub first_prompt: bool,
    /// The past already holds all K and V rows; the call has none.
    pub no_new_rows: bool,
    /// One cache for past and present.
    pub shared: bool,
    /// Cache rows beyond the longest sequence.
    pub spare_rows: usize,
    /// One QKV tensor.
    pub packed: bool,
    /// Order of dimensions.
    pub layout: Layout,
    /// A rolling cache, with this many rows more than the window, which must be set.
    pub sliding: Option<usize>,
    /// The cache holds quantized values.
    pub quantized: Option<Quantization>,
    /// q_norm_weight and k_norm_weight given.
    pub qk_norm: bool,
    /// Rotated sixteenths of the head and pairing; only where head_size is a multiple of 16.
    pub rotary: Option<(usize, bool, Positions)>,
    /// 0: 1/sqrt(head_size).
    pub scale: f32,
    /// 0: off.
    pub softcap: f32,
    /// Negative: none.
    pub window: i64,
    /// Causal mask.
    pub causal: bool,
    /// head_sink given.
    pub head_sink: bool,
    /// smooth_softmax attribute.
    pub smooth_softmax: bool,
    /// attention_bias.
    pub bias: Option<Bias>,
    /// qk_output attribute.
    pub qk_output: i64,
    /// Log-sum-exp wanted.
    pub lse: bool,
    /// Output of float32, whatever the type.
    pub float32_output: bool,
    /// float8e4m3fn output, and its output_scale.
    pub output_scale: Option<f32>,
    /// The call promises that lengths and cache may be read before the launch ahead has ended.
    pub prefetch_cache: bool,
    /// Products of float8 are allowed.
    pub float8_products: bool,
    /// Standard deviation of queries and keys.
    pub spread: f32,
    /// Of all data.
    pub seed: u64,
}

impl Case {
    /// Batch entries.
    pub fn batch(&self) -> usize {
        self.past.len()
    }

    /// Valid rows of a batch entry after the call.
    pub fn total(&self, b: usize) -> usize {
        match &self.tokens {
            Some(tokens) => self.past[b] + tokens[b],
            None if self.first_prompt => self.q_len - self.past[b],
            None => self.past[b] + self.q_len,
        }
    }

    /// Rows of a batch entry that are tokens.
    pub fn tokens(&self, b: usize) -> usize {
        match &self.tokens {
            Some(tokens) => tokens[b],
            None if self.first_prompt => self.total(b),
            None => self.q_len,
        }
    }

    /// The longest past, with room for all rows behind it.
    fn padded_len(&self) -> usize {
        self.past.iter().max().map_or(0, |past| past + self.q_len)
    }

    /// total_sequence_length.
    pub fn total_len(&self) -> usize {
        let longest = (0..self.batch()).map(|b| self.total(b)).max().unwrap_or(0);
        if self.tokens.is_some() {
            // An upper bound; a rolling cache may be for fewer tokens than the chunk has rows.
            let grows = self.sliding.is_none() && !self.shared && self.spare_rows == 0;
            let least = if self.sliding.is_some() { longest } else { longest.max(self.q_len) };
            let is_loose = grows || self.seed.is_multiple_of(2);
            return if is_loose { self.padded_len() } else { least };
        }
        if self.first_prompt { self.q_len } else { longest }
    }

    /// Rows of past_key and past_value; 0: absent. A past that is not a static cache must be
    /// exactly as long as the operator expects: total - new rows.
    pub fn past_rows(&self) -> usize {
        if let Some(rows) = self.sliding {
            return self.window as usize + rows;
        }
        if self.tokens.is_some() {
            let grows = !self.shared && self.spare_rows == 0;
            return self.padded_len() + self.spare_rows - if grows { self.q_len } else { 0 };
        }
        match (self.shared || self.no_new_rows, self.first_prompt) {
            (true, _) => self.total_len() + self.spare_rows,
            (false, true) => 0,
            (false, false) if self.spare_rows > 0 => self.total_len() + self.spare_rows,
            (false, false) => self.total_len() - self.q_len,
        }
    }

    /// Cache rows of a sequence of `total` tokens.
    pub fn cached(&self, total: usize) -> usize {
        let Some(spare) = self.sliding else { return total };
        let grow = |rows| if rows == self.past_rows() { rows - spare } else { rows + 1 };
        (0..total).fold(0, |rows, _| grow(rows))
    }

    /// Standard deviation of the scores before softcap and bias.
    pub fn score_deviation(&self) -> f32 {
        let root = (self.head_size as f32).sqrt();
        let scale = if self.scale == 0.0 { 1.0 / root } else { self.scale.abs() };
        // Normalised rows have the deviation of their weights. Past keys may have more; the bounds
        // are not widened for that.
        let spread = if self.qk_norm { 1.0 } else { self.spread };
        // Quantized values of the past are evenly distributed, up to 2.5 times as far.
        let of_keys = if self.quantized.is_some() { 1.5 * spread } else { spread };
        scale * root * spread * of_keys
    }

    /// Binding of the cache.
    pub fn cache(&self) -> CacheBinding {
        if self.shared { CacheBinding::Shared } else { CacheBinding::Separate }
    }

    /// The operator.
    pub fn op(&self) -> GroupQueryAttention {
        GroupQueryAttention::new((self.kv_heads * self.group) as i64, self.kv_heads as i64)
            .scale(self.scale)
            .softcap(self.softcap)
            .local_window_size(self.window)
            .sliding_window_cache(self.sliding.is_some())
            .causal(self.causal.into())
            .do_rotary(self.rotary.is_some())
            .rotary_interleaved(matches!(self.rotary, Some((_, true, _))))
            .smooth_softmax(self.smooth_softmax)
            .qk_output(self.qk_output)
            .qk_norm_epsilon(EPSILON)
            .k_norm_epsilon(10.0 * EPSILON)
            .k_quant_type(self.quant_type())
            .v_quant_type(self.quant_type())
            .kv_cache_bit_width(self.bit_width())
            .float4_cache(self.quantized.is_some_and(|how| how.format == QuantFormat::Float4))
            .layout(self.layout)
            .log_sum_exp(self.lse)
            .prefetch_cache(self.prefetch_cache)
            .float32_output(self.float32_output && self.output_scale.is_none())
            .float8_products(self.float8_products)
    }
}

impl Case {
    pub(crate) fn quant_type(&self) -> QuantType {
        self.quantized.map(|how| how.scales).into()
    }

    fn bit_width(&self) -> i64 {
        match self.quantized.map(|how| how.format) {
            None => 0,
            Some(format) => format.bits().into(),
        }
    }

    /// Whether the cache has per-token scales.
    pub fn has_row_scales(&self) -> bool {
        self.quantized.is_some_and(|how| how.scales == Scales::PerToken)
    }

    /// Whether the quantized values of a new key depend on earlier rounding.
    pub fn rounds_before_codes(&self) -> bool {
        self.quantized.is_some() && (self.rotary.is_some() || self.qk_norm)
    }
}

/// Large enough to be felt.
const EPSILON: f32 = 0.01;

/// Head sizes up to `limit`, most often the usual ones.
pub fn heads_up_to(limit: usize) -> BoxedStrategy<usize> {
    let usual: Vec<usize> =
        [32, 64, 80, 96, 128].into_iter().filter(|&size| size <= limit).collect();
    prop_oneof![proptest::sample::select(usual), (1..=limit / 8).prop_map(|eighths| eighths * 8)]
        .boxed()
}

/// Head sizes in that range, multiples of 8.
pub fn heads_in(sizes: RangeInclusive<usize>) -> BoxedStrategy<usize> {
    (sizes.start() / 8..=sizes.end() / 8).prop_map(|eighths| eighths * 8).boxed()
}

/// Legal calls with up to `max_rows` rows in a sequence and the given head sizes.
pub fn case(
    dtype: BoxedStrategy<DType>,
    head_size: BoxedStrategy<usize>,
    max_rows: usize,
) -> BoxedStrategy<Case> {
    let phase = prop_oneof![Just(Phase::Prompt), Just(Phase::Chunk), Just(Phase::Token)];
    let shape = (dtype, 1..=3usize, 1..=8usize, head_size, phase, 1..=3usize);
    let sometimes = || proptest::bool::weighted(0.2);
    let sometimes_set = [sometimes(), sometimes()];
    let flags =
        (any::<[bool; 9]>(), 0..=9usize, any::<u64>(), sometimes_set, sometimes_quantized());
    let scores = (
        // Multiples of the default.
        prop_oneof![12 => Just(0.0f32), 4 => 0.3f32..2.0, 2 => -2.0f32..-0.3, 1 => Just(SUBNORMAL)],
        prop_oneof![12 => Just(0.0f32), 4 => 0.5f32..50.0, 1 => extreme_softcap()],
        prop_oneof![2 => Just(-1i64), 1 => 1..=max_rows as i64],
        prop_oneof![4 => Just(0i64), 1 => Just(1), 1 => Just(2)],
        prop_oneof![Just(0.2f32), Just(1.0), Just(3.0)],
    );
    let rotary = proptest::option::of((
        1..=8usize,
        any::<bool>(),
        prop_oneof![
            Just(Positions::Implicit),
            (0..3usize).prop_map(|extra| Positions::Explicit { extra })
        ],
    ));
    let bias = proptest::option::weighted(
        0.25,
        (any::<bool>(), any::<bool>(), 0..4usize).prop_map(|(batch, head, masked_rows)| Bias {
            batch,
            head,
            masked_rows,
        }),
    );
    (shape, flags, scores, rotary, bias)
        .prop_flat_map(move |drawn| {
            let batch = drawn.0.5;
            let rows = proptest::collection::vec(0..max_rows, batch);
            (Just(drawn), rows, 1..=max_rows.max(2) / 2)
        })
        .prop_map(|(drawn, rows, q_len)| assemble(drawn, rows, q_len))
        .boxed()
}

/// Every quantization of a cache; most often none.
fn sometimes_quantized() -> BoxedStrategy<Option<Quantization>> {
    proptest::option::weighted(0.2, any_quantization()).boxed()
}

/// Every way to quantize a cache.
pub fn any_quantization() -> BoxedStrategy<Quantization> {
    let scales = prop_oneof![3 => any_scales(), 1 => Just(Scales::PerToken)];
    (proptest::sample::select(&QuantFormat::ALL), scales)
        .prop_map(|(format, scales)| Quantization { format, scales })
        .boxed()
}

/// Scales of any granularity are inputs, and are never written.
pub fn any_scales() -> BoxedStrategy<Scales> {
    proptest::sample::select(vec![Scales::PerTensor, Scales::PerHead, Scales::PerChannel]).boxed()
}

/// A scale of scores that float32 may flush to 0.
pub(crate) const SUBNORMAL: f32 = 1e-39;

/// Softcaps that float32 can hold, but not their inverse, or not the difference of 1 and a tanh.
pub(crate) fn extreme_softcap() -> impl Strategy<Value = f32> {
    proptest::sample::select(vec![SUBNORMAL, 1e4, 1e6, 1e38])
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Prompt,
    Chunk,
    Token,
}

type Drawn = (
    (DType, usize, usize, usize, Phase, usize),
    ([bool; 9], usize, u64, [bool; 2], Option<Quantization>),
    (f32, f32, i64, i64, f32),
    Option<(usize, bool, Positions)>,
    Option<Bias>,
);

/// Turns independent draws into a legal call.
fn assemble(drawn: Drawn, rows: Vec<usize>, q_len: usize) -> Case {
    let ((dtype, kv_heads, group, head_size, phase, _), flags, scores, rotary, bias) = drawn;
    let (flags, spare, seed, [float32_output, qk_norm], quantized) = flags;
    let (scale, softcap, window, qk_output, spread) = scores;
    let [
        shared,
        packed,
        bnsh,
        bidirectional,
        head_sink,
        smooth_softmax,
        lse,
        no_new_rows,
        prefetch_cache,
    ] = flags;
    let first_prompt = matches!(phase, Phase::Prompt);
    let q_len = match phase {
        Phase::Token => 1,
        // With one row, a chunk is a decode step, and S == T is a first prompt.
        Phase::Chunk => q_len + 1,
        Phase::Prompt => q_len,
    };
    let past: Vec<usize> = if first_prompt {
        // Padding of each entry; at least one entry is full and none is empty.
        rows.iter().enumerate().map(|(b, &r)| if b == 0 { 0 } else { r % q_len }).collect()
    } else {
        rows.iter().map(|&r| r + usize::from(r == 0)).collect()
    };
    let no_new_rows = no_new_rows && !first_prompt && seed % 4 == 0;
    let packed = packed && !no_new_rows;
    let rotary = rotary.filter(|_| head_size % 16 == 0);
    Case {
        dtype,
        kv_heads,
        group,
        head_size,
        q_len,
        past,
        tokens: None,
        first_prompt,
        no_new_rows,
        shared: shared || quantized.is_some_and(|how| how.scales == Scales::PerToken),
        spare_rows: if spare < 4 { 0 } else { spare },
        packed,
        layout: if bnsh && !packed { Layout::Bnsh } else { Layout::Bsnh },
        sliding: None,
        quantized,
        qk_norm,
        rotary: rotary.map(|(dim, inter, pos)| (1 + (dim - 1) % (head_size / 16), inter, pos)),
        scale: scale / (head_size as f32).sqrt(),
        softcap,
        window: if bidirectional { -1 } else { window },
        causal: !bidirectional,
        head_sink,
        smooth_softmax,
        bias,
        qk_output,
        lse,
        prefetch_cache,
        float8_products: false,
        float32_output,
        output_scale: None,
        spread,
        seed,
    }
}

/// Calls that the planner gives to the decode family: up to 64 packed query rows, most often up to
/// 16, its head sizes, no bias, no score output.
pub fn steps(max_rows: usize) -> BoxedStrategy<Case> {
    let own = proptest::sample::select(vec![64usize, 80, 96, 128, 128, 192, 256]);
    // Kernels pad them.
    let others = proptest::sample::select(vec![32usize, 72, 112, 160, 224]);
    let heads = prop_oneof![5 => own, 1 => others];
    let up_to = |rows: usize| {
        (1..=rows).prop_flat_map(move |group| (Just(group), 1..=(rows / group).min(16)))
    };
    let rows = prop_oneof![4 => up_to(16), 1 => up_to(64)];
    (case(crate::half_dtype(), heads.boxed(), max_rows), rows)
        .prop_map(|(case, (group, rows))| {
            let q_len = if case.q_len == 1 { 1 } else { rows };
            step(case, group, q_len)
        })
        .boxed()
        .boxed()
}

/// The same calls on quantized KV caches.
pub fn quantized(cases: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    (cases, any_quantization())
        .prop_map(|(case, how)| Case {
            quantized: Some(how),
            shared: case.shared || how.scales == Scales::PerToken,
            ..case
        })
        .boxed()
}

/// The same calls over quantized KV caches with per-token scales.
pub fn with_row_scales(cases: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    (cases, any_quantization())
        .prop_map(|(case, how)| Case {
            quantized: Some(Quantization { scales: Scales::PerToken, ..how }),
            shared: true,
            ..case
        })
        .boxed()
}

/// The same calls on rolling KV caches, most often with more rows than the cache has.
pub fn sliding(cases: BoxedStrategy<Case>, most_rows: usize) -> BoxedStrategy<Case> {
    (cases, 1..=most_rows, 0..=most_rows)
        .prop_map(|(case, window, spare)| {
            // Rows of quantized values are multiples of 16 bytes, and rolling moves them without
            // per-token scales.
            let fits = |how: &Quantization| {
                case.head_size % (16 * how.codes_per_element()) == 0
                    && how.scales != Scales::PerToken
            };
            let quantized = case.quantized.filter(fits);
            // The quantized value of a rotated or normalised key may round either way, and its row
            // may be evicted before the comparison.
            let turns = quantized.is_none();
            Case {
                sliding: Some(spare),
                window: window as i64,
                causal: true,
                past: if case.first_prompt { vec![0; case.batch()] } else { case.past.clone() },
                no_new_rows: false,
                qk_output: 0,
                quantized,
                rotary: case.rotary.filter(|_| turns),
                qk_norm: case.qk_norm && turns,
                ..case
            }
        })
        .boxed()
}

/// The same calls as chunks padded at the right: each sequence has any number of the rows, none and
/// all included, after its past or as its first ones.
pub fn padded(cases: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    let some = proptest::collection::vec(prop_oneof![Just(0.0), Just(1.0), 0.0..1.0f64], 3);
    (cases, some)
        .prop_map(|(case, some)| {
            let past = if case.first_prompt { vec![0; case.batch()] } else { case.past.clone() };
            let tokens = past.iter().zip(some).map(|(&past, part)| {
                let tokens = (part * case.q_len as f64).round() as usize;
                // A sequence has a token after the call.
                tokens.max(usize::from(past == 0))
            });
            let tokens = tokens.collect();
            // There is a tensor past_key.
            let spare = if past.iter().all(|&past| past == 0) { 5 } else { 0 };
            Case {
                past,
                tokens: Some(tokens),
                first_prompt: false,
                no_new_rows: false,
                causal: true,
                spare_rows: case.spare_rows.max(spare),
                ..case
            }
        })
        .boxed()
}

/// The same calls as chunks of up to 70 rows for the kernels that divide work by the lengths on the
/// device: after no rows, about as many as a tile of keys has, or many, with any number of tokens.
pub fn ragged(cases: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    let pasts = proptest::sample::select(vec![0usize, 1, 63, 64, 127, 128, 129, 600]);
    let tokens = proptest::sample::select(vec![0usize, 1, 7, 31, 32, 63, 64, 70]);
    let lengths = proptest::collection::vec((pasts, tokens), 1..=5);
    (cases, lengths, 1..=70usize, any::<bool>())
        .prop_map(|(case, lengths, q_len, is_padded)| {
            // A sequence has a token after the call.
            let tokens =
                |&(past, tokens): &(usize, usize)| tokens.min(q_len).max(usize::from(past == 0));
            Case {
                q_len,
                past: lengths.iter().map(|(past, _)| *past).collect(),
                tokens: is_padded.then(|| lengths.iter().map(tokens).collect()),
                first_prompt: false,
                no_new_rows: false,
                spare_rows: case.spare_rows.max(5),
                causal: case.causal || is_padded,
                window: if case.causal { case.window } else { -1 },
                softcap: case.softcap.min(50.0),
                quantized: None,
                bias: None,
                rotary: case.rotary.filter(|rotary| rotary.2 == Positions::Implicit),
                scale: case.scale.abs(),
                qk_output: 0,
                lse: false,
                float32_output: false,
                ..case
            }
        })
        .boxed()
}

/// The same calls with float8e4m3fn output, whose largest values are clamped.
pub fn quantized_output(cases: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    (cases, 0.002f32..0.1)
        .prop_map(|(case, scale)| Case {
            output_scale: Some(scale),
            lse: case.lse && case.seed % 4 == 0,
            ..case
        })
        .boxed()
}

/// Head sizes of decode steps over quantized and paged KV caches, with kernels of their own and
/// without.
pub fn step_heads() -> BoxedStrategy<usize> {
    let own = proptest::sample::select(vec![64usize, 128, 256]);
    let others = proptest::sample::select(vec![32usize, 80, 96, 112, 160, 192, 224]);
    prop_oneof![own, others].boxed()
}

/// Calls that the planner gives to the decode family of quantized KV caches.
pub fn quantized_steps(max_rows: usize) -> BoxedStrategy<Case> {
    (quantized(steps(max_rows)), step_heads())
        .prop_map(|(case, head_size)| Case {
            head_size,
            rotary: case.rotary.map(|(sixteenths, interleaved, positions)| {
                (1 + (sixteenths - 1) % (head_size / 16), interleaved, positions)
            }),
            shared: true,
            float32_output: false,
            ..case
        })
        .boxed()
}

/// The same of more than 32 packed query rows and up to 128, of the head sizes that have kernels
/// for 64.
pub fn tall_steps(max_rows: usize) -> BoxedStrategy<Case> {
    let heads = proptest::sample::select(vec![64usize, 80, 96, 128, 256]);
    let rows = (1..=16usize)
        .prop_flat_map(|group| (Just(group), 33usize.div_ceil(group)..=(128 / group).min(60)));
    (case(crate::half_dtype(), heads.boxed(), max_rows), rows)
        .prop_map(|(case, (group, rows))| step(case, group, rows))
        .boxed()
}

/// The case with this many query rows and heads per KV head, without features that decode lacks.
fn step(case: Case, group: usize, q_len: usize) -> Case {
    let past =
        case.past.iter().map(|past| if case.first_prompt { past % q_len } else { *past }).collect();
    Case { q_len, past, group, bias: None, qk_output: 0, ..case }
}

/// Calls that the planner gives to the Hopper family: from 64 query rows on, a positive scale, no
/// large softcap, no bias, no score output, output in its type. Few heads, because the simulator
/// multiplies whole tiles.
pub fn prompts(max_head_size: usize, max_rows: usize) -> BoxedStrategy<Case> {
    (case(crate::half_dtype(), heads_up_to(max_head_size), max_rows), 64..=max_rows)
        .prop_filter_map("one row", |(case, rows)| {
            (case.q_len > 1).then(|| Case {
                q_len: rows,
                past: case.past.iter().map(|past| past % rows).collect(),
                kv_heads: 1 + case.kv_heads % 2,
                group: 1 + case.group % 2,
                scale: case.scale.abs(),
                softcap: case.softcap.min(50.0),
                float32_output: false,
                window: if case.causal { case.window } else { -1 },
                bias: None,
                qk_output: 0,
                ..case
            })
        })
        .boxed()
}

/// The same with RoPE at implicit positions, which some kernels apply themselves.
pub fn rotated_prompts(max_head: usize, max_rows: usize) -> BoxedStrategy<Case> {
    (1..=16usize, any::<bool>(), prompts(max_head, max_rows))
        .prop_map(|(sixteenths, interleaved, case)| {
            let sixteenths = sixteenths.min(case.head_size / 16);
            let rotary = (sixteenths, interleaved, Positions::Implicit);
            Case { rotary: (case.head_size % 16 == 0).then_some(rotary), ..case }
        })
        .boxed()
}

/// The same after hundreds of keys, with scores so far apart that the row maximum grows from tile
/// to tile: some beyond the lazy-rescale threshold, up to infinity with a wide spread of queries
/// and keys.
pub fn prompts_of_wide_scores(max_rows: usize, spread: f32) -> BoxedStrategy<Case> {
    prompts(128, max_rows)
        .prop_map(move |case| Case {
            spread,
            past: case.past.iter().map(|past| past + 256).collect(),
            first_prompt: false,
            // Otherwise values have the spread of queries, and errors grow with it.
            packed: false,
            // A score of a hundred would change with one rounding of a rotated key or of a
            // normalised query.
            rotary: None,
            qk_norm: false,
            scale: 0.0,
            softcap: 0.0,
            window: -1,
            ..case
        })
        .boxed()
}

/// Prefills over float8 caches that may use float8 products, with head sizes for the tile of `tile`
/// columns.
pub fn turned_float8_prompts(tile: usize, max_rows: usize) -> BoxedStrategy<Case> {
    let heads = proptest::sample::select(vec![tile - 48, tile - 16, tile, tile]);
    (prompts(128, max_rows), heads, any_scales())
        .prop_map(|(case, head_size, scales)| Case {
            head_size,
            quantized: Some(Quantization { format: QuantFormat::Float8, scales }),
            float8_products: true,
            rotary: case
                .rotary
                .map(|(dim, pairs, ids)| (1 + (dim - 1) % (head_size / 16), pairs, ids)),
            softcap: 0.0,
            lse: false,
            ..case
        })
        .boxed()
}

/// The same without RoPE and QK-norm, so that the oracle knows which values are rounded.
pub fn float8_prompts(tile: usize, max_rows: usize) -> BoxedStrategy<Case> {
    turned_float8_prompts(tile, max_rows)
        .prop_map(|case| Case { rotary: None, qk_norm: false, ..case })
        .boxed()
}

/// Prefills over quantized caches that kernels read in place: shared, with rows of multiples of 16
/// bytes, without per-token scales and without softcap.
pub fn quantized_prompts(prompts: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    (quantized(prompts), any_scales())
        .prop_map(|(case, scales)| Case {
            quantized: case.quantized.map(|how| Quantization { scales, ..how }),
            head_size: case.head_size.next_multiple_of(32),
            shared: true,
            softcap: 0.0,
            ..case
        })
        .boxed()
}

/// The same in bfloat16 over float8 keys and values.
pub fn prompts_over_float8(prompts: BoxedStrategy<Case>) -> BoxedStrategy<Case> {
    quantized_prompts(prompts)
        .prop_map(|case| Case {
            dtype: DType::BF16,
            quantized: case
                .quantized
                .map(|how| Quantization { format: QuantFormat::Float8, ..how }),
            ..case
        })
        .boxed()
}

/// Prompts with a bias.
pub fn biased_prompts(max_head_size: usize, max_rows: usize) -> BoxedStrategy<Case> {
    let bias = (any::<bool>(), any::<bool>(), 0..4usize);
    (prompts(max_head_size, max_rows), bias)
        .prop_map(|(case, (batch, head, masked_rows))| Case {
            bias: Some(Bias { batch, head, masked_rows }),
            ..case
        })
        .boxed()
}
