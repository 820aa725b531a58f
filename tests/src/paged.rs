//! A random but legal PagedAttention call, and its tensors.

use crate::call::Data;
use crate::case::step_heads;
use crate::compare::{codes_rounded_before, equal_codes, optional, row_scales, tensors};
use crate::parity::{Judge, Parity};
use crate::{Case, Errors, Tolerance};
use gqa_host::backend::Backend;
use gqa_host::op::{PagedAttention, PagedCache, PagedInputs, PagedOutputs};
use gqa_host::plan::{DeviceInfo, Launch, PlanOptions, plan};
use gqa_host::reference::Reference;
use gqa_host::{DType, Problem, QuantFormat, Quantization, Result, Tensor};
use gqa_kernels::registry::{Family, Role};
use ndarray::{ArrayD, IxDyn};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use std::ops::RangeInclusive;

/// One call. `case` has the features shared with GroupQueryAttention; data follows from its seed.
#[derive(Clone, Debug)]
pub struct PagedCase {
    /// Types, heads and attributes.
    pub case: Case,
    /// Rows of each sequence before, and new ones.
    pub sequences: Vec<[usize; 2]>,
    /// Rows of a block.
    pub block_size: usize,
    /// Blocks in no sequence.
    pub spare_blocks: usize,
    /// One token in this many has slot -1, because the cache holds it already; 0: none.
    pub skipped: Option<usize>,
    /// The table leads outside of the cache for some visible or written blocks.
    pub gaps: bool,
}

/// Calls for the decode families of paged KV caches: one or a few tokens of each sequence, up to 16
/// packed query rows for each, with their head sizes. `steps` draws the type of the cache.
pub fn paged_steps(steps: BoxedStrategy<Case>, max_rows: usize) -> BoxedStrategy<PagedCase> {
    let tokens = prop_oneof![Just(1..=1usize), Just(0..=4usize)];
    let sequences = tokens.prop_flat_map(move |tokens| {
        prop::collection::vec((0..=max_rows, tokens).prop_map(|(past, new)| [past, new]), 1..=4)
    });
    let blocks = (prop::sample::select(vec![16usize, 32, 64, 256]), 0..=3usize);
    let skipped = prop::option::weighted(0.2, 0..=3usize);
    (steps, sequences, step_heads(), blocks, skipped)
        .prop_map(|(case, sequences, head_size, (block_size, spare_blocks), skipped)| PagedCase {
            case: Case {
                head_size,
                group: 1 + (case.group - 1) % 16,
                rotary: case.rotary.map(|(sixteenths, interleaved, positions)| {
                    (1 + (sixteenths - 1) % (head_size / 16), interleaved, positions)
                }),
                quantized: case.quantized.filter(|how| fits(how, head_size)),
                ..case
            },
            sequences: with_a_token(sequences),
            block_size,
            spare_blocks,
            skipped,
            gaps: false,
        })
        .boxed()
}

/// These calls with tables that lead outside of the cache.
pub fn with_gaps(cases: BoxedStrategy<PagedCase>) -> BoxedStrategy<PagedCase> {
    cases.prop_map(|case| PagedCase { gaps: true, ..case }).boxed()
}

/// Of these calls, the ones for kernels that read blocks in place, as planned.
pub fn in_place<C: Parity + 'static>(
    cases: BoxedStrategy<C>,
    device: &DeviceInfo,
    options: &PlanOptions,
) -> BoxedStrategy<C> {
    let (device, options) = (device.clone(), options.clone());
    let reads = move |case: &C| !copies(case, &device, &options);
    cases.prop_filter("reads blocks where they are", reads).boxed()
}

/// Such of these calls as kernels take that read a copy of the cache, as planned.
pub fn copied<C: Parity + 'static>(
    cases: BoxedStrategy<C>,
    device: &DeviceInfo,
    options: &PlanOptions,
) -> BoxedStrategy<C> {
    let (device, options) = (device.clone(), options.clone());
    cases.prop_filter("reads a copy", move |case| copies(case, &device, &options)).boxed()
}

fn copies(case: &impl Parity, device: &DeviceInfo, options: &PlanOptions) -> bool {
    let problem = case.problem().expect("legal");
    let plan = plan(&problem, device, options).expect("a plan");
    let copies = [Role::PagedGather, Role::PagedDequantize];
    plan.launches().iter().any(|launch| copies.contains(&launch.entry().role))
}

/// Puts blocks outside of a cache of `count` blocks into a sequence's table: some, the last, all,
/// or none.
pub(crate) fn put_gaps(row: &mut [i32], count: usize, rng: &mut SmallRng) {
    let (kind, last) = (rng.random_range(0..6), row.len().wrapping_sub(1));
    for (i, block) in row.iter_mut().enumerate() {
        let is_gap = match kind {
            0 => false,
            1 => true,
            2 => i == last,
            _ => rng.random_range(0..3) == 0,
        };
        if is_gap {
            let outside = [-1, count as i32, 9999, i32::MAX, i32::MIN, i32::MIN + 1];
            *block = outside[rng.random_range(0..outside.len())];
        }
    }
}

/// Calls for which the planner uses two kernels if SMs are few, or sequences and rows many, and
/// log-sum-exps are not requested: those of [`paged_steps`] with up to 12 sequences, and one more
/// of 64 tokens or more.
pub fn paged_mixed(steps: BoxedStrategy<Case>, max_rows: usize) -> BoxedStrategy<PagedCase> {
    mixed(steps, max_rows, [1..=12, 1..=1])
}

/// Calls for the kernels that divide the work of all sequences: those of [`paged_steps`] with one
/// more sequence, whose `rows` rows are many, and which brings up to 40 tokens.
pub fn paged_long(
    steps: BoxedStrategy<Case>,
    rows: std::ops::RangeInclusive<usize>,
) -> BoxedStrategy<PagedCase> {
    let long = (rows, 1..=40usize, any::<prop::sample::Index>());
    (paged_steps(steps, 60), long)
        .prop_map(|(mut case, (past, new, place))| {
            let place = place.index(case.sequences.len() + 1);
            case.sequences.insert(place, [past, new]);
            case
        })
        .boxed()
}

/// The same with more sequences than a warp of `hopper_paged` examines at once.
pub fn paged_crowds(steps: BoxedStrategy<Case>, max_rows: usize) -> BoxedStrategy<PagedCase> {
    mixed(steps, max_rows, [30..=60, 1..=2])
}

/// Steps of more sequences than a warp has lanes.
pub fn paged_crowd_steps(steps: BoxedStrategy<Case>, max_rows: usize) -> BoxedStrategy<PagedCase> {
    let sequences = prop::collection::vec([0..=max_rows, 0..=2usize], 33..=80);
    (paged_steps(steps, max_rows), sequences)
        .prop_map(|(case, sequences)| PagedCase { sequences: with_a_token(sequences), ..case })
        .boxed()
}

/// This many decode sequences, and this many prefills among them.
fn mixed(
    steps: BoxedStrategy<Case>,
    max_rows: usize,
    [few, prompts]: [RangeInclusive<usize>; 2],
) -> BoxedStrategy<PagedCase> {
    let few = prop::collection::vec([0..=max_rows, 0..=3usize], few);
    let prompt = (0..=max_rows, 64..=160usize, any::<prop::sample::Index>());
    (paged_steps(steps, max_rows), few, prop::collection::vec(prompt, prompts))
        .prop_map(|(case, few, prompts)| {
            let mut sequences = few;
            for (past, new, place) in prompts {
                sequences.insert(place.index(sequences.len() + 1), [past, new]);
            }
            let without_lse = Case { lse: false, ..case.case };
            PagedCase { sequences, case: without_lse, ..case }
        })
        .boxed()
}

/// Kernels for sequences of few tokens.
pub const DECODE_KERNELS: [Family; 2] = [Family::Decode, Family::DecodeQuantized];
/// Prefill kernels that can start before the decode kernel.
pub const PREFILL_KERNELS: [Family; 2] = [Family::HopperPaged, Family::HopperPagedQuantized];

/// Of these calls, the ones for which the planner runs two kernels concurrently, one of `first`
/// starting first.
pub fn paged_concurrent(
    cases: BoxedStrategy<PagedCase>,
    device: &DeviceInfo,
    first: [Family; 2],
) -> BoxedStrategy<PagedCase> {
    let device = device.clone();
    let cases = cases.prop_filter("concurrent", move |case| {
        let problem = case.problem().expect("legal");
        let plan = plan(&problem, &device, &PlanOptions::default()).expect("a plan");
        let begins = |launch: &Launch| first.contains(&launch.entry().family);
        let concurrent = |launch: &Launch| launch.concurrent() && begins(launch);
        let overlapped =
            |both: &[Launch]| both[1].overlaps() && !both[0].overlaps() && begins(&both[0]);
        plan.launches().iter().any(concurrent) || plan.launches().windows(2).any(overlapped)
    });
    cases.boxed()
}

/// A device with that many SMs, so slow that any call takes long.
pub fn slow_device(multiprocessors: u32) -> DeviceInfo {
    DeviceInfo { multiprocessors, tensor_flops: 1e12, bandwidth: 1e9, ..DeviceInfo::h200() }
}

/// Of these calls, the ones whose decode steps divide the keys of all sequences by their lengths.
pub fn paged_in_parts(
    cases: BoxedStrategy<PagedCase>,
    device: &DeviceInfo,
) -> BoxedStrategy<PagedCase> {
    let device = device.clone();
    let is_divided = move |case: &PagedCase| {
        let problem = case.problem().expect("legal");
        let planned = plan(&problem, &device, &PlanOptions::default()).expect("a plan");
        planned.launches().iter().any(|launch| {
            let [heads, parts, _] = launch.grid().map(|blocks| blocks as usize);
            let is_step = DECODE_KERNELS.contains(&launch.entry().family);
            is_step && planned.counters() > 0 && heads == problem.kv_heads && parts >= problem.batch
        })
    };
    cases.prop_filter("keys are divided by lengths", is_divided).boxed()
}

/// The same with a token at least.
fn with_a_token(mut sequences: Vec<[usize; 2]>) -> Vec<[usize; 2]> {
    if sequences.iter().all(|[_, new]| *new == 0) {
        sequences[0][1] = 1;
    }
    sequences
}

/// Whether rows of quantized values are multiples of 16 bytes, as paged KV caches require.
fn fits(how: &Quantization, head_size: usize) -> bool {
    head_size % (16 * how.codes_per_element()) == 0
}

/// Legal calls of up to four sequences, made from those of GroupQueryAttention.
pub fn paged(cases: BoxedStrategy<Case>, max_rows: usize) -> BoxedStrategy<PagedCase> {
    let tokens = prop_oneof![2 => Just(1..=1usize), 3 => Just(0..=max_rows)];
    let sequences = tokens.prop_flat_map(move |tokens| {
        prop::collection::vec((0..=max_rows, tokens).prop_map(|(past, new)| [past, new]), 1..=4)
    });
    let blocks = (prop_oneof![Just(1usize), Just(7), Just(16), Just(64)], 0..=3usize);
    let skipped = prop::option::weighted(0.3, 0..=3usize);
    (cases, sequences, blocks, skipped)
        .prop_map(|(case, sequences, (block_size, spare_blocks), skipped)| {
            let sequences = with_a_token(sequences);
            let quantized = case.quantized.filter(|how| fits(how, case.head_size));
            let case = Case { quantized, ..case };
            PagedCase { case, sequences, block_size, spare_blocks, skipped, gaps: false }
        })
        .boxed()
}

/// The same with log-sum-exps in some, which `tiled_paged` supports and `hopper_paged` does not.
pub fn with_some_lse(cases: BoxedStrategy<PagedCase>) -> BoxedStrategy<PagedCase> {
    let with = |(case, lse): (PagedCase, bool)| {
        let in_some = Case { lse, ..case.case };
        PagedCase { case: in_some, ..case }
    };
    (cases, any::<bool>()).prop_map(with).boxed()
}

/// Calls that the planner gives to `hopper_paged`, or `tiled_paged`: as of [`paged`], with a
/// sequence of 64 tokens or more, in blocks that boxes fit, and without log-sum-exps.
pub fn paged_prompts(cases: BoxedStrategy<Case>, max_rows: usize) -> BoxedStrategy<PagedCase> {
    let block_sizes = prop::sample::select(vec![16usize, 32, 64, 128, 256]);
    (paged(cases, max_rows), block_sizes, any::<prop::sample::Index>())
        .prop_map(|(mut case, block_size, longest)| {
            let longest = longest.index(case.sequences.len());
            case.sequences[longest][1] += 64;
            case.case.lse = false;
            PagedCase { block_size, ..case }
        })
        .boxed()
}

impl PagedCase {
    /// Its tensors by name.
    pub(crate) fn named(&self) -> Vec<(&'static str, Option<Tensor>)> {
        let given = Tensors::new(self);
        let both = |pair: Option<[Tensor; 2]>| pair.map_or([None, None], |pair| pair.map(Some));
        let scales = given.scales.or(given.cache.scales);
        let ([cos, sin], [k_scale, v_scale]) = (both(given.rotary), both(scales));
        let [q_norm_weight, k_norm_weight] = both(given.norm_weights);
        vec![
            ("query", Some(given.query)),
            ("key", given.key),
            ("value", given.value),
            ("cumulative_sequence_length", Some(given.starts)),
            ("past_seqlens", Some(given.past)),
            ("block_table", Some(given.table)),
            ("cos_cache", cos),
            ("sin_cache", sin),
            ("slot_mapping", given.slots),
            ("head_sink", given.head_sink),
            ("q_norm_weight", q_norm_weight),
            ("k_norm_weight", k_norm_weight),
            ("k_scale", k_scale),
            ("v_scale", v_scale),
            ("attention_metadata", None),
            ("key_cache", Some(given.cache.key)),
            ("value_cache", given.cache.value),
        ]
    }

    pub(crate) fn op(&self) -> PagedAttention {
        let case = &self.case;
        PagedAttention::new((case.kv_heads * case.group) as i64, case.kv_heads as i64)
            .scale(case.scale)
            .softcap(case.softcap)
            .local_window_size(case.window)
            .is_causal(case.causal.into())
            .log_sum_exp(case.lse)
            .do_rotary(case.rotary.is_some())
            .rotary_interleaved(matches!(case.rotary, Some((_, true, _))))
            .k_quant_type(case.quant_type())
            .v_quant_type(case.quant_type())
            .k_cache_dtype(self.cache_dtype())
            .v_cache_dtype(self.cache_dtype())
    }

    fn cache_dtype(&self) -> &'static str {
        match self.case.quantized.map(|how| how.format) {
            Some(QuantFormat::Int4) => "int4",
            Some(QuantFormat::Float4) => "float4e2m1",
            Some(QuantFormat::Int8) => "int8",
            _ => "",
        }
    }

    fn tokens(&self) -> usize {
        self.sequences.iter().map(|[_, new]| new).sum()
    }

    /// Blocks of each sequence.
    fn blocks(&self) -> Vec<usize> {
        let blocks = |[past, new]: &[usize; 2]| (past + new).div_ceil(self.block_size);
        self.sequences.iter().map(blocks).collect()
    }

    /// The number of a sequence's first blocks without a visible row: those entirely before the
    /// window, and all blocks of a sequence without tokens.
    fn freed(&self, &[past, new]: &[usize; 2]) -> usize {
        match usize::try_from(self.case.window) {
            _ if new == 0 => past.div_ceil(self.block_size),
            Ok(window) => (past + 1).saturating_sub(window) / self.block_size,
            Err(_) => 0,
        }
    }
}

/// A call's tensors.
struct Tensors {
    query: Tensor,
    key: Option<Tensor>,
    value: Option<Tensor>,
    starts: Tensor,
    past: Tensor,
    table: Tensor,
    slots: Option<Tensor>,
    rotary: Option<[Tensor; 2]>,
    head_sink: Option<Tensor>,
    norm_weights: Option<[Tensor; 2]>,
    scales: Option<[Tensor; 2]>,
    /// NaN, or quantized values with all bits set, where no sequence has rows.
    cache: PagedCache,
}

impl Tensors {
    fn new(paged: &PagedCase) -> Self {
        let case = &paged.case;
        let mut data = Data { dtype: case.dtype, rng: SmallRng::seed_from_u64(case.seed) };
        let (heads, size, tokens) = (case.kv_heads * case.group, case.head_size, paged.tokens());
        let (all, kv) = (heads + 2 * case.kv_heads, case.kv_heads);
        let (query, key, value) = if case.packed {
            (data.normal(&[tokens, all * size], case.spread), None, None)
        } else {
            let query = data.normal(&[tokens, heads * size], case.spread);
            let key = data.normal(&[tokens, kv * size], case.spread);
            (query, Some(key), Some(data.normal(&[tokens, kv * size], 1.0)))
        };
        let rows = paged.sequences.iter().map(|[past, new]| past + new).max().unwrap_or(0);
        let rotary = case.rotary.map(|(sixteenths, ..)| {
            let shape = [rows + 2, sixteenths * 8];
            let angles: Vec<f32> =
                (0..shape[0] * shape[1]).map(|_| data.rng.random_range(0.0..6.3)).collect();
            [f32::cos, f32::sin].map(|f| {
                data.tensor(&shape, &angles.iter().map(|&angle| f(angle)).collect::<Vec<_>>())
            })
        });
        let mut starts = vec![0];
        for [_, new] in &paged.sequences {
            starts.push(starts[starts.len() - 1] + *new as i32);
        }
        let blocks = paged.blocks();
        let count = blocks.iter().sum::<usize>() + paged.spare_blocks + 1;
        let mut order: Vec<_> = (0..count as i32).collect();
        order.shuffle(&mut data.rng);
        let columns = blocks.iter().max().copied().unwrap_or(0) + 1;
        let mut free = order.into_iter();
        let table: Vec<Vec<i32>> = (blocks.iter().zip(&paged.sequences))
            .map(|(&used, sequence)| {
                // Unused entries at the end of a table row are arbitrary, and so are entries of
                // freed blocks: a block of another sequence, or a free one.
                let mut row: Vec<_> = free.by_ref().take(used).collect();
                row.resize_with(columns, || data.rng.random());
                if paged.gaps {
                    put_gaps(&mut row[paged.freed(sequence)..used], count, &mut data.rng);
                }
                for block in &mut row[..paged.freed(sequence)] {
                    *block = match data.rng.random_range(0..4) {
                        0 => *block,
                        1 => data.rng.random(),
                        2 => data.rng.random_range(0..count as i32),
                        _ => -1,
                    };
                }
                row
            })
            .collect();
        let place = |b: usize, row: usize| {
            let block = usize::try_from(table[b][row / paged.block_size]).ok();
            let block = block.filter(|&block| block < count)?;
            Some(block * paged.block_size + row % paged.block_size)
        };
        let mut slots = Vec::new();
        let mut held = vec![false; count * paged.block_size];
        for (b, &[past, new]) in paged.sequences.iter().enumerate() {
            let kept = paged.freed(&[past, new]) * paged.block_size;
            (kept..past).filter_map(|row| place(b, row)).for_each(|place| held[place] = true);
            for row in past..past + new {
                let skips =
                    paged.skipped.is_some_and(|every| every > 0 && slots.len() % every == 0);
                if let Some(place) = place(b, row) {
                    held[place] = skips;
                }
                slots.push(place(b, row).filter(|_| !skips).map_or(-1, |place| place as i32));
            }
        }
        let mut cache = |spread| {
            let shape = [count, paged.block_size, kv, size];
            match case.quantized {
                Some(how) => data.codes(&shape, how, &held),
                None => data.held_rows(&shape, spread, &held),
            }
        };
        let (keys, values) = (cache(case.spread), cache(1.0));
        let shape = [count, paged.block_size, kv];
        let scales = case.quantized.and_then(|how| data.row_scales(case, how, &shape, &held));
        let cache = PagedCache { key: keys, value: Some(values), scales };
        let integers = |shape: &[usize], values: Vec<i32>| {
            Tensor::from(ArrayD::from_shape_vec(IxDyn(shape), values).expect("as many"))
        };
        let past: Vec<_> = paged.sequences.iter().map(|[past, _]| *past as i32).collect();
        Self {
            query,
            key,
            value,
            starts: integers(&[starts.len()], starts),
            past: integers(&[past.len()], past),
            table: integers(&[table.len(), columns], table.concat()),
            slots: paged.skipped.map(|_| integers(&[tokens], slots)),
            rotary,
            head_sink: case.head_sink.then(|| data.normal(&[heads], 2.0)),
            scales: case.quantized.and_then(|how| data.scales(case, how)),
            norm_weights: case.qk_norm.then(|| [(); 2].map(|()| data.normal(&[size], 1.0))),
            cache,
        }
    }

    fn inputs(&self) -> PagedInputs<'_> {
        PagedInputs {
            key: self.key.as_ref(),
            value: self.value.as_ref(),
            cos_cache: self.rotary.as_ref().map(|[cos, _]| cos),
            sin_cache: self.rotary.as_ref().map(|[_, sin]| sin),
            slot_mapping: self.slots.as_ref(),
            head_sink: self.head_sink.as_ref(),
            q_norm_weight: self.norm_weights.as_ref().map(|[query, _]| query),
            k_norm_weight: self.norm_weights.as_ref().map(|[_, key]| key),
            k_scale: self.scales.as_ref().map(|[key, _]| key),
            v_scale: self.scales.as_ref().map(|[_, value]| value),
            ..PagedInputs::new(&self.query, &self.starts, &self.past, &self.table)
        }
    }
}

fn outputs(
    got: &PagedOutputs,
    want: &PagedOutputs,
    tolerance: Tolerance,
) -> std::result::Result<Errors, String> {
    optional("lse", &got.lse, &want.lse, tolerance)?;
    tensors("output", &got.output, &want.output, tolerance)
}

impl Parity for PagedCase {
    fn dtype(&self) -> DType {
        self.case.dtype
    }

    fn problem(&self) -> Result<Problem> {
        let tensors = Tensors::new(self);
        self.op().problem(&tensors.inputs(), &tensors.cache)
    }

    fn judge(&self) -> std::result::Result<Judge<'_>, String> {
        let given = Tensors::new(self);
        let run = |given: &Tensors, backend: &dyn Backend| {
            let mut cache = given.cache.clone();
            let output = self.op().run(&given.inputs(), &mut cache, backend);
            output.map(|outputs| (outputs, cache)).map_err(|e| format!("{}: {e}", backend.name()))
        };
        let want = run(&given, &Reference)?;
        Ok(Box::new(move |backend| self.compare(&given, run(&given, backend)?, &want)))
    }
}

impl PagedCase {
    fn compare(
        &self,
        given: &Tensors,
        (got, mut got_cache): (PagedOutputs, PagedCache),
        (want, want_cache): &(PagedOutputs, PagedCache),
    ) -> std::result::Result<Errors, String> {
        let tolerance = Tolerance::of(&self.case);
        let (dtype, rounds) = (self.case.dtype, self.case.rounds_before_codes());
        let of_keys = row_scales(&got_cache.scales, &want_cache.scales, dtype, rounds)?;
        if rounds {
            // A new key's quantized value may round either way near a tie: the output is compared
            // for the resulting cache, with no new rows.
            let [got_keys, want_keys] = [&got_cache.key, &want_cache.key];
            codes_rounded_before("key_cache", got_keys, want_keys, of_keys, dtype)?;
            equal_codes("value_cache", values(&got_cache), values(want_cache))?;
            let nowhere = Tensor::from(ArrayD::from_elem(IxDyn(&[self.tokens()]), -1));
            let inputs = PagedInputs { slot_mapping: Some(&nowhere), ..given.inputs() };
            let want = self.op().run(&inputs, &mut got_cache, &Reference);
            return outputs(&got, &want.map_err(|e| e.to_string())?, tolerance);
        }
        let errors = outputs(&got, want, tolerance)?;
        let exact = Tolerance { absolute: 0.0, relative: 0.0 };
        let turned = self.case.rotary.is_some() || self.case.qk_norm;
        let keys = if turned { tolerance } else { exact };
        tensors("key_cache", &got_cache.key, &want_cache.key, keys)?;
        tensors("value_cache", values(&got_cache), values(want_cache), exact)?;
        Ok(errors)
    }
}

fn values(cache: &PagedCache) -> &Tensor {
    cache.value.as_ref().expect("keys and values apart")
}
