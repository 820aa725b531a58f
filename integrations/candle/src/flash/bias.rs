//! Biases on scores: ALiBi, and masks that a window cannot express.

use super::scores::{Scores, Sizes};
use crate::cpu;
use crate::error::invalid;
use candle::{CpuStorage, DType, Result};
use gqa_host::TensorView;
use half::{bf16, f16};

/// A bias of shape (1, heads, rows, keys).
pub(super) struct Bias {
    /// Heads that have their own: all, or 1.
    pub(super) heads: usize,
    values: CpuStorage,
}

impl Bias {
    /// ALiBi, where there are slopes. A row before all keys counts distances from the first key.
    /// That does not change the softmax; counted from its own position, all biases would round to
    /// the same value.
    ///
    /// # Errors
    ///
    /// Where there are not as many slopes as heads, and where there is no memory for the bias.
    pub(super) fn alibi(scores: &Scores, sizes: Sizes, dtype: DType) -> Result<Option<Self>> {
        let Some(slopes) = &scores.slopes else { return Ok(None) };
        if slopes.len() != sizes.heads {
            let got = format!("{} slopes", slopes.len());
            return Err(invalid("alibi_slopes", got, format!("{}, the heads of q", sizes.heads)));
        }
        let value =
            |head: usize, place: i64, key: i64| -slopes[head] * (place.max(0) - key).abs() as f32;
        Self::of(sizes, sizes.heads, dtype, value).map(Some)
    }

    /// -inf where a row does not see a key: neither within the window nor in a range with it.
    pub(super) fn ranges(
        window: [Option<usize>; 2],
        ranges: &[[i32; 2]],
        sizes: Sizes,
        dtype: DType,
    ) -> Result<Self> {
        let within = |side: Option<usize>, distance: i64| side.is_none_or(|n| distance <= n as i64);
        let share = |place: i64, key: i64| {
            ranges.iter().any(|[begin, end]| {
                let range = i64::from(*begin)..i64::from(*end);
                range.contains(&place) && range.contains(&key)
            })
        };
        let value = |_, place: i64, key: i64| {
            let seen = within(window[0], place - key) && within(window[1], key - place);
            if seen || share(place, key) { 0. } else { f32::NEG_INFINITY }
        };
        Self::of(sizes, 1, dtype, value)
    }

    /// Its elements.
    pub(super) fn view(&self) -> Result<TensorView<'_>> {
        cpu::all("bias", &self.values)
    }

    /// The same on a GPU.
    #[cfg(feature = "cuda")]
    pub(super) fn on(&self, device: &candle::CudaDevice) -> Result<candle::CudaStorage> {
        use candle::backend::BackendDevice;
        device.storage_from_cpu_storage(&self.values)
    }

    /// Of each head, row and key, by the row's place.
    fn of(
        sizes: Sizes,
        heads: usize,
        dtype: DType,
        value: impl Fn(usize, i64, i64) -> f32,
    ) -> Result<Self> {
        let Sizes { rows, keys, .. } = sizes;
        let first = keys as i64 - rows as i64;
        let rows = (0..heads).flat_map(|head| (0..rows).map(move |row| (head, first + row as i64)));
        let values = rows
            .flat_map(|(head, place)| (0..keys).map(move |key| (head, place, key as i64)))
            .map(|(head, place, key)| value(head, place, key));
        let shape = [1, heads, sizes.rows, keys];
        let values = match dtype {
            DType::F16 => CpuStorage::F16(collected(shape, values.map(f16::from_f32))?),
            DType::BF16 => CpuStorage::BF16(collected(shape, values.map(bf16::from_f32))?),
            _ => CpuStorage::F32(collected(shape, values)?),
        };
        Ok(Self { heads, values })
    }
}

/// The elements of a bias of that shape; an error where memory has no room for them.
fn collected<T>(shape: [usize; 4], elements: impl Iterator<Item = T>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    let count = shape.iter().try_fold(1usize, |count, n| count.checked_mul(*n));
    if count.is_none_or(|count| all.try_reserve_exact(count).is_err()) {
        return Err(invalid("bias", format!("{shape:?}"), "a shape that memory has room for"));
    }
    all.extend(elements);
    Ok(all)
}
