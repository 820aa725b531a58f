//! The simulated GPU with batch-invariant calls: each sequence of a call also runs alone, over a
//! paged KV cache with tighter bounds, and must have the same bits.

use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, Io, Machine};
use gqa_host::plan::{DeviceInfo, Plan, PlanOptions, TensorId, plan};
use gqa_host::{Error, Pages, Problem, ProblemFields, Result, Tensor, TensorView};
use ndarray::Array1;
use proptest::prelude::*;

use crate::PagedCase;
use crate::parity::Parity as _;

/// A simulated GPU whose calls are batch-invariant.
pub struct Alone {
    sim: Sim,
    device: DeviceInfo,
}

/// The call, batch-invariant.
fn invariant(problem: &Problem) -> Result<Problem> {
    problem.derive(|call| ProblemFields { batch_invariant: true, ..call })
}

/// Of these calls, the ones that have batch-invariant kernels.
pub fn invariant_cases(
    cases: BoxedStrategy<PagedCase>,
    device: &DeviceInfo,
) -> BoxedStrategy<PagedCase> {
    let device = device.clone();
    let has_kernels = move |case: &PagedCase| {
        let problem = invariant(&case.problem().expect("legal")).expect("legal");
        plan(&problem, &device, &PlanOptions::default()).is_ok()
    };
    cases.prop_filter("has batch-invariant kernels", has_kernels).boxed()
}

impl Alone {
    /// Of `device`.
    pub fn new(device: DeviceInfo) -> Self {
        Self { sim: Sim::default().with_device(device.clone()), device }
    }

    fn plan(&self, problem: &Problem) -> Result<Plan> {
        plan(problem, &self.device, &PlanOptions::default())
    }

    /// The output of batch entry `b` by itself, where each has a cache of its own.
    fn entry(&self, problem: &Problem, io: &Io<'_>, b: usize) -> Result<Tensor> {
        let own = problem.derive(|call| ProblemFields { batch: 1, ..call })?;
        let of_entry = |id: TensorId, tensor: &Tensor| match id.spec(&own) {
            Some(spec) if spec.shape != tensor.shape() => rows(tensor, b, 1),
            _ => tensor.clone(),
        };
        let slices = io.inputs.iter().map(|(id, given)| (id, of_entry(id, given)));
        let slices = slices.collect::<Vec<_>>();
        let inputs = slices.iter().map(|(id, slice)| (*id, slice)).collect();
        let mut output = of_entry(TensorId::Output, io.output);
        let mut keys = of_entry(TensorId::PresentKey, io.present_key);
        let mut values = of_entry(TensorId::PresentValue, io.present_value);
        let mut scales = io.row_scales.as_ref().map(|[k, v]| [rows(k, b, 1), rows(v, b, 1)]);
        let mut weights = io.output_qk.as_ref().map(|tensor| rows(tensor, b, 1));
        let mut lse = io.lse.as_ref().map(|tensor| rows(tensor, b, 1));
        let mut io = Io {
            inputs,
            output: &mut output,
            present_key: &mut keys,
            present_value: &mut values,
            row_scales: scales.as_mut().map(|scales| scales.each_mut()),
            output_qk: weights.as_mut(),
            lse: lse.as_mut(),
        };
        self.sim.execute(&self.plan(&own)?, &mut io)?;
        Ok(output)
    }

    fn run_entries(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        let alone = (0..problem.batch).map(|b| self.entry(problem, io, b));
        let alone = alone.collect::<Result<Vec<_>>>()?;
        self.sim.execute(&self.plan(problem)?, io)?;
        let differs = |(b, own): &(usize, &Tensor)| rows(io.output, *b, 1).bytes() != own.bytes();
        match alone.iter().enumerate().find(differs) {
            Some((b, _)) => {
                let got = format!("another output of entry {b}");
                Err(Error::invalid("batch_invariant", got, "that of the entry alone"))
            }
            None => Ok(()),
        }
    }

    /// The output of sequence `b` by itself, and its log-sum-exps.
    fn alone(
        &self,
        problem: &Problem,
        io: &Io<'_>,
        [b, start, new]: [usize; 3],
    ) -> Result<(Tensor, Option<Tensor>)> {
        let pages = problem.pages.ok_or(Error::NoKernel("no blocks".to_owned()))?;
        let length = integers(io.inputs.need(TensorId::SeqlensK)?)[b];
        let counted = if pages.counts_new { 0 } else { new };
        let longest = (length.max(0) as usize + counted).max(new).min(problem.total_len);
        let problem = problem.derive(|call| ProblemFields {
            batch: 1,
            q_len: new,
            new_len: call.new_len.min(new),
            total_len: longest,
            past_capacity: longest,
            capacity: longest,
            pages: Some(Pages { tokens: new, one_each: new == 1, ..pages }),
            ..call
        })?;
        let own = [
            (TensorId::Query, new),
            (TensorId::Key, new),
            (TensorId::Value, new),
            (TensorId::SlotMapping, new),
        ];
        let mut slices = Vec::new();
        for (id, count) in own {
            slices.extend(io.inputs.get(id).map(|given| (id, rows(given, start, count))));
        }
        for id in [TensorId::SeqlensK, TensorId::BlockTable] {
            slices.push((id, rows(io.inputs.need(id)?, b, 1)));
        }
        let starts = Array1::from(vec![0, new as i32]).into_dyn().into();
        slices.push((TensorId::CumulativeSequenceLength, starts));
        let inputs = slices.iter().fold(io.inputs, |inputs, (id, slice)| inputs.with(*id, slice));
        let made = |id: TensorId| {
            let spec = id.spec(&problem)?;
            Some(Tensor::try_zeros(id.name(), spec.dtype, &spec.shape))
        };
        let mut output = made(TensorId::Output).expect("always")?;
        let mut lse = made(TensorId::Lse).transpose()?;
        let (mut keys, mut values) = (io.present_key.clone(), io.present_value.clone());
        let mut scales = io.row_scales.as_ref().map(|[k, v]| [(**k).clone(), (**v).clone()]);
        let mut io = Io {
            inputs,
            output: &mut output,
            present_key: &mut keys,
            present_value: &mut values,
            row_scales: scales.as_mut().map(|scales| scales.each_mut()),
            output_qk: None,
            lse: lse.as_mut(),
        };
        self.sim.execute(&self.plan(&problem)?, &mut io)?;
        Ok((output, lse))
    }
}

fn integers(tensor: &Tensor) -> Vec<i32> {
    match tensor.view() {
        TensorView::I32(values) => values.to_vec(),
        _ => Vec::new(),
    }
}

/// `count` rows of a tensor.
fn rows(tensor: &Tensor, first: usize, count: usize) -> Tensor {
    let mut shape = tensor.shape().to_vec();
    let bytes = tensor.bytes().len() / shape[0].max(1);
    shape[0] = count;
    let mut slice = Tensor::try_zeros("slice", tensor.dtype(), &shape).expect("small");
    let own = &tensor.bytes()[first * bytes..(first + count) * bytes];
    slice.bytes_mut().expect("contiguous").copy_from_slice(own);
    slice
}

impl Backend for Alone {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        let problem = invariant(problem)?;
        if problem.pages.is_none() {
            return self.run_entries(&problem, io);
        }
        let starts = integers(io.inputs.need(TensorId::CumulativeSequenceLength)?);
        let sequences = starts.windows(2).enumerate().map(|(b, bounds)| {
            let [start, end] = [bounds[0], bounds[1]].map(|token| token as usize);
            [b, start, end - start]
        });
        let sequences = sequences.filter(|[.., new]| *new > 0).collect::<Vec<_>>();
        let alone = sequences.iter().map(|sequence| self.alone(&problem, io, *sequence));
        let alone = alone.collect::<Result<Vec<_>>>()?;
        self.sim.execute(&self.plan(&problem)?, io)?;
        for ([b, start, new], (output, lse)) in sequences.into_iter().zip(alone) {
            let differs = |what| {
                let got = format!("another {what} of sequence {b} of {new} tokens");
                Err(Error::invalid("batch_invariant", got, "that of the sequence alone"))
            };
            if rows(io.output, start, new).bytes() != output.bytes() {
                return differs("output");
            }
            let (Some(all), Some(own)) = (&io.lse, lse) else { continue };
            let tokens = all.shape()[1];
            for head in 0..all.shape()[0] {
                let [all, own] = [(&**all, head * tokens + start), (&own, head * new)]
                    .map(|(tensor, first)| &tensor.bytes()[4 * first..4 * (first + new)]);
                if all != own {
                    return differs("log-sum-exp");
                }
            }
        }
        Ok(())
    }
}
