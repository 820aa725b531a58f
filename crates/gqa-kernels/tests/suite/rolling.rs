//! The kernels of a rolling KV cache, on the simulator, against rows that come and go one by one.

use crate::support::{entry, optional, query_seqlens, some_tokens, start};
use gqa_kernels::concept::seqlen::{Lengths, Seqlen};
use gqa_kernels::num::{DType, Element, bf16, f16};
use gqa_kernels::params::{RollingBiasParams, RollingParams, Strides};
use gqa_sim::Arg;
use proptest::prelude::*;
use std::cell::Cell;

/// One call.
#[derive(Clone, Debug)]
struct Case {
    kv_heads: u32,
    row_vectors: u32,
    q_len: u32,
    window: u32,
    /// Rows of the cache beyond the window.
    spare: u32,
    first_prompt: bool,
    tokens: Option<Vec<u32>>,
    /// Of each sequence, after the call.
    totals: Vec<u32>,
    clears: bool,
    blocks: u32,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let rows = (1..=4u32, prop_oneof![4 => 1..=12u32, 1 => 500..=1100u32], 0..=9u32);
    let sizes = (1..=3u32, 1..=9u32, prop::collection::vec(0..=40u32, 1..=3));
    (rows, sizes, any::<[bool; 2]>(), 1..=4u32, any::<u64>()).prop_map(
        |(
            (q_len, window, spare),
            (kv_heads, row_vectors, lengths),
            [prompt, clears],
            blocks,
            seed,
        )| {
            let first_prompt = prompt && q_len > 1;
            // Around what the cache holds.
            let total = |length: u32| q_len + length + window.saturating_sub(20);
            let totals: Vec<_> = if first_prompt {
                vec![q_len; lengths.len()]
            } else {
                lengths.into_iter().map(total).collect()
            };
            let tokens = some_tokens(seed, q_len, &totals);
            Case {
                kv_heads,
                row_vectors,
                q_len,
                window,
                spare,
                first_prompt: first_prompt && tokens.is_none(),
                tokens,
                totals,
                clears,
                blocks,
                seed,
            }
        },
    )
}

impl Case {
    fn capacity(&self) -> u32 {
        self.window + self.spare
    }

    fn batch(&self) -> u32 {
        self.totals.len() as u32
    }

    fn tokens(&self, b: u32) -> u32 {
        let tokens = self.tokens.as_ref().map_or(self.q_len, |tokens| tokens[b as usize]);
        tokens.min(self.q_len)
    }

    /// query_seqlens, if there is one.
    fn query_seqlens(&self) -> Option<Vec<i32>> {
        let some =
            self.tokens.as_ref().map(|_| (0..self.batch()).map(|b| self.tokens(b)).collect());
        query_seqlens(&some)
    }

    fn past(&self, b: u32) -> u32 {
        Seqlen::new(
            Lengths { last: self.totals[b as usize] as i32 - 1, tokens: self.tokens(b) },
            u32::MAX,
            self.first_prompt,
        )
        .past
    }

    /// The sequence's rows in the cache after `total` have come: before the next one comes to a
    /// full cache, so many of the oldest go that it and those before it that it sees remain.
    fn resident(&self, total: u32) -> std::ops::Range<u32> {
        let mut first = 0;
        for row in 0..total {
            if row - first == self.capacity() {
                first = row + 1 - self.window;
            }
        }
        first..total
    }

    /// The first row that attention finds, and how many there are.
    fn attended(&self, b: u32, is_staged: bool) -> std::ops::Range<u32> {
        let total = self.totals[b as usize];
        let first =
            if is_staged { self.resident(self.past(b)).start } else { self.resident(total).start };
        first..total
    }

    fn params(&self, is_staged: bool) -> RollingParams {
        RollingParams {
            batch: self.batch(),
            kv_heads: self.kv_heads,
            row_vectors: self.row_vectors,
            q_len: self.q_len,
            window: self.window,
            capacity: self.capacity(),
            from_rows: self.capacity() + if is_staged { self.q_len } else { 0 },
            first_prompt: self.first_prompt.into(),
            staged: is_staged.into(),
            in_place: 0,
            clears: self.clears.into(),
        }
    }

    fn seqlens_k(&self) -> Vec<i32> {
        self.totals.iter().map(|&total| total as i32 - 1).collect()
    }

    /// A cache of so many rows, of which each head has these at its front, whose bytes tell head
    /// and row, and 0xee behind.
    fn cache(&self, rows: u32, held: impl Fn(u32) -> std::ops::Range<u32>) -> Vec<u32> {
        let mut cache = Vec::new();
        for head in 0..self.batch() * self.kv_heads {
            let held = held(head / self.kv_heads);
            for row in 0..rows {
                let number = held.start + row;
                let is_held = number < held.end;
                cache.extend((0..4 * self.row_vectors).map(|word| match is_held {
                    true => (head * 2048 + number) * 64 + word,
                    false => UNHELD,
                }));
            }
        }
        cache
    }

    /// What the cache is expected to hold after `rolling_kv` if it held `before`.
    fn expected(&self, before: &[u32], held: impl Fn(u32) -> std::ops::Range<u32>) -> Vec<u32> {
        let after = self.cache(self.capacity(), held);
        let behind = |before| if self.clears { 0 } else { before };
        after
            .iter()
            .zip(before)
            .map(|(&x, &before)| if x == UNHELD { behind(before) } else { x })
            .collect()
    }
}

const UNHELD: u32 = 0xeeee_eeee;

/// Checks the kernel that evicts rows to make room for a decode step's new row.
fn make_room(case: &Case, is_shared: bool) -> Result<(), TestCaseError> {
    let case = Case { q_len: 1, first_prompt: false, clears: !is_shared, ..case.clone() };
    let p = RollingParams { in_place: is_shared.into(), ..case.params(false) };
    let past = case.cache(case.capacity(), |b| case.resident(case.past(b)));
    let kept = |b: u32| {
        let held = case.attended(b, false);
        held.start.min(case.past(b))..case.past(b)
    };
    let mut present = if is_shared { past.clone() } else { vec![0x77; past.len()] };
    let expected = case.expected(&present, kept);
    let (mut other, mut from) = (present.clone(), past.clone());
    let (mut lengths, mut positions) =
        (vec![-7; case.totals.len()], vec![-7i64; case.totals.len()]);
    let (seqlens_k, query_seqlens) = (case.seqlens_k(), case.query_seqlens());
    {
        let [k, v] = [&mut present, &mut other]
            .map(|cache| Cell::from_mut(&mut cache[..]).as_slice_of_cells());
        let from = Cell::from_mut(&mut from[..]).as_slice_of_cells();
        let [from_k, from_v] = if is_shared { [k, v] } else { [from, from] };
        start(
            entry("rolling_kv", DType::F32),
            case.blocks,
            case.seed,
            &[
                Arg::cells(from_k),
                Arg::cells(from_v),
                Arg::cells(k),
                Arg::cells(v),
                Arg::read(&seqlens_k),
                optional(&query_seqlens),
                Arg::write(&mut lengths),
                Arg::write(&mut positions),
                Arg::params(&p),
            ],
        )?;
    }
    prop_assert!(present == expected, "keys");
    prop_assert!(other == expected, "values");
    for b in 0..case.batch() {
        prop_assert_eq!(lengths[b as usize], case.attended(b, false).len() as i32 - 1);
        prop_assert_eq!(positions[b as usize], i64::from(case.past(b)));
    }
    Ok(())
}

fn rolling_bias<T: Element>(case: &Case, is_staged: bool, heads: u32) -> Result<(), TestCaseError> {
    let q_len = if is_staged { case.q_len } else { 1 };
    let case = Case { q_len, first_prompt: false, ..case.clone() };
    let columns = case.totals.iter().copied().max().unwrap_or(1).max(1);
    let columns_out = columns.min(case.params(is_staged).from_rows);
    let rows = case.batch() * heads * q_len;
    // Every sixteenth number that the type holds, and others.
    let bias: Vec<T> = (0..rows * columns).map(|i| T::from_f32((i % 251) as f32)).collect();
    let strides = Strides {
        batch: u64::from(heads * q_len * columns),
        head: u64::from(q_len * columns),
        row: u64::from(columns),
    };
    let p = RollingBiasParams {
        bias: strides,
        slide: case.params(is_staged),
        heads,
        columns,
        columns_out,
    };
    let mut out = vec![T::from_f32(f32::NAN); (rows * columns_out) as usize];
    let (seqlens_k, query_seqlens) = (case.seqlens_k(), case.query_seqlens());
    start(
        entry("rolling_bias", T::DTYPE),
        case.blocks,
        case.seed,
        &[
            Arg::read(&bias),
            Arg::read(&seqlens_k),
            optional(&query_seqlens),
            Arg::write(&mut out),
            Arg::params(&p),
        ],
    )?;
    for (i, got) in out.into_iter().enumerate() {
        let (row, j) = (i as u32 / columns_out, i as u32 % columns_out);
        let held = case.attended(row / q_len / heads, is_staged);
        let want = if j < held.len() as u32 {
            bias[(row * columns + held.start + j) as usize].to_f32()
        } else {
            0.0
        };
        prop_assert_eq!(got.to_f32(), want, "row {}, column {}", row, j);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(250) })]

    #[test]
    fn room_is_made_in_place(case in case()) {
        make_room(&case, true)?;
    }

    #[test]
    fn room_is_made_on_the_way_to_another_cache(case in case()) {
        make_room(&case, false)?;
    }

    #[test]
    fn the_newest_rows_stay(case in case()) {
        let p = case.params(true);
        let joined = case.cache(p.from_rows, |b| case.attended(b, true));
        let mut present = vec![0x77; case.cache(case.capacity(), |_| 0..0).len()];
        let expected = case.expected(&present, |b| case.resident(case.totals[b as usize]));
        let (mut other, mut lengths, mut positions) = (present.clone(), [-7i32], [-7i64]);
        let (seqlens_k, query_seqlens, mut from) = (case.seqlens_k(), case.query_seqlens(), joined.clone());
        let from = Cell::from_mut(&mut from[..]).as_slice_of_cells();
        start(entry("rolling_kv", DType::F32), case.blocks, case.seed, &[
            Arg::cells(from), Arg::cells(from), Arg::write(&mut present), Arg::write(&mut other), Arg::read(&seqlens_k), optional(&query_seqlens),
            Arg::write(&mut lengths), Arg::write(&mut positions), Arg::params(&p),
        ])?;
        prop_assert!(present == expected, "keys");
        prop_assert!(other == expected, "values");
        prop_assert_eq!((lengths[0], positions[0]), (-7, -7));
    }

    #[test]
    fn lengths_count_from_the_cache_and_positions_do_not(case in case(), generates in any::<bool>()) {
        let (seqlens_k, query_seqlens) = (case.seqlens_k(), case.query_seqlens());
        let mut lengths = vec![-7; case.totals.len()];
        let mut positions = vec![-7i64; case.totals.len() * case.q_len as usize];
        let ids = if generates { Arg::write(&mut positions) } else { Arg::null() };
        start(entry("rolling_lengths", DType::F32), case.blocks, case.seed, &[
            Arg::read(&seqlens_k), optional(&query_seqlens), Arg::write(&mut lengths), ids, Arg::params(&case.params(true)),
        ])?;
        for (i, position) in positions.into_iter().enumerate() {
            let (b, s) = (i as u32 / case.q_len, i as u32 % case.q_len);
            prop_assert_eq!(position, if generates { i64::from(case.past(b) + s) } else { -7 });
            prop_assert_eq!(lengths[b as usize], case.attended(b, true).len() as i32 - 1);
        }
    }

    #[test]
    fn bias_follows_the_rows(case in case(), is_staged in any::<bool>(), heads in 1..=3u32) {
        rolling_bias::<f32>(&case, is_staged, heads)?;
        rolling_bias::<f16>(&case, is_staged, heads)?;
        rolling_bias::<bf16>(&case, is_staged, heads)?;
    }

    /// The simulator faults on any access outside a tensor.
    #[test]
    fn no_length_leads_outside(case in case(), lengths in prop::collection::vec(any::<i32>(), 6), is_staged in any::<bool>()) {
        let q_len = if is_staged { case.q_len } else { 1 };
        let case = Case { q_len, first_prompt: case.first_prompt && is_staged, ..case };
        let p = case.params(is_staged);
        let (seqlens_k, others) = (&lengths[..case.totals.len()], &lengths[3..][..case.totals.len()]);
        let query_seqlens = case.tokens.as_ref().map(|_| others.to_vec());
        let words = |rows: u32| vec![0u32; (case.batch() * case.kv_heads * rows * 4 * case.row_vectors) as usize];
        let (from, mut k, mut v) = (words(p.from_rows), words(p.capacity), words(p.capacity));
        let (mut told, mut positions) = (vec![0; seqlens_k.len()], vec![0i64; seqlens_k.len() * q_len as usize]);
        start(entry("rolling_kv", DType::F32), case.blocks, case.seed, &[
            Arg::read(&from), Arg::read(&from), Arg::write(&mut k), Arg::write(&mut v), Arg::read(seqlens_k), optional(&query_seqlens),
            Arg::write(&mut told), Arg::write(&mut positions), Arg::params(&p),
        ])?;
        let (bias, mut out) = (vec![0.0f32; 5 * q_len as usize], vec![0.0f32; 7 * q_len as usize * seqlens_k.len()]);
        let bias_params = RollingBiasParams {
            bias: Strides { row: 5, ..Strides::default() }, slide: p, heads: 1, columns: 5, columns_out: 7,
        };
        start(entry("rolling_bias", DType::F32), case.blocks, case.seed, &[
            Arg::read(&bias), Arg::read(seqlens_k), optional(&query_seqlens), Arg::write(&mut out), Arg::params(&bias_params),
        ])?;
    }
}
