//! Mixed prefill and decode: which kernels attend to which sequences of a paged call.
//!
//! Sequences of few tokens suit `decode_paged`, which reads keys once for all query heads that
//! share them, and those of many `hopper_paged` or `tiled_paged`, whose tiles they would leave
//! almost empty. A batch may have both, as servers make them that add decode steps of running
//! sequences to a prefill. How many tokens each sequence has only the device knows; so each kernel
//! leaves out the sequences of the other one.
//!
//! One is bound by memory and the other by arithmetic, and half of the SMs can read all that memory
//! delivers. So where that pays a primary launch of `hopper_paged` begins first, on some SMs,
//! `decode_paged` runs concurrently on the others, and a secondary launch of `hopper_paged` behind
//! that takes what work tiles are left in their queue: whatever the lengths turn out to be, no SM
//! is idle for long.
//!
//! Elsewhere `decode_paged` begins first, on all SMs, and what it leaves free is for the launches
//! behind it. It appends the tokens of its own sequences, so that it need not wait for the launch
//! that appends the others'.

use super::cascade::{consider, decision};
use super::decision::{Decision, Rejection};
use super::device::DeviceInfo;
use super::families::{
    DecodePaged, DecodePagedQuantized, HopperPaged, HopperPagedQuantized, TiledPaged,
};
use super::family::{Call, Choice, Family, Job, Task, TileQueue};
use super::launch::Launch;
use super::options::PlanOptions;
use super::rows::Rows;
use super::scratch::Scratch;
use crate::{Pages, Problem, ProblemFields, Result};

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
            launch.concurrent = task.concurrent;
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
        decisions[0] = decision(step, &Ok(few.choice));
        let mixed = Mixed { problem: &read, few, prompt, task };
        Self { chosen: mixed.attentions(device, appends), decisions }
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
            let numbers = if quantized { problem.dequantized() } else { problem.clone() };
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
    /// are, unless more sequences may be few by a larger one.
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
                let problem = p.derive(|call| ProblemFields { q_len: tokens, new_len, ..call });
                let choice = consider(&problem).ok()?;
                Some(Self { problem, choice, lengths: Lengths::of(p, pages, tokens) })
            });
        candidates.reduce(
            |small, large| {
                if large.lengths.few > small.lengths.few { large } else { small }
            },
        )
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
    /// The kernel for prefill first, on some SMs, where that is sooner done, or else the other one.
    fn attentions(self, device: &DeviceInfo, appends: bool) -> Vec<Attention> {
        let Self { problem, few, prompt, task } = self;
        let Few { problem: few, choice, lengths } = few;
        let task = Task { least: few.q_len + 1, ..task };
        let many = |queue: Option<TileQueue>| Attention {
            problem: problem.clone(),
            choice: prompt,
            task: Task {
                concurrent: queue.is_some_and(|queue| !queue.is_secondary),
                queue,
                ..task
            },
        };
        let shares_tiles = prompt.family.draws_tiles();
        let primary =
            shares_tiles.then(|| lengths.primary_blocks(problem, &few, &prompt, device)).flatten();
        // Arrivals would be counted where work is.
        let concurrent = choice.kernel.splits == 1;
        let few = |task| Attention { problem: few, choice, task };
        let Some(primary) = primary.filter(|_| concurrent) else {
            let appended = !(appends && concurrent);
            return vec![few(Task { appended, concurrent, ..task }), many(None)];
        };
        let secondary = device.multiprocessors - primary;
        let part = |is_secondary| many(Some(TileQueue { primary, secondary, is_secondary }));
        vec![part(false), few(task), part(true)]
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

    /// Whether a launch for those of few tokens costs less than they do in the tiles of the kernel
    /// for prefill, which are of a query head or of all that share a KV head.
    fn come_apart(self, p: &Problem, prompt: &Choice, device: &DeviceInfo) -> bool {
        /// What the launch costs, in key tiles of each SM.
        const LAUNCH: usize = 6;
        let heads = if prompt.family.draws_tiles() { p.q_heads } else { p.kv_heads };
        let tiles = self.few.saturating_mul(heads).saturating_mul(self.keys.div_ceil(KEYS));
        tiles > LAUNCH * device.multiprocessors as usize
    }

    /// Blocks of `hopper_paged` with which the other kernel runs concurrently and both are done
    /// soonest, where that is noticeably sooner than one after the other. It takes as long for as
    /// many rounds of work tiles, so only the fewest blocks of each number of rounds come into
    /// question, of equal ones the most. The constants are measured: `docs/perf-log.md`.
    fn primary_blocks(
        self,
        p: &Problem,
        few: &Problem,
        prompt: &Choice,
        device: &DeviceInfo,
    ) -> Option<u32> {
        /// Of the peak rates: what either kernel reaches.
        const OF_ARITHMETIC: f64 = 0.65;
        const OF_MEMORY: f64 = 0.9;
        /// Fewest seconds that count, and the share of all that does.
        const LEAST: f64 = 1e-5;
        const NOTICEABLE: f64 = 0.03;
        let all = device.multiprocessors as usize;
        let rows = prompt.kernel.entry.rows as usize;
        let tiles = (self.many * self.tokens.div_ceil(rows)).saturating_mul(p.q_heads);
        let widths = (4 * rows * KEYS * p.head_size) as f64;
        let tile = widths * all as f64 / (device.tensor_flops * OF_ARITHMETIC);
        let round = self.keys.div_ceil(KEYS) as f64 * tile;
        let [.., width] = few.key_cache_shape(0);
        let bytes = 2 * p.kv_heads * width * few.key_cache_dtype().size();
        let few = (self.few * self.keys) as f64 * bytes as f64 / (device.bandwidth * OF_MEMORY);
        let apart = tiles.div_ceil(all) as f64 * round + few;
        let concurrently = |rounds: usize| {
            let blocks = tiles.div_ceil(rounds);
            let rate = (2.0 * (all - blocks) as f64 / all as f64).min(1.0);
            let many = rounds as f64 * round;
            // What is not read meanwhile is read by all.
            (blocks, if rate * many < few { many + few - rate * many } else { many })
        };
        let candidates = (1..all).rev().map(|most| concurrently(tiles.div_ceil(most)));
        let (blocks, seconds) = candidates.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let gain = apart - seconds;
        (gain > LEAST.max(NOTICEABLE * apart)).then_some(blocks as u32)
    }
}
