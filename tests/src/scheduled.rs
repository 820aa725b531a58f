//! The simulated GPU with schedules: it makes one for each paged call whose plan divides keys or
//! work, or one that does not fit the call.

use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io, Machine};
use gqa_host::plan::{DeviceInfo, PlanOptions, TensorId, Tensors, plan};
use gqa_host::{Pages, Problem, ProblemFields, Result, Tensor};
use ndarray::Array1;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

/// The schedule that a call gets. Those for something else assign no part to any CTA: a kernel that
/// took one would leave its outputs as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// Made for the call.
    Right,
    /// Made for the call, then without parts.
    Emptied,
    /// Made for other lengths, of at least one sequence.
    OtherLengths,
    /// Made for the same lengths on a GPU with another number of SMs.
    OtherSlots,
    /// Made for the call, but says that key tiles have twice as many keys.
    OtherKeys,
    /// Zeros.
    Nothing,
    /// Made for the call, then up to eight bits are flipped, chosen by this seed.
    Damaged(u64),
    /// For the call, but parts or ranges of some CTAs are made up, by this seed, with seals that
    /// fit.
    Forged(u64),
}

/// A simulated GPU whose calls have such schedules.
pub struct Scheduled {
    sim: Sim,
    device: DeviceInfo,
    options: PlanOptions,
    made: Made,
}

/// Of the schedules of decode kernels, words ahead of the key tiles, and those among them that
/// count CTA slots, the keys of a tile, and CTAs.
const SHAPE_WORDS: usize = 8;
const SLOTS_WORD: usize = 2;
const KEYS_WORD: usize = 3;
const CTAS_WORD: usize = 7;
/// Words of the part of a CTA.
const PART_WORDS: usize = 4;

/// Of the schedules of kernels that split prefill, the first word, words ahead of the lengths, and
/// those among them that count CTAs and the keys of a tile.
const WORK: u32 = u32::from_le_bytes(*b"gqaH");
const WORK_SHAPE_WORDS: usize = 12;
const WORK_CTAS_WORD: usize = 2;
const WORK_KEYS_WORD: usize = 8;
/// Words of a CTA's range. The last one is its seal.
const RANGE_WORDS: usize = 32;

/// How a schedule lies in memory.
struct Words {
    /// Whether kernels that split prefill read it.
    is_of_work: bool,
    /// The first word of the parts or ranges, and how many each CTA has.
    first: usize,
    of_cta: usize,
    keys: usize,
    ctas: usize,
}

impl Words {
    fn of(words: &[i32], sequences: usize) -> Self {
        match words[0] as u32 == WORK {
            true => Self {
                is_of_work: true,
                first: WORK_SHAPE_WORDS + 4 * sequences,
                of_cta: RANGE_WORDS,
                keys: WORK_KEYS_WORD,
                ctas: words[WORK_CTAS_WORD] as usize,
            },
            false => Self {
                is_of_work: false,
                first: SHAPE_WORDS + sequences.next_multiple_of(4),
                of_cta: PART_WORDS,
                keys: KEYS_WORD,
                ctas: words[CTAS_WORD] as usize,
            },
        }
    }
}

/// Seals a range as kernels expect it.
fn seal_range(cta: usize, range: &mut [i32]) {
    range[RANGE_WORDS - 1] = (WORK ^ cta as u32) as i32;
    let words = range.iter().zip((1u32..).step_by(2));
    let seal = words.fold(0u32, |sum, (&word, odd)| {
        sum.wrapping_add((word as u32).wrapping_mul(odd.wrapping_mul(0x9E37_79B1)))
    });
    range[RANGE_WORDS - 1] = seal as i32;
}

/// Makes up ranges of one CTA in four, of numbers at which something ends.
fn forge_ranges(ranges: &mut [i32], sequences: usize, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    for (cta, range) in ranges.chunks_exact_mut(RANGE_WORDS).enumerate() {
        if rng.random_range(0..4) > 0 {
            continue;
        }
        let ends = [0, 1, 2, 3, sequences as i32, 64, 1 << 20, i32::MAX, -1];
        for word in range.iter_mut() {
            if rng.random_range(0..6) == 0 {
                *word = *ends.choose(&mut rng).expect("some");
            }
        }
        seal_range(cta, range);
    }
}

/// A part as schedules have it, with the seal that kernels expect.
fn sealed(cta: usize, [batch, split, splits]: [u32; 3]) -> [i32; PART_WORDS] {
    let odd = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
    let words = [cta as u32, batch, split].into_iter().zip(odd);
    let seal = words.fold(splits ^ u32::from_le_bytes(*b"gqaD"), |sum, (word, odd)| {
        sum.wrapping_add(u32::wrapping_mul(word, odd))
    });
    [batch, seal, split, splits].map(|word| word as i32)
}

/// Takes the parts or ranges of all CTAs.
fn empty(parts: &mut [i32], is_of_work: bool) {
    if is_of_work {
        for (cta, range) in parts.chunks_exact_mut(RANGE_WORDS).enumerate() {
            range.fill(0);
            seal_range(cta, range);
        }
        return;
    }
    for (cta, part) in parts.chunks_exact_mut(PART_WORDS).enumerate() {
        part.copy_from_slice(&sealed(cta, [u32::MAX, 0, 0]));
    }
}

/// Changes up to eight bits of the parts or ranges that CTAs have, or one bit of any word.
fn damage(words: &mut [i32], of: &Words, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let end = of.first + of.of_cta * of.ctas;
    let (first, most) = if rng.random_range(0..4) == 0 { (0, 1) } else { (of.first, 8) };
    for _ in 0..rng.random_range(1..=most) {
        words[rng.random_range(first..end)] ^= 1 << rng.random_range(0..32);
    }
}

/// Gives one CTA in four a random part, made of boundary values.
fn forge(parts: &mut [i32], sequences: usize, slots: u32, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    for (cta, part) in parts.chunks_exact_mut(PART_WORDS).enumerate() {
        let own = cta as u32;
        let ends = [0, 1, 2, own, own + 1, slots, 2 * slots, 63, 64, 65, 1 << 20, u32::MAX];
        if rng.random_range(0..4) > 0 {
            continue;
        }
        let [split, splits] = [(); 2].map(|()| *ends.choose(&mut rng).expect("some"));
        let after = splits.saturating_sub(rng.random_range(1..=2));
        let batch = rng.random_range(0..=sequences as u32);
        let split = if rng.random() { split } else { after };
        part.copy_from_slice(&sealed(cta, [batch, split, splits]));
    }
}

impl Scheduled {
    /// Of `device`.
    pub fn new(device: DeviceInfo, made: Made) -> Self {
        let sim = Sim::default().with_device(device.clone());
        Self { sim, device, options: PlanOptions::default(), made }
    }

    /// With these options of the planner.
    pub fn with_options(self, options: PlanOptions) -> Self {
        Self { options, ..self }
    }

    /// The schedule for a call with these inputs; zeros if its plan divides no keys.
    fn schedule(&self, problem: &Problem, inputs: Tensors<&Tensor>) -> Result<Tensor> {
        let by = |device: &DeviceInfo, inputs| {
            let plan = plan(problem, device, &self.options)?;
            self.sim.schedule(&plan, inputs)
        };
        let other =
            DeviceInfo { multiprocessors: 2 * self.device.multiprocessors, ..self.device.clone() };
        let changed = match inputs.need(TensorId::SeqlensK)? {
            Tensor::I32(lengths) => Tensor::from(lengths.mapv(|length| length ^ 128)),
            other => other.clone(),
        };
        let count = TensorId::Schedule.spec(problem).map_or(0, |spec| spec.len());
        let words = |schedule| match schedule {
            Some(Tensor::I32(words)) => words.iter().copied().collect(),
            _ => vec![0; count],
        };
        let right = words(by(&self.device, inputs)?);
        let mut words = match self.made {
            Made::OtherLengths => {
                words(by(&self.device, inputs.with(TensorId::SeqlensK, &changed))?)
            }
            Made::OtherSlots => words(by(&other, inputs)?),
            Made::Nothing => vec![0; count],
            _ => right.clone(),
        };
        let of = Words::of(&right, problem.batch);
        let parts = of.first;
        // With a window the other lengths may have as many key tiles.
        let is_other = words[..parts] != right[..parts];
        match self.made {
            Made::Right | Made::Nothing => {}
            Made::OtherLengths if !is_other => {}
            Made::OtherSlots if of.is_of_work && !is_other => {}
            Made::Damaged(seed) => damage(&mut words, &of, seed),
            Made::Forged(seed) if of.is_of_work => {
                forge_ranges(&mut words[parts..], problem.batch, seed);
            }
            Made::Forged(seed) => {
                let slots = words[SLOTS_WORD] as u32;
                forge(&mut words[parts..], problem.batch, slots, seed);
            }
            _ => empty(&mut words[parts..], of.is_of_work),
        }
        if self.made == Made::OtherKeys {
            words[of.keys] *= 2;
        }
        Ok(Array1::from(words).into_dyn().into())
    }
}

impl Backend for Scheduled {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        let scheduled = |pages| Pages { scheduled: true, ..pages };
        let problem =
            problem.derive(|call| ProblemFields { pages: call.pages.map(scheduled), ..call })?;
        let schedule = self.schedule(&problem, io.inputs)?;
        let scales = io.row_scales.as_mut();
        let mut io = Io {
            inputs: io.inputs.with(TensorId::Schedule, &schedule),
            output: &mut *io.output,
            present_key: &mut *io.present_key,
            present_value: &mut *io.present_value,
            row_scales: scales.map(|scales| scales.each_mut().map(|tensor| &mut **tensor)),
            output_qk: io.output_qk.as_deref_mut(),
            lse: io.lse.as_deref_mut(),
        };
        let plan = plan(&problem, &self.device, &self.options)?;
        self.sim.execute(&plan, &mut io)
    }
}
