//! Mixed prefill and decode: which kernels attend to which sequences of a paged call.
//!
//! Sequences with few new tokens suit `decode`, which reads keys once for all query heads of
//! a group. Sequences with many suit `hopper_paged`, `blackwell_paged` or `tiled_paged`, whose
//! tiles a few tokens would leave almost empty. Servers batch decode steps with a prefill, so that
//! one call may have both. Only the device knows the tokens of each sequence; so each kernel skips
//! the sequences of the other one.
//!
//! One is bound by memory and the other by arithmetic, and half of the SMs can read all that memory
//! delivers. So where that pays (`cost/mixed.rs`) a first launch of `hopper_paged` begins first, on
//! some SMs, `decode` overlaps it on the others, and a secondary launch of `hopper_paged`
//! overlaps that when SMs become free, and takes what work tiles are left in their queue: whatever
//! the lengths turn out to be, no SM is idle for long.
//!
//! Where sequences may be long beside what others have to do, split kernels of `hopper_paged` take
//! all sequences: their CTAs divide the work among them by the lengths on the device.
//!
//! In a batch-invariant call the number of a sequence's tokens alone says which kernel it has:
//! `decode` up to as many as a tile of its rows holds, [`tiled_paged`](TiledPaged) with more.
//! Both are chosen for a typical call, and neither divides keys by the lengths of all sequences.
//! `hopper_paged` will not do: it rescales the rows of a warp together, and among these may be some
//! of the next sequence.
//!
//! Elsewhere `decode` begins first, and what it leaves free is for the launches behind it. It
//! appends the tokens of its own sequences, so that it need not wait for the launch that appends
//! the others'. Where nothing is appended, `hopper_paged` is a secondary launch behind it.

use super::cascade::{consider, decision};
use super::cost::mixed::{Order, Work};
use super::decision::{Decision, Rejection};
use super::device::{Capability, DeviceInfo};
use super::families::{LARGEST_DECODE_HEAD, PAGED, in_halves, in_parts};
use super::family::{Call, Choice, Family, Job, Kernel, Paged, Sequences, Task, TileQueue};
use super::launch::Launch;
use super::options::PlanOptions;
use super::rows::Rows;
use super::scratch::Scratch;
use crate::problem::{Pages, Problem, ProblemFields};
use gqa_tensor::Result;

/// The families that take such sequences of the call, best first.
fn families(
    sequences: Sequences,
    problem: &Problem,
    device: &DeviceInfo,
) -> impl Iterator<Item = &'static dyn Family> {
    let takes =
        move |paged: &&Paged| paged.sequences == sequences && (paged.concerns)(problem, device);
    PAGED.iter().filter(takes).map(|paged| paged.family)
}

/// The first of these families that takes the call. Decisions are noted.
fn first(
    sequences: Sequences,
    problem: &Problem,
    device: &DeviceInfo,
    consider: impl Fn(&'static dyn Family) -> Result<Choice, Rejection>,
    decisions: &mut Vec<Decision>,
) -> Option<Choice> {
    families(sequences, problem, device).find_map(|family| {
        let outcome = consider(family);
        decisions.push(decision(family, &outcome));
        outcome.ok()
    })
}

/// The kernels for a paged cache, and the rejections of others.
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
    /// Whether it reads a dequantized copy of a quantized cache.
    pub(super) fn reads_dequantized(&self, of: &Problem) -> bool {
        of.quantized.is_some() && self.problem.quantized.is_none()
    }

    /// Whether, without a causal mask, tokens before the first key of their sequence see all keys,
    /// as other tokens do.
    pub(super) fn computes_all_rows(&self) -> bool {
        self.choice.family.computes_all_rows()
    }

    /// Whether it reads queries that a launch ahead has rotated.
    pub(super) fn reads_rotated(&self, of: &Problem) -> bool {
        self.choice.family.follows_append() && of.rotary.is_some()
    }

    /// Its launches; with `follows_concurrent`, they do not wait for the launch ahead.
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
            // CTAs that start early would take the SMs of the concurrent launch.
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
        let whole = Task::whole(problem, true);
        let consider = |family, problem: &Problem| -> Result<Choice, Rejection> {
            let typical = problem.batch_invariant.then(|| problem.typical());
            consider(family, &Call::new(typical.as_ref().unwrap_or(problem), device, options))
        };
        let ask = |family| may_be_steps(problem).and_then(|()| consider(family, problem));
        let mut decisions = Vec::new();
        let all = first(Sequences::Short, problem, device, ask, &mut decisions);
        // Kernels do not append by slot_mapping; a launch before them does.
        let appends = !pages.slots && !problem.reads_pages_only();
        if let Some(choice) = all {
            let task = Task { appended: !appends || choice.family.follows_append(), ..whole };
            let call = Call::new(problem, device, options);
            let kernel = in_parts(&choice.kernel, &call).unwrap_or(choice.kernel);
            let choice = Choice { kernel, ..choice };
            let all = Attention { problem: problem.clone(), choice, task };
            return Self { chosen: vec![all], decisions };
        }
        let Some((read, prompt)) = Self::prompts(problem, device, consider, &mut decisions) else {
            return Self { chosen: Vec::new(), decisions };
        };
        let task = Task { appended: true, ..whole };
        let few = Few::of(problem, pages, |problem| {
            families(Sequences::Short, problem, device)
                .find_map(|family| consider(family, problem).ok())
        });
        if prompt.divides_work() {
            // The kernel reads copies of quantized keys, which cost too much for a few tokens, or
            // converts all of them.
            let copies = problem.quantized.is_some() && read.quantized.is_none();
            let apart = few.filter(|few| {
                let converts = read.quantized.is_some() && few.lengths.are_many(problem, device);
                few.lengths.few > 0 && (copies || converts)
            });
            let steps = apart.map(|few| {
                let task = Task { appended: !appends, concurrent: true, ..whole };
                few.divided(task, device, options)
            });
            let least = steps.as_ref().map_or(task.least, |steps| steps.problem.q_len + 1);
            if let Some(steps) = &steps {
                decide(&mut decisions, steps.choice);
            }
            let others = Attention { problem: read, choice: prompt, task: Task { least, ..task } };
            return Self { chosen: steps.into_iter().chain([others]).collect(), decisions };
        }
        let come_apart =
            |few: &Few| problem.batch_invariant || few.lengths.come_apart(problem, &prompt, device);
        let Some(few) = few.filter(come_apart) else {
            let chosen = match problem.batch_invariant {
                true => Vec::new(),
                false => vec![Attention { problem: read, choice: prompt, task }],
            };
            return Self { chosen, decisions };
        };
        let step = few.choice.family.module();
        let mixed = Mixed { problem: &read, few, prompt, task };
        let chosen = mixed.attentions(device, options, appends);
        let steps = chosen.iter().find(|attention| attention.choice.family.module() == step);
        if let Some(attention) = steps {
            decide(&mut decisions, attention.choice);
        }
        Self { chosen, decisions }
    }

    /// The prefill kernel, and the call as it reads it. A quantized cache that no prefill kernel
    /// reads is first dequantized into new blocks.
    fn prompts(
        problem: &Problem,
        device: &DeviceInfo,
        consider: impl Fn(&'static dyn Family, &Problem) -> Result<Choice, Rejection>,
        decisions: &mut Vec<Decision>,
    ) -> Option<(Problem, Choice)> {
        let mut ask = |problem: &Problem| {
            let consider = |family| consider(family, problem);
            let choice = first(Sequences::Long, problem, device, consider, decisions);
            choice.map(|choice| (problem.clone(), choice))
        };
        let dequantized = || problem.quantized.and_then(|_| problem.dequantized().ok());
        ask(problem).or_else(|| ask(&dequantized()?))
    }
}

/// A family that does not take all sequences takes those of few tokens.
fn decide(decisions: &mut [Decision], choice: Choice) {
    let of_family = |known: &&mut Decision| known.family == choice.family.module();
    if let Some(known) = decisions.iter_mut().find(of_family) {
        *known = decision(choice.family, &Ok(choice));
    }
}

/// Rows of the tiles of decode kernels.
const ROW_TILES: [usize; 4] = [8, 16, 32, 64];

/// Tokens up to which a sequence of a batch-invariant call has the decode kernel: those of the
/// smallest tile that holds one, so that the tile does not depend on the call's bound.
fn step_tokens(p: &Problem) -> usize {
    let group = p.q_heads / p.kv_heads;
    let rows = ROW_TILES.into_iter().find(|rows| *rows >= group).unwrap_or(group);
    rows / group
}

/// Why a batch-invariant call cannot leave all sequences to the decode kernel.
fn may_be_steps(p: &Problem) -> Result<(), Rejection> {
    if !p.batch_invariant {
        return Ok(());
    }
    if p.latent || p.tree_mask || p.head_size > LARGEST_DECODE_HEAD {
        return Err(Rejection::Argument { name: "batch_invariant" });
    }
    match step_tokens(p) {
        most if p.q_len > most => {
            let max = (most * p.q_heads / p.kv_heads) as u32;
            Err(Rejection::Rows { got: p.packed_rows(), max })
        }
        _ => Ok(()),
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
    /// Sequences that fit the smallest tile that holds their [tokens](drafts).
    fn of(
        p: &Problem,
        pages: Pages,
        consider: impl Fn(&Problem) -> Option<Choice>,
    ) -> Option<Self> {
        let tokens = ROW_TILES.map(|rows| (rows * p.kv_heads / p.q_heads).max(1));
        let tokens = if p.batch_invariant { vec![step_tokens(p)] } else { tokens.to_vec() };
        let least = if p.batch_invariant { 1 } else { drafts(p, pages) };
        let mut candidates = tokens
            .into_iter()
            .filter(|&tokens| (least..p.q_len).contains(&tokens))
            .filter_map(|tokens| {
                let new_len = if p.reads_pages_only() { 0 } else { tokens };
                let problem =
                    p.derive(|call| ProblemFields { q_len: tokens, new_len, ..call }).ok()?;
                let lengths = Lengths::of(p, pages, tokens);
                let of_batch = consider(&problem)?;
                // As many CTAs as suit its sequences, without splits: splits would need scratch
                // memory for the whole batch.
                let few =
                    problem.derive(|call| ProblemFields { batch: lengths.few, ..call }).ok()?;
                let own = consider(&few).filter(|choice| choice.kernel.splits == 1);
                let own = own.filter(|_| !p.batch_invariant);
                Some(Self { problem, choice: own.unwrap_or(of_batch), lengths })
            });
        candidates.next()
    }

    /// A launch of their own, whose CTAs divide keys by lengths where that is faster.
    fn divided(self, task: Task, device: &DeviceInfo, options: &PlanOptions) -> Attention {
        let Self { problem, choice, .. } = self;
        let call = Call::new(&problem, device, options);
        let kernel = in_parts(&choice.kernel, &call).unwrap_or(choice.kernel);
        Attention { choice: Choice { kernel, ..choice }, task, problem }
    }
}

/// Tokens of a sequence of few: one each, unless the numbers of tokens and sequences are those of
/// some prompts as long as the longest beside sequences of so many tokens each, as where an engine
/// checks drafts. Larger tiles for a few sequences more were slower for all of them
/// (`docs/perf-log.md`).
fn drafts(p: &Problem, pages: Pages) -> usize {
    let most = ROW_TILES[3] * p.kv_heads / p.q_heads;
    let each = |prompts: usize| {
        let left = pages.tokens.checked_sub(prompts * p.q_len)?;
        let few = p.batch.checked_sub(prompts).filter(|few| *few > 1)?;
        left.is_multiple_of(few).then_some(left / few)
    };
    let prompts = 1..=pages.tokens / p.q_len.max(1);
    prompts.filter_map(each).find(|each| (2..=most).contains(each)).unwrap_or(1)
}

/// A call with both short and long sequences.
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
        let mut kernel = match shares_tiles {
            true => lengths.beside_others(&few, &choice.kernel, device, options),
            false => choice.kernel,
        };
        let work = |kernel: &Kernel| lengths.work(problem, &few, kernel, &prompt, device);
        // A launch that overlaps the one ahead starts when all CTAs of that one run, unless these
        // are clusters. Where prefill leaves SMs free, a second stream is faster.
        let takes_all = lengths.work_tiles(problem, &prompt) >= device.multiprocessors as usize;
        let is_first = shares_tiles && takes_all && nothing_is_ahead(problem);
        let alone = Kernel::whole(kernel.entry);
        let is_forced = options.force.is_some() || options.cluster.is_some();
        if is_first && kernel.cluster > 1 && !is_forced && work(&alone).hides_longest() {
            kernel = alone;
        }
        let choice = Choice { kernel, ..choice };
        // Arrivals would be counted where work is.
        let concurrent = choice.kernel.splits == 1;
        let order =
            if shares_tiles && concurrent { work(&choice.kernel).order() } else { Order::Decode };
        let Order::Prefill { blocks } = order else {
            if is_first && concurrent && choice.kernel.cluster == 1 {
                let secondary = device.multiprocessors;
                let rest = TileQueue { primary: 0, secondary, is_secondary: true };
                return vec![Attention { problem: few, choice, task }, many(Some(rest))];
            }
            // A kernel that appends attends to its new rows last. So it does in all batch-invariant
            // calls, or in none.
            let by_itself = concurrent || problem.batch_invariant;
            let task = Task { appended: !(appends && by_itself), concurrent, ..task };
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

/// Whether attention is the first launch of the call. In two streams the launch for prefill, which
/// takes all SMs, would begin before that for decode, and decode only behind it.
fn nothing_is_ahead(p: &Problem) -> bool {
    p.reads_pages_only() && p.quantized.is_none() && p.qk_norm.is_none() && p.rotary.is_none()
}

/// Key tiles in which times are counted: those of `hopper_paged` at head size 128.
const KEYS: usize = 128;

/// The assumed lengths of a call: as many short sequences as possible, and the others alike.
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
    /// Keys of all sequences of few tokens at most: the cache has a row for each.
    cached: usize,
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
        let rows = pages.blocks.saturating_mul(pages.block_size);
        let of_others = many.saturating_mul(tokens);
        let cached = few.saturating_mul(keys).min(rows.saturating_sub(of_others));
        Self { few, many, tokens, keys, cached }
    }

    /// Whether a separate launch for short sequences costs less than the prefill kernel's tiles for
    /// them, which cover one query head, or all that share a KV head.
    fn come_apart(self, p: &Problem, prompt: &Choice, device: &DeviceInfo) -> bool {
        // The cost of the launch in key tiles per SM; the second value was not measured.
        let (heads, launch) =
            if prompt.family.draws_tiles() { (p.q_heads, 2) } else { (p.kv_heads, 6) };
        let tiles = self.few.saturating_mul(heads).saturating_mul(self.keys.div_ceil(KEYS));
        tiles > launch * device.multiprocessors as usize
    }

    /// Whether sequences of few tokens have so many keys that the decode kernel reads them sooner
    /// than a prefill kernel converts them (measured: `docs/perf-log.md`).
    fn are_many(self, p: &Problem, device: &DeviceInfo) -> bool {
        /// Key tiles for each SM.
        const MOST: usize = 16;
        let tiles = self.cached.saturating_mul(p.kv_heads) / KEYS;
        tiles > MOST * device.multiprocessors as usize
    }

    /// The decode kernel as it suits the concurrent launches. Half-SM CTAs where a CTA has few keys
    /// to read or there are many CTAs: with fewer copies in flight the other launches' loads wait
    /// less, two CTAs fit where one of `hopper_paged` is not resident, and the last ones end at
    /// about the same time. Elsewhere without clusters, if that many CTAs nearly saturate memory,
    /// which leaves the other SMs free (measured: `docs/perf-log.md`).
    fn beside_others(
        self,
        few: &Problem,
        kernel: &Kernel,
        device: &DeviceInfo,
        options: &PlanOptions,
    ) -> Kernel {
        /// The most bytes for a half-SM CTA to read, in total and per CTA.
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
        /// The fraction of peak FLOP/s that `hopper_paged` reaches.
        const OF_ARITHMETIC: f64 = 0.77;
        /// Seconds to begin a work tile.
        const START: f64 = 2.5e-6;
        let Self { few: sequences, many, tokens, keys, cached } = self;
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
            cached_bytes: (cached as f64 * p.kv_heads as f64) * key_bytes(few) as f64,
            longest_bytes: (keys * key_bytes(few)) as f64 / f64::from(step.cluster),
            new_bytes: all_tokens as f64 * (p.kv_heads * 2 * p.head_size * p.dtype.size()) as f64,
            tiles: self.work_tiles(p, prompt),
            // A causal row attends to half of its sequence's new tokens on average.
            tile: [tile((tokens + KEYS) / 2), tile(keys)],
        }
    }

    /// Work tiles of the long sequences.
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
