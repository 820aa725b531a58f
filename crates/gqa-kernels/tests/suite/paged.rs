//! The kernels of a paged KV cache keep within their tensors, whatever lengths, tables and slots
//! are. What they compute, `tests/tests/paged.rs` compares with the definition.

use crate::support::{entry, start};
use bytemuck::Zeroable;
use gqa_kernels::attention::{decode, hopper, tiled};
use gqa_kernels::concept::pages::{CONSECUTIVE, LOG_CONTIGUOUS};
use gqa_kernels::num::{DType, Format, bf16};
use gqa_kernels::params::scales::PER_TOKEN;
use gqa_kernels::params::{
    AttentionParams, DecodeParams, HopperParams, PageSteps, PagedDecodeParams, PagedGapsParams,
    PagedHopperParams, PagedParams, PagedTiledParams, RotaryParams, Strides,
};
use gqa_kernels::prologue::dequantize;
use gqa_sim::{Arg, Launch, launch};
use proptest::prelude::*;

/// Small numbers, and any.
fn integers(count: usize) -> impl Strategy<Value = Vec<i32>> {
    prop::collection::vec(prop_oneof![3 => -2..=12i32, 1 => any::<i32>()], count)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// The simulator faults on any access outside a tensor.
    #[test]
    fn no_integer_leads_outside(
        (batch, q_len, tokens) in (1..=3u32, 1..=4u32, 1..=6u32),
        (block_size, blocks, per_sequence) in (1..=5u32, 1..=4u32, 1..=3u32),
        integers in [integers(4), integers(3), integers(9), integers(6)],
        [has_slots, moves, by_token, counts_new, by_row] in any::<[bool; 5]>(),
        (window, format, seed) in (0..=5u32, 0..=2u32, any::<u64>()),
    ) {
        let (q_heads, kv_heads, head_size) = (2, 1, 16);
        let strides = |heads: u32| {
            Strides { batch: 0, head: u64::from(head_size), row: u64::from(heads * head_size) }
        };
        let in_bytes = |head_bytes: u32, p: PagedParams| {
            let steps = PageSteps { block: block_size, row: 1, unit: kv_heads * head_bytes, reserved: 0 };
            PagedParams { steps, head_bytes, ..p }
        };
        let p = PagedParams {
            q: strides(q_heads), k: strides(kv_heads), v: strides(kv_heads),
            rotary: RotaryParams { dim: 16, max_positions: 3, ..RotaryParams::default() },
            batch, q_heads, kv_heads, head_size, row_vectors: head_size / 4, q_len, tokens,
            value_heads: kv_heads, v_head_size: head_size,
            capacity: (per_sequence * block_size).min(7), blocks, per_sequence,
            block_size: if block_size == 1 && !has_slots { CONSECUTIVE } else { block_size },
            moves_queries: moves.into(), scales: if by_row { PER_TOKEN } else { 0 }, by_token: (by_token && !moves).into(), least: 2, window, counts_new: counts_new.into(), format,
            ..PagedParams::zeroed()
        };
        let p = in_bytes(4 * head_size, p);
        let rows = |count: u32, heads: u32| vec![0.5f32; (count * heads * head_size) as usize];
        let [starts, past, table, slots] = integers;
        let (starts, past) = (&starts[..batch as usize + 1], &past[..batch as usize]);
        let (table, slots) = (&table[..(batch * per_sequence) as usize], &slots[..tokens as usize]);
        let slots = || if has_slots { Arg::read(slots) } else { Arg::null() };
        let (q, kv, angles) = (rows(tokens, q_heads), rows(tokens, kv_heads), vec![0.5f32; 3 * 8]);
        let [mut k_cache, mut v_cache] = [(); 2].map(|()| rows(blocks * block_size, kv_heads));
        let [mut present_k, mut present_v] = [(); 2].map(|()| rows(batch * p.capacity, kv_heads));
        let (mut padded, mut out) = (rows(batch * q_len, q_heads), rows(tokens, q_heads));
        let mut lengths = vec![-7i32; batch as usize];
        let (row_lse, mut lse) =
            (vec![0.5f32; (batch * q_len * q_heads) as usize], vec![0.5f32; (tokens * q_heads) as usize]);
        start(entry("paged_append", DType::F32), 2, seed, &[
            Arg::read(&q), Arg::read(&kv), Arg::read(&kv), Arg::read(&angles), Arg::read(&angles), Arg::null(), Arg::read(starts),
            Arg::read(past), Arg::read(table), slots(), if moves { Arg::write(&mut padded) } else { Arg::null() },
            Arg::write(&mut k_cache), Arg::write(&mut v_cache), Arg::params(&p),
        ]).or_else(overlaps)?;
        let mut codes = [(); 2].map(|()| vec![0u16; k_cache.len() / 2]);
        let of_codes = in_bytes(head_size, p);
        let [k_codes, v_codes] = &mut codes;
        let count = if by_row { blocks * block_size * kv_heads } else { 1 };
        let [mut k_scale, mut v_scale] = [(); 2].map(|()| vec![0.5f32; count as usize]);
        let [mut k_gathered, mut v_gathered] = [(); 2].map(|()| vec![0.5f32; (batch * kv_heads * p.capacity) as usize]);
        start(entry("paged_append_quantized", DType::F32), 2, seed, &[
            Arg::read(&q), Arg::read(&kv), Arg::read(&kv), Arg::read(&angles), Arg::read(&angles), Arg::null(), Arg::write(&mut k_scale),
            Arg::write(&mut v_scale), Arg::read(starts), Arg::read(past), Arg::read(table), slots(),
            if moves { Arg::write(&mut padded) } else { Arg::null() }, Arg::write(k_codes),
            Arg::write(v_codes), Arg::params(&of_codes),
        ]).or_else(overlaps)?;
        start(entry("paged_gather", DType::F32), 2, seed, &[
            Arg::read(starts), Arg::read(past), Arg::read(table), slots(), Arg::read(&k_cache), Arg::read(&v_cache),
            Arg::write(&mut present_k), Arg::write(&mut present_v), Arg::write(&mut lengths),
            if by_row { Arg::read(&k_scale) } else { Arg::null() }, if by_row { Arg::read(&v_scale) } else { Arg::null() },
            Arg::write(&mut k_gathered), Arg::write(&mut v_gathered), Arg::params(&p),
        ])?;
        let numbers = (batch * dequantize::blocks_of_sequence(p.capacity)) as usize;
        let values = vec![bf16::ZERO; numbers * (dequantize::BLOCK * kv_heads * head_size) as usize];
        let ([mut k, mut v], mut tables) = ([values.clone(), values], vec![-7i32; numbers]);
        start(entry("paged_dequantize", DType::BF16), 2, seed, &[
            Arg::read(&k_scale), Arg::read(&v_scale), Arg::read(starts), Arg::read(past), Arg::read(table), Arg::read(&k_codes[..]),
            Arg::read(&v_codes[..]), Arg::write(&mut k), Arg::write(&mut v), Arg::write(&mut tables),
            Arg::params(&of_codes),
        ])?;
        prop_assert!((0..).zip(&tables).all(|(own, &table)| table == -7 || table == own));
        prop_assert!(lengths.iter().all(|&last| (-1..p.capacity as i32).contains(&last)));
        start(entry("paged_scatter", DType::F32), 2, seed, &[
            Arg::read(&padded), Arg::read(&row_lse), Arg::read(starts), Arg::read(past), Arg::write(&mut out),
            Arg::write(&mut lse), Arg::params(&p),
        ]).or_else(overlaps)?;
        let gaps = PagedGapsParams {
            paged: PagedParams { least: 0, ..if by_token { of_codes } else { p } },
            format: Format::Int8 as u32, parts: 2, causal: has_slots.into(),
            lack_rows: moves.into(), sink: 0, scale: 0.25, softcap: 0.0, reserved: 0,
        };
        let words = vec![-1i64; tokens as usize];
        let (has_codes, has_tree) = (by_token, moves && !has_slots);
        let [k_codes, v_codes] = codes.each_ref().map(|codes| bytemuck::cast_slice::<u16, u8>(codes));
        let only = |when: bool, arg| if when { arg } else { Arg::null() };
        start(entry("paged_gaps", DType::F32), 2, seed, &[
            Arg::read(&q), Arg::read(&angles), Arg::read(&angles), Arg::read(starts), Arg::read(past), Arg::read(table),
            only(!has_codes, Arg::read(&k_cache)), only(!has_codes, Arg::read(&v_cache)), only(has_codes, Arg::read(k_codes)), only(has_codes, Arg::read(v_codes)),
            Arg::read(&k_scale), Arg::read(&v_scale), only(has_tree, Arg::read(&words)), Arg::null(), Arg::write(&mut out), Arg::write(&mut lse), Arg::params(&gaps),
        ]).or_else(overlaps)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// Nor do they in a step over blocks, which may leave sequences to another launch.
    #[test]
    fn no_integer_leads_a_step_outside(
        (batch, q_len, more, tokens) in (1..=3u32, 1..=4u32, 0..=3u32, 1..=6u32),
        (per_sequence, spare, capacity) in (1..=2u32, 0..=2u32, 7..=32u32),
        [starts, past, table] in [integers(4), integers(3), integers(6)],
        [appends, has_starts, has_tree, counts_new] in any::<[bool; 4]>(),
        words in prop::collection::vec(any::<i64>(), 6),
        seed in any::<u64>(),
    ) {
        let (q_heads, kv_heads, head_size, rows) = (4, 2, 64, 16);
        let height = if has_tree { 16 } else { 8 };
        let blocks = batch * per_sequence + spare;
        let strides = |heads: u32| {
            Strides { batch: 0, head: u64::from(head_size), row: u64::from(heads * head_size) }
        };
        let (of_queries, of_keys) = (strides(q_heads), strides(kv_heads));
        let attention = AttentionParams {
            q: of_queries, k: of_keys, v: of_keys, out: of_queries, batch, q_heads, kv_heads, head_size, q_len,
            capacity: capacity.min(per_sequence * rows), causal: u32::from(!has_tree), scale: 0.125, ..AttentionParams::zeroed()
        };
        let p = PagedDecodeParams {
            decode: DecodeParams {
                attention, new_k: of_keys, new_v: of_keys,
                rotary: RotaryParams { dim: 64, max_positions: 3, ..RotaryParams::default() },
                new_len: if appends { q_len } else { 0 }, splits: 1, clusters: decode::clusters(&attention, height), rows: height,
                at_a_time: 4, ..DecodeParams::zeroed()
            },
            steps: steps(rows, of_keys), per_sequence, log_block_size: rows.ilog2(), blocks,
            tokens: tokens.max(batch), longest: q_len + more, counts_new: counts_new.into(),
        };
        let values = |count: u32| vec![bf16::from_f32(0.5); (count * head_size) as usize];
        let (q, kv, angles) = (values(p.tokens * q_heads), values(p.tokens * kv_heads), vec![bf16::from_f32(0.5); 3 * 32]);
        let [mut k, mut v] = [(); 2].map(|()| values(blocks * rows * kv_heads));
        let mut out = values(p.tokens * q_heads);
        let (mut starts, past) = (starts[..batch as usize + 1].to_vec(), &past[..batch as usize]);
        // Sequences of the same tokens, or blocks of several that append, would be a race that no
        // kernel can help.
        starts.sort_unstable();
        let own: Vec<_> = (0..(batch * per_sequence) as i32).collect();
        let table = if appends { &own[..] } else { &table[..own.len()] };
        let new = || if appends { Arg::read(&kv) } else { Arg::null() };
        let name = if has_tree { "decode_bf16_d64_r16" } else { "decode_bf16_d64_r8" };
        let entry = entry(name, DType::BF16);
        let shape = Launch {
            name: entry.name, grid: decode::grid(&p.decode, 1), threads: entry.threads, shared_bytes: entry.shared_bytes, seed, cluster: 1,
            communicates: entry.communicates, programmatic: true,
        };
        let mut lse = vec![0.5f32; (p.tokens * q_heads) as usize];
        let arguments = [
            Arg::read(&q), new(), new(), Arg::read(&angles), Arg::read(&angles), Arg::null(),
            Arg::read(past), Arg::null(), if has_starts { Arg::read(&starts) } else { Arg::null() }, Arg::read(table), Arg::null(),
            // Those that there are, and no more.
            if has_tree { Arg::read(&words[..p.tokens as usize]) } else { Arg::null() },
            Arg::write(&mut k), Arg::write(&mut v), Arg::write(&mut out), Arg::null(), Arg::null(), Arg::null(),
            Arg::write(&mut lse), Arg::null(), Arg::null(), Arg::null(), Arg::null(), Arg::params(&p),
        ];
        let started = launch(&shape, &entry.simulate, &arguments);
        prop_assert!(started.is_ok(), "{}", started.unwrap_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// Nor do they in a prefill over blocks, which may leave sequences to another launch.
    #[test]
    fn no_integer_leads_a_prefill_outside(
        (batch, q_len, tokens, least) in (1..=3u32, 1..=70u32, 1..=100u32, 0..=3u32),
        (per_sequence, blocks, capacity) in (1..=2u32, 1..=5u32, 70..=128u32),
        [starts, past, table] in [integers(4), integers(3), integers(6)],
        [causal, rotates, has_lse, counts_new] in any::<[bool; 4]>(),
        (window, seed) in (0..=40u32, any::<u64>()),
    ) {
        let (q_heads, kv_heads, head_size, rows) = (4, 2, 64, 64);
        let strides = |heads: u32| {
            Strides { batch: 0, head: u64::from(head_size), row: u64::from(heads * head_size) }
        };
        let (of_queries, of_keys) = (strides(q_heads), strides(kv_heads));
        let attention = AttentionParams {
            q: of_queries, k: of_keys, v: of_keys, out: of_queries, batch, q_heads, kv_heads, head_size, q_len,
            capacity: capacity.min(per_sequence * rows), causal: causal.into(), window: if causal { window } else { 0 }, scale: 0.125,
            ..AttentionParams::zeroed()
        };
        let p = PagedTiledParams {
            attention, rotary: RotaryParams { dim: if rotates { 64 } else { 0 }, max_positions: 3, ..RotaryParams::default() },
            steps: steps(rows, of_keys), tokens, per_sequence, log_block_size: rows.ilog2(), blocks,
            least, counts_new: counts_new.into(),
        };
        let values = |count: u32| vec![bf16::from_f32(0.5); (count * head_size) as usize];
        let (q, kv, angles) = (values(tokens * q_heads), values(blocks * rows * kv_heads), vec![bf16::from_f32(0.5); 3 * 32]);
        let (mut out, mut lse) = (values(tokens * q_heads), vec![0.5f32; (tokens * q_heads) as usize]);
        // Sequences of many tokens, too.
        let starts: Vec<_> = starts[..=batch as usize].iter().map(|start| start.wrapping_mul(8)).collect();
        let table = &table[..(batch * per_sequence) as usize];
        let entry = entry("tiled_paged_bf16_d64", DType::BF16);
        let [blocks, ..] = tiled::paged_grid(&p, entry.rows);
        start(entry, blocks, seed, &[
            Arg::read(&q), Arg::read(&kv), Arg::read(&kv), Arg::read(&angles), Arg::read(&angles), Arg::read(&starts),
            Arg::read(&past[..batch as usize]), Arg::read(table), Arg::null(), Arg::write(&mut out),
            if has_lse { Arg::write(&mut lse) } else { Arg::null() }, Arg::params(&p),
        ]).or_else(overlaps)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// Nor do they where CTAs divide the work of a prefill. Ranges begin one behind the other, and
    /// each CTA has the row tiles of its own; by a schedule they are the same. The cache may be
    /// contiguous.
    #[test]
    fn no_integer_leads_a_division_outside(
        (batch, q_len, tokens, ctas) in (1..=40u32, 1..=300u32, 1..=600u32, 1..=20u32),
        (tile_heads, groups, capacity) in (1..=8u32, 1..=3u32, 300..=5000u32),
        [starts, past] in [integers(41), integers(40)],
        [causal, counts_new, contiguous, first_prompt] in any::<[bool; 4]>(),
        (window, times, seed) in (0..=600u32, 1..=50i32, any::<u64>()),
    ) {
        let (log_block_size, per_sequence, tokens) = match contiguous {
            true => (LOG_CONTIGUOUS, q_len, batch * q_len),
            false => (0, 0, tokens),
        };
        let attention = AttentionParams {
            batch, q_heads: tile_heads * groups, kv_heads: groups, head_size: 128, q_len, capacity,
            first_prompt: first_prompt.into(), causal: causal.into(), window: if causal { window } else { 0 },
            ..AttentionParams::zeroed()
        };
        let p = PagedHopperParams {
            hopper: HopperParams { attention, ..HopperParams::zeroed() },
            tokens, counts_new: counts_new.into(), tile_heads, ctas, columns: 128, shortest: 2,
            keys: 128, blocks: 1, log_block_size, per_sequence,
            ..PagedHopperParams::zeroed()
        };
        // Sequences of many tokens, too.
        let long = |integers: &[i32]| -> Vec<_> {
            integers.iter().map(|i| i.wrapping_mul(times)).collect()
        };
        let (starts, past) = (long(&starts[..=batch as usize]), long(&past[..batch as usize]));
        let divided = |given| {
            hopper::divided(&starts, &past, given, &p, seed)
                .map_err(|fault| TestCaseError::fail(fault.to_string()))
        };
        let [row_tiles, range_starts] = divided(None)?;
        let made = hopper::made(&starts, &past, &p, seed)
            .map_err(|fault| TestCaseError::fail(fault.to_string()))?;
        let right = [row_tiles.clone(), range_starts.clone()];
        prop_assert_eq!(&divided(Some(&made))?, &right);
        // A word of other lengths, shapes or ranges.
        let mut damaged = made.clone();
        damaged[seed as usize % hopper::words_read(batch as usize, ctas)] ^= 1 << (seed % 32);
        prop_assert_eq!(&divided(Some(&damaged))?, &right);
        let places = range_starts.chunks(8).map(|place| [place[0], place[1], place[2]]);
        let begins: Vec<_> = places.collect();
        let end = begins[ctas as usize];
        prop_assert!(begins.is_sorted() && begins[0] == [0; 3], "{begins:?}");
        prop_assert!(end[1..] == [0, 0] && end[0] <= hopper::most_row_tiles(&p), "{begins:?}");
        let is_inside = |&[row_tile, group, _]: &[u32; 3]| row_tile <= end[0] && group < groups;
        prop_assert!(begins.iter().all(is_inside), "{begins:?}");
        for (cta, range) in begins.windows(2).enumerate() {
            let behind = range[1][0] + u32::from(range[1][1] + range[1][2] > 0);
            for row_tile in range[0][0]..behind {
                let words = &row_tiles[12 * (row_tile as usize + cta)..][..12];
                prop_assert!(words[1] > words[0] && words[4] < batch, "{cta}: {words:?}");
            }
        }
    }
}

/// Rows of a contiguous cache in blocks of as many.
fn steps(rows: u32, keys: Strides) -> PageSteps {
    PageSteps { block: rows, row: 1, unit: keys.row as u32, reserved: 0 }
}

/// Integers that make two blocks write the same row are no fault of the kernel's.
fn overlaps(error: TestCaseError) -> Result<(), TestCaseError> {
    if error.to_string().contains("both write") { Ok(()) } else { Err(error) }
}
