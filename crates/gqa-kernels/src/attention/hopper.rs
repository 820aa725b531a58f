//! Flash attention for prompts and chunks on SM 90a: warp-specialised, TMA in, wgmma, ping-pong.
//!
//! **One block** walks over work tiles: `WARPGROUPS · 64` query rows of one (batch, query head). One producer thread keeps
//! rings of K and V tiles full through the copy engine; each consumer warpgroup owns 64 rows: S = Q·Kᵀ from shared memory, online
//! softmax in registers, O += P·V with P from registers. The next tile's S is issued before the P·V of the current
//! one, and two named barriers hand the tensor cores from one warpgroup to the other, so that one exponentiates while
//! the other multiplies (FlashAttention-3, 2024).
//!
//! **Grid** ([`grid`]): as many blocks as SMs, (WARPGROUPS + 1) · 128 threads. Tiles are numbered so that the (head, batch) pairs of a section,
//! whose K and V fit the L2 cache together, are finished before the next section, longest tiles first.
//!
//! **Tensors**: q and out (batch, query head, S, head size), k and v (batch, KV head, capacity, head size), each through a tensor map
//! with any strides that are multiples of 8; out once more as a pointer, for rows that see nothing. lse, which may be null, is
//! (batch, query head, S). Scales are positive.
//!
//! **Shared memory**: Q, then K and V rings of `STAGES` tiles, each as 64-column chunks of 128-byte rows with the 128-byte swizzle,
//! then the barriers. Columns behind `head_size` and rows behind the tensor arrive as zeros. A warpgroup's output leaves through
//! its rows of the Q tile.
//!
//! **Barriers** (mbarriers; full: the producer's bytes have landed; empty: one arrival per consumer warp): Q, each K
//! stage, each V stage.
//!
//! **Numerics**: f32 accumulation, `exp2` of scores times `scale · log2 e`, weights rounded to the element type.

use crate::concept::seqlen::Seqlen;
use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::MmaElement;
use crate::params::{AttentionParams, sink};
use crate::simt::*;

/// Tiles in flight of K and of V.
const STAGES: u32 = 2;
/// Columns of a swizzled chunk: 128 bytes.
const CHUNK: u32 = 64;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// Shape of a block's work, and the shared-memory map that follows from it.
trait Tile {
    /// Head size in the tile, a multiple of 16.
    const D: u32;
    /// Keys of a tile.
    const N: u32;
    /// Consumer warpgroups of 64 rows.
    const WARPGROUPS: u32;
    const ROWS: u32 = Self::WARPGROUPS * 64;
    const CHUNKS: u32 = Self::D.div_ceil(CHUNK);
    const Q_BYTES: u32 = Self::ROWS * Self::CHUNKS * 128;
    const KV_BYTES: u32 = Self::N * Self::CHUNKS * 128;
    /// Q tiles in flight: two where shared memory allows, so that the next one is there before it is needed.
    const Q_STAGES: u32 = if Self::D <= 128 { 2 } else { 1 };
    const K: u32 = Self::Q_STAGES * Self::Q_BYTES;
    const V: u32 = Self::K + STAGES * Self::KV_BYTES;
    const Q_FULL: u32 = Self::V + STAGES * Self::KV_BYTES;
    const Q_EMPTY: u32 = Self::Q_FULL + 8 * Self::Q_STAGES;
    const K_FULL: u32 = Self::Q_EMPTY + 8 * Self::Q_STAGES;
    const K_EMPTY: u32 = Self::K_FULL + 8 * STAGES;
    const V_FULL: u32 = Self::K_EMPTY + 8 * STAGES;
    const V_EMPTY: u32 = Self::V_FULL + 8 * STAGES;
    const BYTES: u32 = Self::V_EMPTY + 8 * STAGES;
}

/// A shape: `D` columns, `N` keys, `G` consumer warpgroups; `C` score, `W` packed weight and `O` output registers per thread.
pub struct Hopper<
    const D: u32,
    const N: u32,
    const G: u32,
    const C: usize,
    const W: usize,
    const O: usize,
>;

/// Head sizes up to 64.
pub type D64 = Hopper<64, 112, 3, 56, 28, 32>;
/// Head sizes up to 128.
pub type D128 = Hopper<128, 128, 2, 64, 32, 64>;
/// Head sizes up to 192.
pub type D192 = Hopper<192, 112, 2, 56, 28, 96>;
/// Head sizes up to 256.
pub type D256 = Hopper<256, 64, 2, 32, 16, 128>;

impl<const D: u32, const N: u32, const G: u32, const C: usize, const W: usize, const O: usize> Tile
    for Hopper<D, N, G, C, W, O>
{
    const D: u32 = D;
    const N: u32 = N;
    const WARPGROUPS: u32 = G;
}

impl<const D: u32, const N: u32, const G: u32, const C: usize, const W: usize, const O: usize>
    Hopper<D, N, G, C, W, O>
{
    /// Oldest compute capability, times ten.
    pub const MIN_SM: u32 = 90;
    /// Largest head size.
    pub const HEAD_SIZE: u32 = D;
    /// Query rows of a work tile.
    pub const ROWS: u32 = <Self as Tile>::ROWS;
    /// Keys of a tile.
    pub const KEYS: u32 = N;
    /// Threads of a block.
    pub const THREADS: u32 = (G + 1) * WARPGROUP;
    /// Dynamic shared memory of a block.
    pub const SHARED_BYTES: u32 = <Self as Tile>::BYTES;

    /// The kernel.
    #[inline(always)]
    pub fn run<T: MmaElement>(
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        out: TensorMap,
        seqlens_k: Global<i32>,
        head_sink: Global<T>,
        out_rows: Global<T>,
        lse: Global<f32>,
        p: AttentionParams,
    ) {
        const { assert!(C == N as usize / 2 && W == N as usize / 4 && O == D as usize / 2) };
        let base = shared_base();
        if thread_idx() == 0 {
            for map in [q, k, v, out] {
                prefetch_tensor_map(map);
            }
            init_barriers::<Self>(base);
        }
        sync_threads();
        if thread_idx() < WARPGROUP {
            if G == 2 {
                registers_lower::<24>()
            } else {
                registers_lower::<32>()
            }
            if thread_idx() == 0 {
                producer::<Self>(base, q, k, v, seqlens_k, &p);
            }
        } else {
            if G == 2 {
                registers_raise::<240>()
            } else {
                registers_raise::<160>()
            }
            consumer::<T, Self, C, W, O>(base, seqlens_k, head_sink, out, out_rows, lse, &p);
        }
    }
}

/// Blocks of a launch: one per multiprocessor at most; each walks over work tiles of `rows` rows.
#[cfg(not(target_arch = "nvptx64"))]
pub fn grid(p: &AttentionParams, rows: u32, multiprocessors: u32) -> [u32; 3] {
    let work = u64::from(p.q_len.div_ceil(rows)) * u64::from(p.q_heads) * u64::from(p.batch);
    [u32::try_from(work).unwrap_or(u32::MAX).min(multiprocessors), 1, 1]
}

/// (query head, batch) pairs whose K and V fill about half the L2 cache together, whole groups of them.
#[cfg(not(target_arch = "nvptx64"))]
pub fn section(p: &AttentionParams, l2_bytes: u64) -> u32 {
    let bytes = 4 * u64::from(p.capacity) * u64::from(p.head_size);
    let caches = (l2_bytes / 2 / bytes.max(1)).max(1);
    let pairs = caches.saturating_mul(u64::from(p.q_heads / p.kv_heads));
    u32::try_from(pairs).unwrap_or(u32::MAX).min(p.q_heads * p.batch)
}

/// Position in a ring of tiles: how many have gone through it.
#[derive(Clone, Copy)]
struct Ring(u32);

impl Ring {
    #[inline(always)]
    fn stage(self, stages: u32) -> u32 {
        self.0 % stages
    }

    /// Byte offset of the stage's barrier among its kind.
    #[inline(always)]
    fn barrier(self, stages: u32) -> u32 {
        self.stage(stages) * 8
    }

    /// Parity of the phase in which the stage is filled; the opposite is that in which it was emptied before.
    #[inline(always)]
    fn parity(self, stages: u32) -> u32 {
        self.0 / stages % 2
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.0 += 1;
    }
}

/// One work tile: query rows `row..row + ROWS` of a head, and the key tiles that they see.
struct Work {
    batch: u32,
    head: u32,
    row: u32,
    seqlen: Seqlen,
    /// Key tiles `first..end`; all rows see all keys of the tiles `full_first..full_end`.
    first: u32,
    end: u32,
    full_first: u32,
    full_end: u32,
}

impl Work {
    /// Work tile number `index` of the grid's numbering.
    #[inline(always)]
    fn new<S: Tile>(index: u32, p: &AttentionParams, seqlens_k: Global<i32>) -> Self {
        let row_tiles = p.q_len.div_ceil(S::ROWS);
        let pairs = p.q_heads * p.batch;
        let section = quotient(index, p.section * row_tiles);
        let within = index - section * p.section * row_tiles;
        let here = (pairs - section * p.section).min(p.section);
        let nth = quotient(within, here);
        let pair = section * p.section + within - nth * here;
        let batch = quotient(pair, p.q_heads);
        let row = (row_tiles - 1 - nth) * S::ROWS;
        let seqlen =
            Seqlen::new(seqlens_k.load(batch as usize), p.q_len, p.capacity, p.first_prompt != 0);
        Self::spans::<S>(batch, pair - batch * p.q_heads, row, seqlen, p)
    }

    /// The key tiles that rows `row..` see.
    #[inline(always)]
    fn spans<S: Tile>(
        batch: u32,
        head: u32,
        row: u32,
        seqlen: Seqlen,
        p: &AttentionParams,
    ) -> Self {
        let Seqlen { total, past } = seqlen;
        let last = (row + S::ROWS).min(p.q_len);
        // One past the last key of the first and of the last row.
        let (low, high) = if p.causal != 0 {
            ((past + row + 1).min(total), (past + last).min(total))
        } else {
            (total, total)
        };
        let window = |end: u32| if p.window > 0 { end.saturating_sub(p.window) } else { 0 };
        let end = if past + row < total { high.div_ceil(S::N) } else { 0 };
        Self {
            batch,
            head,
            row,
            seqlen,
            first: window(low) / S::N,
            end,
            full_first: window(high).div_ceil(S::N),
            full_end: low / S::N,
        }
    }

    /// Work tiles of the whole call.
    #[inline(always)]
    fn count<S: Tile>(p: &AttentionParams) -> u32 {
        p.q_len.div_ceil(S::ROWS) * p.q_heads * p.batch
    }

    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.first >= self.end
    }
}

/// Division that compiles to no panic; divisors are never 0.
#[inline(always)]
fn quotient(a: u32, b: u32) -> u32 {
    a.checked_div(b).unwrap_or(0)
}

/// Starts copying a tile of `rows` rows: one box per chunk of columns.
#[inline(always)]
fn load_tile<S: Tile>(
    rows: u32,
    destination: u32,
    map: TensorMap,
    row: u32,
    head: u32,
    batch: u32,
    full: u32,
) {
    mbarrier_arrive_expect(full, rows * S::CHUNKS * 128);
    let mut chunk = 0;
    while chunk < S::CHUNKS {
        tma_load(destination + chunk * rows * 128, map, [chunk * CHUNK, row, head, batch], full);
        chunk += 1;
    }
}

/// A ring's producer side: waits until the stage is free, fills it and moves on.
#[inline(always)]
fn produce<S: Tile>(
    ring: &mut Ring,
    base: u32,
    tiles: u32,
    full: u32,
    empty: u32,
    map: TensorMap,
    row: u32,
    head: u32,
    batch: u32,
) {
    mbarrier_wait(base + empty + ring.barrier(STAGES), ring.parity(STAGES) ^ 1);
    let destination = base + tiles + ring.stage(STAGES) * S::KV_BYTES;
    load_tile::<S>(S::N, destination, map, row, head, batch, base + full + ring.barrier(STAGES));
    ring.advance();
}

/// The producer: K runs one tile ahead of V, as the consumers need them; tiles from the right to the left.
#[inline(always)]
fn producer<S: Tile>(
    base: u32,
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    seqlens_k: Global<i32>,
    p: &AttentionParams,
) {
    let (mut q_ring, mut k_ring, mut v_ring) = (Ring(0), Ring(0), Ring(0));
    let mut index = block_idx_x();
    while index < Work::count::<S>(p) {
        let work = Work::new::<S>(index, p, seqlens_k);
        index += grid_dim_x();
        if work.is_empty() {
            continue;
        }
        let kv_head = quotient(work.head, quotient(p.q_heads, p.kv_heads));
        let q_barrier = q_ring.barrier(S::Q_STAGES);
        mbarrier_wait(base + S::Q_EMPTY + q_barrier, q_ring.parity(S::Q_STAGES) ^ 1);
        let q_tile = base + q_ring.stage(S::Q_STAGES) * S::Q_BYTES;
        load_tile::<S>(
            S::ROWS,
            q_tile,
            q,
            work.row,
            work.head,
            work.batch,
            base + S::Q_FULL + q_barrier,
        );
        q_ring.advance();
        let mut tile = work.end;
        produce::<S>(
            &mut k_ring,
            base,
            S::K,
            S::K_FULL,
            S::K_EMPTY,
            k,
            (tile - 1) * S::N,
            kv_head,
            work.batch,
        );
        while tile > work.first {
            tile -= 1;
            if tile > work.first {
                produce::<S>(
                    &mut k_ring,
                    base,
                    S::K,
                    S::K_FULL,
                    S::K_EMPTY,
                    k,
                    (tile - 1) * S::N,
                    kv_head,
                    work.batch,
                );
            }
            produce::<S>(
                &mut v_ring,
                base,
                S::V,
                S::V_FULL,
                S::V_EMPTY,
                v,
                tile * S::N,
                kv_head,
                work.batch,
            );
        }
    }
}

/// Descriptor of a tile with the 128-byte swizzle: eight-row groups 1024 bytes apart, chunks of columns `chunk_bytes` apart.
#[inline(always)]
fn descriptor(address: u32, chunk_bytes: u32) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    ((address as u64 & 0x3_ffff) >> 4)
        | ((chunk_bytes as u64 >> 4) << 16)
        | ((1024 >> 4) << 32)
        | SWIZZLE_128
}

/// What a consumer thread keeps of its two rows, `row` and `row + 8`.
#[derive(Clone, Copy)]
struct RowPair {
    /// Running maxima times `factor`.
    max: [f32; 2],
    /// This thread's share of the running sums.
    sum: [f32; 2],
}

/// A consumer warpgroup: `C` score, `W` packed weight and `O` output registers per thread.
struct Consumer<'a, T, S, const C: usize, const W: usize, const O: usize> {
    p: &'a AttentionParams,
    base: u32,
    warpgroup: u32,
    q_ring: Ring,
    k_ring: Ring,
    v_ring: Ring,
    /// Whether the last output tile is still on its way from its Q stage.
    stored: bool,
    /// Scores times this are exponents of 2.
    factor: f32,
    kind: core::marker::PhantomData<(T, S)>,
}

impl<T: MmaElement, S: Tile, const C: usize, const W: usize, const O: usize>
    Consumer<'_, T, S, C, W, O>
{
    const BLOCK: u32 = S::WARPGROUPS * WARPGROUP;

    /// Waits for the tensor cores. Barrier 1 + w is warpgroup w's turn.
    #[inline(always)]
    fn take_turn(&self) {
        named_barrier_sync(1 + self.warpgroup, 2 * WARPGROUP);
    }

    /// Hands the tensor cores on.
    #[inline(always)]
    fn pass_turn(&self) {
        let next = if self.warpgroup + 1 == S::WARPGROUPS { 0 } else { self.warpgroup + 1 };
        named_barrier_arrive(1 + next, 2 * WARPGROUP);
    }

    /// This warpgroup's rows of the Q tile; later they hold its output.
    #[inline(always)]
    fn q_tile(&self) -> u32 {
        self.base + self.q_ring.stage(S::Q_STAGES) * S::Q_BYTES + self.warpgroup * 64 * 128
    }

    #[inline(always)]
    fn wait_q(&self) {
        mbarrier_wait(
            self.base + S::Q_FULL + self.q_ring.barrier(S::Q_STAGES),
            self.q_ring.parity(S::Q_STAGES),
        );
    }

    #[inline(always)]
    fn wait_k(&self) {
        mbarrier_wait(
            self.base + S::K_FULL + self.k_ring.barrier(STAGES),
            self.k_ring.parity(STAGES),
        );
    }

    #[inline(always)]
    fn wait_v(&self) {
        mbarrier_wait(
            self.base + S::V_FULL + self.v_ring.barrier(STAGES),
            self.v_ring.parity(STAGES),
        );
    }

    #[inline(always)]
    fn release_k(&mut self) {
        self.release(S::K_EMPTY + self.k_ring.barrier(STAGES));
        self.k_ring.advance();
    }

    #[inline(always)]
    fn release_v(&mut self) {
        self.release(S::V_EMPTY + self.v_ring.barrier(STAGES));
        self.v_ring.advance();
    }

    /// This warp has read what the barrier guards.
    #[inline(always)]
    fn release(&self, barrier: u32) {
        if lane() == 0 {
            mbarrier_arrive(self.base + barrier);
        }
    }

    /// Issues S = Q · Kᵀ.
    #[inline(always)]
    fn issue_scores(&self) -> [f32; C] {
        let k = descriptor(self.base + S::K + self.k_ring.stage(STAGES) * S::KV_BYTES, 16);
        let q = descriptor(self.q_tile(), 16);
        wgmma_fence();
        let mut s = T::wgmma(q, k);
        let mut step = 1;
        while step < S::D / 16 {
            let (chunk, within) = (step / 4, step % 4 * 2);
            T::wgmma_add(
                &mut s,
                q + (chunk * S::ROWS * 8 + within) as u64,
                k + (chunk * S::N * 8 + within) as u64,
            );
            step += 1;
        }
        wgmma_commit();
        s
    }

    /// Issues O += P · V.
    #[inline(always)]
    fn issue_output(&self, o: &mut [f32; O], weights: &[u32; W]) {
        let v = descriptor(self.base + S::V + self.v_ring.stage(STAGES) * S::KV_BYTES, S::N * 128);
        wgmma_fence();
        let mut step = 0;
        while step < W / 4 {
            let a = [
                weights[4 * step],
                weights[4 * step + 1],
                weights[4 * step + 2],
                weights[4 * step + 3],
            ];
            T::wgmma_add_registers(o, a, v + step as u64 * 128);
            step += 1;
        }
        wgmma_commit();
    }

    /// First of this thread's two rows in the block's tile.
    #[inline(always)]
    fn row(&self) -> u32 {
        self.warpgroup * 64 + warp() % 4 * 16 + lane() / 4
    }

    /// Scores of keys that their row does not see become -inf.
    #[inline(always)]
    fn mask(&self, s: &mut [f32; C], work: &Work, tile: u32) {
        let mut first = [0; 2];
        let mut end = [0; 2];
        let (lane, row) = (lane(), self.row());
        let mut half = 0;
        while half < 2 {
            let position = work.seqlen.past + work.row + row + 8 * half as u32;
            end[half] = if self.p.causal != 0 {
                (position + 1).min(work.seqlen.total)
            } else {
                work.seqlen.total
            };
            first[half] =
                if self.p.window > 0 { (position + 1).saturating_sub(self.p.window) } else { 0 };
            half += 1;
        }
        let key = tile * S::N + lane % 4 * 2;
        let mut i = 0;
        while i < C {
            let key = key + (i / 4 * 8 + i % 2) as u32;
            let half = i / 2 % 2;
            if key >= end[half] || key < first[half] {
                s[i] = f32::NEG_INFINITY;
            }
            i += 1;
        }
    }

    /// Scores become `softcap · tanh(score · scale / softcap)`.
    #[inline(always)]
    fn cap(&self, s: &mut [f32; C]) {
        let inner = 2.0 * LOG2_E * self.p.scale / self.p.softcap;
        let mut i = 0;
        while i < C {
            // tanh(x) = 1 - 2 / (1 + e^(2x))
            s[i] = fma(-2.0 * self.p.softcap, rcp(1.0 + exp2(s[i] * inner)), self.p.softcap);
            i += 1;
        }
    }

    /// Online softmax: scores become weights; returns the factors for what was accumulated.
    #[inline(always)]
    fn softmax(&self, s: &mut [f32; C], rows: &mut RowPair) -> [f32; 2] {
        let mut factors = [0.0; 2];
        let mut half = 0;
        while half < 2 {
            let mut top = s[2 * half];
            let mut i = 0;
            while i < C / 4 {
                top = max(top, max(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
                i += 1;
            }
            top = max(top, shfl_xor_f32(top, 1));
            top = max(top, shfl_xor_f32(top, 2));
            let old = rows.max[half];
            let new = max(old, top * self.factor);
            rows.max[half] = new;
            let finite = if new == f32::NEG_INFINITY { 0.0 } else { new };
            factors[half] = exp2(old - finite);
            let mut sums = [0.0; 2];
            i = 0;
            while i < C / 4 {
                let mut j = 0;
                while j < 2 {
                    let weight = exp2(fma(s[4 * i + 2 * half + j], self.factor, -finite));
                    s[4 * i + 2 * half + j] = weight;
                    sums[j] += weight;
                    j += 1;
                }
                i += 1;
            }
            rows.sum[half] = fma(rows.sum[half], factors[half], sums[0] + sums[1]);
            half += 1;
        }
        factors
    }

    /// Scores of key tile `tile` to weights.
    #[inline(always)]
    fn weigh(&self, s: &mut [f32; C], rows: &mut RowPair, work: &Work, tile: u32) -> [f32; 2] {
        if self.p.softcap > 0.0 {
            self.cap(s);
        }
        if tile >= work.full_end || tile < work.full_first {
            self.mask(s, work, tile);
        }
        self.softmax(s, rows)
    }

    /// All key tiles of a work tile; returns the unnormalised output.
    #[inline(always)]
    fn attend(&mut self, work: &Work, rows: &mut RowPair) -> [f32; O] {
        let mut o = [0.0; O];
        let mut tile = work.end - 1;
        self.wait_q();
        self.wait_k();
        self.take_turn();
        let mut s = self.issue_scores();
        self.pass_turn();
        self.release_stored();
        wgmma_wait::<0>();
        self.release_k();
        let mut factors = self.weigh(&mut s, rows, work, tile);
        let mut weights = pack::<T, C, W>(&s);
        self.clear_values(work, tile);
        while tile > work.first {
            tile -= 1;
            self.wait_k();
            self.take_turn();
            let mut s = self.issue_scores();
            scale(&mut o, factors);
            self.wait_v();
            self.issue_output(&mut o, &weights);
            self.pass_turn();
            wgmma_wait::<1>();
            self.release_k();
            factors = self.weigh(&mut s, rows, work, tile);
            wgmma_wait::<0>();
            self.release_v();
            weights = pack::<T, C, W>(&s);
        }
        scale(&mut o, factors);
        self.wait_v();
        self.take_turn();
        self.issue_output(&mut o, &weights);
        self.pass_turn();
        wgmma_wait::<0>();
        self.release_v();
        o
    }

    /// Where the last output tile was stored from is free once the copy engine has read it.
    #[inline(always)]
    fn release_stored(&mut self) {
        if self.stored && thread_idx() % WARPGROUP == 0 {
            bulk_wait_read();
            let last = Ring(self.q_ring.0 - 1);
            mbarrier_arrive(self.base + S::Q_EMPTY + last.barrier(S::Q_STAGES));
        }
        self.stored = false;
    }

    /// Normalises the output, writes it over this warpgroup's Q rows and starts its way to `out`.
    #[inline(always)]
    fn store(&mut self, work: &Work, mut o: [f32; O], factors: [f32; 2], out: TensorMap) {
        scale(&mut o, factors);
        // Opaque, or the addresses below would be hoisted out of the loop over work and spilled.
        let lane = opaque(lane());
        let row = warp() % 4 * 16 + lane / 4;
        let s = work.row + self.warpgroup * 64 + row;
        let token = [work.seqlen.is_token(s), work.seqlen.is_token(s + 8)];
        let mut i = 0;
        while i < O / 2 {
            // Register pairs alternate between the rows `row` and `row + 8`, which swizzle alike.
            let column = i as u32 / 2 * 8;
            let unit = (column % CHUNK / 8) ^ (row % 8);
            let at = column / CHUNK * S::ROWS * 128
                + (row + i as u32 % 2 * 8) * 128
                + unit * 16
                + lane % 4 * 4;
            let pair = if token[i % 2] { T::pack(o[2 * i], o[2 * i + 1]) } else { 0 };
            st_shared(self.q_tile() + at, pair);
            i += 1;
        }
        fence_proxy_async();
        named_barrier_sync(STORED + self.warpgroup, WARPGROUP);
        if thread_idx() % WARPGROUP == 0 {
            let mut chunk = 0;
            while chunk < S::CHUNKS {
                let at = [chunk * CHUNK, work.row + self.warpgroup * 64, work.head, work.batch];
                tma_store(out, at, self.q_tile() + chunk * S::ROWS * 128);
                chunk += 1;
            }
            bulk_commit();
        }
        self.stored = true;
        self.q_ring.advance();
        if S::Q_STAGES == 1 {
            self.release_stored();
        }
    }

    /// Rows of V behind the sequence may hold anything, NaN included, and a weight of 0 does not silence NaN: they become 0.
    #[inline(always)]
    fn clear_values(&self, work: &Work, tile: u32) {
        let valid = work.seqlen.total - tile * S::N;
        if valid >= S::N {
            return;
        }
        self.wait_v();
        let thread = self.warpgroup * WARPGROUP + thread_idx() % WARPGROUP;
        let mut vector = valid * 8 + thread;
        while vector < S::N * 8 {
            let mut chunk = 0;
            while chunk < S::CHUNKS {
                let at = S::V
                    + self.v_ring.stage(STAGES) * S::KV_BYTES
                    + chunk * S::N * 128
                    + vector * 16;
                st_shared_vec(self.base + at, [0; 4]);
                chunk += 1;
            }
            vector += Self::BLOCK;
        }
        fence_proxy_async();
        named_barrier_sync(CLEARED, Self::BLOCK);
    }
}

/// Named barrier: all consumers have cleared their share of a V tile.
const CLEARED: u32 = 8;
/// Named barrier of the first warpgroup: its output tile is complete in shared memory.
const STORED: u32 = 9;

/// Weights as the A operand of the next multiplication: accumulator and operand layouts agree.
#[inline(always)]
fn pack<T: MmaElement, const C: usize, const W: usize>(s: &[f32; C]) -> [u32; W] {
    let mut weights = [0; W];
    let mut i = 0;
    while i < W {
        weights[i] = T::pack(s[2 * i], s[2 * i + 1]);
        i += 1;
    }
    weights
}

/// Multiplies each row by its factor.
#[inline(always)]
fn scale<const O: usize>(o: &mut [f32; O], factors: [f32; 2]) {
    let mut i = 0;
    while i < O {
        o[i] *= factors[i / 2 % 2];
        i += 1;
    }
}

/// The consumers: attend, normalise, store.
#[inline(always)]
fn consumer<T: MmaElement, S: Tile, const C: usize, const W: usize, const O: usize>(
    base: u32,
    seqlens_k: Global<i32>,
    head_sink: Global<T>,
    out: TensorMap,
    out_rows: Global<T>,
    lse: Global<f32>,
    p: &AttentionParams,
) {
    // Through a shuffle the compiler sees that a warp's lanes agree, and keeps what follows in uniform registers.
    let warpgroup = shfl_idx_u32(thread_idx() / WARPGROUP, 0) - 1;
    let mut consumer = Consumer::<T, S, C, W, O> {
        p,
        base,
        warpgroup,
        q_ring: Ring(0),
        k_ring: Ring(0),
        v_ring: Ring(0),
        stored: false,
        factor: if p.softcap > 0.0 { LOG2_E } else { p.scale * LOG2_E },
        kind: core::marker::PhantomData,
    };
    // The first turn is warpgroup 0's.
    if warpgroup + 1 == S::WARPGROUPS {
        consumer.pass_turn();
    }
    let mut index = block_idx_x();
    while index < Work::count::<S>(p) {
        let work = Work::new::<S>(index, p, seqlens_k);
        let mut rows = RowPair { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2] };
        if work.is_empty() {
            finish(&work, &rows, consumer.row(), head_sink, lse, p);
            clear::<T, S>(&work, out_rows, p);
        } else {
            let o = consumer.attend(&work, &mut rows);
            // Cheaper found again than kept in registers all along.
            let work = Work::new::<S>(opaque(index), p, seqlens_k);
            let factors = finish(&work, &rows, consumer.row(), head_sink, lse, p);
            consumer.store(&work, o, factors, out);
        }
        index += grid_dim_x();
    }
    consumer.release_stored();
    // The turn that went round comes to rest.
    if warpgroup == 0 {
        consumer.take_turn();
    }
}

/// Joins the sink, writes log-sum-exp, and returns what each row must be multiplied by.
#[inline(always)]
fn finish<T: MmaElement>(
    work: &Work,
    rows: &RowPair,
    row: u32,
    head_sink: Global<T>,
    lse: Global<f32>,
    p: &AttentionParams,
) -> [f32; 2] {
    let mut factors = [0.0; 2];
    let mut half = 0;
    while half < 2 {
        let mut state = SoftmaxState { max: rows.max[half], sum: rows.sum[half] };
        state.sum += shfl_xor_f32(state.sum, 1);
        state.sum += shfl_xor_f32(state.sum, 2);
        factors[half] = 1.0;
        if p.sink != sink::NONE {
            let logit = if p.sink == sink::PER_HEAD {
                head_sink.load(work.head as usize).to_f32()
            } else {
                0.0
            };
            factors[half] = state.join_sink(logit * LOG2_E);
        }
        factors[half] *= state.normaliser();
        let s = work.row + row + 8 * half as u32;
        let token = work.seqlen.is_token(s);
        if !lse.is_null() && s < p.q_len && lane() % 4 == 0 {
            let at = (work.batch * p.q_heads + work.head) as usize * p.q_len as usize + s as usize;
            lse.store(at, if token { state.log_sum_exp() } else { f32::NEG_INFINITY });
        }
        half += 1;
    }
    factors
}

/// Rows of a work tile that see nothing are zero.
#[inline(always)]
fn clear<T: MmaElement, S: Tile>(work: &Work, out: Global<T>, p: &AttentionParams) {
    let vectors = p.head_size / T::PER_VEC;
    let rows = (p.q_len - work.row).min(S::ROWS);
    let mut i = thread_idx() - WARPGROUP;
    while i < rows * vectors {
        let row = quotient(i, vectors);
        let column = (i - row * vectors) * T::PER_VEC;
        out.store_vec(p.out.at(work.batch, work.head, work.row + row) + column as usize, [0; 4]);
        i += S::WARPGROUPS * WARPGROUP;
    }
}

#[inline(always)]
fn init_barriers<S: Tile>(base: u32) {
    let warps = S::WARPGROUPS * 4;
    let mut stage = 0;
    while stage < S::Q_STAGES {
        mbarrier_init(base + S::Q_FULL + 8 * stage, 1);
        mbarrier_init(base + S::Q_EMPTY + 8 * stage, S::WARPGROUPS);
        stage += 1;
    }
    stage = 0;
    while stage < STAGES {
        mbarrier_init(base + S::K_FULL + 8 * stage, 1);
        mbarrier_init(base + S::K_EMPTY + 8 * stage, warps);
        mbarrier_init(base + S::V_FULL + 8 * stage, 1);
        mbarrier_init(base + S::V_EMPTY + 8 * stage, warps);
        stage += 1;
    }
    fence_mbarrier_init();
}
