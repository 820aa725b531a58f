//! The kernels' entry functions, with their parameters in order.

use super::exchange::{Output, Splits};
use super::layout::Layout;
use super::new_tokens::NewTokens;
use super::schedule::Schedule;
use super::tree::Tree;
use super::{Codes, Coding, Decode, Heads, Products, quantized};
use crate::attention::out::Results;
use crate::concept::pages::LOG_CONTIGUOUS;
use crate::num::{MmaCode, MmaElement, e4m3};
use crate::params::PagedDecodeParams;
use crate::prologue::rope::Rope;
use crate::simt::Global;
use crate::tile::seqlens::Seqlens;

impl<
    const D8: usize,
    const UNITS: usize,
    const M: usize,
    const HALVES: usize,
    const N8: usize,
    const WARPS: u32,
    const STAGES: u32,
    H: Heads,
    P: Products,
> Decode<D8, UNITS, M, HALVES, N8, WARPS, STAGES, H, P>
{
    /// The kernel for a KV cache of elements: contiguous, (batch, KV head, capacity, head size), or
    /// paged, (block, row, KV head, head size). `block_table`, (batch, blocks of a sequence), lists
    /// the blocks of each sequence, and `starts` is cu_seqlens, (batch + 1), or null if each
    /// sequence has one token; over a contiguous cache both are null. `tree_mask` has a word for
    /// each new token, (batch, S) or packed, or is null. `schedule` is written by
    /// [`schedule`](super::schedule()), or null. The output has the type of the first non-null
    /// pointer of `Results` (`out.rs`).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run<T: MmaElement>(
        q: Global<T>,
        new_k: Global<T>,
        new_v: Global<T>,
        cos: Global<T>,
        sin: Global<T>,
        position_ids: Global<i64>,
        seqlens: Seqlens,
        starts: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        tree_mask: Global<i64>,
        k: Global<T>,
        v: Global<T>,
        out: Global<T>,
        out_f32: Global<f32>,
        out_f8: Global<e4m3>,
        out_scale: Global<f32>,
        lse: Global<f32>,
        partial_out: Global<f32>,
        partial_states: Global<[f32; 2]>,
        arrivals: Global<u32>,
        schedule: Global<u32>,
        p: PagedDecodeParams,
    ) {
        let rope = Rope { cos, sin, position_ids, params: p.decode.rotary, offset: 0 };
        let new_tokens =
            NewTokens::<T> { q, k: new_k, v: new_v, present_k: k, present_v: v, rope, coding: () };
        let layout = Self::layout(starts, block_table, &p);
        let results = Results { out, out_f32, out_f8, scale: out_scale };
        let output = Output { head_sink, results, lse, tokens: layout.packed_tokens() };
        let splits = Splits { columns: partial_out, states: partial_states, arrivals };
        let (schedule, tree) = (Schedule { words: schedule }, Tree { words: tree_mask });
        Self::step(new_tokens, seqlens, layout, output, splits, schedule, tree, p.decode);
    }

    /// The same for a quantized KV cache in one of the formats of `F`: rows have bytes in place of
    /// elements. Scales are one, (KV head), (KV head, head size) or, per token, (batch, KV head,
    /// capacity) or (block, row, KV head).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn run_quantized<F: MmaCode, T: MmaElement>(
        q: Global<T>,
        new_k: Global<T>,
        new_v: Global<T>,
        cos: Global<T>,
        sin: Global<T>,
        position_ids: Global<i64>,
        seqlens: Seqlens,
        starts: Global<i32>,
        block_table: Global<i32>,
        head_sink: Global<T>,
        k: Global<u8>,
        v: Global<u8>,
        k_scale: Global<f32>,
        v_scale: Global<f32>,
        out: Global<T>,
        lse: Global<f32>,
        partial_out: Global<f32>,
        partial_states: Global<[f32; 2]>,
        arrivals: Global<u32>,
        schedule: Global<u32>,
        p: PagedDecodeParams,
    ) {
        const { Self::assert_codes::<F>() }
        let rope = Rope { cos, sin, position_ids, params: p.decode.rotary, offset: 0 };
        let coding = Coding::new(k_scale, v_scale, &p.decode);
        let new_tokens = NewTokens::<Codes<T, F>> {
            q,
            k: new_k,
            v: new_v,
            present_k: k,
            present_v: v,
            rope,
            coding,
        };
        let layout = Self::layout(starts, block_table, &p);
        let results = Results::unscaled(out, Global::null());
        let output = Output { head_sink, results, lse, tokens: layout.packed_tokens() };
        let splits = Splits { columns: partial_out, states: partial_states, arrivals };
        let (schedule, tree) = (Schedule { words: schedule }, Tree::none());
        Self::step(new_tokens, seqlens, layout, output, splits, schedule, tree, p.decode);
    }

    /// The layout of all sequences.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn layout(starts: Global<i32>, table: Global<i32>, p: &PagedDecodeParams) -> Layout {
        if Self::TAKES_BLOCKS {
            return Layout::new(starts, table, p);
        }
        Layout::new(starts, table, &PagedDecodeParams { log_block_size: LOG_CONTIGUOUS, ..*p })
    }

    /// Asserts that the shape's rows have the size of format `F`, and that the threads suffice to
    /// convert the queries.
    const fn assert_codes<F: MmaCode>() {
        assert!(128 * UNITS as u32 == Self::HEAD_SIZE * F::BITS);
        assert!(Self::HEAD_SIZE <= quantized::CHANNELS as u32 * Self::THREADS);
        assert!(Self::ROWS * D8 as u32 <= quantized::PASSES as u32 * Self::THREADS);
    }
}
