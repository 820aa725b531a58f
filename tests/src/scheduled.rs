//! The simulated GPU with decode schedules: it makes one for each paged call whose plan divides
//! keys, or one that does not fit the call.

use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io, Machine};
use gqa_host::plan::{DeviceInfo, PlanOptions, TensorId, Tensors, plan};
use gqa_host::{Pages, Problem, ProblemFields, Result, Tensor};
use ndarray::Array1;

/// The schedule that a call gets. All but the right one assign no part to any CTA: a kernel that
/// took one would leave its outputs as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// For the call.
    Right,
    /// For the call, but without parts.
    Emptied,
    /// For sequences that have other lengths, one of them at least.
    OtherLengths,
    /// For the same lengths on a GPU with another number of SMs.
    OtherSlots,
    /// With another key tile, if key tiles have so many keys.
    OtherKeys,
    /// Zeros.
    Nothing,
}

/// A simulated GPU whose calls have such schedules.
pub struct Scheduled {
    sim: Sim,
    device: DeviceInfo,
    made: Made,
}

/// Words ahead of the key tiles, and the one among them that counts the keys of a tile.
const SHAPE_WORDS: usize = 8;
const KEYS_WORD: usize = 3;

impl Scheduled {
    /// Of `device`.
    pub fn new(device: DeviceInfo, made: Made) -> Self {
        Self { sim: Sim::default().with_device(device.clone()), device, made }
    }

    /// The schedule for a call with these inputs; zeros where the plan that it is made by divides
    /// nothing.
    fn schedule(&self, problem: &Problem, inputs: Tensors<&Tensor>) -> Result<Tensor> {
        let by = |device: &DeviceInfo, inputs| {
            let plan = plan(problem, device, &PlanOptions::default())?;
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
        let parts = SHAPE_WORDS + problem.batch.next_multiple_of(4);
        // With a window the other lengths may have as many key tiles.
        let is_other = self.made != Made::OtherLengths || words[..parts] != right[..parts];
        if self.made != Made::Right && is_other {
            words[parts..].fill(-1);
        }
        if self.made == Made::OtherKeys {
            words[KEYS_WORD] *= 2;
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
        let plan = plan(&problem, &self.device, &PlanOptions::default())?;
        self.sim.execute(&plan, &mut io)
    }
}
