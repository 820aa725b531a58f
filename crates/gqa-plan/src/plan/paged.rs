//! Calls over a paged KV cache: kernels read the blocks in place, or rows are gathered into
//! contiguous scratch memory first.
//!
//! | launch | decode steps: few tokens per sequence | prefill, with or without decode steps | all other calls |
//! |---|---|---|---|
//! | `qk_norm` | with QK-norm | with QK-norm | with QK-norm |
//! | `paged_append`, or `paged_append_quantized`: new rows into the cache, queries into scratch | but the queries, where slot_mapping says where they go | but the queries, and the rows that `decode` appends | always |
//! | `paged_dequantize`: dequantized keys and values of the prompts, in blocks in scratch | | where the cache holds quantized values | |
//! | `paged_gather`: the rows of every sequence into scratch | | | always |
//! | attention | `decode`, `decode_quantized` | `hopper_paged`, `blackwell_paged` or `tiled_paged`, and `decode` (`mixed.rs`) | any kernel |
//! | `paged_scatter`: output rows, and log-sum-exps, to their tokens | | | unless every sequence has one token, and no log-sum-exps are wanted |
//! | `paged_gaps`: rows anew of sequences whose tables lead outside of the cache, or that have fewer keys than tokens | | where the cache holds quantized values, or by kernels that take tokens before all keys for padding | always |
//!
//! Families for which [`follows_append`](super::family::Family::follows_append) is true take all
//! sequences, behind `paged_append`, which leaves rotated queries in scratch.
//!
//! Packed keys and values are a cache of consecutive rows. `hopper_paged` and `blackwell_paged`
//! read these where they are; the last column has all other kernels, unless values lie unlike their
//! keys.
//!
//! If the cache already holds the new rows, `paged_append` only copies queries, or is left out.
//!
//! In the last column queries are read in place if every sequence has one token and the queries are
//! contiguous, not packed with keys and not rotated.

use super::build::{block_rows, element, find, launch, page_steps, pages_strides, tensor, u32_of};
use super::cascade::refusals;
use super::contiguous::Composed;
use super::device::DeviceInfo;
use super::families::{schedule, work_schedule};
use super::launch::{Arg, Launch};
use super::mixed::{Attention, Attentions};
use super::options::PlanOptions;
use super::params::{format, rope_offset, rotary_params, scale_tensors, scales};
use super::positions::positions;
use super::prologue::normalise;
use super::rebind::Rebind;
use super::rows::{Operand, Rows};
use super::scratch::Scratch;
use super::tree_mask::Expanded;
use crate::tensors::TensorId;
use crate::{DType, Error, Pages, Problem, Result, Sink};
use gqa_kernels::params::{PagedGapsParams, PagedParams, Strides, sink};
use gqa_kernels::registry::prologue_grid::{paged_gaps_grid, paged_grid};
use gqa_kernels::registry::{Entry, Role};

/// The launches of a call whose cache consists of blocks.
pub(super) fn compose(
    problem: &Problem,
    pages: Pages,
    device: &DeviceInfo,
    options: &PlanOptions,
    scratch: &mut Scratch,
) -> Result<Composed> {
    let (mut launches, rows) = normalise(&problem.tokens()?, device, scratch)?;
    let rows = rows.of_all_sequences();
    let Attentions { chosen, mut decisions } = Attentions::choose(problem, pages, device, options);
    let appends = !problem.reads_pages_only();
    let (others, by_themselves): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|attention| attention.task.appended);
    for attention in &by_themselves {
        launches.extend(attention.launches(device, rows, false, scratch)?);
    }
    let mut rows = rows;
    if appends && let Some(first) = others.first() {
        let least = if by_themselves.is_empty() { 0 } else { first.task.least };
        let prologue = Prologue::new(problem, pages, rows)?;
        if first.reads_rotated(problem) {
            rows.query = prologue.rotated_queries(scratch)?;
        }
        let moved = if first.reads_rotated(problem) { rows.query.arg } else { Arg::Null };
        launches.push(prologue.append(moved, least, device)?);
    }
    let of_codes = others.iter().find(|attention| attention.reads_dequantized(problem));
    let least = of_codes.map_or(0, |attention| attention.task.least);
    let numbers = of_codes.map(|_| Dequantized::new(problem, pages, rows, least, scratch));
    let numbers = numbers.transpose()?;
    if let Some(numbers) = &numbers {
        launches.push(numbers.launch(device)?);
    }
    for attention in &others {
        let follows_concurrent = launches.last().is_some_and(|launch| launch.concurrent);
        let own = attention.launches(device, rows, follows_concurrent, scratch)?;
        match &numbers {
            Some(numbers) if attention.reads_dequantized(problem) => {
                let rebind = numbers.rebind();
                launches.extend(own.into_iter().map(|launch| rebind.launch(launch)));
            }
            _ => launches.extend(own),
        }
    }
    let is_in_place = !(others.is_empty() && by_themselves.is_empty());
    let computes_them = |attention: &Attention| attention.computes_all_rows();
    let mut all = others.iter().chain(&by_themselves);
    let lack_rows = problem.may_lack_seeing_rows() && !(is_in_place && all.all(computes_them));
    if numbers.is_some() || is_in_place && lack_rows {
        let least = if lack_rows { 0 } else { least };
        launches.push(Prologue::new(problem, pages, rows)?.gaps(least, lack_rows, device)?);
    }
    if is_in_place {
        let of_keys = launches.iter().find_map(schedule);
        if of_keys.is_some() {
            launches.iter_mut().for_each(Launch::forget_work_schedule);
        }
        let schedule = of_keys.or_else(|| launches.iter().find_map(work_schedule)).transpose()?;
        let positions = positions(problem, true);
        return Ok(Composed { launches, schedule, decisions, positions });
    }
    if problem.batch_invariant {
        let reasons = refusals(&decisions);
        let allowed = format!("false, as no such kernel reads blocks where they are: {reasons}");
        return Err(Error::invalid("batch_invariant", "true", allowed));
    }
    if !problem.has_values_like_keys(pages) {
        let why = "values that lie unlike their keys are only read where they are";
        return Err(Error::NoKernel(format!("{why}; {}", refusals(&decisions))));
    }
    let gathered = Gathered::new(problem, pages, rows, scratch)?;
    if appends || gathered.moved != Arg::Null {
        launches.push(gathered.prologue.append(gathered.moved, 0, device)?);
    }
    launches.push(gathered.gather(device)?);
    let (mut attended, mut rebind) = (problem.gathered()?, gathered.rebind());
    if problem.tree_mask {
        let expanded = Expanded::new(problem, &attended, device, scratch)?;
        rebind.0.push(expanded.mask());
        launches.push(expanded.launch);
        attended = expanded.problem;
    }
    let call = Composed::of(&attended, device, options, scratch)?;
    launches.extend(call.launches.into_iter().map(|launch| rebind.launch(launch)));
    if gathered.output != Arg::Null {
        launches.push(gathered.scatter(device)?);
    }
    launches.push(gathered.prologue.gaps(0, lack_rows, device)?);
    decisions.extend(call.decisions);
    let positions = positions(problem, true);
    Ok(Composed { launches, schedule: None, decisions, positions })
}

/// The launches around attention.
#[derive(Clone, Copy)]
struct Prologue<'a> {
    problem: &'a Problem,
    /// Tokens' rows.
    rows: Rows,
    params: PagedParams,
}

impl<'a> Prologue<'a> {
    fn new(p: &'a Problem, pages: Pages, rows: Rows) -> Result<Self> {
        let size = p.dtype.size();
        let cache = pages_strides(p, pages, 1);
        let params = PagedParams {
            q: rows.query.strides,
            k: rows.key.strides,
            v: rows.value.strides,
            steps: page_steps(cache),
            rotary: rotary_params(p.rotary, 0)?,
            batch: u32_of("batch", p.batch)?,
            q_heads: u32_of("query heads", p.q_heads)?,
            kv_heads: u32_of("KV heads", p.kv_heads)?,
            head_size: u32_of("head size", p.head_size)?,
            row_vectors: u32_of("head size", p.head_size * size / Problem::VECTOR_BYTES)?,
            scales: scales(p),
            by_token: 0,
            least: 0,
            window: u32_of("window", p.window.unwrap_or(0).min(p.capacity))?,
            counts_new: pages.counts_new.into(),
            format: format(p),
            head_bytes: cache.head as u32,
            rope_offset: rope_offset(p.rotary)?,
            value_heads: u32_of("KV heads", p.value_heads())?,
            v_head_size: u32_of("value head size", p.v_head_size)?,
            q_len: u32_of("query rows", p.q_len)?,
            tokens: u32_of("tokens", pages.tokens)?,
            capacity: u32_of("rows of a sequence", p.capacity)?,
            blocks: u32_of("blocks", pages.blocks)?,
            block_size: block_rows(pages)?,
            per_sequence: u32_of("blocks of a sequence", pages.columns())?,
            moves_queries: 0,
        };
        Ok(Self { problem: p, rows, params })
    }

    /// Scratch memory for rotated queries, if every sequence has the same number of tokens.
    fn rotated_queries(&self, scratch: &mut Scratch) -> Result<Operand> {
        let PagedParams { q_heads, head_size, .. } = self.params;
        let row = q_heads as usize * head_size as usize;
        let tokens = self.params.tokens as usize;
        let arg = scratch.take(tokens.saturating_mul(row), self.problem.dtype.size())?;
        let strides = Strides { batch: 0, head: u64::from(head_size), row: row as u64 };
        Ok(Operand { arg, strides })
    }

    /// Appends the new rows of sequences with `least` tokens or more, and copies the queries to
    /// `query` unless that is null.
    fn append(&self, query: Arg, least: usize, device: &DeviceInfo) -> Result<Launch> {
        let only_queries = self.problem.reads_pages_only();
        let new = |arg| if only_queries { Arg::Null } else { arg };
        let [k_scale, v_scale] = scale_tensors(self.problem);
        let arguments = [
            ("q", self.rows.query.arg),
            ("k", new(self.rows.key.arg)),
            ("v", new(self.rows.value.arg)),
            ("cos", self.rotation(TensorId::CosCache)),
            ("sin", self.rotation(TensorId::SinCache)),
            ("position_ids", Arg::Null),
            ("q_out", query),
            k_scale,
            v_scale,
        ];
        let role = match self.problem.quantized {
            None => Role::PagedAppend,
            Some(_) => Role::PagedAppendQuantized,
        };
        let p = self.params;
        let moves_queries = u32::from(query != Arg::Null);
        // A binary search for the sequence costs less than visiting many padding rows.
        let mostly_empty = u64::from(p.tokens) < u64::from(p.batch) * u64::from(p.q_len) / 2;
        let by_token = u32::from(moves_queries == 0 && mostly_empty);
        let [kv_heads, value_heads] =
            if only_queries { [0; 2] } else { [p.kv_heads, p.value_heads] };
        let least = u32_of("tokens", least)?;
        let params = PagedParams { moves_queries, by_token, kv_heads, value_heads, least, ..p };
        self.launch(self.typed(role)?, &arguments, &params, device)
    }

    /// cos_cache or sin_cache, if anything rotates.
    fn rotation(&self, id: TensorId) -> Arg {
        self.problem.rotary.map_or(Arg::Null, |_| tensor(self.problem, id, 0))
    }

    /// After attention over a copy of the cache: recomputes sequences of `least` tokens or more
    /// whose tables point outside of the cache, and with `lack_rows` sequences with fewer keys than
    /// tokens, whose tokens see all keys.
    fn gaps(&self, least: usize, lack_rows: bool, device: &DeviceInfo) -> Result<Launch> {
        let p = self.problem;
        let [k_scale, v_scale] = scale_tensors(p);
        let values = if p.latent { TensorId::PresentKey } else { TensorId::PresentValue };
        let cached = |id, quantized| match p.quantized.is_some() == quantized {
            true => tensor(p, id, 0),
            false => Arg::Null,
        };
        let arguments = [
            ("q", self.rows.query.arg),
            ("cos", self.rotation(TensorId::CosCache)),
            ("sin", self.rotation(TensorId::SinCache)),
            ("k_cache", cached(TensorId::PresentKey, false)),
            ("v_cache", cached(values, false)),
            ("k_codes", cached(TensorId::PresentKey, true)),
            ("v_codes", cached(values, true)),
            k_scale,
            v_scale,
            ("tree_mask", tensor(p, TensorId::TreeMask, 0)),
            ("head_sink", tensor(p, TensorId::HeadSink, 0)),
            ("out", tensor(p, TensorId::Output, 0)),
            ("lse", tensor(p, TensorId::Lse, 0)),
        ];
        let params = PagedGapsParams {
            paged: PagedParams { least: u32_of("tokens", least)?, ..self.params },
            format: p.quantized.map_or(0, |how| how.format as u32),
            parts: 0,
            causal: p.causal.into(),
            lack_rows: lack_rows.into(),
            sink: if p.sink == Sink::PerHead { sink::PER_HEAD } else { sink::NONE },
            scale: p.least_scale(),
            softcap: p.softcap_in_f32(),
            reserved: 0,
        };
        let (grid, parts) = paged_gaps_grid(&params, device.multiprocessors);
        let entry = find(Role::PagedGaps, element(p.dtype))?;
        launch(entry, grid, &self.arguments(&arguments), &PagedGapsParams { parts, ..params })
    }

    /// The kernel for the call's element type.
    fn typed(&self, role: Role) -> Result<&'static Entry> {
        find(role, element(self.problem.dtype))
    }

    fn launch(
        &self,
        entry: &'static Entry,
        arguments: &[(&'static str, Arg)],
        params: &PagedParams,
        device: &DeviceInfo,
    ) -> Result<Launch> {
        let grid = paged_grid(entry, params, device.multiprocessors);
        launch(entry, grid, &self.arguments(arguments), params)
    }

    /// A launch's own arguments, and the sequences and cache of the call where it has none.
    fn arguments(&self, own: &[(&'static str, Arg)]) -> Vec<(&'static str, Arg)> {
        let p = self.problem;
        let of_pages = [
            ("starts", TensorId::CumulativeSequenceLength),
            ("past_seqlens", TensorId::SeqlensK),
            ("block_table", TensorId::BlockTable),
            ("slot_mapping", TensorId::SlotMapping),
            ("k_cache", TensorId::PresentKey),
            ("v_cache", TensorId::PresentValue),
        ];
        [own, &of_pages.map(|(name, id)| (name, tensor(p, id, 0)))].concat()
    }
}

/// Scratch memory for attention over dequantized values.
struct Dequantized<'a> {
    prologue: Prologue<'a>,
    /// Sequences with fewer tokens are not dequantized.
    least: usize,
    cache: [Arg; 2],
    table: Arg,
}

impl<'a> Dequantized<'a> {
    fn new(
        p: &'a Problem,
        pages: Pages,
        rows: Rows,
        least: usize,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        let numbers = p.dequantized()?;
        let tables = numbers.pages.map_or(0, |pages| pages.blocks);
        let cached =
            numbers.key_cache_shape(0).iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let mut take = || scratch.take(cached.unwrap_or(usize::MAX), p.dtype.size());
        Ok(Self {
            prologue: Prologue::new(p, pages, rows)?,
            least,
            cache: [take()?, take()?],
            table: scratch.take(tables, DType::I32.size())?,
        })
    }

    fn launch(&self, device: &DeviceInfo) -> Result<Launch> {
        let (p, [k, v]) = (self.prologue.problem, self.cache);
        let [k_scale, v_scale] = scale_tensors(p);
        let arguments = [k_scale, v_scale, ("k", k), ("v", v), ("table", self.table)];
        let entry = self.prologue.typed(Role::PagedDequantize)?;
        let least = u32_of("tokens", self.least)?;
        let params = PagedParams { least, ..self.prologue.params };
        self.prologue.launch(entry, &arguments, &params, device)
    }

    /// The tensors of the inner call, which are in scratch memory.
    fn rebind(&self) -> Rebind {
        Rebind(vec![
            (TensorId::PresentKey, self.cache[0]),
            (TensorId::PresentValue, self.cache[1]),
            (TensorId::BlockTable, self.table),
        ])
    }
}

/// Scratch memory for attention over gathered rows.
struct Gathered<'a> {
    prologue: Prologue<'a>,
    /// The copied queries; null if queries are read in place.
    moved: Arg,
    cache: [Arg; 2],
    /// Per-token scales of the gathered rows, or null.
    scales: [Arg; 2],
    lengths: Arg,
    /// Null if every row is a token and the call has no lse.
    output: Arg,
    /// Null if the call has no lse.
    lse: Arg,
}

impl<'a> Gathered<'a> {
    fn new(p: &'a Problem, pages: Pages, rows: Rows, scratch: &mut Scratch) -> Result<Self> {
        let (size, code_size) = (p.dtype.size(), p.key_cache_dtype().size());
        let padded = |size| p.batch * p.q_len * p.q_heads * size;
        let gathered = p.gathered()?;
        let cached: usize = gathered.key_cache_shape(p.capacity).iter().product();
        let of_rows = gathered.row_scales_shape();
        let scaled = of_rows.map_or(0, |shape| shape.iter().product());
        let lies_apart = p.packed || p.strided.query.is_some();
        let moves = !p.has_single_tokens() || p.rotary.is_some() || lies_apart;
        let mut take = |wanted: bool, elements: usize, size: usize| match wanted {
            true => scratch.take(elements, size),
            false => Ok(Arg::Null),
        };
        Ok(Self {
            prologue: Prologue::new(p, pages, rows)?,
            moved: take(moves, padded(p.head_size), size)?,
            cache: [take(true, cached, code_size)?, take(!p.latent, cached, code_size)?],
            scales: [take(of_rows.is_some(), scaled, 4)?, take(of_rows.is_some(), scaled, 4)?],
            lengths: take(true, p.batch, DType::I32.size())?,
            output: take(!p.has_single_tokens() || p.lse, padded(p.v_head_size), size)?,
            lse: take(p.lse, p.batch * p.q_heads * p.q_len, DType::F32.size())?,
        })
    }

    fn gather(&self, device: &DeviceInfo) -> Result<Launch> {
        let (p, [k, v]) = (self.prologue.problem, self.cache);
        let [k_scale, v_scale] = match p.has_row_scales() {
            true => scale_tensors(p),
            false => [("k_scale", Arg::Null), ("v_scale", Arg::Null)],
        };
        let arguments = [
            ("present_k", k),
            ("present_v", v),
            ("lengths", self.lengths),
            k_scale,
            v_scale,
            ("present_k_scale", self.scales[0]),
            ("present_v_scale", self.scales[1]),
        ];
        let [.., width] = p.gathered()?.key_cache_shape(0);
        let bytes = width * p.key_cache_dtype().size();
        let row_vectors = u32_of("head size", bytes / Problem::VECTOR_BYTES)?;
        let params = PagedParams { row_vectors, ..self.prologue.params };
        let entry = find(Role::PagedGather, None)?;
        self.prologue.launch(entry, &arguments, &params, device)
    }

    fn scatter(&self, device: &DeviceInfo) -> Result<Launch> {
        let Prologue { problem, params, .. } = &self.prologue;
        let arguments = [
            ("rows", self.output),
            ("row_lse", self.lse),
            ("out", tensor(problem, TensorId::Output, 0)),
            ("lse", tensor(problem, TensorId::Lse, 0)),
        ];
        let bytes = problem.v_head_size * problem.dtype.size();
        let row_vectors = u32_of("head size", bytes / Problem::VECTOR_BYTES)?;
        let params = PagedParams { row_vectors, ..*params };
        let entry = find(Role::PagedScatter, None)?;
        self.prologue.launch(entry, &arguments, &params, device)
    }

    /// The tensors of the call over gathered rows, which are in scratch memory.
    fn rebind(&self) -> Rebind {
        let query = if self.moved == Arg::Null { self.prologue.rows.query.arg } else { self.moved };
        Rebind(vec![
            (TensorId::Query, query),
            (TensorId::PresentKey, self.cache[0]),
            (TensorId::PresentValue, self.cache[1]),
            (TensorId::KRowScale, self.scales[0]),
            (TensorId::VRowScale, self.scales[1]),
            (TensorId::SeqlensK, self.lengths),
            (TensorId::Output, self.output),
            (TensorId::Lse, self.lse),
        ])
    }
}
