//! `blackwell_decode` on the simulator, compared with attention as it is defined.

use crate::flash::{Case, Tensors, case};
use crate::support::{Random, optional, unit, wide};
use bytemuck::Zeroable;
use gqa_kernels::attention::blackwell_decode::{self as decode, D64, D128, D128Float8};
use gqa_kernels::num::{Code, DType, Float8, MmaElement, bf16, e4m3, f16};
use gqa_kernels::params::{DecodeParams, PagedDecodeParams, Strides, scales, sink};
use gqa_kernels::registry::Output;
use gqa_kernels::tile::seqlens::Seqlens;
use gqa_sim::{Arg, Arguments, Launch, Report, Swizzle, TensorLayout, launch};
use proptest::prelude::*;

/// A call and how it is launched.
#[derive(Clone, Debug)]
struct Call {
    case: Case,
    /// Rows of a row tile.
    rows: u32,
    ranks: u32,
    /// Rows of a block; `None`: a contiguous cache.
    block: Option<u32>,
    /// Granularity of the scales of a cache of float8.
    scales: Option<u32>,
    output: Output,
    /// Whether later keys are larger, so that maxima rise from tile to tile.
    grows: bool,
    /// The blocks of a paged cache that have a wrong entry in the table.
    gaps: Vec<u32>,
}

/// What the type of a case's elements cannot hold: blocks of a cache, codes, results.
struct Stored {
    k: Vec<u16>,
    v: Vec<u16>,
    table: Vec<i32>,
    per_sequence: u32,
    blocks: u32,
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
}

const OUT_SCALE: f32 = 0.25;

impl Call {
    fn tokens(&self, b: usize) -> u32 {
        let total = self.case.totals[b];
        match &self.case.tokens {
            Some(tokens) => tokens[b],
            None if self.case.first_prompt => total,
            None => self.case.q_len,
        }
    }

    /// Tokens of all sequences before each one.
    fn starts(&self) -> Vec<i32> {
        let mut starts = vec![0];
        for b in 0..self.case.totals.len() {
            starts.push(starts[b] + self.tokens(b) as i32);
        }
        starts
    }

    /// Distances in the cache, in its elements.
    fn cache(&self) -> Strides {
        match self.block {
            None => self.case.params(1).k,
            Some(_) => {
                let width = u64::from(self.case.head_size);
                let row = u64::from(self.case.kv_heads) * width;
                Strides { batch: 0, head: width, row }
            }
        }
    }

    fn params(&self) -> DecodeParams {
        let mut attention = self.case.params(1);
        (attention.k, attention.v) = (self.cache(), self.cache());
        if self.block.is_some() {
            attention.q.batch = 0;
            attention.out.batch = 0;
        }
        let scales = self.scales.unwrap_or(scales::PER_TENSOR);
        DecodeParams { attention, rows: self.rows, scales, ..Zeroable::zeroed() }
    }

    fn scale(&self, random: &mut Random) -> Vec<f32> {
        let count = match self.scales {
            None | Some(scales::PER_TENSOR) => 1,
            Some(scales::PER_HEAD) => self.case.kv_heads,
            Some(_) => self.case.kv_heads * self.case.head_size,
        };
        // Powers of two, so that values of either type are exact.
        (0..count).map(|_| 0.5f32.powi(random.below(4) as i32 + 3)).collect()
    }

    /// The scale of a channel.
    fn of_channel(&self, all: &[f32], head: u32, channel: u32) -> f32 {
        match self.scales {
            None => 1.0,
            Some(scales::PER_TENSOR) => all[0],
            Some(scales::PER_HEAD) => all[head as usize],
            Some(_) => all[(head * self.case.head_size + channel) as usize],
        }
    }

    /// Multiplies keys by their tile's number.
    fn grow<T: MmaElement>(&self, k: &mut [T]) {
        let p = self.case.params(1);
        for b in 0..p.batch {
            for (head, j) in (0..p.kv_heads).flat_map(|h| (0..p.capacity).map(move |j| (h, j))) {
                for x in &mut k[p.k.at(b, head, j)..][..p.head_size as usize] {
                    *x = T::from_f32(x.to_f32() * (1 + j / decode::KEYS) as f32);
                }
            }
        }
    }

    /// Rounds keys and values to what the cache stores, and stores them.
    fn store<T: MmaElement>(&self, t: &mut Tensors<T>) -> Stored {
        let (case, mut random) = (&self.case, Random::new(self.case.seed ^ 5));
        let (k_scale, v_scale) = (self.scale(&mut random), self.scale(&mut random));
        let p = case.params(1);
        let block = self.block.unwrap_or(p.capacity);
        let per_sequence = p.capacity.div_ceil(block);
        // One block that no sequence has.
        let blocks = p.batch * per_sequence + 1;
        let bytes = if self.scales.is_some() { 1 } else { 2 };
        let (to, size) = match self.block {
            None => (p.k, t.k.len()),
            Some(_) => {
                let row = (case.kv_heads * case.head_size) as usize;
                (self.cache(), blocks as usize * block as usize * row)
            }
        };
        let nan = if bytes == 1 { 0x7f7f } else { 0x7fff };
        let [mut k, mut v] = [(); 2].map(|()| vec![nan; size * bytes / 2]);
        let table: Vec<i32> = (0..p.batch * per_sequence)
            .map(|i| {
                let nth = i % per_sequence;
                let first = nth * block;
                let sees = self.seen(i / per_sequence);
                let is_seen = first < sees.1 && first + block > sees.0;
                match self.gaps.contains(&nth) || !is_seen {
                    // A gap, or a block of another sequence.
                    true if is_seen => [-1, blocks as i32][i as usize % 2],
                    true => blocks as i32 - 1,
                    false => (p.batch * per_sequence - 1 - i) as i32,
                }
            })
            .collect();
        for (values, stored, scale) in [(&mut t.k, &mut k, &k_scale), (&mut t.v, &mut v, &v_scale)]
        {
            for (b, &total) in (0..).zip(&case.totals) {
                for head in 0..case.kv_heads {
                    for j in 0..total {
                        let from = p.k.at(b, head, j);
                        let at = match self.block {
                            None => to.at(b, head, j),
                            Some(block) => {
                                let own = table[(b * per_sequence + j / block) as usize];
                                if own < 0 || own >= blocks as i32 - 1 {
                                    continue;
                                }
                                to.at(0, head, own as u32 * block + j % block)
                            }
                        };
                        for i in 0..case.head_size as usize {
                            let scale = self.of_channel(scale, head, i as u32);
                            let value = &mut values[from + i];
                            if bytes == 2 {
                                stored[at + i] = bytemuck::cast(*value);
                                continue;
                            }
                            let code = Float8.encode(value.to_f32() / scale);
                            *value = T::from_f32(Float8.decode(code) * scale);
                            let bytes: &mut [u8] = bytemuck::cast_slice_mut(stored);
                            bytes[at + i] = code as u8;
                        }
                    }
                }
            }
        }
        Stored { k, v, table, per_sequence, blocks, k_scale, v_scale }
    }

    /// The keys that some token of a sequence sees.
    fn seen(&self, b: u32) -> (u32, u32) {
        let tokens = self.tokens(b as usize);
        let keys: Vec<_> = (0..tokens).filter_map(|s| self.keys(b, s)).collect();
        let first = keys.iter().map(|keys| keys.0).min().unwrap_or(0);
        (first, keys.iter().map(|keys| keys.1).max().unwrap_or(0))
    }

    /// The keys that a row sees.
    fn keys(&self, b: u32, s: u32) -> Option<(u32, u32)> {
        let (total, position) = (self.case.totals[b as usize], self.case.past(b) + s);
        let end = if self.case.causal { position + 1 } else { total };
        let first = if self.case.window > 0 { end.saturating_sub(self.case.window) } else { 0 };
        (position < total).then_some((first, end))
    }

    /// One row in f64: output, the size of its terms, and log-sum-exp.
    fn row<T: MmaElement>(
        &self,
        t: &Tensors<T>,
        [b, head, s]: [u32; 3],
    ) -> (Vec<f64>, Vec<f64>, f64) {
        let (case, p) = (&self.case, self.case.params(1));
        let width = case.head_size as usize;
        let at = |tensor: &[T], start: usize| -> Vec<f64> {
            tensor[start..][..width].iter().map(|x| wide(*x)).collect()
        };
        let zero = vec![0.0; width];
        let Some((first, end)) = self.keys(b, s) else {
            return (zero.clone(), zero, f64::NEG_INFINITY);
        };
        let query = at(&t.q, p.q.at(b, head, s));
        let block = self.block.unwrap_or(u32::MAX);
        let keys: Vec<u32> =
            (first..end).filter(|key| !self.gaps.contains(&(key / block))).collect();
        let score = |j: &u32| {
            let key = at(&t.k, p.k.at(b, head / case.group, *j));
            let x = f64::from(case.scale) * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
            let cap = f64::from(case.softcap);
            if cap > 0.0 { cap * (x / cap).tanh() } else { x }
        };
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let sink = match case.sink {
            sink::NONE => f64::NEG_INFINITY,
            sink::ZERO => 0.0,
            _ => wide(t.head_sink[head as usize]),
        };
        let max = scores.iter().copied().fold(sink, f64::max);
        if max == f64::NEG_INFINITY {
            return (zero.clone(), zero, max);
        }
        let sum = scores.iter().map(|x| (x - max).exp()).sum::<f64>() + (sink - max).exp();
        let (mut out, mut size) = (zero.clone(), zero);
        for (j, x) in keys.iter().zip(scores) {
            let value = at(&t.v, p.v.at(b, head / case.group, *j));
            let weight = (x - max).exp() / sum;
            for i in 0..width {
                out[i] += weight * value[i];
                size[i] += weight * value[i].abs();
            }
        }
        (out, size, max + sum.ln())
    }

    /// Launches the kernel and compares.
    fn check<T: MmaElement>(&self) -> Result<Report, TestCaseError> {
        let case = &self.case;
        let mut t = Tensors::<T>::new(case);
        if self.grows {
            self.grow(&mut t.k);
        }
        let stored = self.store(&mut t);
        let p = self.params();
        let bytes = if self.scales.is_some() { 1 } else { 2 };
        let sizes = match self.block {
            None => [p.attention.capacity, case.kv_heads, p.attention.batch],
            Some(block) => [block, case.kv_heads, stored.blocks],
        };
        let cache = self.cache();
        let outer = self.block.map_or(cache.batch, |block| u64::from(block) * cache.row);
        let layout = TensorLayout {
            size: [case.head_size * bytes / 2, sizes[0], sizes[1], sizes[2]],
            stride: [cache.row, cache.head, outer].map(|stride| stride * u64::from(bytes)),
            tile: [64, self.block.unwrap_or(decode::KEYS).min(decode::KEYS), 1, 1],
            swizzle: Swizzle::Bytes128,
        };
        let starts = self.starts();
        let tokens = *starts.last().unwrap() as u32;
        let paged = PagedDecodeParams {
            decode: p,
            per_sequence: stored.per_sequence,
            log_block_size: self.block.map_or(0, u32::ilog2),
            blocks: stored.blocks,
            tokens,
            longest: case.q_len,
            ..Zeroable::zeroed()
        };
        // Over a paged cache the tokens of all sequences follow each other.
        let packed = self.block.is_some();
        let packs = |from: &[T], to: &mut [T], back: bool| {
            let a = &case.params(1);
            for b in 0..a.batch {
                for head in 0..a.q_heads {
                    for s in 0..self.tokens(b as usize) {
                        let (padded, token) = (a.q.at(b, head, s), starts[b as usize] as u32 + s);
                        let own = p.attention.q.at(0, head, token);
                        let (from_at, to_at) = if back { (own, padded) } else { (padded, own) };
                        let width = case.head_size as usize;
                        to[to_at..][..width].copy_from_slice(&from[from_at..][..width]);
                    }
                }
            }
        };
        let mut q = t.q.clone();
        if packed {
            q.fill(T::from_f32(f32::NAN));
            packs(&t.q, &mut q, false);
        }
        let past: Vec<i32> = (0..p.attention.batch).map(|b| case.past(b) as i32).collect();
        let size = t.out.len();
        let mut out = (t.out.clone(), vec![f32::NAN; size], vec![0x7fu8; size]);
        let lse_size = if packed { tokens * case.q_heads() } else { t.lse.len() as u32 };
        let mut lse = vec![f32::NAN; lse_size.max(1) as usize];
        let lengths = match packed {
            true => [Arg::read(&starts), Arg::read(&past), Arg::read(&stored.table)],
            false => [Arg::read(&t.seqlens_k), optional(&t.query_seqlens), Arg::null()],
        };
        let [a, b, c] = lengths;
        let only = |output, arg| if self.output == output { arg } else { Arg::null() };
        let scaled = |scale| if bytes == 1 { Arg::read(scale) } else { Arg::null() };
        let given = [
            Arg::read(&stored.k).tensor_map(layout),
            Arg::read(&stored.v).tensor_map(layout),
            Arg::read(&q),
            a,
            b,
            c,
            if case.sink == sink::PER_HEAD { Arg::read(&t.head_sink) } else { Arg::null() },
            scaled(&stored.k_scale[..]),
            scaled(&stored.v_scale[..]),
            only(Output::Element, Arg::write(&mut out.0)),
            only(Output::F32, Arg::write(&mut out.1)),
            only(Output::E4M3, Arg::write(&mut out.2)),
            only(Output::E4M3, Arg::read(&[OUT_SCALE])),
            if case.want_lse { Arg::write(&mut lse) } else { Arg::null() },
            match packed {
                true => Arg::params(&paged),
                false => Arg::params(&p),
            },
        ];
        let shape = Launch {
            name: "blackwell_decode",
            grid: decode::grid(&p, self.ranks),
            threads: decode::THREADS,
            shared_bytes: decode::SHARED_BYTES,
            seed: case.seed,
            cluster: self.ranks,
            ..Launch::default()
        };
        let kernel = |arguments: &Arguments| self.launch::<T>(arguments);
        let report = launch(&shape, &kernel, &given);
        let report = report.map_err(|fault| TestCaseError::fail(fault.to_string()))?;
        drop(given);
        let results: Vec<f64> = match self.output {
            Output::Element => out.0.iter().map(|x| wide(*x)).collect(),
            Output::F32 => out.1.iter().map(|x| f64::from(*x)).collect(),
            Output::E4M3 => {
                let value = |code: &u8| f64::from(Float8.decode(u32::from(*code)) * OUT_SCALE);
                out.2.iter().map(value).collect()
            }
        };
        self.compare(&t, &starts, &results, &lse)?;
        Ok(report)
    }

    fn compare<T: MmaElement>(
        &self,
        t: &Tensors<T>,
        starts: &[i32],
        results: &[f64],
        lse: &[f32],
    ) -> Result<(), TestCaseError> {
        let (case, p) = (&self.case, self.params().attention);
        let tokens = *starts.last().unwrap() as u32;
        let rounding = match self.output {
            Output::Element => unit::<T>(),
            Output::F32 => 0.0,
            Output::E4M3 => 0.5f64.powi(4),
        };
        let mut written = vec![false; results.len()];
        for b in 0..p.batch {
            let (rows, start) = match self.block {
                None => (case.q_len, 0),
                Some(_) => (self.tokens(b as usize), starts[b as usize] as u32),
            };
            for (head, s) in (0..p.q_heads).flat_map(|head| (0..rows).map(move |s| (head, s))) {
                let (want, size, log) = self.row(t, [b, head, s]);
                let at = p.out.at(b, head, start + s);
                for (i, (want, size)) in want.iter().zip(size).enumerate() {
                    let got = results[at + i];
                    let allowed = 1.1 * (rounding * want.abs() + unit::<T>() * size)
                        + if self.output == Output::E4M3 { 1e-3 } else { 2e-5 };
                    prop_assert!(
                        (got - want).abs() <= allowed,
                        "batch {b} head {head} row {s} column {i}: got {got}, want {want}"
                    );
                    written[at + i] = true;
                }
                let index = match self.block {
                    None => (b * p.q_heads + head) * p.q_len + s,
                    Some(_) => head * tokens + start + s,
                };
                let got = f64::from(lse[index as usize]);
                // Terms of queries end at 2^-18 of a row's largest element.
                let allowed = if self.scales.is_some() { 2e-4 } else { 2e-5 };
                let same = got == log || (got - log).abs() <= allowed * (1.0 + log.abs());
                prop_assert!(
                    same || !case.want_lse,
                    "lse batch {b} head {head} row {s}: got {got}, want {log}"
                );
            }
        }
        let intact = results.iter().zip(written).all(|(x, written)| written || x.is_nan());
        prop_assert!(intact, "a gap between rows of out was written");
        Ok(())
    }

    fn launch<T: MmaElement>(&self, given: &Arguments) {
        let [k, v] = [0, 1].map(|i| given.tensor_map(i));
        let (q, head_sink) = (given.global::<T>(2), given.global::<T>(6));
        let [k_scale, v_scale] = [7, 8].map(|i| given.global::<f32>(i));
        let out = (given.global::<T>(9), given.global::<f32>(10), given.global::<e4m3>(11));
        let [scale, lse] = [12, 13].map(|i| given.global::<f32>(i));
        let [a, b, table] = [3, 4, 5].map(|i| given.global::<i32>(i));
        let (o, f, e) = out;
        let seqlens = Seqlens::new(a, b);
        macro_rules! run {
            ($shape:ident) => {
                match self.block {
                    None => {
                        let p = given.params(14);
                        $shape::run(k, v, q, seqlens, head_sink, o, f, e, scale, lse, p)
                    }
                    Some(_) => {
                        let p = given.params(14);
                        $shape::run_paged(k, v, q, a, b, table, head_sink, o, f, e, scale, lse, p)
                    }
                }
            };
        }
        match (self.scales, self.block) {
            (None, _) if self.case.head_size <= 64 => run!(D64),
            (None, _) => run!(D128),
            (Some(_), None) => {
                let p = given.params(14);
                D128Float8::run_quantized(
                    k, v, q, seqlens, head_sink, k_scale, v_scale, o, f, e, scale, lse, p,
                );
            }
            (Some(_), Some(_)) => {
                let p = given.params(14);
                D128Float8::run_paged_quantized(
                    k, v, q, a, b, table, head_sink, k_scale, v_scale, o, f, e, scale, lse, p,
                );
            }
        }
    }

    fn run(&self) -> Result<Report, TestCaseError> {
        match self.case.dtype {
            DType::F16 => self.check::<f16>(),
            _ => self.check::<bf16>(),
        }
    }
}

/// Calls with a cache of elements or of float8, contiguous or in blocks.
fn call(rows: u32, keys: u32, is_float8: bool, is_paged: bool) -> impl Strategy<Value = Call> {
    let ranks = prop_oneof![1..=4u32, Just(8u32), Just(16u32)];
    let outputs = prop_oneof![Just(Output::Element), Just(Output::F32), Just(Output::E4M3)];
    let tile = prop_oneof![Just(16u32), Just(24), Just(80), Just(128)];
    let granularity = (0..=scales::PER_CHANNEL, any::<bool>());
    let blocks = (prop_oneof![Just(16u32), Just(64), Just(256)], prop::option::of(0..4u32));
    (case(rows, keys), ranks, outputs, tile, granularity, blocks).prop_map(
        move |(case, ranks, output, tile, (granularity, grows), (block, gap))| {
            let units = if is_float8 { 16 } else { 8 };
            let head_size = case.head_size.min(128).next_multiple_of(units);
            let mut case = Case { head_size, ..case };
            if is_paged {
                let new = (0..case.totals.len()).map(|b| match &case.tokens {
                    Some(tokens) => tokens[b],
                    None => case.totals[b].min(case.q_len),
                });
                (case.tokens, case.first_prompt) = (Some(new.collect()), false);
                case.bnsh = false;
            }
            if is_float8 {
                // Rows of codes are whole 16 bytes.
                case.gap = 0;
            }
            let tile = if is_float8 { tile.min(D128Float8::ROWS) } else { tile };
            Call {
                rows: tile,
                ranks,
                block: is_paged.then_some(block),
                scales: is_float8.then_some(granularity),
                output,
                // Errors of float8 terms are relative to scores.
                grows: grows && !is_float8,
                gaps: gap.filter(|_| is_paged).into_iter().collect(),
                case,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn any_call(call in call(100, 900, false, false)) {
        call.run()?;
    }

    #[test]
    fn any_call_over_blocks(call in call(40, 900, false, true)) {
        call.run()?;
    }

    #[test]
    fn any_call_over_float8(call in call(40, 900, true, false)) {
        call.run()?;
    }

    #[test]
    fn any_call_over_blocks_of_float8(call in call(40, 900, true, true)) {
        call.run()?;
    }
}
