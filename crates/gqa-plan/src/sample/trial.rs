//! A test of a kernel: one call, planned once with that kernel and once with the simplest kernels.

use super::small;
use crate::plan::{DeviceInfo, Plan, PlanOptions, plain_options, plan};
use crate::problem::{Problem, ProblemFields};
use crate::tensors::TensorSpec;
use gqa_kernels::registry::Entry;
use gqa_tensor::{Error, Result};

/// Most bytes of a call's tensors in a test.
const MOST_BYTES: usize = 1 << 30;

/// A test of a kernel.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The plan with the tested kernel.
    pub tested: Plan,
    /// The plan with the simplest kernels, for the same tensors.
    pub plain: Plan,
}

impl Trial {
    /// A test of kernel `entry` of the plan `call`: on a [small](small()) call, or on the same call
    /// if the kernel does not take small ones.
    ///
    /// # Errors
    /// Where there is no such call, or where its tensors are too large.
    pub fn of(entry: &'static Entry, call: &Plan) -> Result<Self> {
        let device = call.device();
        let small = small(call.problem());
        let forced = entry.role.leads().then_some(entry.name);
        let options = [None, forced].map(|force| PlanOptions { force, ..PlanOptions::default() });
        let whole = call.problem().contiguous().into_owned();
        let problems = small.into_iter().chain([whole]);
        let mut calls =
            problems.flat_map(|problem| options.clone().map(|with| (problem.clone(), with)));
        let tested = calls.find_map(|(problem, options)| {
            let tested = plan(&problem, device, &options).ok()?;
            let has = tested.launches().iter().any(|launch| launch.entry().name == entry.name);
            (has && is_small(&problem)).then_some(tested)
        });
        let tested = tested.ok_or_else(|| {
            Error::NoKernel(format!("{} takes no call that is small enough for a test", entry.name))
        })?;
        let plain = simplest(tested.problem(), device)?;
        Ok(Self { tested, plain })
    }
}

fn is_small(problem: &Problem) -> bool {
    TensorSpec::all(problem).iter().map(|(_, spec)| spec.bytes()).sum::<usize>() <= MOST_BYTES
}

fn simplest(problem: &Problem, device: &DeviceInfo) -> Result<Plan> {
    let problem = problem.derive(|call| ProblemFields {
        float8_products: false,
        batch_invariant: false,
        ..call
    })?;
    plan(&problem, device, &plain_options())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents;
    use crate::engine::{Dense, Heads, LatentHeads, Layer, Paged, Rope};
    use crate::problem::{QuantFormat, Quantization, Scales, Sink};
    use crate::sample::tensors;
    use crate::tensors::Tensors;
    use gqa_tensor::DType;
    use std::collections::BTreeSet;

    /// Calls as engines make them.
    fn calls() -> Vec<Problem> {
        let mut calls = Vec::new();
        let mut add = |layer: &Layer| {
            let dense = [
                Dense::decode(1, 8192),
                Dense::decode(64, 9000),
                Dense::chunk(2, 512, 8192).longest(4096),
                Dense::chunk(4, 2048, 8192).longest(2048),
                Dense::chunk(8, 4, 3000),
            ];
            calls.extend(dense.into_iter().flat_map(|call| layer.dense(call)));
            let paged = [
                Paged::decode(3, [4000, 16, 500]),
                Paged::new(64, 64, [9000, 16, 140]).longest(2200),
                Paged::new(64, 1200, [9000, 16, 140]).most_tokens(512).longest(2000),
                Paged::new(2, 4000, [9000, 64, 40]).most_tokens(2000).longest(2000),
                Paged::decode(2, [900, 48, 10]),
            ];
            calls.extend(paged.into_iter().flat_map(|call| layer.paged(call)));
        };
        let heads = |query, kv, size| Heads { query, kv, size };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for of in [
                heads(32, 8, 128),
                heads(8, 8, 64),
                heads(16, 1, 96),
                heads(8, 2, 256),
                heads(4, 4, 512),
                heads(4, 2, 576),
            ] {
                let layer = Layer::new(dtype, of);
                add(&layer);
                add(&layer.clone().rope(Rope::new(16, 10_000)).window(300).sink(Sink::PerHead));
                add(&layer.clone().softcap(30.0).bidirectional());
                add(&layer.clone().batch_invariant());
                for format in QuantFormat::ALL {
                    for scales in [Scales::PerChannel, Scales::PerToken] {
                        add(&layer.clone().quantized(Quantization { format, scales }));
                    }
                }
            }
            let latent = LatentHeads { query: 16, size: 576, values: 512 };
            add(&Layer::latent(dtype, latent, 0.07));
        }
        calls
    }

    fn check_tensors(problem: &Problem) {
        let bytes: usize = TensorSpec::all(problem).iter().map(|(_, spec)| spec.bytes()).sum();
        if bytes < 8 << 20 {
            let read = tensors(problem, 1).unwrap();
            let read: Tensors<_> = read.iter().map(|(id, tensor)| (*id, tensor.view())).collect();
            contents::check(problem, &read).unwrap();
        }
    }

    /// Every kernel that is planned for a GPU on which the project never ran has a test, with
    /// tensors that pass the checks of back ends.
    #[test]
    fn every_kernel_that_may_be_untested_has_a_test() {
        let (mut tested, mut failed, mut seen) =
            (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for name in ["t4", "a100", "rtx4090", "b200"] {
            let device = DeviceInfo::known(name).unwrap();
            for problem in calls() {
                let Ok(plan) = plan(&problem, &device, &PlanOptions::default()) else { continue };
                for entry in plan.unproven() {
                    if !seen.insert((name, entry.name)) {
                        continue;
                    }
                    match Trial::of(entry, &plan) {
                        Ok(trial) => {
                            check_tensors(trial.tested.problem());
                            assert!(trial.plain.unproven().is_empty());
                            tested.insert(entry.name);
                        }
                        Err(error) => {
                            failed
                                .insert(format!("{name}: {}: {error}: {:?}", entry.name, problem));
                        }
                    }
                }
            }
        }
        assert!(failed.is_empty(), "{} {:#?}", failed.len(), failed.iter().take(5));
        assert!(tested.len() > 100, "{}: {tested:?}", tested.len());
    }
}
