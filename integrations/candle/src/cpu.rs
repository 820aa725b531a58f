//! candle's tensors on the CPU as gqa's: slices of the same memory.

use crate::attention::{Attention, element_type};
use crate::error::{invalid, ours};
use candle::{CpuStorage, DType, Layout, Result, Storage};
use gqa_host::backend::IoViews;
use gqa_host::backend::cpu::{Cpu, Instructions};
use gqa_host::plan::{PlanOptions, Tensors};
use gqa_host::{CacheView, Problem, RowMajor, Tensor, TensorView, TensorViewMut};
use std::ops::Range;
use std::sync::OnceLock;

/// A tensor's elements: those that it has where it is contiguous, and all from its first one on
/// where it has strides.
pub(crate) fn view<'a>(
    argument: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<TensorView<'a>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => part(argument, storage, start..end),
        None => part(argument, storage, layout.start_offset()..count(storage)),
    }
}

/// Elements in that range.
pub(crate) fn part<'a>(
    argument: &'static str,
    storage: &'a CpuStorage,
    range: Range<usize>,
) -> Result<TensorView<'a>> {
    Ok(match storage {
        CpuStorage::F32(elements) => TensorView::F32(&elements[range]),
        CpuStorage::F16(elements) => TensorView::F16(&elements[range]),
        CpuStorage::BF16(elements) => TensorView::BF16(&elements[range]),
        storage => return Err(foreign(argument, storage)),
    })
}

/// All elements.
pub(crate) fn all<'a>(argument: &'static str, storage: &'a CpuStorage) -> Result<TensorView<'a>> {
    part(argument, storage, 0..count(storage))
}

/// Number of elements, of a type that attention is computed of.
pub(crate) fn count(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::F32(elements) => elements.len(),
        CpuStorage::F16(elements) => elements.len(),
        CpuStorage::BF16(elements) => elements.len(),
        _ => 0,
    }
}

/// The same of a tensor on some device.
///
/// # Errors
///
/// Unless that is the CPU.
pub(crate) fn view_of<'a>(
    argument: &'static str,
    storage: &'a Storage,
    layout: &Layout,
) -> Result<TensorView<'a>> {
    match storage {
        Storage::Cpu(storage) => view(argument, storage, layout),
        other => {
            let got = format!("a tensor on {:?}", other.device().location());
            Err(invalid(argument, got, "one on the CPU, as the others"))
        }
    }
}

/// Elements in that range, to be written.
pub(crate) fn part_mut<'a>(
    argument: &'static str,
    storage: &'a mut CpuStorage,
    range: Range<usize>,
) -> Result<TensorViewMut<'a>> {
    Ok(match storage {
        CpuStorage::F32(elements) => TensorViewMut::F32(&mut elements[range]),
        CpuStorage::F16(elements) => TensorViewMut::F16(&mut elements[range]),
        CpuStorage::BF16(elements) => TensorViewMut::BF16(&mut elements[range]),
        storage => return Err(foreign(argument, storage)),
    })
}

/// All elements, to be written.
pub(crate) fn view_mut<'a>(
    argument: &'static str,
    storage: &'a mut CpuStorage,
) -> Result<TensorViewMut<'a>> {
    let all = 0..count(storage);
    part_mut(argument, storage, all)
}

fn foreign(argument: &'static str, storage: &CpuStorage) -> candle::Error {
    use candle::backend::BackendStorage;
    invalid(argument, format!("{:?}", storage.dtype()), "F32, F16 or BF16")
}

/// Zeros of a type that attention is computed of; an error where memory has no room for them.
pub(crate) fn zeros(argument: &'static str, dtype: DType, shape: &[usize]) -> Result<CpuStorage> {
    let dtype = element_type(argument, dtype)?;
    Ok(match Tensor::try_zeros(argument, dtype, shape).map_err(ours)? {
        Tensor::F16(zeros) => CpuStorage::F16(elements(zeros)),
        Tensor::BF16(zeros) => CpuStorage::BF16(elements(zeros)),
        Tensor::F32(zeros) => CpuStorage::F32(elements(zeros)),
        other => return Err(invalid(argument, other.dtype(), "float32, float16 or bfloat16")),
    })
}

/// The memory of an array.
fn elements<T>(array: RowMajor<T>) -> Vec<T> {
    array.into_array().into_raw_vec_and_offset().0
}

/// Runs a call.
pub(crate) fn run(problem: &Problem, io: &mut IoViews<'_>) -> Result<()> {
    cpu()?.run_on(problem, io).map_err(ours)
}

/// What the environment says, which the first call reads, as a GPU's first call does: a misspelt
/// variable is a warning, and a wrong value an error of every call.
fn cpu() -> Result<Cpu> {
    static CPU: OnceLock<std::result::Result<Cpu, String>> = OnceLock::new();
    let read = || PlanOptions::from_env().and_then(|_| Instructions::from_env()).map(Cpu::new);
    let cpu = CPU.get_or_init(|| read().map_err(|error| error.to_string()));
    cpu.clone().map_err(candle::Error::msg)
}

/// Runs a call with the layer's own tensors.
pub(crate) fn run_layer(problem: &Problem, io: IoViews<'_>, attention: &Attention) -> Result<()> {
    let tensors = attention.tensors();
    let held: Vec<_> = tensors.map(|(id, name, x)| (id, name, x.storage_and_layout())).collect();
    let mut inputs = io.inputs;
    for (id, name, (storage, layout)) in &held {
        inputs = inputs.with(*id, view_of(name, storage, layout)?);
    }
    run(problem, &mut IoViews { inputs, ..io })
}

/// Runs a call without a KV cache.
pub(crate) fn attend(
    problem: &Problem,
    inputs: Tensors<TensorView<'_>>,
    output: TensorViewMut<'_>,
) -> Result<()> {
    let [present_key, present_value] = [CacheView::NONE; 2];
    let mut io = IoViews {
        inputs,
        output,
        present_key,
        present_value,
        row_scales: None,
        output_qk: None,
        lse: None,
    };
    run(problem, &mut io)
}
