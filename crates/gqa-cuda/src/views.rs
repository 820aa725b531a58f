//! Borrowed tensors and scratch memory of a call.

use gqa_plan::RowStrides;
use gqa_plan::plan::{Plan, TensorId, TensorSpec, Tensors};
use gqa_tensor::{DType, Error, Result};

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
    /// Strides of heads and rows; `None`: row-major and contiguous.
    pub strides: Option<RowStrides>,
}

impl<'a> DeviceView<'a> {
    /// The tensor of that type and shape at `pointer`, a `CUdeviceptr`.
    pub const fn new(pointer: u64, dtype: DType, shape: &'a [usize]) -> Self {
        Self { pointer, dtype, shape, strides: None }
    }

    /// The same with strided heads and rows, in elements.
    pub const fn strided(self, strides: RowStrides) -> Self {
        Self { strides: Some(strides), ..self }
    }

    /// Whether some dimension is 0.
    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Whether it has the type, shape and strides that a call needs.
    fn fits(&self, spec: &TensorSpec) -> bool {
        self.dtype == spec.dtype
            && self.shape == spec.shape
            && self.strides == spec.strides
            && self.pointer != 0
            && self.pointer.is_multiple_of(16)
    }
}

impl std::fmt::Display for DeviceView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pointer, dtype, shape, strides } = self;
        write!(f, "{dtype} {shape:?} at {pointer:#x}")?;
        strides.map_or(Ok(()), |strides| write!(f, ", {strides:?}"))
    }
}

/// The tensors of a call by their role.
pub type Views<'a> = Tensors<DeviceView<'a>>;

/// Checks that every tensor of the plan's problem is present with its type, shape and strides, and
/// no other one. One without elements is optional.
pub(super) fn check(views: &Views<'_>, plan: &Plan) -> Result<()> {
    let mut known = 0;
    for (id, spec) in plan.tensors() {
        let is_given = views.get(*id).is_some();
        known += usize::from(is_given);
        // Only plans that divide keys read a schedule.
        if is_given || *id != TensorId::Schedule || plan.schedule().is_some() {
            check_one(views, *id, spec)?;
        }
    }
    if views.iter().count() == known { Ok(()) } else { foreign(views, plan) }
}

/// Checks that the plan's tensors are present, with the types and shapes of its problem.
pub(super) fn check_some<const N: usize>(
    views: &Views<'_>,
    plan: &Plan,
    ids: [TensorId; N],
) -> Result<()> {
    let mut wanted = plan.tensors().iter().filter(|(id, _)| ids.contains(id));
    wanted.try_for_each(|(id, spec)| check_one(views, *id, spec))
}

/// Checks that the tensor is what `spec` says; one without elements is optional.
fn check_one(views: &Views<'_>, id: TensorId, spec: &TensorSpec) -> Result<()> {
    let view = views.get(id);
    let optional = spec.is_empty() && view.is_none_or(DeviceView::is_empty);
    if optional || view.is_some_and(|view| view.fits(spec)) {
        return Ok(());
    }
    let got = view.map_or("nothing".to_owned(), ToString::to_string);
    let place = |strides| format!("{strides:?}, 16-byte aligned");
    let place = spec.strides.map_or("contiguous, 16-byte aligned".to_owned(), place);
    let allowed = format!("{} {:?}, {place}", spec.dtype, spec.shape);
    Err(Error::invalid(id.name(), got, allowed))
}

/// Errs if a tensor with elements is given that the plan's problem does not have.
#[cold]
fn foreign(views: &Views<'_>, plan: &Plan) -> Result<()> {
    let is_known = |id| plan.tensors().iter().any(|(known, _)| *known == id);
    match views.iter().find(|(id, view)| !view.is_empty() && !is_known(*id)) {
        Some((id, view)) => {
            Err(Error::invalid(id.name(), view.to_string(), "none, as the problem has none"))
        }
        None => Ok(()),
    }
}

/// The address of a tensor; 0 where the call has none.
pub(super) fn pointer(views: &Views<'_>, id: TensorId) -> u64 {
    views.get(id).map_or(0, |view| view.pointer)
}

/// Scratch memory of a call. Concurrent calls need one each.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Workspace {
    /// `CUdeviceptr`, 256-byte aligned.
    pub pointer: u64,
    /// Length, at least [`Plan::workspace_bytes`]. The contents need not be kept between calls.
    pub bytes: usize,
    /// `CUdeviceptr` of at least [`Plan::counters`] 32-bit counters, which are zero before the
    /// first call and after every call; 0 where no plan needs any.
    ///
    /// They are not zero after a kernel that did not run to its end, nor, perhaps, after two calls
    /// that had them at the same time. A call with such counters takes KV splits for complete that
    /// are not, or leaves out rows, and reports nothing: set all counters to zero again before the
    /// next call. An error of `enqueue` alone leaves them zero. `GQA_CHECK=1` notices.
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
