//! `hopper_paged`: `hopper` over a paged KV cache: prefill, long chunks, and decode steps among
//! them.

use super::hopper::{self, LEAST_ROWS, boxes, tensor_map};
use crate::plan::build::{block_rows, launch, page_values_strides, pages_strides, tensor, u32_of};
use crate::plan::decision::Rejection;
use crate::plan::device::DeviceInfo;
use crate::plan::family::{Call, Family, Job, Kernel, TileQueue};
use crate::plan::launch::{Arg, Launch};
use crate::plan::options::PlanOption;
use crate::plan::params::{output, params, rotary_params};
use crate::plan::scratch::Scratch;
use crate::plan::{requirements, select};
use crate::problem::RowLayout;
use crate::tensors::TensorId;
use crate::{Error, Pages, Problem, Result};
use bytemuck::Pod;
use gqa_kernels::attention::hopper as kernels;
use gqa_kernels::concept::pages::CONTIGUOUS;
use gqa_kernels::params::{AttentionParams, PagedHopperParams, Strides};
use gqa_kernels::registry::{self, Entry, Role, entries};

pub(in crate::plan) struct HopperPaged;

impl Family for HopperPaged {
    fn module(&self) -> registry::Family {
        registry::Family::HopperPaged
    }

    fn is_paged(&self) -> bool {
        true
    }

    fn takes_any_values(&self) -> bool {
        true
    }

    fn computes_all_rows(&self) -> bool {
        true
    }

    fn draws_tiles(&self) -> bool {
        true
    }

    fn options(&self) -> &'static [PlanOption] {
        &[PlanOption::DisableFlashAttention, PlanOption::DisableFusedKv]
    }

    fn choose(&self, call: &Call<'_>) -> Result<Kernel, Rejection> {
        choose(self, call)
    }

    fn launches(&self, kernel: &Kernel, job: Job<'_>) -> Result<Vec<Launch>> {
        let paged = PagedCall::new(job, kernel.entry)?;
        paged.launches(&paged.params)
    }
}

/// The kernel of this family or of `hopper_paged_quantized`.
pub(super) fn choose(family: &dyn Family, call: &Call<'_>) -> Result<Kernel, Rejection> {
    let p = call.problem;
    if p.lse && p.quantized.is_some() {
        return Err(Rejection::Argument { name: "lse" });
    }
    requirements::flash(p)?;
    // TMA boxes must fit the blocks. With consecutive rows a sequence is one block.
    match p.pages {
        Some(Pages { consecutive: true, blocks: 1.., .. }) => (),
        _ => requirements::blocks_of(p, kernels::LEAST_BOX)?,
    }
    let entry = select::among(family, call, |_| true, |entry| order(entry, p))?;
    if entry.role == Role::SplitAttention {
        may_split(p)?;
    }
    hopper::can_do(p, call.device)?;
    if !p.rotary.is_none_or(hopper::knows) {
        return Err(Rejection::TooLarge);
    }
    requirements::narrow_output(p)?;
    if let Some(kernel) = split(call, entry) {
        return Ok(kernel);
    }
    suits(call)?;
    Ok(Kernel::whole(entry))
}

/// The order of kernels for a call: first by whether its sums are as exact as the call needs (at
/// head size 64 sums of rounded P are too coarse for a log-sum-exp), then by the smallest tile that
/// holds the heads.
pub(super) fn order(entry: &Entry, p: &Problem) -> select::Order {
    [(entry.exact_sums != p.lse).into(), select::columns(entry), 0, 0]
}

/// Errs where kernels that divide the work do not take the call.
pub(super) fn may_split(p: &Problem) -> Result<(), Rejection> {
    if p.lse {
        return Err(Rejection::Argument { name: "lse" });
    }
    match p.v_head_size == p.head_size {
        true => Ok(()),
        false => Err(Rejection::Values { dtype: p.v_dtype, size: p.v_head_size }),
    }
}

/// Errs where it is faster to gather the rows from their blocks and attend to the copy.
fn suits(call: &Call<'_>) -> Result<(), Rejection> {
    let p = call.problem;
    let is_sole = call.options.force.is_some() || p.pages.is_some_and(|pages| pages.consecutive);
    if !is_sole && leaves_tiles_empty(p, call.device) {
        return Err(Rejection::FewRows { got: p.q_len, min: LEAST_ROWS });
    }
    Ok(())
}

/// Whether tiles of one query head would be almost empty, and reading the keys once per query head
/// costs more than row tiles that query heads share.
fn leaves_tiles_empty(p: &Problem, device: &DeviceInfo) -> bool {
    !fills_tiles(p) && !reading_often_pays(p, device) && !is_short(p, device)
}

/// Whether all query heads run at the same time over so few keys that nothing else is faster: at
/// most two pieces of a divided row tile.
fn is_short(p: &Problem, device: &DeviceInfo) -> bool {
    const KEYS: usize = 512;
    p.total_len <= KEYS && p.q_heads.saturating_mul(p.batch) <= device.multiprocessors as usize
}

/// Whether the longest sequence fills a tile of one query head well.
fn fills_tiles(p: &Problem) -> bool {
    p.q_len >= LEAST_ROWS
}

/// Whether reading the keys once per query head is faster than gathering them and reading the copy
/// once per group.
fn reading_often_pays(p: &Problem, device: &DeviceInfo) -> bool {
    /// Time of all SMs to gather a key of a KV head and to read the copy, relative to the time of
    /// one SM for a key of `hopper`.
    const GATHER_TIME: usize = 6;
    let sms = (device.multiprocessors as usize).max(1);
    let waves = p.q_heads.saturating_mul(p.batch).div_ceil(sms);
    waves * sms < GATHER_TIME.saturating_mul(p.kv_heads * p.batch)
}

/// The kernel of the same shape that divides the work among the SMs, if a launch of `entry` would
/// end with one long row tile, or its tiles would be almost empty.
fn split(call: &Call<'_>, entry: &'static Entry) -> Option<Kernel> {
    let (p, device) = (call.problem, call.device);
    let split = dividing(entry).filter(|_| may_split(p).is_ok())?;
    let division = Division::of(p, split, device);
    if !division.fits(p) {
        return None;
    }
    if let Some(forced) = call.forced {
        let is_this = forced.role == Role::Merge || forced.name == split.name;
        return is_this.then(|| Kernel::whole(split));
    }
    (leaves_tiles_empty(p, device) || division.pays()).then(|| Kernel::whole(split))
}

/// The kernel of the same shape that divides the work.
pub(super) fn dividing(entry: &Entry) -> Option<&'static Entry> {
    let is_sister = |split: &&Entry| {
        split.family == entry.family
            && split.role == Role::SplitAttention
            && split.dtype == entry.dtype
            && split.head_size == entry.head_size
            && split.formats == entry.formats
    };
    entries().find(is_sister)
}

/// How the work of a call is divided.
pub(super) struct Division {
    /// Query heads of a row tile.
    tile_heads: usize,
    /// Groups of query heads that share row tiles.
    groups: usize,
    /// Upper bounds, to which kernels clamp the lengths on the device: row tiles of all sequences
    /// for a group, and key tiles of a row tile.
    most: [usize; 2],
    /// Key tiles of the longest row tile, if the lengths are as the call says.
    longest: usize,
    /// Key tiles of an SM's equal share of the work, if prompts have no earlier keys.
    share: usize,
    /// Fewest key tiles of a piece.
    shortest: usize,
    /// Sequences of one token, times KV heads: a decode kernel could take these.
    steps: usize,
    multiprocessors: usize,
}

impl Division {
    pub(super) fn of(p: &Problem, entry: &Entry, device: &DeviceInfo) -> Self {
        let tile_heads = tile_heads(p, entry.rows);
        let tokens = kernels::packed_tokens(tile_heads as u32, entry.rows) as usize;
        let groups = p.q_heads / tile_heads;
        let (keys, multiprocessors) = (entry.keys as usize, device.multiprocessors as usize);
        let within =
            |len: usize| p.window.map_or(len, |window| len.min(window.saturating_add(tokens)));
        let key_tiles = |len: usize| within(len).div_ceil(keys) + 1;
        // On average a token of a prompt sees half of the prompt.
        let own = p.q_len / (2 * keys) + 1;
        let full_tiles = (all_tokens(p) / tokens).saturating_mul(groups);
        Self {
            tile_heads,
            groups,
            most: [row_tiles(p, tile_heads as u32, entry), key_tiles(p.capacity)],
            longest: key_tiles(p.total_len),
            share: full_tiles.saturating_mul(own) / multiprocessors.max(1),
            shortest: shortest_piece(entry),
            steps: (p.batch - long_sequences(p)) * p.kv_heads,
            multiprocessors,
        }
    }

    /// Whether dividing the work pays: the longest row tile may take much longer than an equal
    /// share. The division itself costs time, and decode steps are slower than in the decode kernel
    /// (measured: `docs/perf-log.md`).
    pub(super) fn pays(&self) -> bool {
        // In key tiles: what dividing and merging cost, and how often the share fits into it;
        // beside many decode steps it takes a longer sequence.
        let least = match self.steps < self.multiprocessors {
            true => self.share.saturating_mul(9) / 4 + 18,
            false => self.share.saturating_add(4).saturating_mul(8),
        };
        self.longest > least
    }

    /// CTAs: at most one per SM, and no more than there may be pieces.
    fn ctas(&self) -> usize {
        let [row_tiles, key_tiles] = self.most;
        let pieces = row_tiles.saturating_mul(self.groups);
        let pieces = pieces.saturating_mul(key_tiles.div_ceil(self.shortest));
        pieces.clamp(1, self.multiprocessors)
    }

    /// Whether the prefix sums of the call fit shared memory, and its work fits 32 bits.
    pub(super) fn fits(&self, p: &Problem) -> bool {
        let [row_tiles, key_tiles] = self.most;
        p.batch <= kernels::MOST_SEQUENCES as usize
            && row_tiles <= kernels::MOST_ROW_TILES as usize
            && row_tiles.saturating_mul(key_tiles.saturating_add(2)) <= i32::MAX as usize
    }
}

/// Fewest key tiles of a piece of a work tile: those of 256 keys.
fn shortest_piece(entry: &Entry) -> usize {
    256 / entry.keys as usize
}

/// Parameters and arguments of a launch, over a cache of elements or quantized values. The launch
/// rotates the queries if the call has RoPE. The tokens of all sequences are one batch entry.
/// Sequences with fewer tokens than `Task::least` are skipped.
pub(super) struct PagedCall {
    entry: &'static Entry,
    pub(super) params: PagedHopperParams,
    arguments: Vec<(&'static str, Arg)>,
    blocks: u32,
}

impl PagedCall {
    pub(super) fn new(job: Job<'_>, entry: &'static Entry) -> Result<Self> {
        let params = paged_params(&job, entry)?;
        let mut arguments = arguments(&job, &params, entry)?;
        arguments.extend(scratch(&params, entry, job.scratch)?);
        let has_place = params.ctas <= kernels::MOST_GIVEN_CTAS;
        let given = if has_place { tensor(job.problem, TensorId::Schedule, 0) } else { Arg::Null };
        arguments.push(("schedule", given));
        Ok(Self {
            entry,
            params,
            arguments,
            blocks: if params.is_secondary == 1 { params.secondary } else { params.primary },
        })
    }

    /// The attention launch with parameters `params`, and the merge of pieces if there are any.
    pub(super) fn launches(&self, params: &impl Pod) -> Result<Vec<Launch>> {
        let attention = launch(self.entry, [self.blocks, 1, 1], &self.arguments, params)?;
        if self.entry.role == Role::Attention {
            // After a launch that appends, an early start would cost a short call half a
            // microsecond.
            return Ok(vec![Launch { programmatic: self.params.is_secondary == 1, ..attention }]);
        }
        let grid = kernels::merge_grid(&self.params);
        let merge = launch(merge_of(self.entry)?, grid, &self.arguments, &self.params)?;
        Ok([attention, merge].map(|launch| Launch { programmatic: true, ..launch }).to_vec())
    }
}

/// What `launch` divides work by, if it reads a schedule.
pub(in crate::plan) fn work_division(launch: &Launch) -> Option<PagedHopperParams> {
    if launch.entry.role != Role::SplitAttention || launch.argument("schedule")? == Arg::Null {
        return None;
    }
    let params = launch.params.get(..size_of::<PagedHopperParams>())?;
    bytemuck::try_pod_read_unaligned(params).ok()
}

impl Launch {
    /// Lets a kernel that splits prefill divide the work itself: the call's schedule is that of
    /// another launch.
    pub(in crate::plan) fn forget_work_schedule(&mut self) {
        let number = self.entry.arguments.iter().position(|name| *name == "schedule");
        if self.entry.role == Role::SplitAttention
            && let Some(arg) = number.and_then(|number| self.args.get_mut(number))
        {
            *arg = Arg::Null;
        }
    }
}

/// The launch that writes the schedule which `launch` reads, if it does.
pub(in crate::plan) fn work_schedule(read: &Launch) -> Option<Result<Launch>> {
    let params = work_division(read)?;
    let is_schedule = |entry: &&Entry| {
        entry.family == registry::Family::HopperPaged && entry.role == Role::Schedule
    };
    let entry = entries().find(is_schedule)?;
    let names = ["starts", "past_seqlens", "schedule"];
    let [starts, lengths, written] = names.map(|name| read.argument(name));
    let arguments = [(names[0], starts?), (names[1], lengths?), (names[2], written?)];
    Some(launch(entry, [params.ctas, 1, 1], &arguments, &params))
}

/// The kernel that merges what one leaves in pieces, for its element type.
fn merge_of(entry: &Entry) -> Result<&'static Entry> {
    let family = registry::Family::HopperPaged;
    let is_it = |other: &&Entry| {
        (other.family, other.role, other.dtype) == (family, Role::Merge, entry.dtype)
    };
    let missing = || Error::NoKernel(format!("{} has no merge", entry.name));
    entries().find(is_it).ok_or_else(missing)
}

/// The parameters of the call, and of the queue of work tiles.
fn paged_params(job: &Job<'_>, entry: &Entry) -> Result<PagedHopperParams> {
    let (p, device, task) = (job.problem, job.device, job.task);
    let divides = entry.role == Role::SplitAttention;
    let division = divides.then(|| Division::of(p, entry, device));
    let tile_heads = division.as_ref().map_or(1, |division| division.tile_heads);
    let attention = match p.pages {
        Some(pages) => attention_params(job, pages, tile_heads)?,
        None => params(p, job.rows.query.strides, 1)?,
    };
    let (per_sequence, rows, blocks) = match p.pages {
        Some(pages) => (pages.columns(), block_rows(pages)?, pages.blocks),
        None => (rows_apart(p)?, CONTIGUOUS, p.batch),
    };
    let rotary = p.rotary.filter(|_| rotates(job));
    let params = PagedHopperParams {
        hopper: hopper::hopper_params(p, attention, rotary_params(rotary, 0)?)?,
        tokens: u32_of("tokens", all_tokens(p))?,
        per_sequence: u32_of("blocks of a sequence", per_sequence)?,
        log_block_size: rows.ilog2(),
        blocks: u32_of("blocks", blocks)?,
        least: u32_of("tokens", task.least)?,
        primary: 0,
        secondary: 0,
        is_secondary: 0,
        counts_new: p.pages.is_some_and(|pages| pages.counts_new).into(),
        tile_heads: u32_of("query heads", tile_heads)?,
        ctas: u32_of("CTAs", division.as_ref().map_or(0, Division::ctas))?,
        columns: entry.value_size,
        shortest: u32_of("key tiles", shortest_piece(entry))?,
        keys: entry.keys,
    };
    let most = match divides {
        true => params.ctas,
        false => kernels::paged_grid(&params, entry.rows, device.multiprocessors)[0],
    };
    let all = TileQueue { primary: most, secondary: 0, is_secondary: false };
    let queue = task.queue.unwrap_or(all);
    Ok(PagedHopperParams {
        // Every CTA of the primary launch starts with a work tile.
        primary: queue.primary.min(most),
        secondary: queue.secondary,
        is_secondary: queue.is_secondary.into(),
        ..params
    })
}

/// Tokens of all sequences; over a contiguous cache every row may be one.
fn all_tokens(p: &Problem) -> usize {
    p.pages.map_or(p.batch.saturating_mul(p.q_len), |pages| pages.tokens)
}

/// Row tiles of all sequences for a group of query heads, at most.
fn row_tiles(p: &Problem, tile_heads: u32, entry: &Entry) -> usize {
    let tokens = kernels::packed_tokens(tile_heads, entry.rows) as usize;
    // The same bound as `most_row_tiles` of the kernel.
    let of_longest = p.batch.saturating_mul(p.q_len.div_ceil(tokens));
    of_longest.min(all_tokens(p) / tokens + p.batch)
}

/// Whether the kernel rotates the queries: over a contiguous cache a launch ahead may do it.
fn rotates(job: &Job<'_>) -> bool {
    job.problem.pages.is_some() || job.task.fused && job.problem.rotary.is_some_and(hopper::knows)
}

/// Rows of the output from one batch entry to the next.
pub(super) fn rows_apart(p: &Problem) -> Result<usize> {
    let RowLayout { batch, row, .. } = p.output_layout();
    match p.batch > 1 && batch % row.max(1) != 0 {
        true => Err(Error::NoKernel("output rows are not a whole number apart".to_owned())),
        false => Ok(batch / row.max(1)),
    }
}

/// Number of sequences with the most tokens, if as many of the others as possible have one token.
fn long_sequences(p: &Problem) -> usize {
    all_tokens(p).saturating_sub(p.batch).div_ceil((p.q_len - 1).max(1)).min(p.batch)
}

/// How many query heads share a row tile of `rows` rows: the smallest divisor of the group with the
/// fewest row tiles. Assumes that as many sequences as possible have one token, and the others the
/// most tokens.
fn tile_heads(p: &Problem, rows: u32) -> usize {
    let group = p.q_heads / p.kv_heads;
    let many = long_sequences(p);
    let few = p.batch - many;
    let tiles = |&heads: &usize| {
        let height = kernels::packed_tokens(heads as u32, rows) as usize;
        (few + many * p.q_len.div_ceil(height)) * (group / heads)
    };
    let fits = |&heads: &usize| group.is_multiple_of(heads);
    (1..=group.min(kernels::QUERY_BOX as usize)).filter(fits).min_by_key(tiles).unwrap_or(1)
}

/// Scratch memory: the counter from which CTAs draw work tiles; or the division of the work and the
/// results of pieces.
fn scratch(
    params: &PagedHopperParams,
    entry: &Entry,
    scratch: &mut Scratch,
) -> Result<Vec<(&'static str, Arg)>> {
    if entry.role == Role::Attention {
        return Ok(vec![("counter", scratch.count(1))]);
    }
    let [row_tiles, range_starts] = kernels::schedule_words(params);
    let [columns, states] = kernels::part_elements(params);
    let mut take = |elements, size| scratch.take(elements, size);
    Ok(vec![
        ("row_tiles", take(row_tiles, size_of::<u32>())?),
        ("range_starts", take(range_starts, size_of::<u32>())?),
        ("part_columns", take(columns, size_of::<f32>())?),
        ("part_states", take(states, size_of::<[f32; 2]>())?),
    ])
}

/// The cache is (block, row, head), and the output's rows are tokens. Strides of the cache count
/// columns of 16 bits, as TMA has them.
pub(super) fn attention_params(
    job: &Job<'_>,
    pages: Pages,
    tile_heads: usize,
) -> Result<AttentionParams> {
    let params = params(job.problem, job.rows.query.strides, 1)?;
    let [k_columns, v_columns] = columns(job.problem)?;
    let size = job.problem.dtype.size();
    let k = pages_strides(job.problem, pages, size);
    let v = page_values_strides(job.problem, pages, size);
    let out = Strides { batch: 0, ..params.out };
    let params = AttentionParams { k, v, out, ..params };
    let head_size = k_columns.midpoint(v_columns);
    let read = AttentionParams { batch: 1, head_size, ..params };
    let heads = kernels::l2_section(&read, job.device.l2_bytes, job.device.multiprocessors);
    Ok(AttentionParams { l2_section: heads / u32_of("query heads", tile_heads)?, ..params })
}

/// Columns of a key and of a value of the cache, as TMA has them: of 16 bits, whatever these are.
fn columns(p: &Problem) -> Result<[u32; 2]> {
    let columns = |[.., width]: [usize; 4]| {
        u32_of("bytes of a row", width * p.key_cache_dtype().size() / p.dtype.size())
    };
    Ok([columns(p.key_cache_shape(0))?, columns(p.value_cache_shape(0))?])
}

/// Maps of keys and values: (block, KV head, row), or where rows are consecutive one block of them.
pub(super) fn key_maps(
    job: &Job<'_>,
    attention: &AttentionParams,
    blocks: u32,
    box_rows: u32,
) -> Result<[Arg; 2]> {
    let (p, pages) = (job.problem, pages(job.problem)?);
    let AttentionParams { kv_heads, k, v, .. } = *attention;
    let ([k_arg, v_arg], [k_columns, v_columns]) = (job.rows.attended, columns(p)?);
    let map = |arg, strides: Strides, columns| {
        if pages.consecutive {
            let strides = Strides { row: strides.batch, batch: 0, ..strides };
            return tensor_map(p, arg, strides, [columns, blocks, kv_heads, 1], box_rows);
        }
        let size = [columns, pages.block_size as u32, kv_heads, blocks];
        tensor_map(p, arg, strides, size, box_rows)
    };
    Ok([map(k_arg, k, k_columns), map(v_arg, v, v_columns)])
}

fn arguments(
    job: &Job<'_>,
    params: &PagedHopperParams,
    entry: &Entry,
) -> Result<Vec<(&'static str, Arg)>> {
    let p = job.problem;
    let AttentionParams { head_size, q_heads, q_len, batch, q, .. } = params.hopper.attention;
    // Packed tokens of all sequences are one batch entry.
    let (rows, entries, starts) = match p.pages {
        Some(_) => (params.tokens, 1, TensorId::CumulativeSequenceLength),
        None => (q_len, batch, TensorId::QuerySeqlens),
    };
    // Rows of one head are one box of rows; heads that share a tile come before rows.
    let heads = params.tile_heads;
    let (queries, apart, tile) = match heads {
        1 => ([rows, q_heads], [q.row, q.head], [kernels::QUERY_BOX, 1]),
        _ => ([q_heads, rows], [q.head, q.row], [heads, kernels::QUERY_BOX / heads]),
    };
    let queries = [head_size, queries[0], queries[1], entries];
    let apart = [apart[0], apart[1], if entries == 1 { 0 } else { q.batch }];
    let [k, v] = match p.pages {
        Some(pages) => {
            let box_rows = kernels::box_rows(block_rows(pages)?, entry.keys);
            key_maps(job, &params.hopper.attention, params.blocks, box_rows)?
        }
        None => hopper::key_maps(p, &params.hopper.attention, &job.rows, entry)?,
    };
    let [cos, sin] = hopper::tables(p, rotates(job));
    let tensor = |id| tensor(p, id, 0);
    Ok(vec![
        ("q", boxes(p, job.rows.query.arg, apart, queries, tile)),
        ("k", k),
        ("v", v),
        cos,
        sin,
        ("k_scale", tensor(TensorId::KScale)),
        ("v_scale", tensor(TensorId::VScale)),
        ("starts", tensor(starts)),
        ("past_seqlens", tensor(TensorId::SeqlensK)),
        ("block_table", tensor(TensorId::BlockTable)),
        ("head_sink", tensor(TensorId::HeadSink)),
        ("lse", tensor(TensorId::Lse)),
        output(p)[0],
    ])
}

pub(super) fn pages(p: &Problem) -> Result<Pages> {
    p.pages.ok_or_else(|| Error::NoKernel("the KV cache is not paged".to_owned()))
}
