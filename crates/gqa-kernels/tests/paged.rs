//! The kernels of a cache of blocks keep within their tensors, whatever lengths, tables and slots are. What they compute, `tests/tests/paged.rs` compares with the definition.

#[allow(dead_code, reason = "each test uses a part")]
mod support;

use gqa_kernels::num::DType;
use gqa_kernels::params::{PagedParams, RotaryParams, Strides};
use gqa_sim::Arg;
use proptest::prelude::*;
use support::{entry, start};

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
        [has_slots, moves, by_token] in any::<[bool; 3]>(),
        seed in any::<u64>(),
    ) {
        let (q_heads, kv_heads, head_size) = (2, 1, 16);
        let strides = |heads: u32| {
            Strides { batch: 0, head: u64::from(head_size), row: u64::from(heads * head_size) }
        };
        let p = PagedParams {
            q: strides(q_heads), k: strides(kv_heads), v: strides(kv_heads),
            rotary: RotaryParams { dim: 16, max_positions: 3, ..RotaryParams::default() },
            batch, q_heads, kv_heads, head_size, row_vectors: head_size / 4, q_len, tokens,
            capacity: (per_sequence * block_size).min(7), blocks, block_size, per_sequence,
            moves_queries: moves.into(), per_channel: 0, by_token: (by_token && !moves).into(),
        };
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
        start(entry("paged_append", DType::F32), 2, seed, &[
            Arg::read(&q), Arg::read(&kv), Arg::read(&kv), Arg::read(&angles), Arg::read(&angles), Arg::null(), Arg::read(starts),
            Arg::read(past), Arg::read(table), slots(), if moves { Arg::write(&mut padded) } else { Arg::null() },
            Arg::write(&mut k_cache), Arg::write(&mut v_cache), Arg::params(&p),
        ]).or_else(overlaps)?;
        let (scale, mut codes) = ([0.5f32], [(); 2].map(|()| vec![0u16; k_cache.len() / 2]));
        let [k_codes, v_codes] = &mut codes;
        start(entry("paged_append_codes_i8", DType::F32), 2, seed, &[
            Arg::read(&q), Arg::read(&kv), Arg::read(&kv), Arg::read(&angles), Arg::read(&angles), Arg::null(), Arg::read(&scale),
            Arg::read(&scale), Arg::read(starts), Arg::read(past), Arg::read(table), slots(),
            if moves { Arg::write(&mut padded) } else { Arg::null() }, Arg::write(k_codes), Arg::write(v_codes), Arg::params(&p),
        ]).or_else(overlaps)?;
        start(entry("paged_gather", DType::F32), 2, seed, &[
            Arg::read(starts), Arg::read(past), Arg::read(table), slots(), Arg::read(&k_cache), Arg::read(&v_cache),
            Arg::write(&mut present_k), Arg::write(&mut present_v), Arg::write(&mut lengths), Arg::params(&p),
        ])?;
        prop_assert!(lengths.iter().all(|&last| (-1..p.capacity as i32).contains(&last)));
        start(entry("paged_scatter", DType::F32), 2, seed, &[
            Arg::read(&padded), Arg::read(starts), Arg::read(past), Arg::write(&mut out), Arg::params(&p),
        ]).or_else(overlaps)?;
    }
}

/// Integers that make two blocks write the same row are no fault of the kernel's.
fn overlaps(error: TestCaseError) -> Result<(), TestCaseError> {
    if error.to_string().contains("both write") { Ok(()) } else { Err(error) }
}
