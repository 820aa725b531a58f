//! `decode` with a quantized KV cache on the simulator.

use crate::support::{Layout, Random, Rows, unit, wide};
use bytemuck::Zeroable;
use gqa_kernels::attention::decode;
use gqa_kernels::concept::pages::LOG_CONTIGUOUS;
use gqa_kernels::num::{Code, DType, Element, Float4, Float8, Format, Int4, Int8, bf16, f16};
use gqa_kernels::params::{
    AttentionParams, DecodeParams, PageSteps, PagedDecodeParams, RotaryParams, Strides, scales,
    sink,
};
use gqa_kernels::registry::{Entry, find};
use gqa_sim::{Arg, Launch, launch};
use proptest::prelude::*;

const BSNH: Layout = Layout { bnsh: false, gap: 0 };

/// One call.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    format: Format,
    head_size: u32,
    /// Query rows of a block.
    rows: u32,
    /// What queries are multiplied by.
    query_size: f32,
    kv_heads: u32,
    group: u32,
    q_len: u32,
    /// Whether the call brings keys and values of its rows.
    is_new: bool,
    /// Valid keys of each sequence, the new ones included.
    totals: Vec<u32>,
    /// One of `params::scales`.
    scales: u32,
    rotary: RotaryParams,
    causal: bool,
    window: u32,
    softcap: f32,
    sink: u32,
    ranks: u32,
    splits: u32,
    /// Whether lengths and cache may be read early, and keys before lengths are known.
    prefetches: bool,
    is_ahead: bool,
    seed: u64,
}

fn case(head_size: u32) -> impl Strategy<Value = Case> {
    let formats = proptest::sample::select(&Format::ALL);
    let types = prop_oneof![Just(DType::F16), Just(DType::BF16)];
    let shape = (1..=2u32, 1..=4u32, prop_oneof![Just(1u32), Just(3)], any::<bool>());
    let totals = proptest::collection::vec(prop_oneof![0..=12u32, 0..=900u32], 1..=2);
    let turns = prop_oneof![Just(0), Just(head_size / 2), Just(head_size)];
    let mask = (any::<bool>(), prop_oneof![2 => Just(0), 1 => 1..=200u32], any::<bool>());
    let score = (
        prop_oneof![3 => Just(0.0f32), 1 => Just(2.0)],
        prop_oneof![Just(sink::NONE), Just(sink::ZERO), Just(sink::PER_HEAD)],
    );
    let cluster = (prop_oneof![Just(1u32), Just(2), Just(4)], 1..=2u32, any::<[bool; 2]>());
    let sizes = prop_oneof![3 => Just(1.0f32), 1 => Just(0.0), 1 => Just(0.001), 1 => Just(10.0)];
    let values = (
        formats,
        types,
        0..=scales::PER_TOKEN,
        prop_oneof![Just(8u32), Just(16)],
        sizes,
        any::<u64>(),
    );
    (values, shape, totals, (turns, any::<bool>()), mask, score, cluster).prop_map(
        move |(values, shape, totals, turns, mask, score, cluster)| {
            let (format, dtype, scales, rows, query_size, seed) = values;
            let (kv_heads, group, q_len, is_new) = shape;
            let ((ranks, splits, [prefetches, is_ahead]), (causal, window, is_windowed)) =
                (cluster, mask);
            let window = if is_windowed { window } else { 0 };
            // Kernels that pad heads have one shape each.
            let rows = match head_size {
                64 | 128 | 256 => rows,
                ..=128 => 16,
                _ => 8,
            };
            let rotary = RotaryParams {
                dim: turns.0,
                interleaved: turns.1.into(),
                max_positions: 1024,
                position_stride: 0,
            };
            // New rows that other clusters read may be appended before or after they do.
            let is_alone = splits == 1 && group * q_len <= rows;
            let is_ahead = is_ahead && window == 0 && (!is_new || is_alone);
            Case {
                dtype,
                format,
                head_size,
                rows,
                query_size,
                kv_heads,
                group,
                q_len,
                is_new,
                totals,
                scales,
                rotary,
                causal,
                window,
                softcap: score.0,
                sink: score.1,
                ranks,
                splits,
                prefetches,
                is_ahead,
                seed,
            }
        },
    )
}

impl Case {
    fn entry(&self) -> &'static Entry {
        let format = if self.format.bits() == 4 { "i4" } else { "q8" };
        let dtype = if self.dtype == DType::F16 { "f16" } else { "bf16" };
        let name = match self.head_size {
            size @ (64 | 128 | 256) => format!("{format}_{dtype}_d{size}_r{}", self.rows),
            ..=128 => format!("padded_{format}_{dtype}_d128_r16_w4"),
            _ => format!("padded_{format}_{dtype}_d256_r8_w4"),
        };
        let entry = find(&format!("gqa_decode_{name}")).expect("a kernel");
        assert!(entry.holds(Some(self.format)) && entry.dtype == self.dtype);
        entry
    }

    fn batch(&self) -> u32 {
        self.totals.len() as u32
    }

    fn q_heads(&self) -> u32 {
        self.kv_heads * self.group
    }

    fn capacity(&self) -> u32 {
        self.totals.iter().max().copied().unwrap_or(0) + 5
    }

    fn past(&self, b: u32) -> u32 {
        self.totals[b as usize].saturating_sub(self.q_len)
    }

    /// Keys that row `s` sees; none if it is padding.
    fn visible(&self, b: u32, s: u32) -> std::ops::Range<u32> {
        let (total, position) = (self.totals[b as usize], self.past(b) + s);
        if position >= total {
            return 0..0;
        }
        let end = if self.causal { position + 1 } else { total };
        let first = if self.window > 0 { end.saturating_sub(self.window) } else { 0 };
        first..end
    }

    fn params(&self, bytes: u64) -> DecodeParams {
        let shape = |heads, rows, width: u32| [self.batch(), heads, rows, width];
        let strides =
            |heads| Rows::<f32>::nan(shape(heads, self.q_len, self.head_size), BSNH).strides;
        let (rows, heads) = (u64::from(self.capacity()), u64::from(self.kv_heads));
        let cache = Strides { batch: heads * rows * bytes, head: rows * bytes, row: bytes };
        let attention = AttentionParams {
            q: strides(self.q_heads()),
            k: cache,
            v: cache,
            out: strides(self.q_heads()),
            batch: self.batch(),
            q_heads: self.q_heads(),
            kv_heads: self.kv_heads,
            head_size: self.head_size,
            q_len: self.q_len,
            capacity: self.capacity(),
            causal: self.causal.into(),
            window: self.window,
            sink: self.sink,
            splits: 1,
            scale: 1.0 / (self.head_size as f32).sqrt(),
            softcap: self.softcap,
            ..Zeroable::zeroed()
        };
        DecodeParams {
            new_k: strides(self.kv_heads),
            new_v: strides(self.kv_heads),
            rotary: self.rotary,
            new_len: if self.is_new { self.q_len } else { 0 },
            splits: self.splits,
            clusters: decode::clusters(&attention, self.rows),
            rows: self.rows,
            at_a_time: 132,
            overlap: self.prefetches.into(),
            ahead: self.is_ahead.into(),
            scales: self.scales,
            format: self.format as u32,
            parts: 0,
            attention,
        }
    }
}

/// Quantized values of (batch, KV head, row) and their scales.
#[derive(Clone)]
struct Cache {
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// What each is for: one of `params::scales`.
    kind: u32,
    strides: Strides,
    width: usize,
}

impl Cache {
    /// Random quantized values where the case has keys that some row sees, and quantized values of
    /// NaN, or the greatest ones, elsewhere.
    fn random<C: Code>(code: C, case: &Case, random: &mut Random) -> Self {
        let width = case.head_size as usize;
        let bytes = width * C::BITS as usize / 8;
        let strides = case.params(bytes as u64).attention.k;
        let count = match case.scales {
            scales::PER_TENSOR => 1,
            scales::PER_HEAD => case.kv_heads as usize,
            scales::PER_TOKEN => (case.batch() * case.kv_heads * case.capacity()) as usize,
            _ => case.kv_heads as usize * width,
        };
        let scale = |random: &mut Random| (0.5 + random.unit() as f32) * 1.5 / code.largest();
        let mut cache = Self {
            codes: vec![0xff; strides.batch as usize * case.totals.len()],
            scales: (0..count).map(|_| scale(random)).collect(),
            kind: case.scales,
            strides,
            width,
        };
        let mut held = vec![case.scales != scales::PER_TOKEN; count];
        for b in 0..case.batch() {
            let old = if case.is_new { case.past(b) } else { case.totals[b as usize] };
            for head in 0..case.kv_heads {
                for row in 0..old {
                    if case.scales == scales::PER_TOKEN {
                        // Far apart, some of them.
                        let number = cache.number([b, head, row]);
                        cache.scales[number] *= [1.0, 1.0, 1.0, 0.01, 20.0][number * 7 % 5];
                        held[number] = true;
                    }
                    if (0..case.q_len).any(|s| case.visible(b, s).contains(&row)) {
                        let values: Vec<f32> = random.values(width);
                        let codes = cache.encode(code, [b, head, row], &values);
                        cache.row_mut(b, head, row, codes.len()).copy_from_slice(&codes);
                    }
                }
            }
        }
        for (scale, _) in cache.scales.iter_mut().zip(held).filter(|(_, held)| !held) {
            *scale = f32::NAN;
        }
        cache
    }

    /// The number of a row among those of all heads.
    fn number(&self, [b, head, row]: [u32; 3]) -> usize {
        self.strides.at(b, head, row) / self.strides.row as usize
    }

    fn scale(&self, [b, head, row]: [u32; 3], channel: usize) -> f32 {
        match self.kind {
            scales::PER_TENSOR => self.scales[0],
            scales::PER_HEAD => self.scales[head as usize],
            scales::PER_TOKEN => self.scales[self.number([b, head, row])],
            _ => self.scales[head as usize * self.width + channel],
        }
    }

    /// Puts a new row in, with a scale of its own if it has one.
    fn append(&mut self, code: impl Code, [b, head, row]: [u32; 3], values: &[f32]) {
        if self.kind == scales::PER_TOKEN {
            let number = self.number([b, head, row]);
            let largest = values.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
            self.scales[number] = largest / code.largest();
        }
        let codes = self.encode(code, [b, head, row], values);
        self.row_mut(b, head, row, codes.len()).copy_from_slice(&codes);
    }

    fn row_mut(&mut self, b: u32, head: u32, row: u32, bytes: usize) -> &mut [u8] {
        &mut self.codes[self.strides.at(b, head, row)..][..bytes]
    }

    /// A row as bytes.
    fn encode<C: Code>(&self, code: C, place: [u32; 3], values: &[f32]) -> Vec<u8> {
        let per_byte = 8 / C::BITS as usize;
        let of = |i: usize| code.encode(values[i] / self.scale(place, i));
        let byte = |first: usize| {
            (0..per_byte).fold(0, |byte, i| byte | of(first + i) << (i as u32 * C::BITS))
        };
        (0..self.width).step_by(per_byte).map(|first| byte(first) as u8).collect()
    }

    /// A row as numbers.
    fn decode<C: Code>(&self, format: C, b: u32, head: u32, row: u32) -> Vec<f64> {
        let at = self.strides.at(b, head, row);
        let number = |i: usize| {
            let bit = i * C::BITS as usize;
            let code = u32::from(self.codes[at + bit / 8]) >> (bit % 8);
            f64::from(format.decode(code)) * f64::from(self.scale([b, head, row], i))
        };
        (0..self.width).map(number).collect()
    }
}

/// Everything a launch reads or writes.
struct Tensors<T> {
    q: Rows<T>,
    new: [Rows<T>; 2],
    cos: Vec<T>,
    sin: Vec<T>,
    head_sink: Vec<T>,
    out: Rows<T>,
    lse: Vec<f32>,
}

impl<T: Element> Tensors<T> {
    fn random(case: &Case, random: &mut Random) -> Self {
        let rows = |heads, random: &mut Random| {
            let shape = [case.batch(), heads, case.q_len, case.head_size];
            let mut rows = Rows::random(shape, BSNH, random);
            for b in 0..case.batch() {
                for s in case.totals[b as usize].min(case.q_len)..case.q_len {
                    (0..heads).for_each(|h| rows.row_mut(b, h, s).fill(T::from_f32(f32::NAN)));
                }
            }
            rows
        };
        let angles: Vec<f64> =
            (0..1024 * case.rotary.dim / 2).map(|_| 6.3 * random.unit()).collect();
        let table = |f: fn(f64) -> f64| angles.iter().map(|&x| T::from_f32(f(x) as f32)).collect();
        let shape = [case.batch(), case.q_heads(), case.q_len, case.head_size];
        let mut q = rows(case.q_heads(), random);
        q.data.iter_mut().for_each(|x| *x = T::from_f32(x.to_f32() * case.query_size));
        Self {
            q,
            new: [rows(case.kv_heads, random), rows(case.kv_heads, random)],
            cos: table(f64::cos),
            sin: table(f64::sin),
            head_sink: random.values(case.q_heads() as usize),
            out: Rows::nan(shape, BSNH),
            lse: vec![f32::NAN; (case.batch() * case.q_heads() * case.q_len) as usize],
        }
    }

    /// A row at a position, rotated and rounded as the rotary embedding is defined.
    fn turned(&self, case: &Case, x: &[T], position: u32) -> Vec<f32> {
        let mut row: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let half = case.rotary.dim as usize / 2;
        for i in 0..half {
            let angle = position as usize * half + i;
            let (cos, sin) = (self.cos[angle].to_f32(), self.sin[angle].to_f32());
            let [a, b] =
                if case.rotary.interleaved != 0 { [2 * i, 2 * i + 1] } else { [i, i + half] };
            let (x, y) = (row[a], row[b]);
            row[a] = T::from_f32(x.mul_add(cos, -(y * sin))).to_f32();
            row[b] = T::from_f32(y.mul_add(cos, x * sin)).to_f32();
        }
        row
    }

    /// The cache with the new rows, as it must be.
    fn appended<C: Code>(&self, code: C, case: &Case, [mut k, mut v]: [Cache; 2]) -> [Cache; 2] {
        for b in 0..if case.is_new { case.batch() } else { 0 } {
            for s in 0..case.totals[b as usize].min(case.q_len) {
                let position = case.past(b) + s;
                for head in 0..case.kv_heads {
                    let key = self.turned(case, self.new[0].row(b, head, s), position);
                    k.append(code, [b, head, position], &key);
                    let value: Vec<f32> =
                        self.new[1].row(b, head, s).iter().map(|x| x.to_f32()).collect();
                    v.append(code, [b, head, position], &value);
                }
            }
        }
        [k, v]
    }
}

fn run<T: Element>(code: impl Code, case: &Case) -> Result<(), TestCaseError> {
    let mut random = Random::new(case.seed);
    let [mut k, mut v] = [(); 2].map(|()| Cache::random(code, case, &mut random));
    let mut t = Tensors::<T>::random(case, &mut random);
    let want = t.appended(code, case, [k.clone(), v.clone()]);
    start(case, &mut t, &mut k, &mut v)?;
    prop_assert!(k.codes == want[0].codes, "keys appended");
    prop_assert!(v.codes == want[1].codes, "values appended");
    let bits = |cache: &Cache| cache.scales.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    prop_assert!(bits(&k) == bits(&want[0]), "scales of keys appended");
    prop_assert!(bits(&v) == bits(&want[1]), "scales of values appended");
    for b in 0..case.batch() {
        for head in 0..case.q_heads() {
            for s in 0..case.q_len {
                check_row(code, case, &t, [&k, &v], [b, head, s])?;
            }
        }
    }
    Ok(())
}

fn start<T: Element>(
    case: &Case,
    t: &mut Tensors<T>,
    k: &mut Cache,
    v: &mut Cache,
) -> Result<(), TestCaseError> {
    let entry = case.entry();
    let p = case.params(k.strides.row);
    let seqlens_k: Vec<i32> = case.totals.iter().map(|&total| total as i32 - 1).collect();
    let (columns, states) =
        if case.splits > 1 { decode::partial_elements(&p, case.ranks) } else { (0, 0) };
    let mut partial_out = vec![f32::NAN; columns];
    let mut partial_states = vec![[f32::NAN; 2]; states];
    let mut arrivals =
        vec![0u32; if case.splits > 1 { decode::arrivals(&p, case.ranks) } else { 0 }];
    let Tensors { q, new: [new_k, new_v], cos, sin, head_sink, out, lse } = t;
    let new =
        [new_k, new_v].map(|rows| if case.is_new { Arg::read(&rows.data) } else { Arg::null() });
    let [new_k, new_v] = new;
    let arguments = [
        Arg::read(&q.data),
        new_k,
        new_v,
        settle(case, Arg::read(cos)),
        settle(case, Arg::read(sin)),
        Arg::null(),
        settle(case, Arg::read(&seqlens_k)),
        Arg::null(),
        Arg::null(),
        Arg::null(),
        Arg::read(head_sink),
        settle(case, Arg::write(&mut k.codes)),
        settle(case, Arg::write(&mut v.codes)),
        scales_of(case, &mut k.scales),
        scales_of(case, &mut v.scales),
        Arg::write(&mut out.data),
        Arg::write(lse),
        Arg::write(&mut partial_out),
        Arg::write(&mut partial_states),
        Arg::write(&mut arrivals),
        Arg::null(),
        Arg::params(&contiguous(p)),
    ];
    let shape = Launch {
        name: entry.name,
        grid: decode::grid(&p, case.ranks),
        threads: entry.threads,
        shared_bytes: entry.shared_bytes,
        seed: case.seed,
        cluster: case.ranks,
        communicates: entry.communicates,
        programmatic: true,
    };
    launch(&shape, &entry.simulate, &arguments)
        .map_err(|fault| TestCaseError::fail(fault.to_string()))?;
    prop_assert!(arrivals.iter().all(|&count| count == 0), "counters are left behind");
    Ok(())
}

/// The step over a contiguous cache.
fn contiguous(decode: DecodeParams) -> PagedDecodeParams {
    let unit = decode.attention.k.row as u32;
    PagedDecodeParams {
        decode,
        steps: PageSteps { row: 1, unit, ..PageSteps::default() },
        log_block_size: LOG_CONTIGUOUS,
        ..Zeroable::zeroed()
    }
}

/// Scales, which are written where rows have scales of their own.
fn scales_of<'a>(case: &Case, scales: &'a mut [f32]) -> Arg<'a> {
    match case.scales {
        scales::PER_TOKEN => settle(case, Arg::write(scales)),
        _ => Arg::read(scales),
    }
}

/// Angles, lengths and cache may be older than the launch before.
fn settle<'a>(case: &Case, arg: Arg<'a>) -> Arg<'a> {
    if case.prefetches { arg.early() } else { arg }
}

/// Compares a row with attention as it is defined, over what the quantized values mean.
fn check_row<T: Element, C: Code>(
    code: C,
    case: &Case,
    t: &Tensors<T>,
    [k, v]: [&Cache; 2],
    [b, head, s]: [u32; 3],
) -> Result<(), TestCaseError> {
    /// A bound on the relative error of rounding to half precision.
    const HALF: f64 = 1.0 / 2048.0;
    let keys = case.visible(b, s);
    let kv_head = head / case.group;
    let query = t.turned(case, t.q.row(b, head, s), case.past(b) + s);
    let scale = 1.0 / f64::from(case.head_size).sqrt();
    // Queries are rounded, so a score errs with the sum of its terms' sizes.
    let mut slack = 0.0f64;
    let scores: Vec<f64> = keys
        .clone()
        .map(|j| {
            let key = k.decode(code, b, kv_head, j);
            let terms = query.iter().zip(key).map(|(&q, k)| f64::from(q) * k * scale);
            let (x, size) = terms.fold((0.0, 0.0), |(x, size), term| (x + term, size + term.abs()));
            slack = slack.max(1.1 * HALF * size);
            let cap = f64::from(case.softcap);
            if cap > 0.0 { cap * (x / cap).tanh() } else { x }
        })
        .collect();
    let sink = match case.sink {
        _ if keys.is_empty() => f64::NEG_INFINITY,
        sink::NONE => f64::NEG_INFINITY,
        sink::ZERO => 0.0,
        _ => wide(t.head_sink[head as usize]),
    };
    let max = scores.iter().copied().fold(sink, f64::max);
    let sum = scores.iter().map(|x| (x - max).exp()).sum::<f64>() + (sink - max).exp();
    let (mut out, mut sizes) = (vec![0.0; k.width], vec![0.0; k.width]);
    for (j, x) in keys.clone().zip(scores) {
        let weight = (x - max).exp() / sum;
        for (i, value) in v.decode(code, b, kv_head, j).into_iter().enumerate() {
            out[i] += weight * value;
            sizes[i] += weight * value.abs();
        }
    }
    for (i, &got) in t.out.row(b, head, s).iter().enumerate() {
        let allowed = 1.1 * unit::<T>() * out[i].abs() + (HALF + 2.0 * slack) * sizes[i] + 2e-5;
        prop_assert!(
            (wide(got) - out[i]).abs() <= allowed,
            "batch {b} head {head} row {s} column {i}: got {}, want {}",
            wide(got),
            out[i]
        );
    }
    let index = ((b * case.q_heads() + head) * case.q_len + s) as usize;
    let (got, lse) = (f64::from(t.lse[index]), max + sum.ln());
    let same = keys.is_empty() && got == f64::NEG_INFINITY || (got - lse).abs() <= slack + 2e-5;
    prop_assert!(same, "lse of batch {b} head {head} row {s}: got {got}, want {lse}");
    Ok(())
}

fn run_any(case: &Case) -> Result<(), TestCaseError> {
    match (case.dtype, case.format) {
        (DType::F16, Format::Int8) => run::<f16>(Int8, case),
        (DType::F16, Format::Int4) => run::<f16>(Int4, case),
        (DType::F16, Format::Float8) => run::<f16>(Float8, case),
        (DType::F16, Format::Float4) => run::<f16>(Float4, case),
        (_, Format::Int8) => run::<bf16>(Int8, case),
        (_, Format::Int4) => run::<bf16>(Int4, case),
        (_, Format::Float8) => run::<bf16>(Float8, case),
        (_, Format::Float4) => run::<bf16>(Float4, case),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    #[test]
    fn head_size_64(case in case(64)) {
        run_any(&case)?;
    }

    #[test]
    fn head_size_128(case in case(128)) {
        run_any(&case)?;
    }

    #[test]
    fn head_size_256(case in case(256)) {
        run_any(&case)?;
    }

    #[test]
    fn other_head_sizes(case in prop_oneof![case(96), case(160), case(32)]) {
        run_any(&case)?;
    }
}
