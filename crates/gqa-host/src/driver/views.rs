//! The tensors and the scratch memory of a call, where they belong to the caller.

use crate::plan::{Plan, TensorId, TensorSpec};
use crate::{DType, Error, Result, RowStrides};

/// A tensor in device memory, 16-byte aligned.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DeviceView<'a> {
    /// `CUdeviceptr` of the first element.
    pub pointer: u64,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: &'a [usize],
    /// Where heads and rows are; `None`: row-major and contiguous.
    pub strides: Option<RowStrides>,
}

impl<'a> DeviceView<'a> {
    /// The tensor of that type and shape at `pointer`, a `CUdeviceptr`.
    pub const fn new(pointer: u64, dtype: DType, shape: &'a [usize]) -> Self {
        Self { pointer, dtype, shape, strides: None }
    }

    /// The same with heads and rows that are not side by side, in elements.
    pub const fn strided(self, strides: RowStrides) -> Self {
        Self { strides: Some(strides), ..self }
    }

    /// Whether it is what a call wants.
    fn fits(&self, spec: &TensorSpec) -> bool {
        self.dtype == spec.dtype
            && self.shape == spec.shape
            && self.strides == spec.strides
            && self.pointer != 0
            && self.pointer.is_multiple_of(16)
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
            let allowed = || {
                let strides = spec.strides.map_or("contiguous".to_owned(), |s| format!("{s:?}"));
                format!("{} {:?}, {strides}, 16-byte aligned", spec.dtype, spec.shape)
            };
            let got = match self.0[*id as usize] {
                Some(view) if view.fits(spec) => continue,
                Some(DeviceView { pointer, dtype, shape, strides: None }) => {
                    format!("{dtype} {shape:?} at {pointer:#x}")
                }
                Some(DeviceView { pointer, dtype, shape, strides: Some(strides) }) => {
                    format!("{dtype} {shape:?}, {strides:?}, at {pointer:#x}")
                }
                None => "nothing".to_owned(),
            };
            return Err(Error::invalid(id.name(), got, allowed()));
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
