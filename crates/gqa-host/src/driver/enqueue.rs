//! Plans put into streams, on memory that belongs to the caller.

use super::arguments::Addresses;
use super::cust::{self, RawStream, Shape};
use super::device::Device;
use super::error::DriverError;
use super::launch::{self, launch_failed};
use crate::plan::{Launch, Plan, TensorId};
use crate::{DType, Error, Result};

/// A tensor in device memory, row-major and contiguous, 16-byte aligned.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a> {
    /// CUdeviceptr of the first element.
    pub pointer: u64,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: &'a [usize],
}

/// The tensors of a call by their role.
#[derive(Clone, Copy, Debug, Default)]
pub struct Views<'a>([Option<DeviceView<'a>>; TensorId::ALL.len()]);

impl<'a> Views<'a> {
    /// No tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// With `view` in the role `id`. Many are quicker collected.
    #[inline]
    pub fn bind(mut self, id: TensorId, view: DeviceView<'a>) -> Self {
        self.0[id as usize] = Some(view);
        self
    }

    /// Errs unless every tensor of the plan's problem is there with its type and shape.
    pub(super) fn check(&self, plan: &Plan) -> Result<()> {
        for (id, spec) in plan.tensors.iter().filter(|(_, spec)| !spec.is_empty()) {
            let allowed = || format!("{} {:?}, 16-byte aligned", spec.dtype, spec.shape);
            match self.0[*id as usize] {
                None => return Err(Error::invalid(id.name(), "nothing", allowed())),
                Some(view)
                    if view.dtype != spec.dtype
                        || view.shape != spec.shape
                        || !view.pointer.is_multiple_of(16) =>
                {
                    let got = format!("{} {:?} at {:#x}", view.dtype, view.shape, view.pointer);
                    return Err(Error::invalid(id.name(), got, allowed()));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    pub(super) fn pointer(&self, id: TensorId) -> u64 {
        self.0[id as usize].map_or(0, |view| view.pointer)
    }
}

impl<'a> FromIterator<(TensorId, DeviceView<'a>)> for Views<'a> {
    fn from_iter<I: IntoIterator<Item = (TensorId, DeviceView<'a>)>>(tensors: I) -> Self {
        let mut views = Self::new();
        for (id, view) in tensors {
            views.0[id as usize] = Some(view);
        }
        views
    }
}

/// Scratch memory of at least [`Plan::workspace_bytes`] bytes, 256-byte aligned. Its content means nothing between calls; calls that
/// may run at the same time need one each.
#[derive(Clone, Copy, Debug)]
pub struct Workspace {
    /// CUdeviceptr.
    pub pointer: u64,
    /// Length.
    pub bytes: usize,
    /// CUdeviceptr of at least [`Plan::counters`] 32-bit counters, which are zero before the first call and after every call; 0 where no plan needs
    /// any.
    pub counters: u64,
}

impl Workspace {
    pub(super) fn check(self, plan: &Plan) -> Result<()> {
        if plan.counters > 0 && (self.counters == 0 || !self.counters.is_multiple_of(4)) {
            let allowed = format!("{} zeroed 32-bit counters in device memory", plan.counters);
            return Err(Error::invalid(
                "workspace.counters",
                format!("{:#x}", self.counters),
                allowed,
            ));
        }
        if self.bytes >= plan.workspace_bytes && self.pointer.is_multiple_of(256) {
            return Ok(());
        }
        let got = format!("{} bytes at {:#x}", self.bytes, self.pointer);
        Err(Error::invalid(
            "workspace",
            got,
            format!("{} bytes, 256-byte aligned", plan.workspace_bytes),
        ))
    }
}

impl Device {
    /// Puts the plan's kernels into `stream`. Allocates no memory and does not wait; the first use of a kernel loads its module.
    /// The stream may be captured: what changes from one replay to the next (tensor contents, `seqlens_k` among them) is read
    /// on the device. Where a plan has launches [aside](Launch::aside) they go into a stream that the device has beside this one, which waits for them; but into this one where
    /// it is every thread's own default stream.
    ///
    /// # Safety
    /// - `stream` is a stream of this GPU's primary context, or null for its default stream.
    /// - Every view and the workspace is device memory of its stated size and stays so until the work is done. Outputs and
    ///   workspace overlap nothing else.
    /// - With a shared cache, present_key and present_value hold the past.
    pub unsafe fn enqueue(
        &self,
        plan: &Plan,
        tensors: &Views<'_>,
        workspace: Workspace,
        stream: RawStream,
    ) -> Result<()> {
        let _range = super::range::open("GroupQueryAttention");
        tracing::debug!(call = %plan.problem, "enqueue");
        // SAFETY: the caller's.
        unsafe { self.enqueue_launches(plan, 0..plan.launches.len(), tensors, workspace, stream) }
    }

    /// As [`enqueue`](Self::enqueue), for a part of the plan's launches.
    ///
    /// # Safety
    /// As [`enqueue`](Self::enqueue).
    pub(super) unsafe fn enqueue_launches(
        &self,
        plan: &Plan,
        launches: std::ops::Range<usize>,
        tensors: &Views<'_>,
        workspace: Workspace,
        stream: RawStream,
    ) -> Result<()> {
        tensors.check(plan)?;
        workspace.check(plan)?;
        let _entered = self.enter().map_err(DriverError::from)?;
        let chosen = plan.launches.get(launches.clone()).ok_or_else(|| {
            let allowed = format!("numbers below {}", plan.launches.len());
            Error::invalid("launches", format!("{launches:?}"), allowed)
        })?;
        let is_whole = chosen.len() == plan.launches.len();
        if !is_whole && plan.launches.iter().any(|launch| launch.aside) {
            let got = format!("{launches:?} of a plan whose launches share work");
            return Err(Error::invalid("launches", got, "all of them together"));
        }
        let mut beside = None;
        let launched = chosen.iter().try_for_each(|launch| {
            let stream = if launch.aside && !cust::is_of_each_thread(stream) {
                let side = self.beside(stream).map_err(DriverError::from)?;
                beside.insert(side).fork(stream).map_err(DriverError::from)?
            } else {
                stream
            };
            // SAFETY: the planner bounds every argument by the tensors and the workspace, whose sizes were just checked.
            unsafe { self.launch(launch, tensors, workspace, stream) }
        });
        // After a failure, too, or a capture would not end.
        if let Some(side) = beside {
            side.join(stream).map_err(DriverError::from)?;
        }
        launched
    }

    /// Loads and compiles the plan's kernels now instead of at their first launch.
    pub fn prepare(&self, plan: &Plan) -> Result<()> {
        let _entered = self.enter().map_err(DriverError::from)?;
        for launch in &plan.launches {
            self.function(launch.entry)?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`enqueue`](Self::enqueue), for one launch whose arguments lie in the tensors and the workspace.
    unsafe fn launch(
        &self,
        launch: &Launch,
        tensors: &Views<'_>,
        workspace: Workspace,
        stream: RawStream,
    ) -> Result<()> {
        let Launch { entry, grid, cluster, programmatic, aside, .. } = launch;
        tracing::debug!(
            entry = entry.name,
            ?grid,
            cluster,
            programmatic,
            aside,
            threads = entry.threads,
            shared_bytes = entry.shared_bytes,
            "launch"
        );
        let shape = Shape::of(launch)?;
        let addresses = Addresses::new(launch, tensors, workspace)?;
        let _range = super::range::open(entry.name);
        let function = self.function(entry)?;
        let plain = shape.cluster == 0 && !shape.programmatic;
        let start = if plain { cust::launch } else { launch::launch };
        // SAFETY: one value per argument, then the parameters, of the sizes that the entry has.
        let launched = addresses
            .with(launch, |arguments| unsafe { start(function, &shape, arguments, stream) })?;
        launched.map_err(|failure| launch_failed(entry, failure))
    }
}
