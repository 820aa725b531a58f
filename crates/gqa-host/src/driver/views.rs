//! The tensors and the scratch memory of a call, where they belong to the caller.

use crate::plan::{Plan, TensorId};
use crate::{DType, Error, Result};

/// A tensor in device memory, row-major and contiguous, 16-byte aligned.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceView<'a> {
    /// `CUdeviceptr` of the first element.
    pub pointer: u64,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: &'a [usize],
}

impl<'a> DeviceView<'a> {
    /// The tensor of that type and shape at `pointer`, a `CUdeviceptr`.
    pub const fn new(pointer: u64, dtype: DType, shape: &'a [usize]) -> Self {
        Self { pointer, dtype, shape }
    }
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
        for (id, spec) in plan.tensors().iter().filter(|(_, spec)| !spec.is_empty()) {
            let allowed = || format!("{} {:?}, 16-byte aligned", spec.dtype, spec.shape);
            match self.0[*id as usize] {
                None => return Err(Error::invalid(id.name(), "nothing", allowed())),
                Some(view)
                    if view.dtype != spec.dtype
                        || view.shape != spec.shape
                        || view.pointer == 0
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

/// Scratch memory of a call. Calls that may run at the same time need one each.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Workspace {
    /// `CUdeviceptr`, 256-byte aligned.
    pub pointer: u64,
    /// Length, at least [`Plan::workspace_bytes`]. The content means nothing between calls.
    pub bytes: usize,
    /// `CUdeviceptr` of at least [`Plan::counters`] 32-bit counters, which are zero before the
    /// first call and after every call; 0 where no plan needs any.
    pub counters: u64,
}

impl Workspace {
    /// `bytes` bytes at `pointer`, and counters at `counters`, both `CUdeviceptr`s.
    pub const fn new(pointer: u64, bytes: usize, counters: u64) -> Self {
        Self { pointer, bytes, counters }
    }

    pub(super) fn check(self, plan: &Plan) -> Result<()> {
        let (counters, bytes) = (plan.counters(), plan.workspace_bytes());
        if counters > 0 && (self.counters == 0 || !self.counters.is_multiple_of(4)) {
            let allowed = format!("{counters} zeroed 32-bit counters in device memory");
            let got = format!("{:#x}", self.counters);
            return Err(Error::invalid("workspace.counters", got, allowed));
        }
        let placed = bytes == 0 || (self.pointer != 0 && self.pointer.is_multiple_of(256));
        if self.bytes >= bytes && placed {
            return Ok(());
        }
        let got = format!("{} bytes at {:#x}", self.bytes, self.pointer);
        Err(Error::invalid("workspace", got, format!("{bytes} bytes, 256-byte aligned")))
    }
}
