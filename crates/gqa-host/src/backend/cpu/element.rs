//! The operator's floating-point types.

use crate::{Error, Result, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// A type that query, key, value and output can have; everything is computed in `f32`.
pub(super) trait Element: Copy + Send + Sync + 'static {
    /// 0
    const ZERO: Self;

    /// The elements of a tensor of this type.
    fn elements(tensor: &Tensor) -> Option<&[Self]>;

    /// The elements of a tensor of this type, to be written.
    fn elements_mut(tensor: &mut Tensor) -> Option<&mut [Self]>;

    /// Exact.
    fn widen(from: &[Self], to: &mut [f32]);

    /// Rounds to nearest.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// `from` in `f32`: itself, or a copy in `buffer`.
    fn in_f32<'a>(from: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
        let buffer = &mut buffer[..from.len()];
        Self::widen(from, buffer);
        buffer
    }
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    fn elements(tensor: &Tensor) -> Option<&[Self]> {
        if let Tensor::F32(a) = tensor { a.as_slice() } else { None }
    }

    fn elements_mut(tensor: &mut Tensor) -> Option<&mut [Self]> {
        if let Tensor::F32(a) = tensor { a.as_slice_mut() } else { None }
    }

    fn widen(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn in_f32<'a>(from: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        from
    }
}

macro_rules! half_element {
    ($t:ty, $variant:ident) => {
        impl Element for $t {
            const ZERO: Self = <$t>::ZERO;

            fn elements(tensor: &Tensor) -> Option<&[Self]> {
                if let Tensor::$variant(a) = tensor { a.as_slice() } else { None }
            }

            fn elements_mut(tensor: &mut Tensor) -> Option<&mut [Self]> {
                if let Tensor::$variant(a) = tensor { a.as_slice_mut() } else { None }
            }

            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }

            fn narrow(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
        }
    };
}
half_element!(f16, F16);
half_element!(bf16, BF16);

/// The elements of the call's tensor `name`.
pub(super) fn elements<'a, T: Element>(name: &'static str, tensor: &'a Tensor) -> Result<&'a [T]> {
    T::elements(tensor).ok_or_else(|| foreign(name, tensor))
}

/// The elements of the call's tensor `name`, to be written.
pub(super) fn elements_mut<'a, T: Element>(
    name: &'static str,
    tensor: &'a mut Tensor,
) -> Result<&'a mut [T]> {
    let error = foreign(name, tensor);
    T::elements_mut(tensor).ok_or(error)
}

/// The error for a tensor that does not belong to the problem.
pub(super) fn foreign(name: &'static str, tensor: &Tensor) -> Error {
    Error::invalid(name, tensor.dtype(), "the problem's type, in row-major order")
}
