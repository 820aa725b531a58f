//! Merges attention over shares of the keys that several GPUs hold, through memory that they map of
//! each other: every GPU sends its part to all others, and merges all parts itself.
//!
//! **One warp** takes a row of the output at a time. First it sends its rows of this GPU's part, 8
//! bytes for each lane, to every other GPU. Then it waits, row by row, until the other parts are in
//! this GPU's memory, and sums them, weighted by their log-sum-exps, in the order of the ranks: all
//! GPUs get the same bits.
//!
//! **Grid**: the same number of CTAs in x in every call of an exchange, [`BLOCKS`], which stride
//! over the rows; so few that all are resident on a GPU of 16 SMs. Those of one number wait for
//! each other on different GPUs, and for no other CTA. **CTA**: 128 threads.
//!
//! **Tensors**: part (batch, S, head, head size); part_lse (batch, head, S) with its strides;
//! inbox, what other GPUs write, and peer_0 to peer_7, the inboxes of all ranks as this GPU maps
//! them, null at the own rank and behind the last; state, two words for each CTA: the number of its
//! last call, and whether it has failed; late, a word, 0 until a GPU was waited for in vain, then
//! a bit for each such rank; out (batch, S, head, head size); lse (batch, head, S).
//!
//! **Inbox**: (slot, sender, capacity) pairs of 64-bit words, zero before the first call. A
//! sender's pairs are a log-sum-exp for each row, padded to whole lines, and then the units of the
//! rows.
//!
//! **Order**: a word is 32 bits of a part and, above them, the call's number, written and read in
//! one piece. So what a word holds says whether it has arrived, and no fence or flag is needed.
//! Calls alternate between two slots. A GPU that sends for call `n` has all parts of `n - 1`; they
//! were sent by launches that began when the senders had ended `n - 2`, whose slot is used again.
//! That holds while the calls of an exchange follow each other on each GPU, and come in one order
//! on all. Numbers repeat after 2^32 calls: a word that none of these has written must not be read
//! then. The barrier at the end precedes the state's update.
//!
//! **Failure**: parts that are not there after `timeout` make the row NaN. The CTA then neither
//! sends nor waits any more, so that all GPUs fail in bounded time.
//!
//! **Numerics**: as `combine`, from parts that were rounded to the element type. A part whose
//! weight is 0 does not count, whatever it holds.

use crate::concept::softmax::{LOG2_E, SoftmaxState};
use crate::num::{Element, pack_pairs, unpack};
use crate::params::PeersParams;
use crate::simt::{
    Global, any_sync, block_idx_x, fma, grid_dependency_wait, grid_dim_x, lane, max, nanoseconds,
    shfl_idx_f32, shfl_xor_f32, shfl_xor_u32, sync_threads, thread_idx, warp,
};

/// Most GPUs that merge.
pub const RANKS: usize = 8;
/// Threads of a CTA.
pub const THREADS: u32 = 32 * WARPS;
/// CTAs of every launch: with few rows each has one, with many all fit on any GPU at once.
pub const BLOCKS: u32 = 64;
/// Words of the state.
pub const STATE_WORDS: u32 = 2 * BLOCKS;
/// Slots of an inbox.
pub const SLOTS: u32 = 2;

const WARPS: u32 = 4;
/// Pairs in a 128-byte line of memory.
const LINE: u32 = 8;
/// Polls of an inbox between two reads of the clock.
const LOOKS: u32 = 64;

/// The inboxes of all ranks; null at this GPU's own rank.
pub type Peers = [Global<u64>; RANKS];

impl PeersParams {
    /// Pairs that a sender writes in a call.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn pairs(&self) -> u32 {
        self.first_unit() + self.rows * self.row_units
    }

    /// Where a sender's units begin.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_unit(&self) -> u32 {
        self.rows.next_multiple_of(LINE)
    }

    /// The first pair of a sender, in a slot.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sender(&self, slot: u32, rank: u32) -> usize {
        ((slot * self.count + rank) * self.capacity) as usize
    }

    /// Batch entry, head and row of a sequence. A call has rows and heads.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place(&self, row: u32) -> [u32; 3] {
        let (heads, q_len) = (self.heads.max(1), self.q_len.max(1));
        [row / heads / q_len, row % heads, row / heads % q_len]
    }

    /// The unit of a row that the lane has in a pass, if there is one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn unit(&self, pass: u32) -> Option<u32> {
        let unit = lane() + 32 * pass;
        (unit < self.row_units).then_some(unit)
    }
}

/// The kernel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn merge_peers<T: Element>(
    part: Global<T>,
    part_lse: Global<f32>,
    inbox: Global<u64>,
    peer_0: Global<u64>,
    peer_1: Global<u64>,
    peer_2: Global<u64>,
    peer_3: Global<u64>,
    peer_4: Global<u64>,
    peer_5: Global<u64>,
    peer_6: Global<u64>,
    peer_7: Global<u64>,
    state: Global<u32>,
    late: Global<u32>,
    out: Global<T>,
    lse: Global<f32>,
    p: PeersParams,
) {
    let peers = [peer_0, peer_1, peer_2, peer_3, peer_4, peer_5, peer_6, peer_7];
    let part = Part { out: part, lse: part_lse };
    merge_as([block_idx_x(), grid_dim_x()], part, inbox, peers, state, late, out, lse, p);
}

/// The result of attention over this GPU's share of the keys.
#[derive(Clone, Copy)]
pub struct Part<T> {
    /// Its output, (batch, S, head, head size).
    pub out: Global<T>,
    /// Its log-sum-exps, (batch, head, S) with strides.
    pub lse: Global<f32>,
}

/// The kernel, as CTA `block` of `blocks`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn merge_as<T: Element>(
    [block, blocks]: [u32; 2],
    part: Part<T>,
    inbox: Global<u64>,
    peers: Peers,
    state: Global<u32>,
    late: Global<u32>,
    out: Global<T>,
    lse: Global<f32>,
    p: PeersParams,
) {
    grid_dependency_wait();
    let state = state.offset(2 * block as usize);
    let [calls, failed] = state.load_vec8(0);
    let call = calls.wrapping_add(1);
    let (first, step) = (block + blocks * warp(), blocks * WARPS);

    let mut has_failed = failed != 0;
    let mut row = first;
    while row < p.rows {
        send(part, peers, call, !has_failed, row, &p);
        row += step;
    }
    let mut row = first;
    while row < p.rows {
        for pass in 0..p.row_units.div_ceil(32) {
            let unit = p.unit(pass);
            let mut parts = Parts::of(part, row, unit, &p);
            if !has_failed {
                let missing = parts.receive(inbox, call, row, unit, &p);
                if missing != 0 {
                    has_failed = true;
                    if lane() == 0 {
                        late.store_relaxed(0, missing);
                    }
                }
            }
            let (values, log_sum_exp) = parts.merged::<T>(has_failed);
            if let Some(unit) = unit {
                let [a, b, ..] = pack_pairs::<T>(values);
                out.store_vec8(element::<T>(row, unit, &p), [a, b]);
            }
            if lane() + pass == 0 {
                let [batch, head, s] = p.place(row);
                lse.store(((batch * p.heads + head) * p.q_len + s) as usize, log_sum_exp);
            }
        }
        row += step;
    }
    sync_threads();
    if lane() == 0 && has_failed {
        state.store_relaxed(1, 1);
    }
    if thread_idx() == 0 {
        state.store_relaxed(0, call);
    }
}

/// The first element of a unit.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn element<T: Element>(row: u32, unit: u32, p: &PeersParams) -> usize {
    (row as usize * p.row_units as usize + unit as usize) * (T::PER_VEC / 2) as usize
}

/// A word with the number of its call.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn numbered(word: u32, call: u32) -> u64 {
    word as u64 | (call as u64) << 32
}

/// Whether a pair is of that call.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn is_of([a, b]: [u64; 2], call: u32) -> bool {
    (a >> 32) as u32 == call && (b >> 32) as u32 == call
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn log_sum_exp_of(part_lse: Global<f32>, row: u32, p: &PeersParams) -> f32 {
    let [batch, head, s] = p.place(row);
    part_lse.load(p.part_lse.at(batch, head, s))
}

/// Sends a row to all other GPUs if `is_sent`. The loads do not depend on `is_sent` and `call`, so
/// that they start before these are known.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn send<T: Element>(
    part: Part<T>,
    peers: Peers,
    call: u32,
    is_sent: bool,
    row: u32,
    p: &PeersParams,
) {
    let log = log_sum_exp_of(part.lse, row, p).to_bits();
    for pass in 0..p.row_units.div_ceil(32) {
        let unit = p.unit(pass);
        let words = unit.map(|unit| part.out.load_vec8(element::<T>(row, unit, p)));
        if !is_sent {
            continue;
        }
        let to = p.sender(call % SLOTS, p.rank);
        if let (Some(unit), Some(words)) = (unit, words) {
            let at = to + (p.first_unit() + row * p.row_units + unit) as usize;
            send_pair(peers, at, words.map(|word| numbered(word, call)));
        }
        if lane() + pass == 0 {
            send_pair(peers, to + row as usize, [log, 0].map(|word| numbered(word, call)));
        }
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn send_pair(peers: Peers, at: usize, pair: [u64; 2]) {
    for rank in 0..RANKS {
        if !peers[rank].is_null() {
            peers[rank].store_pair_system(2 * at, pair);
        }
    }
}

/// A row of all ranks.
struct Parts {
    /// The lane's unit from each rank; 0 for ranks that do not exist.
    units: [[u64; 2]; RANKS],
    /// The log-sum-exp from rank `lane()`; -inf for ranks that do not exist.
    log: f32,
}

impl Parts {
    /// With this GPU's own part only.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of<T: Element>(part: Part<T>, row: u32, unit: Option<u32>, p: &PeersParams) -> Self {
        let mut parts = Self { units: [[0; 2]; RANKS], log: f32::NEG_INFINITY };
        if lane() == p.rank {
            parts.log = log_sum_exp_of(part.lse, row, p);
        }
        if let Some(unit) = unit {
            let words = part.out.load_vec8(element::<T>(row, unit, p));
            for rank in 0..RANKS {
                if rank as u32 == p.rank {
                    parts.units[rank] = words.map(|word| word as u64);
                }
            }
        }
        parts
    }

    /// Waits for the other ranks' parts; returns a bit for each rank that sent none in time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn receive(
        &mut self,
        inbox: Global<u64>,
        call: u32,
        row: u32,
        unit: Option<u32>,
        p: &PeersParams,
    ) -> u32 {
        let (mut looks, mut begun) = (0, 0);
        loop {
            let late = self.look(inbox, call, row, unit, p);
            if !any_sync(late != 0) {
                return 0;
            }
            if looks == 0 {
                let now = nanoseconds();
                if begun == 0 {
                    begun = now;
                }
                if any_sync(now.wrapping_sub(begun) > p.timeout as u64 * 1000) {
                    return [16, 8, 4, 2, 1]
                        .into_iter()
                        .fold(late, |late, mask| late | shfl_xor_u32(late, mask));
                }
            }
            looks = (looks + 1) % LOOKS;
        }
    }

    /// Polls the inbox for the row; returns a bit for each rank whose part has not arrived yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn look(
        &mut self,
        inbox: Global<u64>,
        call: u32,
        row: u32,
        unit: Option<u32>,
        p: &PeersParams,
    ) -> u32 {
        let slot = call % SLOTS;
        let has_log = lane() < p.count && lane() != p.rank;
        let is_there = |rank: usize| (rank as u32) < p.count && rank as u32 != p.rank;
        let mut log = [numbered(0, call); 2];
        if has_log {
            log = inbox.load_pair_system(2 * (p.sender(slot, lane()) + row as usize));
        }
        // All loads are in flight before the first result is used.
        if let Some(unit) = unit {
            let at = (p.first_unit() + row * p.row_units + unit) as usize;
            for rank in 0..RANKS {
                if is_there(rank) {
                    let from = p.sender(slot, rank as u32) + at;
                    self.units[rank] = inbox.load_pair_system(2 * from);
                }
            }
        }
        let mut late = 0;
        if has_log {
            self.log = f32::from_bits(log[0] as u32);
            late |= u32::from(!is_of(log, call)) << lane();
        }
        if unit.is_some() {
            for rank in 0..RANKS {
                if is_there(rank) {
                    late |= u32::from(!is_of(self.units[rank], call)) << rank;
                }
            }
        }
        late
    }

    /// The lane's values of the merged row, as many as a unit has, and in the first lanes its
    /// log-sum-exp; NaN after a failure.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn merged<T: Element>(&self, has_failed: bool) -> ([f32; 8], f32) {
        let log = self.log * LOG2_E;
        let mut state = SoftmaxState::EMPTY;
        state.raise(over_ranks(log, max));
        let share = state.weight(log);
        state.sum = over_ranks(share, |a, b| a + b);
        let weight = share * state.normaliser();
        let mut sums = [0.0; 8];
        for rank in 0..RANKS {
            let weight = shfl_idx_f32(weight, rank as u32);
            let [a, b] = self.units[rank].map(|word| word as u32);
            let values = unpack::<T>([a, b, 0, 0]);
            if weight != 0.0 {
                for i in 0..4 {
                    sums[i] = fma(weight, values[i], sums[i]);
                }
            }
        }
        if has_failed { ([f32::NAN; 8], f32::NAN) } else { (sums, state.log_sum_exp()) }
    }
}

/// Reduces the values of the first lanes, one lane per rank.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn over_ranks(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    [4, 2, 1].into_iter().fold(value, |value, mask| join(value, shfl_xor_f32(value, mask)))
}
