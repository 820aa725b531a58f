//! Mixed prefill and decode: which kernels attend to which sequences of a paged call.
//!
//! Sequences of few tokens suit `decode_paged`, which reads keys once for all query heads that
//! share them, and those of many `hopper_paged` or `tiled_paged`, whose tiles they would leave
//! almost empty. A batch may have both, as servers make them that add decode steps of running
//! sequences to a prefill. How many tokens each sequence has only the device knows; so each kernel
//! leaves out the sequences of the other one.
//!
//! One is bound by memory and the other by arithmetic, and half of the SMs can read all that memory
//! delivers. So where that pays (`cost/mixed.rs`) a primary launch of `hopper_paged` begins first, on
//! some SMs, `decode_paged` overlaps it on the others, and a secondary launch of `hopper_paged`
//! overlaps that when SMs become free, and takes what work tiles are left in their queue: whatever
//! the lengths turn out to be, no SM is idle for long.
//!
//! Elsewhere `decode_paged` begins first, and what it leaves free is for the launches behind it. It
//! appends the tokens of its own sequences, so that it need not wait for the launch that appends
//! the others'.

use super::cascade::{consider, decision};
use super::cost::mixed::{Order, Work};
use super::decision::{Decision, Rejection};
use super::device::{Capability, DeviceInfo};
use super::families::{
    DecodePaged, DecodePagedQuantized, HopperPaged, HopperPagedQuantized, TiledPaged, in_halves,
};
use super::family::{Call, Choice, Family, Job, Kernel, Task, TileQueue};
use super::launch::Launch;
use super::options::PlanOptions;
use super::rows::Rows;
use super::scratch::Scratch;
use crate::problem::{Pages, Problem, ProblemFields};
use gqa_tensor::Result;

/// Kernels that read a paged cache, and why not others.
pub(super) struct Attentions {
    /// None: rows must be gathered.
    pub(super) chosen: Vec<Attention>,
    pub(super) decisions: Vec<Decision>,
}

/// A kernel, and what is its part of the call.
pub(super) struct Attention {
    problem: Problem,
    choice: Choice,
    pub(super) task: Task,
}

impl Attention {
    /// Whether it reads a quantized cache dequantized.
    pub(super) fn reads_dequantized(&self, of: &Problem) -> bool {
        of.quantized.is_some() && self.problem.quantized.is_none()
    }

    /// Its launches; where it `follows_concurrent`, they do not wait for the one ahead.
    pub(super) fn launches(
        &self,
        device: &DeviceInfo,
        rows: Rows,
        follows_concurrent: bool,
        scratch: &mut Scratch,
    ) -> Result<Vec<Launch>> {
        let Self { problem, choice, task } = self;
        let mut launches = choice.launches(Job { problem, device, rows, task: *task, scratch })?;
        for launch in &mut launches {
            (launch.concurrent, launch.overlaps) = (task.concurrent, task.overlaps);
            // Whoever began early would take the place of those.
            launch.programmatic &= !follows_concurrent && !task.concurrent;
        }
        Ok(launches)
    }
}

impl Attentions {
    pub(super) fn choose(
        problem: &Problem,
        pages: Pages,
        device: &DeviceInfo,
        options: &PlanOptions,
    ) -> Self {
        let step: &'static dyn Family = match problem.quantized {
            None => &DecodePaged,
            Some(_) => &DecodePagedQuantized,
        };
        let whole = Task::whole(problem, true);
        let consider = |family, problem: &Problem| -> Result<Choice, Rejection> {
            consider(family, &Call::new(problem, device, options))
        };
        let steps = consider(step, problem);
        let decided = decision(step, &steps);
        // Where slot_mapping says, no kernel that attends writes.
        let appends = !pages.slots && !problem.reads_pages_only();
        if let Ok(choice) = steps {
            let task = Task { appended: !appends, ..whole };
            let all = Attention { problem: problem.clone(), choice, task };
            return Self { chosen: vec![all], decisions: vec![decided] };
        }
        let mut decisions = vec![decided];
        let Some((read, prompt)) = Self::prompts(problem, consider, &mut decisions) else {
            return Self { chosen: Vec::new(), decisions };
        };
        let task = Task { appended: true, ..whole };
        let few = Few::of(problem, pages, |problem| consider(step, problem));
        let Some(few) = few.filter(|few| few.lengths.come_apart(problem, &prompt, device)) else {
            let all = Attention { problem: read, choice: prompt, task };
            return Self { chosen: vec![all], decisions };
        };
        let mixed = Mixed { problem: &read, few, prompt, task };
        let chosen = mixed.attentions(device, options, appends);
        let steps =
            chosen.iter().find(|attention| attention.choice.family.module() == step.module());
        if let Some(attention) = steps {
            decisions[0] = decision(step, &Ok(attention.choice));
        }
        Self { chosen, decisions }
    }

    /// The kernel for prefill, and the call as it reads it. A quantized cache that none reads where
    /// it is is dequantized into blocks, which are then read as others are.
    fn prompts(
        problem: &Problem,
        consider: impl Fn(&'static dyn Family, &Problem) -> Result<Choice, Rejection>,
        decisions: &mut Vec<Decision>,
    ) -> Option<(Problem, Choice)> {
        let mut ask = |family, problem: Problem| {
            let outcome = consider(family, &problem);
            decisions.push(decision(family, &outcome));
            outcome.ok().map(|choice| (problem, choice))
        };
        let quantized = problem.quantized.is_some();
        let in_place = if quantized { ask(&HopperPagedQuantized, problem.clone()) } else { None };
        in_place.or_else(|| {
            let numbers = if quantized { problem.dequantized().ok()? } else { problem.clone() };
            let families: [&'static dyn Family; 2] = [&HopperPaged, &TiledPaged];
            families.into_iter().find_map(|family| ask(family, numbers.clone()))
        })
    }
}

/// The sequences of few tokens.
struct Few {
    /// As the call would be without the others.
    problem: Problem,
    choice: Choice,
    lengths: Lengths,
}

impl Few {
    /// Those of as few as a row tile for one sequence holds; the smallest of the tiles that there
    /// are, unless more sequences may be few by a larger one. More may always be, but if single
    /// tokens leave prompts that are all as long as the longest, sequences of few tokens have one.
    fn of<E>(
        p: &Problem,
        pages: Pages,
        consider: impl Fn(&Problem) -> Result<Choice, E>,
    ) -> Option<Self> {
        const ROW_TILES: [usize; 4] = [8, 16, 32, 64];
        let tokens = ROW_TILES.map(|rows| (rows * p.kv_heads / p.q_heads).max(1));
        let candidates =
            tokens.into_iter().filter(|&tokens| tokens < p.q_len).filter_map(|tokens| {
                let new_len = if p.reads_pages_only() { 0 } else { tokens };
                let problem =
                    p.derive(|call| ProblemFields { q_len: tokens, new_len, ..call }).ok()?;
                let lengths = Lengths::of(p, pages, tokens);
                let of_batch = consider(&problem).ok()?;
                // As many blocks as suit the sequences that it attends to, but no splits, which
                // would be merged through scratch memory for the whole batch.
                let few =
                    problem.derive(|call| ProblemFields { batch: lengths.few, ..call }).ok()?;
                let own = consider(&few).ok().filter(|choice| choice.kernel.splits == 1);
                Some(Self { problem, choice: own.unwrap_or(of_batch), lengths })
            });
        candidates.reduce(|small, large| {
            let more = large.lengths.few > small.lengths.few;
            if more && !small.lengths.leave_whole_prompts(p) { large } else { small }
        })
    }
}

/// A call with sequences of few tokens and of many.
struct Mixed<'a> {
    /// As the kernel for prefill reads it.
    problem: &'a Problem,
    few: Few,
    /// The kernel for the others.
    prompt: Choice,
    task: Task,
}

impl Mixed<'_> {
    /// In the order that is done first.
    fn attentions(
        self,
        device: &DeviceInfo,
        options: &PlanOptions,
        appends: bool,
    ) -> Vec<Attention> {
        let Self { problem, few, prompt, task } = self;
        let Few { problem: few, choice, lengths } = few;
        let task = Task { least: few.q_len + 1, ..task };
        let many = |queue: Option<TileQueue>| Attention {
            problem: problem.clone(),
            choice: prompt,
            task: Task { overlaps: queue.is_some_and(|queue| queue.is_secondary), queue, ..task },
        };
        let shares_tiles =
            prompt.family.draws_tiles() && device.has(Capability::ProgrammaticLaunch);
        let kernel = match shares_tiles {
            true => lengths.beside_others(&few, &choice.kernel, device, options),
            false => choice.kernel,
        };
        let choice = Choice { kernel, ..choice };
        // Arrivals would be counted where work is.
        let concurrent = choice.kernel.splits == 1;
        let order = if shares_tiles && concurrent {
            lengths.work(problem, &few, &choice.kernel, &prompt, device).order()
        } else {
            Order::Decode
        };
        let Order::Prefill { blocks } = order else {
            let task = Task { appended: !(appends && concurrent), concurrent, ..task };
            return vec![Attention { problem: few, choice, task }, many(None)];
        };
        let few = |task| Attention { problem: few, choice, task };
        let leaves_tiles = lengths.work_tiles(problem, &prompt) > blocks;
        let primary = blocks as u32;
        let secondary = if leaves_tiles { device.multiprocessors - primary } else { 0 };
        let part = |is_secondary| many(Some(TileQueue { primary, secondary, is_secondary }));
        let first = [part(false), few(Task { overlaps: true, ..task })];
        first.into_iter().chain(leaves_tiles.then(|| part(true))).collect()
    }
}

/// Keys in which times are counted: a tile of `hopper_paged` at head size 128.
const KEYS: usize = 128;

/// What lengths a call's sequences may have, if those of few tokens are as many as there can be,
/// and the others alike.
#[derive(Clone, Copy)]
struct Lengths {
    /// Sequences of few tokens.
    few: usize,
    /// Other ones.
    many: usize,
    /// Tokens of each of these.
    tokens: usize,
    /// Keys that a sequence has at most, or sees.
    keys: usize,
}

impl Lengths {
    /// Where up to `most` tokens are few.
    fn of(p: &Problem, pages: Pages, most: usize) -> Self {
        let missing = p.batch.saturating_mul(p.q_len).saturating_sub(pages.tokens);
        let few = (missing / (p.q_len - most)).min(p.batch - 1);
        let many = p.batch - few;
        let tokens = pages.tokens.saturating_sub(few).div_ceil(many).max(1);
        let keys =
            p.window.map_or(p.total_len, |window| p.total_len.min(window.saturating_add(p.q_len)));
        Self { few, many, tokens, keys }
    }

    /// Whether the others are about as long as the longest.
    fn leave_whole_prompts(self, p: &Problem) -> bool {
        (p.q_len - p.q_len / 32..=p.q_len).contains(&self.tokens)
    }

    /// Whether a launch for those of few tokens costs less than they do in the tiles of the kernel
    /// for prefill, which are of a query head or of all that share a KV head.
    fn come_apart(self, p: &Problem, prompt: &Choice, device: &DeviceInfo) -> bool {
        // What the launch costs, in key tiles of each SM; the latter was not measured.
        let (heads, launch) =
            if prompt.family.draws_tiles() { (p.q_heads, 2) } else { (p.kv_heads, 6) };
        let tiles = self.few.saturating_mul(heads).saturating_mul(self.keys.div_ceil(KEYS));
        tiles > launch * device.multiprocessors as usize
    }

    /// The decode kernel as it suits the launches beside it: in blocks of half an SM, where a block
    /// has few keys to read or there are many blocks. With fewer copies under way the other
    /// launches' loads wait less, two blocks fit where one of `hopper_paged` is not, and the last
    /// ones end at about the same time. Elsewhere without clusters, if as many blocks read nearly
    /// what memory delivers, which leaves the other SMs free (measured: `docs/perf-log.md`).
    fn beside_others(
        self,
        few: &Problem,
        kernel: &Kernel,
        device: &DeviceInfo,
        options: &PlanOptions,
    ) -> Kernel {
        /// Bytes that a half block may have to read, at most and for each block that there is.
        const MOST: usize = 3 << 19;
        const PER_BLOCK: usize = 32 << 10;
        let PlanOptions { force, cluster, splits, .. } = options;
        if force.is_some() || cluster.is_some() || splits.is_some() {
            return *kernel;
        }
        let (blocks, sms) =
            (self.few.saturating_mul(few.kv_heads), device.multiprocessors as usize);
        let bytes = self.keys.saturating_mul(key_bytes(few));
        if blocks > sms / 2 || bytes <= blocks.saturating_mul(PER_BLOCK).min(MOST) {
            return in_halves(kernel, device).unwrap_or(*kernel);
        }
        if blocks >= sms / 3 { Kernel::whole(kernel.entry) } else { *kernel }
    }

    /// What the launches have to do.
    fn work<'a>(
        self,
        p: &Problem,
        few: &Problem,
        step: &Kernel,
        prompt: &Choice,
        device: &'a DeviceInfo,
    ) -> Work<'a> {
        /// Of the peak rate: what `hopper_paged` reaches.
        const OF_ARITHMETIC: f64 = 0.77;
        /// Seconds to begin a work tile.
        const START: f64 = 2.5e-6;
        let Self { few: sequences, many, tokens, keys } = self;
        let heads = sequences.saturating_mul(p.kv_heads);
        let rows = prompt.kernel.entry.rows as usize;
        // Smaller heads have as many exponentials.
        let width = (p.head_size + 64) as f64 * 2.0 / 3.0;
        let flops = (4 * rows * KEYS) as f64 * width;
        let sm_flops = device.tensor_flops * OF_ARITHMETIC / f64::from(device.multiprocessors);
        let tile = |keys: usize| START + keys.div_ceil(KEYS) as f64 * flops / sm_flops;
        let all_tokens = sequences.saturating_add(many.saturating_mul(tokens));
        Work {
            device,
            blocks: heads.saturating_mul(step.cluster as usize),
            in_halves: step.entry.min_blocks > 1,
            cached_bytes: heads as f64 * keys as f64 * key_bytes(few) as f64,
            new_bytes: all_tokens as f64 * (p.kv_heads * 2 * p.head_size * p.dtype.size()) as f64,
            tiles: self.work_tiles(p, prompt),
            // A causal row sees half of its own in the mean.
            tile: [tile((tokens + KEYS) / 2), tile(keys)],
        }
    }

    /// Work tiles of the sequences that are not few.
    fn work_tiles(self, p: &Problem, prompt: &Choice) -> usize {
        let rows = prompt.kernel.entry.rows as usize;
        (self.many * self.tokens.div_ceil(rows)).saturating_mul(p.q_heads)
    }
}

/// Bytes of a key and its value in the cache.
fn key_bytes(p: &Problem) -> usize {
    let [.., width] = p.key_cache_shape(0);
    2 * width * p.key_cache_dtype().size()
}
