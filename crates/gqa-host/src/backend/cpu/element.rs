//! The operator's floating-point types.

use gqa_cpu::{CacheElement, StoredRows, StoredTile};
use gqa_tensor::{Error, Result, TensorView, TensorViewMut};
use half::{bf16, f16};
use std::iter;

/// A type of query, key, value and output; computation is in `f32`.
pub(super) trait Element: CacheElement + Copy + Send + Sync + 'static {
    /// 0
    const ZERO: Self;

    /// The elements of a tensor of this type.
    fn elements(tensor: TensorView<'_>) -> Option<&[Self]>;

    /// The elements of an output tensor of this type.
    fn elements_mut(tensor: TensorViewMut<'_>) -> Option<&mut [Self]>;

    /// For each pair of rows, widens the first into the second, exactly.
    fn widen_rows<'a>(rows: impl Iterator<Item = (&'a [Self], &'a mut [f32])>);

    /// The same for one row.
    fn widen(from: &[Self], to: &mut [f32]) {
        Self::widen_rows(iter::once((from, to)));
    }

    /// Keys and values of a tile, of this type.
    fn stored(rows: [StoredRows<'_, Self>; 2]) -> StoredTile<'_>;

    /// Rounds to nearest.
    fn narrow(from: &[f32], to: &mut [Self]);

    /// `from` as `f32`: itself, or converted into `buffer`.
    fn in_f32<'a>(from: &'a [Self], buffer: &'a mut [f32]) -> &'a [f32] {
        let buffer = &mut buffer[..from.len()];
        Self::widen(from, buffer);
        buffer
    }
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    fn elements(tensor: TensorView<'_>) -> Option<&[Self]> {
        if let TensorView::F32(a) = tensor { Some(a) } else { None }
    }

    fn elements_mut(tensor: TensorViewMut<'_>) -> Option<&mut [Self]> {
        if let TensorViewMut::F32(a) = tensor { Some(a) } else { None }
    }

    fn widen_rows<'a>(rows: impl Iterator<Item = (&'a [Self], &'a mut [f32])>) {
        rows.for_each(|(from, to)| to.copy_from_slice(from));
    }

    fn stored(rows: [StoredRows<'_, Self>; 2]) -> StoredTile<'_> {
        StoredTile::F32(rows)
    }

    fn narrow(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn in_f32<'a>(from: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        from
    }
}

macro_rules! half_element {
    ($t:ty, $variant:ident, $narrow:expr) => {
        impl Element for $t {
            const ZERO: Self = <$t>::ZERO;

            fn elements(tensor: TensorView<'_>) -> Option<&[Self]> {
                if let TensorView::$variant(a) = tensor { Some(a) } else { None }
            }

            fn elements_mut(tensor: TensorViewMut<'_>) -> Option<&mut [Self]> {
                if let TensorViewMut::$variant(a) = tensor { Some(a) } else { None }
            }

            fn widen_rows<'a>(mut rows: impl Iterator<Item = (&'a [Self], &'a mut [f32])>) {
                Self::widen_scaled(&[], &mut rows);
            }

            fn stored(rows: [StoredRows<'_, Self>; 2]) -> StoredTile<'_> {
                StoredTile::$variant(rows)
            }

            fn narrow(from: &[f32], to: &mut [Self]) {
                $narrow(from, to);
            }
        }
    };
}
half_element!(f16, F16, gqa_cpu::narrow_to_f16);
half_element!(bf16, BF16, gqa_cpu::narrow_to_bf16);

/// The elements of the call's tensor `name`.
pub(super) fn elements<'a, T: Element>(
    name: &'static str,
    tensor: TensorView<'a>,
) -> Result<&'a [T]> {
    T::elements(tensor).ok_or_else(|| foreign(name, tensor))
}

/// The elements of the output tensor `name`.
pub(super) fn elements_mut<'a, T: Element>(
    name: &'static str,
    tensor: TensorViewMut<'a>,
) -> Result<&'a mut [T]> {
    let error = foreign(name, tensor.view());
    T::elements_mut(tensor).ok_or(error)
}

/// The error for a tensor that does not belong to the problem.
pub(super) fn foreign(name: &'static str, tensor: TensorView<'_>) -> Error {
    Error::invalid(name, tensor.dtype(), "the problem's type")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widened_are_the_numbers_of_the_library() {
        let numbers = || 0..=u16::MAX;
        let halves: Vec<_> = numbers().map(f16::from_bits).collect();
        let brains: Vec<_> = numbers().map(bf16::from_bits).collect();
        let same =
            |got: f32, want: f32| got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        let mut got = vec![0.0; halves.len()];
        f16::widen(&halves, &mut got);
        assert!(halves.iter().zip(&got).all(|(x, got)| same(*got, x.to_f32())));
        bf16::widen(&brains, &mut got);
        assert!(brains.iter().zip(&got).all(|(x, got)| same(*got, x.to_f32())));
    }
}
