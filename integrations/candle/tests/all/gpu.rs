//! The same on a GPU as on the CPU. Ignored, as it needs one: `cargo test --features cuda gpu --
//! --ignored`.

use crate::definition::noise;
use candle::{DType, Device, Result, Tensor};
use gqa_candle::flash::{
    flash_attn, flash_attn_alibi, flash_attn_varlen, flash_attn_varlen_paged_windowed,
    flash_attn_windowed,
};
use gqa_candle::{Attention, KvCache, PagedKvCache, Rope};

/// Runs `call` on both devices in each element type, and compares what it gives.
fn alike(call: impl Fn(&Device, DType) -> Result<Tensor>) -> Result<()> {
    let gpu = Device::new_cuda(0)?;
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let want = call(&Device::Cpu, dtype)?.to_dtype(DType::F32)?;
        let got = call(&gpu, dtype)?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let apart = (got - want)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        assert!(apart < tolerance, "{dtype:?}: {apart}");
    }
    Ok(())
}

/// Query, key and value, with heads before rows in memory.
fn tensors(rows: usize, keys: usize, device: &Device, dtype: DType) -> Result<[Tensor; 3]> {
    let of = |shape: (usize, usize, usize, usize), seed| {
        noise(shape, seed)?.to_device(device)?.to_dtype(dtype)?.transpose(1, 2)
    };
    Ok([of((2, 6, rows, 64), 1)?, of((2, 2, keys, 64), 2)?, of((2, 2, keys, 64), 3)?])
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_functions() -> Result<()> {
    for [rows, keys] in [[70, 70], [5, 300], [1, 900]] {
        alike(|device, dtype| {
            let [q, k, v] = tensors(rows, keys, device, dtype)?;
            let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625, 0.03, 0.01], device)?;
            let outputs = [
                flash_attn(&q, &k, &v, 0.125, true)?,
                flash_attn(&q, &k, &v, 0.125, false)?,
                flash_attn_windowed(&q, &k, &v, 0.125, Some(20), Some(3))?,
                flash_attn_alibi(&q, &k, &v, &slopes, 0.125, true)?,
            ];
            Tensor::stack(&outputs, 0)
        })?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_functions_of_any_lengths() -> Result<()> {
    alike(|device, dtype| {
        let of = |shape: (usize, usize, usize), seed| {
            noise(shape, seed)?.to_device(device)?.to_dtype(dtype)
        };
        let (q, k, v) = (of((12, 6, 64), 1)?, of((26, 2, 64), 2)?, of((26, 2, 64), 3)?);
        let starts = Tensor::new(&[0u32, 5, 5, 12], device)?;
        let ends = Tensor::new(&[0u32, 9, 19, 26], device)?;
        let plain = flash_attn_varlen(&q, &k, &v, &starts, &ends, 7, 10, 0.125, true)?;
        let blocks = |seed| of((10 * 32, 2, 64), seed)?.reshape((10, 32, 2, 64));
        let table = Tensor::new(&[[7u32], [4], [2]], device)?;
        let paged = flash_attn_varlen_paged_windowed(
            &q,
            &blocks(4)?,
            &blocks(5)?,
            &starts,
            &ends,
            &table,
            None,
            7,
            10,
            0.125,
            Some(6),
            Some(0),
            32,
            None,
        )?;
        Tensor::stack(&[plain, paged], 0)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_caches() -> Result<()> {
    alike(|device, dtype| {
        let rope = Rope::of_frequency(10_000., 64, 256, dtype, device)?;
        let attention = Attention::new(6, 2, 64).rope(rope);
        let mut dense = KvCache::new(&attention, 2, 256, dtype, device)?;
        let mut paged = PagedKvCache::new(&attention, 32, 16, dtype, device)?;
        let sequences = [paged.begin(), paged.begin()];
        let mut outputs = Vec::new();
        for tokens in [100, 1, 30, 1] {
            let [q, k, v] = tensors(tokens, tokens, device, dtype)?;
            outputs.push(dense.attend(&q, &k, &v)?);
            let batch = sequences.map(|sequence| (sequence, tokens));
            let flat = |tensor: &Tensor| tensor.flatten(0, 1);
            let output = paged.attend(&flat(&q)?, &flat(&k)?, &flat(&v)?, &batch)?;
            outputs.push(output.reshape(q.shape())?);
        }
        Tensor::cat(&outputs, 1)
    })
}
