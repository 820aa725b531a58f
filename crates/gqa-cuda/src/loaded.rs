//! Plans whose kernels are loaded on a device, and how they are launched.

use super::arguments::Addresses;
use super::check;
use super::constants::constants;
use super::deferred::Deferred;
use super::device::Device;
use super::error::DriverError;
use super::kernel::Kernel;
use super::raw::module::{self, Shape};
use super::raw::{self, Failure};
use super::stream::Stream;
use super::sys::RawFunction;
use super::views::{Views, Workspace};
use gqa_kernels::registry::Entry;
use gqa_plan::plan::{Capability, DeviceInfo, Launch, Plan};
use gqa_ptx::Constants;
use gqa_tensor::{Error, Result};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

/// A plan loaded on a device. To enqueue it takes no lock, no lookup and no memory allocation.
pub struct LoadedPlan {
    device: Device,
    plan: Arc<Plan>,
    /// One for each launch of the plan.
    kernels: Vec<LoadedKernel>,
    /// The kernel that writes the plan's schedule, if the plan has one.
    schedule: Option<LoadedKernel>,
    /// `GQA_CHECK` was set when it was loaded.
    checked: bool,
}

/// A launch's kernel, and how it is launched.
pub(super) struct LoadedKernel {
    kernel: Kernel,
    /// Whether constants are folded into its PTX.
    is_folded: bool,
    /// The specialized kernel that takes over after enough launches of this one.
    deferred: Option<Arc<Deferred>>,
    pub(super) shape: Shape,
}

/// When the constants of a plan are folded into its kernels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Folding {
    Now,
    Deferred,
}

impl Device {
    /// Compiles the kernels that the plan's GPU gets, with the constants of [`Plan::fold`] folded
    /// into their PTX. Plans of one layer share kernels. Keep the loaded plan as long as calls of
    /// that shape come.
    ///
    /// # Errors
    /// Where the plan was made for a newer GPU, or for one with more shared memory, where the
    /// driver is too old for a kernel, and where `GQA_CHECK` is neither 0 nor 1.
    pub fn load(&self, plan: impl Into<Arc<Plan>>) -> Result<LoadedPlan> {
        self.load_when(plan.into(), Folding::Now)
    }

    /// As [`load`](Self::load), for callers that do not know which layers will call: general
    /// kernels serve the first calls. Once plans with equal constants have launched a kernel 16
    /// times, a background thread compiles it with these constants. Both compute the same bits.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_deferred(&self, plan: impl Into<Arc<Plan>>) -> Result<LoadedPlan> {
        self.load_when(plan.into(), Folding::Deferred)
    }

    fn load_when(&self, plan: Arc<Plan>, folding: Folding) -> Result<LoadedPlan> {
        let checked = check::is_on()?;
        self.expect_runs(&plan)?;
        let _entered = self.enter()?;
        let load = |launch: &Launch| {
            launch.check_cluster()?;
            Addresses::unknown(launch)?;
            self.loaded_kernel(launch, &plan, folding)
        };
        let kernels = plan.launches().iter().map(load).collect::<Result<_>>()?;
        let schedule = plan.schedule().map(load).transpose()?;
        Ok(LoadedPlan { device: self.clone(), plan, kernels, schedule, checked })
    }

    /// The device must be entered.
    fn loaded_kernel(&self, launch: &Launch, plan: &Plan, when: Folding) -> Result<LoadedKernel> {
        let (modules, entry, sm) = (self.modules(), launch.entry(), plan.device().sm);
        let (constants, shape) = (constants(launch, plan.fold()), shape(launch, plan.device()));
        if when == Folding::Now || constants.is_empty() {
            let (kernel, is_folded) = modules.kernel(entry, sm, &constants)?;
            return Ok(LoadedKernel { kernel, is_folded, deferred: None, shape });
        }
        let (kernel, is_folded) = modules.kernel(entry, sm, &Constants::default())?;
        let deferred = Some(modules.deferred(entry, sm, constants)?);
        Ok(LoadedKernel { kernel, is_folded, deferred, shape })
    }

    /// Errs where the plan needs more than the GPU has.
    fn expect_runs(&self, plan: &Plan) -> Result<()> {
        let (have, want) = (self.info(), plan.device());
        let shared = plan.launches().iter().map(|launch| launch.entry().shared_bytes).max();
        if want.sm <= have.sm && shared.is_none_or(|bytes| bytes <= have.shared_bytes) {
            return Ok(());
        }
        let got = format!(
            "one for {} (compute capability {}, {} bytes of shared memory)",
            want.name,
            want.capability(),
            shared.unwrap_or_default()
        );
        let allowed = format!(
            "up to compute capability {} and {} bytes, as {} has",
            have.capability(),
            have.shared_bytes,
            have.name
        );
        Err(Error::invalid("plan", got, allowed))
    }
}

fn shape(launch: &Launch, device: &DeviceInfo) -> Shape {
    let entry = launch.entry();
    // A kernel compiled for clusters is launched as a cluster even if it has one CTA: its cluster
    // instructions are illegal otherwise. Its variant for devices without clusters has none.
    let has_cluster = entry.max_cluster > 1 && device.has(Capability::Clusters);
    Shape {
        grid: launch.grid(),
        threads: entry.threads,
        shared_bytes: entry.shared_bytes,
        cluster: if has_cluster { launch.cluster() } else { 0 },
        programmatic: launch.programmatic(),
        urgent: launch.concurrent(),
    }
}

impl LoadedPlan {
    /// The plan.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// The device that it is loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn kernels(&self) -> &[LoadedKernel] {
        &self.kernels
    }

    /// The number of launches that use a specialized kernel by now.
    pub fn folded(&self) -> usize {
        self.kernels.iter().filter(|kernel| kernel.is_folded()).count()
    }

    /// Whether `GQA_CHECK` was set when it was loaded.
    pub(super) fn checked(&self) -> bool {
        self.checked
    }

    /// Puts the plan's kernels into `stream`. Allocates no memory and does not wait. The stream
    /// may be captured: what changes from one replay to the next (contents of tensors, lengths
    /// among them) is read on the device. Concurrent launches go into a second stream that
    /// `stream` keeps, and that it waits for; but into `stream` itself where that is every
    /// thread's own default stream.
    ///
    /// # Errors
    /// Where a tensor is missing or has another type, shape or alignment than the plan's, where
    /// the workspace is too small, where an output, a cache that is appended to, the workspace or
    /// its counters overlap anything else, and where the stream belongs to another device. While
    /// `GQA_CHECK` is set, also where lengths, positions, block tables, counters or a schedule hold
    /// what they must not, and where the stream is captured. Nothing is launched then.
    ///
    /// # Safety
    /// - Every view and the workspace is device memory of its stated size and stays so until the
    ///   work is done.
    /// - Counters are zero when the call begins, and no other call has them until it ends.
    /// - With a shared cache, present_key and present_value hold the past.
    pub unsafe fn enqueue(
        &self,
        tensors: &Views<'_>,
        workspace: Workspace,
        stream: &Stream,
    ) -> Result<()> {
        let _range = super::range::open("GroupQueryAttention");
        tracing::debug!(call = %self.plan.problem(), "enqueue");
        // SAFETY: the caller's.
        unsafe { self.enqueue_launches(0..self.kernels.len(), tensors, workspace, stream) }
    }

    /// Puts the kernel of [`Plan::schedule`] into `stream`: it writes the tensor
    /// [`Schedule`](gqa_plan::plan::TensorId::Schedule) that the plan's calls read, and those of
    /// other layers. A plan without one leaves that tensor as it is, which is right for its calls.
    /// `tensors` has the schedule and what it is made of, `SeqlensK` and
    /// `CumulativeSequenceLength`; others are not looked at. Allocates no memory and does not wait.
    /// The stream may be captured.
    ///
    /// Calls must begin after the kernel has ended, as they do in the same stream.
    ///
    /// # Errors
    /// Where a tensor is missing or has another type, shape or alignment than the plan's, where
    /// the schedule overlaps the others, and where the stream belongs to another device. Nothing
    /// is launched then.
    ///
    /// # Safety
    /// Every view is device memory of its stated size and stays so until the work is done.
    pub unsafe fn schedule(&self, tensors: &Views<'_>, stream: &Stream) -> Result<()> {
        stream.expect_on(&self.device)?;
        let (Some(kernel), Some(launch)) = (&self.schedule, self.plan.schedule()) else {
            return Ok(());
        };
        check::schedule(&self.plan, tensors)?;
        let _entered = self.device.enter()?;
        let addresses = Addresses::new(launch, tensors, Workspace::default());
        // SAFETY: the planner bounds every argument by the tensors, whose sizes were just checked;
        // the rest is the caller's.
        unsafe { kernel.launch(&self.device, launch, &addresses, stream.raw()) }
    }

    /// As [`enqueue`](Self::enqueue), for a range of the plan's launches.
    ///
    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    pub(super) unsafe fn enqueue_launches(
        &self,
        launches: Range<usize>,
        tensors: &Views<'_>,
        workspace: Workspace,
        stream: &Stream,
    ) -> Result<()> {
        stream.expect_on(&self.device)?;
        let launches = self.expect_launches(launches)?;
        // SAFETY: the caller's.
        unsafe { check::call(&self.plan, tensors, workspace, stream, self.checked) }?;
        let _entered = self.device.enter()?;
        let mut forked = None;
        let launched = launches.into_iter().try_for_each(|number| {
            let launch = &self.plan.launches()[number];
            let place = if launch.concurrent() && !raw::stream::is_per_thread(stream.raw()) {
                forked.insert(stream.side()?).fork(stream.raw())?
            } else {
                stream.raw()
            };
            let addresses = Addresses::new(launch, tensors, workspace);
            // SAFETY: the planner bounds every argument by the tensors and the workspace, whose
            // sizes were just checked; the rest is the caller's.
            unsafe { self.kernels[number].launch(&self.device, launch, &addresses, place) }
        });
        // Joins the side stream after a failure too, or a capture would not end.
        if let Some(side) = forked {
            side.join(stream.raw())?;
        }
        launched
    }

    /// Errs where the launches do not exist, or share a work queue with others.
    fn expect_launches(&self, launches: Range<usize>) -> Result<Range<usize>> {
        let all = self.plan.launches();
        if launches.start > launches.end || launches.end > all.len() {
            let allowed = format!("numbers below {}", all.len());
            return Err(Error::invalid("launches", format!("{launches:?}"), allowed));
        }
        let shared = |launch: &Launch| launch.concurrent() || launch.overlaps();
        if launches.len() != all.len() && all.iter().any(shared) {
            let got = format!("{launches:?} of a plan whose launches share work");
            return Err(Error::invalid("launches", got, "all of them together"));
        }
        Ok(launches)
    }
}

impl LoadedKernel {
    fn is_folded(&self) -> bool {
        let deferred = self.deferred.as_ref();
        self.is_folded || deferred.is_some_and(|deferred| deferred.kernel().is_some())
    }

    /// The kernel to launch; counts the launch.
    pub(super) fn function(&self, device: &Device) -> RawFunction {
        let folded = self.deferred.as_ref().and_then(|deferred| deferred.launched(device));
        folded.unwrap_or(self.kernel).function
    }

    /// # Safety
    /// The addresses are of memory that the launch may access.
    unsafe fn launch(
        &self,
        device: &Device,
        launch: &Launch,
        addresses: &Addresses,
        stream: *mut c_void,
    ) -> Result<()> {
        let entry = launch.entry();
        tracing::debug!(
            entry = entry.name,
            grid = ?self.shape.grid,
            cluster = self.shape.cluster,
            programmatic = self.shape.programmatic,
            concurrent = self.shape.urgent,
            threads = self.shape.threads,
            shared_bytes = self.shape.shared_bytes,
            "launch"
        );
        let _range = super::range::open(entry.name);
        let function = self.function(device);
        let launched = addresses.with(launch, |arguments| {
            // SAFETY: the array has one value per argument, then the parameters, with the sizes of
            // the entry; constants in the kernel's text are those of this launch.
            unsafe { module::launch(function, &self.shape, arguments, stream) }
        })?;
        launched.map_err(|failure| launch_failed(entry, failure))
    }
}

/// A kernel that did not start.
pub(super) fn launch_failed(entry: &Entry, failure: Failure) -> Error {
    DriverError::LaunchFailed { kernel: entry.name.to_owned(), code: failure.code }.into()
}
