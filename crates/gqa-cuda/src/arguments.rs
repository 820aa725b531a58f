//! Marshals the arguments of a launch for the driver.

use super::sys::EncodedTensorMap;
use super::tensor_map;
use super::views::{self, Views, Workspace};
use gqa_kernels::registry::Entry;
use gqa_plan::plan::{Arg, Launch, TensorMap};
use gqa_tensor::{Error, Result};
use std::ffi::c_void;

/// More pointer arguments than any kernel has.
const MAX_ARGUMENTS: usize = 24;
/// More tensor maps than any kernel has.
const MAX_TENSOR_MAPS: usize = 4;

/// The device address of each argument of a launch; 0 for a null pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses([u64; MAX_ARGUMENTS]);

impl Addresses {
    /// Resolves the addresses of a launch that [`unknown`](Self::unknown) has accepted.
    pub(super) fn new(launch: &Launch, tensors: &Views<'_>, workspace: Workspace) -> Self {
        let mut addresses = Self([0; MAX_ARGUMENTS]);
        for (address, arg) in addresses.0.iter_mut().zip(launch.args()) {
            *address = start(*arg, tensors, workspace);
        }
        addresses
    }

    /// Placeholder addresses, for a launch that is recorded before its memory is known.
    ///
    /// Errs if the arguments of the launch do not match its kernel.
    pub(super) fn unknown(launch: &Launch) -> Result<Self> {
        let entry = launch.entry();
        if takes(entry, launch.args(), launch.params()) {
            return Ok(Self([0; MAX_ARGUMENTS]));
        }
        let other = format!("{}: the launch's arguments do not match the kernel's", entry.name);
        Err(Error::NoKernel(other))
    }

    /// Calls `f` with a pointer to each argument, including tensor maps and the parameter struct.
    /// `launch` must be the launch that these addresses were resolved for.
    pub(super) fn with<R>(
        &self,
        launch: &Launch,
        f: impl FnOnce(&mut [*mut c_void]) -> R,
    ) -> Result<R> {
        let mut maps = [EncodedTensorMap::default(); MAX_TENSOR_MAPS];
        let mut arguments = [std::ptr::null_mut::<c_void>(); MAX_ARGUMENTS + 1];
        for (i, arg) in launch.args().iter().enumerate() {
            arguments[i] = std::ptr::from_ref(&self.0[i]).cast_mut().cast();
            if let Arg::Map(map) = arg {
                // Tensor maps come first. Unknown memory has no map.
                if self.0[i] != 0 {
                    maps[i] = tensor_map::encode(map, self.0[i], launch.entry().name)?;
                }
                arguments[i] = std::ptr::from_mut(&mut maps[i]).cast();
            }
        }
        let count = launch.args().len();
        arguments[count] = launch.params().as_ptr().cast_mut().cast();
        Ok(f(&mut arguments[..=count]))
    }
}

/// Whether the launch matches its kernel in the kinds of arguments and the size of the parameters.
fn takes(entry: &Entry, args: &[Arg], params: &[u8]) -> bool {
    let is_map = |arg: &Arg| matches!(arg, Arg::Map(_));
    args.len() <= MAX_ARGUMENTS
        && entry.tensor_maps <= MAX_TENSOR_MAPS
        && args.iter().enumerate().all(|(i, arg)| is_map(arg) == (i < entry.tensor_maps))
        && args.len() == entry.arguments.len()
        && params.len() == entry.params_bytes
}

fn start(arg: Arg, tensors: &Views<'_>, workspace: Workspace) -> u64 {
    match arg {
        Arg::Null => 0,
        Arg::Tensor { id, offset } | Arg::Map(TensorMap { id: Some(id), offset, .. }) => {
            views::pointer(tensors, id) + offset as u64
        }
        Arg::Workspace { offset, .. } | Arg::Map(TensorMap { id: None, offset, .. }) => {
            workspace.pointer + offset as u64
        }
        Arg::Counters { .. } => workspace.counters,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::views::DeviceView;
    use gqa_plan::engine::{Dense, Heads, Layer};
    use gqa_plan::plan::{DeviceInfo, Plan, PlanOptions, TensorId, plan};
    use gqa_tensor::DType;

    /// A decode step without tensor maps: splits of the keys, then their merge.
    fn step() -> Plan {
        let layer = Layer::new(DType::F16, Heads { query: 32, kv: 8, size: 72 });
        let problem = layer.dense(Dense::decode(1, 4096).packed()).unwrap();
        plan(&problem, &DeviceInfo::known("t4").unwrap(), &PlanOptions::default()).unwrap()
    }

    /// The tensor in a role, far from all others.
    fn pointer(id: TensorId) -> u64 {
        (1 + id as u64) << 32
    }

    const SCRATCH: Workspace = Workspace::new(1 << 50, 1 << 30, 1 << 51);

    fn views(plan: &Plan) -> Views<'_> {
        let view = |id, shape| DeviceView::new(pointer(id), DType::F16, shape);
        plan.tensors().iter().map(|(id, spec)| (*id, view(*id, &spec.shape[..]))).collect()
    }

    #[test]
    fn the_driver_finds_each_argument_and_then_the_parameters() {
        let plan = step();
        assert!(plan.launches().len() > 1);
        let mut scratch = 0;
        for launch in plan.launches() {
            let addresses = Addresses::new(launch, &views(&plan), SCRATCH);
            let found = addresses.with(launch, |arguments| {
                let (params, pointers) = arguments.split_last().unwrap();
                assert_eq!(params.cast_const().cast(), launch.params().as_ptr());
                // SAFETY: each leads to an address.
                pointers.iter().map(|at| unsafe { at.cast::<u64>().read() }).collect::<Vec<_>>()
            });
            let found = found.unwrap();
            assert_eq!(found.len(), launch.args().len());
            for (arg, found) in launch.args().iter().zip(found) {
                let want = match *arg {
                    Arg::Null => 0,
                    Arg::Tensor { id, offset } => pointer(id) + offset as u64,
                    Arg::Workspace { offset, .. } => SCRATCH.pointer + offset as u64,
                    Arg::Counters { .. } => SCRATCH.counters,
                    Arg::Map(_) => panic!("no kernel of the step has a tensor map"),
                };
                scratch += u32::from(want >= SCRATCH.pointer);
                assert_eq!(found, want, "{arg:?} of {}", launch.entry().name);
            }
        }
        assert!(scratch > 0);
    }

    #[test]
    fn a_launch_without_one_of_its_arguments_is_refused() {
        let plan = step();
        let launch = &plan.launches()[0];
        let unknown = Addresses::unknown(launch).unwrap();
        assert_ne!(unknown, Addresses::new(launch, &views(&plan), SCRATCH));
        let (entry, args, params) = (launch.entry(), launch.args(), launch.params());
        assert!(takes(entry, args, params));
        assert!(!takes(entry, &args[1..], params) && !takes(entry, args, &params[1..]));
    }
}
