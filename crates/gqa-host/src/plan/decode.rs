//! A token step in one launch: when, with which kernel, in which clusters.

use super::attention::{Task, writes};
use super::decision::Rejection;
use super::launch::{Scratch, element, launch, tensor, u32_of};
use super::params::{arguments, params};
use super::prologue::{Rows, rotary_params};
use super::switches::Switches;
use super::{Arg, DeviceInfo, Launch, TensorId};
use crate::{CacheBinding, Pages, Problem, Result};
use bytemuck::Zeroable;
use gqa_kernels::attention::decode::{self, Shape};
use gqa_kernels::num::Format;
use gqa_kernels::params::{DecodeParams, PagedDecodeParams, RotaryParams, Strides};
use gqa_kernels::registry::{Entry, Family, entries};

/// The clusters of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clusters {
    /// Blocks of each.
    ranks: u32,
    /// How many share a row tile's keys.
    pub(super) parts: u32,
}

/// Whether the kernel also rotates and appends: where the cache is shared and holds what it reads, it takes the new rows as they are given.
pub(super) fn is_fused(p: &Problem, entry: &Entry, fused: bool) -> bool {
    let codes = p.quantised.map(|how| how.format);
    fused && p.cache == CacheBinding::Shared && entry.codes == codes
}

/// Most packed query rows. Row tiles read the keys each for itself: where all run at a time, keys come from memory once, and that is faster than
/// the larger tiles of other kernels (`docs/perf-log.md`).
const MAX_ROWS: usize = 128;

/// The kernel for the call's type, head size and rows: as few row tiles as there can be.
pub(super) fn entry(
    p: &Problem,
    family: Family,
    device: &DeviceInfo,
    forced: Option<&'static Entry>,
) -> Result<&'static Entry, Rejection> {
    const SM: u32 = 90;
    if device.sm != SM {
        return Err(Rejection::Architecture { have: device.sm, need: SM });
    }
    let codes = p.quantised.map(|how| how.format);
    let mine = || {
        let reads = |entry: &&Entry| entry.codes.is_none() || entry.codes == codes;
        entries().filter(move |entry| entry.family == family).filter(reads)
    };
    let is_whole = |entry: &&Entry| entry.min_blocks == 1;
    let typed = || mine().filter(|entry| element(p.dtype) == Some(entry.dtype));
    if typed().next().is_none() {
        return Err(Rejection::ElementType { got: p.dtype });
    }
    let written = || typed().filter(|entry| writes(entry, p));
    if written().next().is_none() {
        return Err(Rejection::OutputType { got: p.out_dtype });
    }
    let sized = || written().filter(|entry| entry.head_size as usize == p.head_size);
    let rows = p.packed_rows();
    let chosen = match forced {
        Some(forced) => sized().find(|entry| entry.name == forced.name),
        None => sized()
            .filter(is_whole)
            .min_by_key(|entry| (rows.div_ceil(entry.rows as usize), entry.rows)),
    };
    let entry = chosen.ok_or(Rejection::OtherHeadSize { got: p.head_size })?;
    if [p.keys_read(), p.values_read()].iter().any(|layout| layout.row != p.head_size) {
        return Err(Rejection::Strided);
    }
    if forced.is_none() {
        let tiles = rows.div_ceil(entry.rows as usize);
        let clusters = tiles.saturating_mul(p.kv_heads).saturating_mul(p.batch);
        if rows > MAX_ROWS {
            return Err(Rejection::Rows { got: rows, max: MAX_ROWS as u32 });
        }
        if tiles > 1 && clusters > device.multiprocessors as usize {
            return Err(Rejection::RowTiles { got: clusters, max: device.multiprocessors });
        }
    }
    if p.cache == CacheBinding::Shared && p.new_len > entry.keys as usize {
        return Err(Rejection::NewRows { got: p.new_len, max: entry.keys });
    }
    if entry.shared_bytes > device.shared_bytes {
        return Err(Rejection::SharedMemory {
            have: device.shared_bytes,
            need: entry.shared_bytes,
        });
    }
    Ok(entry)
}

/// Codes in the room of an element of 16 bits.
fn codes_per_element(entry: &Entry) -> u32 {
    match entry.codes {
        None => 1,
        Some(Format::Int8 | Format::Float8) => 2,
        Some(Format::Int4) => 4,
    }
}

/// The same kernel in blocks of which a multiprocessor holds two, if it has room for them.
fn half_of(entry: &Entry, device: &DeviceInfo) -> Option<&'static Entry> {
    /// What a block takes of a multiprocessor's shared memory besides its own.
    const RESERVED: u32 = 1024;
    let fits = |half: &&Entry| 2 * half.shared_bytes + RESERVED <= device.shared_bytes;
    half_like(entry).filter(fits)
}

/// The same kernel in blocks of half the size.
fn half_like(entry: &Entry) -> Option<&'static Entry> {
    let is_like = |other: &&Entry| {
        other.family == entry.family
            && other.dtype == entry.dtype
            && (other.head_size, other.rows) == (entry.head_size, entry.rows)
            && other.arguments == entry.arguments
            && other.min_blocks == 2
    };
    entries().find(is_like)
}

/// The switches' clusters, or those with which the call ends first, and the kernel for them: `entry` or, unless that is forced, its half.
pub(super) fn clusters(
    p: &Problem,
    entry: &'static Entry,
    device: &DeviceInfo,
    switches: &Switches,
) -> Result<(&'static Entry, Clusters), Rejection> {
    check_blocks(p, entry, Clusters { ranks: 1, parts: 1 })?;
    let mut params = params(p, Strides::zeroed(), 1).map_err(|_| Rejection::TooLarge)?;
    // Keys cost what their bytes cost.
    params.head_size /= codes_per_element(entry);
    let keys = p.most_keys();
    let (entry, clusters) = match (switches.cluster, switches.splits) {
        (None, None) => {
            let half = if switches.force.is_none() { half_of(entry, device) } else { None };
            let Shape { ranks, parts, together } =
                decode::shape(&params, entry.rows, keys, device.multiprocessors, half.is_some());
            let entry = half.filter(|_| together == 2).unwrap_or(entry);
            (entry, Clusters { ranks, parts })
        }
        (ranks, parts) => {
            (entry, Clusters { ranks: ranks.unwrap_or(1), parts: parts.unwrap_or(1) })
        }
    };
    check_blocks(p, entry, clusters)?;
    let need = decode::arrivals(&params, entry.rows, clusters.ranks, clusters.parts);
    if need > MAX_COUNTERS {
        return Err(Rejection::Counters { need, max: MAX_COUNTERS });
    }
    Ok((entry, clusters))
}

/// Errs where there are more blocks than CUDA starts.
fn check_blocks(p: &Problem, entry: &Entry, clusters: Clusters) -> Result<(), Rejection> {
    const MAX: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];
    let row_tiles = p.packed_rows().div_ceil(entry.rows as usize);
    let blocks = clusters.ranks as usize * clusters.parts as usize;
    let grid = [blocks, p.kv_heads, row_tiles.saturating_mul(p.batch)];
    let fits = grid.iter().zip(MAX).all(|(&blocks, max)| blocks <= max);
    let all = grid.iter().try_fold(1usize, |all, &blocks| all.checked_mul(blocks));
    (fits && all.is_some_and(|all| all <= u32::MAX as usize))
        .then_some(())
        .ok_or(Rejection::TooLarge)
}

/// Most counters of a call: what is shared among so many blocks does not need parts.
const MAX_COUNTERS: usize = 1 << 16;

/// The launch; `rows` are where a prologue left them, or else where the caller has them.
pub(super) fn launches(
    p: &Problem,
    device: &DeviceInfo,
    entry: &'static Entry,
    clusters: Clusters,
    rows: Rows,
    task: Task,
    scratch: &mut Scratch,
) -> Result<Vec<Launch>> {
    let Clusters { ranks, parts } = clusters;
    let fused = is_fused(p, entry, task.fused);
    let appends = fused && !task.appended;
    let mut attention = params(p, rows.query.strides, 1)?;
    if p.pages.is_some() {
        let [head, row] = [p.head_size as u64, (p.kv_heads * p.head_size) as u64];
        (attention.k, attention.v) = ([(); 2].map(|()| Strides { batch: 0, head, row })).into();
        attention.out.batch = 0;
    }
    let codes = p.quantised.filter(|_| entry.codes.is_some());
    if let Some(how) = codes {
        let bytes = |numbers: Strides| {
            let per_byte = how.codes_per_element() as u64;
            let [batch, head, row] =
                [numbers.batch, numbers.head, numbers.row].map(|stride| stride / per_byte);
            Strides { batch, head, row }
        };
        (attention.k, attention.v) = (bytes(attention.k), bytes(attention.v));
    }
    let params = DecodeParams {
        new_k: rows.key.strides,
        new_v: rows.value.strides,
        rotary: if fused {
            rotary_params(p.rotary, u32_of("a row of position_ids", position_stride(p))?)?
        } else {
            RotaryParams::zeroed()
        },
        new_len: if appends { u32_of("new keys", p.new_len)? } else { 0 },
        parts,
        clusters: decode::clusters(&attention, entry.rows),
        rows: entry.rows,
        at_a_time: device.multiprocessors * entry.min_blocks,
        // The launch that normalises begins when all before it has ended, and writes scratch.
        settled: u32::from(appends && (p.settled || p.qk_norm.is_some())),
        ahead: u32::from(asks_ahead(p, entry, clusters, appends && p.new_len > 0)),
        per_channel: codes.is_some_and(|how| how.per_channel).into(),
        attention,
    };
    let mut bound = arguments(p, &rows);
    let given = |arg: Arg| if fused { arg } else { Arg::Null };
    let new = |arg: Arg| if appends { arg } else { Arg::Null };
    bound.extend([
        ("new_k", new(rows.key.arg)),
        ("new_v", new(rows.value.arg)),
        ("cos", given(tensor(p, TensorId::CosCache, 0))),
        ("sin", given(tensor(p, TensorId::SinCache, 0))),
        ("position_ids", given(tensor(p, TensorId::PositionIds, 0))),
        ("k_scale", tensor(p, TensorId::KScale, 0)),
        ("v_scale", tensor(p, TensorId::VScale, 0)),
    ]);
    let [out, states, arrivals] = if parts > 1 {
        let (out, states) = decode::partial_elements(&params, ranks);
        let counters = decode::arrivals(&params.attention, entry.rows, ranks, parts);
        [
            scratch.take(out, size_of::<f32>())?,
            scratch.take(states, size_of::<[f32; 2]>())?,
            scratch.count(counters),
        ]
    } else {
        [Arg::Null; 3]
    };
    bound.extend([("partial_out", out), ("partial_states", states), ("arrivals", arrivals)]);
    let grid = decode::grid(&params, ranks);
    let launch = match p.pages {
        None => launch(entry, grid, &bound, &params)?,
        Some(pages) => {
            let single = task.longest == 1 && pages.tokens == p.batch;
            let starts = tensor(p, TensorId::CumulativeSequenceLength, 0);
            bound.extend([
                ("starts", if single { Arg::Null } else { starts }),
                ("past_seqlens", tensor(p, TensorId::SeqlensK, 0)),
                ("block_table", tensor(p, TensorId::BlockTable, 0)),
            ]);
            launch(entry, grid, &bound, &paged(params, pages, task.longest)?)?
        }
    };
    Ok(vec![Launch { cluster: ranks, programmatic: true, ..launch }])
}

/// What a step over blocks is told besides.
fn paged(decode: DecodeParams, pages: Pages, longest: usize) -> Result<PagedDecodeParams> {
    Ok(PagedDecodeParams {
        decode,
        per_sequence: u32_of("blocks of a sequence", pages.per_sequence)?,
        log_block_size: pages.block_size.ilog2(),
        blocks: u32_of("blocks", pages.blocks)?,
        tokens: u32_of("tokens", pages.tokens)?,
        longest: u32_of("query rows", longest)?,
        reserved: 0,
    })
}

/// Whether teams ask for their first keys before they know how many there are. Rows that the call appends must not be among them, unless one cluster
/// alone reads them; it appends them later than otherwise if it has several ranks and few keys, which then costs more than asking early brings
/// (`docs/perf-log.md`). A table of blocks says nothing of keys that there are not: whose rows those would be, the others' appends may be among.
fn asks_ahead(p: &Problem, entry: &Entry, clusters: Clusters, appends: bool) -> bool {
    let Clusters { ranks, parts } = clusters;
    let row_tiles = p.packed_rows().div_ceil(entry.rows as usize);
    let is_alone = parts == 1 && row_tiles == 1;
    let most_ahead = (ranks * entry.threads / 32 * entry.keys) as usize;
    let has_more = ranks == 1 || p.total_len > 2 * most_ahead;
    p.window.is_none() && p.pages.is_none() && has_more && (!appends || is_alone)
}

pub(super) fn position_stride(p: &Problem) -> usize {
    p.rotary.and_then(|rotary| rotary.explicit).unwrap_or(0)
}
