//! On a GPU: long rows and the head sizes of models in every element type, as on the CPU; threads
//! and streams; what is refused.

use crate::definition::noise;
use crate::devices::on_gpu;
use crate::refusal::refusal;
use candle::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle::{DType, Device, Result, Tensor};
use gqa_candle::flash::*;
use gqa_candle::{Attention, KvCache, PagedKvCache, QuantFormat, Rope};
use std::thread;

/// The largest difference.
fn apart(got: &Tensor, want: &Tensor) -> Result<f32> {
    let [got, want] =
        [got, want].map(|tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32));
    (got? - want?)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// Runs `call` on both devices in each element type, and compares what it gives.
fn alike(call: impl Fn(&Device, DType) -> Result<Tensor>) -> Result<()> {
    on_gpu(|gpu| {
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
            let apart = apart(&call(gpu, dtype)?, &call(&Device::Cpu, dtype)?)?;
            assert!(apart < tolerance, "{dtype:?}: {apart}");
        }
        Ok(())
    })
}

/// Query, key and value, with heads before rows in memory.
fn tensors(
    rows: usize,
    keys: usize,
    size: usize,
    device: &Device,
    dtype: DType,
) -> Result<[Tensor; 3]> {
    let of = |heads, rows, seed| {
        noise((2, heads, rows, size), seed, device)?.to_dtype(dtype)?.transpose(1, 2)
    };
    Ok([of(6, rows, 1)?, of(2, keys, 2)?, of(2, keys, 3)?])
}

fn slopes(device: &Device) -> Result<Tensor> {
    Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625, 0.03, 0.01], device)
}

#[test]
fn functions_are_as_on_the_cpu() -> Result<()> {
    for [rows, keys, size] in [[70, 70, 64], [200, 200, 128], [5, 300, 64], [1, 900, 128]] {
        alike(|device, dtype| {
            let [q, k, v] = tensors(rows, keys, size, device, dtype)?;
            let alibi = &slopes(device)?;
            let outputs = [
                flash_attn(&q, &k, &v, 0.125, true)?,
                flash_attn(&q, &k, &v, 0.125, false)?,
                flash_attn_windowed(&q, &k, &v, 0.125, Some(20), Some(3))?,
                flash_attn_alibi(&q, &k, &v, alibi, 0.125, true)?,
                flash_attn_alibi_windowed(&q, &k, &v, alibi, 0.125, Some(20), Some(0))?,
                flash_attn_alibi_windowed_softcap(
                    &q,
                    &k,
                    &v,
                    Some(alibi),
                    0.125,
                    None,
                    Some(0),
                    2.,
                )?,
            ];
            Tensor::stack(&outputs, 0)
        })?;
    }
    Ok(())
}

/// Of three sequences, of which one has no rows: 90 rows over 350 keys.
#[test]
fn functions_of_any_lengths_are_as_on_the_cpu() -> Result<()> {
    alike(|device, dtype| {
        let of = |rows, heads, seed| noise((rows, heads, 64), seed, device)?.to_dtype(dtype);
        let (q, k, v) = (&of(90, 6, 1)?, &of(350, 2, 2)?, &of(350, 2, 3)?);
        let sq = &Tensor::new(&[0u32, 40, 40, 90], device)?;
        let sk = &Tensor::new(&[0u32, 100, 110, 350], device)?;
        let alibi = &slopes(device)?;
        let blocks = |seed| of(16 * 32, 2, seed)?.reshape((16, 32, 2, 64));
        let table = [[7u32, 4, 2, 9, 0, 0, 0, 0], [1; 8], [3, 5, 6, 8, 10, 11, 12, 13]];
        let (kb, vb, table) = (&blocks(4)?, &blocks(5)?, &Tensor::new(&table, device)?);
        let paged = |left, right| {
            flash_attn_varlen_paged_windowed(
                q, kb, vb, sq, sk, table, None, 50, 240, 0.125, left, right, 32, None,
            )
        };
        let outputs = [
            flash_attn_varlen(q, k, v, sq, sk, 50, 240, 0.125, true)?,
            flash_attn_varlen_windowed(q, k, v, sq, sk, 50, 240, 0.125, Some(9), Some(2))?,
            flash_attn_varlen_alibi(q, k, v, alibi, sq, sk, 50, 240, 0.125, true)?,
            flash_attn_varlen_alibi_windowed(
                q,
                k,
                v,
                alibi,
                sq,
                sk,
                50,
                240,
                0.125,
                Some(9),
                Some(0),
            )?,
            flash_attn_varlen_alibi_windowed_softcap(
                q,
                k,
                v,
                None,
                sq,
                sk,
                50,
                240,
                0.125,
                None,
                Some(0),
                2.,
            )?,
            paged(None, Some(0))?,
            paged(Some(6), Some(0))?,
            paged(None, None)?,
            paged(Some(6), Some(6))?,
        ];
        Tensor::stack(&outputs, 0)
    })
}

#[test]
fn kv_caches_are_as_on_the_cpu() -> Result<()> {
    caches_are_as_on_the_cpu(|device, dtype| {
        Ok(Attention::new(6, 2, 64).rope(Rope::of_frequency(10_000., 64, 256, dtype, device)?))
    })
}

/// Keys that rotate are rounded before, and may then become another quantized value.
#[test]
fn quantized_kv_caches_are_as_on_the_cpu() -> Result<()> {
    for format in [QuantFormat::Int8, QuantFormat::Float8, QuantFormat::Int4] {
        caches_are_as_on_the_cpu(|device, _| {
            let scale = Tensor::new(&[0.2f32, 0.15], device)?;
            Attention::new(6, 2, 64).quantized(format, &scale, &scale)
        })?;
    }
    Ok(())
}

fn caches_are_as_on_the_cpu(layer: impl Fn(&Device, DType) -> Result<Attention>) -> Result<()> {
    alike(|device, dtype| {
        let attention = layer(device, dtype)?;
        let mut dense = KvCache::new(&attention, 2, 256, dtype, device)?;
        let mut paged = PagedKvCache::new(&attention, 32, 16, dtype, device)?;
        let sequences = [paged.begin(), paged.begin()];
        let mut outputs = Vec::new();
        for tokens in [100, 1, 30, 1] {
            let [q, k, v] = tensors(tokens, tokens, 64, device, dtype)?;
            outputs.push(dense.attend(&q, &k, &v)?);
            let batch = sequences.map(|sequence| (sequence, tokens));
            let flat = |tensor: &Tensor| tensor.flatten(0, 1);
            let output = paged.attend(&flat(&q)?, &flat(&k)?, &flat(&v)?, &batch)?;
            outputs.push(output.reshape(q.shape())?);
        }
        Tensor::cat(&outputs, 1)
    })
}

/// Streams of candle's devices are every thread's own, under one name, and run side by side.
#[test]
fn threads_share_no_scratch_memory() -> Result<()> {
    on_gpu(|device| {
        // Prompts, whose rotated queries lie in scratch memory.
        let rope = Rope::of_frequency(10_000., 64, 600, DType::F32, device)?;
        let attention = &Attention::new(32, 8, 64).rope(rope);
        let inputs = |seed| {
            let of = |heads, seed| noise((1, 600, heads, 64), seed, device);
            Ok([of(32, seed)?, of(8, seed + 1)?, of(8, seed + 2)?])
        };
        let attend = |[q, k, v]: &[Tensor; 3], times| {
            let mut cache = KvCache::new(attention, 1, 600, DType::F32, device)?;
            let outputs = (0..times).map(|_| {
                cache.truncate(0);
                cache.attend(q, k, v)
            });
            outputs.collect::<Result<Vec<_>>>()
        };
        let inputs = (0..4).map(|thread| inputs(10 * thread)).collect::<Result<Vec<_>>>()?;
        let want = inputs.iter().map(|inputs| attend(inputs, 1)).collect::<Result<Vec<_>>>()?;
        device.synchronize()?;
        thread::scope(|scope| {
            let run = |(inputs, want): (_, &Vec<Tensor>)| {
                let want = want[0].clone();
                scope.spawn(move || {
                    let outputs = attend(inputs, 50)?;
                    outputs.iter().map(|got| apart(got, &want)).collect::<Result<Vec<_>>>()
                })
            };
            let threads: Vec<_> = inputs.iter().zip(&want).map(run).collect();
            for thread in threads {
                let apart = thread.join().expect("no panic")?;
                assert!(apart.iter().all(|apart| *apart < 1e-5), "{apart:?}");
            }
            Ok(())
        })
    })
}

/// Fills free memory of the device's pool with NaN, in blocks of many sizes.
fn poison(device: &Device) -> Result<()> {
    for elements in [1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23] {
        let blocks = (0..8).map(|_| Tensor::full(f32::NAN, elements, device));
        blocks.collect::<Result<Vec<_>>>()?;
    }
    Ok(())
}

/// Freed memory is filled with NaN between the calls, so a launch that still needs freed memory
/// gives NaN. The calls split keys, so that they need scratch memory and counters, and they are the
/// first calls of their streams.
#[test]
fn first_calls_of_streams_and_threads_use_no_freed_memory() -> Result<()> {
    on_gpu(|_| {
        let work = |(rows, keys, dtype): (usize, usize, DType)| -> Result<()> {
            let device = Device::new_cuda_with_stream(0)?;
            let of = |device: &Device| tensors(rows, keys, 128, device, dtype);
            let [q, k, v] = of(&Device::Cpu)?;
            let want = flash_attn_windowed(&q, &k, &v, 0.125, None, Some(0))?;
            let want_alibi = flash_attn_alibi(&q, &k, &v, &slopes(&Device::Cpu)?, 0.125, true)?;
            poison(&device)?;
            let [q, k, v] = of(&device)?;
            let got = flash_attn_windowed(&q, &k, &v, 0.125, None, Some(0))?;
            poison(&device)?;
            let got_alibi = flash_attn_alibi(&q, &k, &v, &slopes(&device)?, 0.125, true)?;
            drop([q, k, v]);
            poison(&device)?;
            let tolerance = if dtype == DType::F32 { 1e-4 } else { 4e-3 };
            for (got, want) in [(got, want), (got_alibi, want_alibi)] {
                let apart = apart(&got, &want)?;
                assert!(apart < tolerance, "{rows} x {keys} {dtype:?}: {apart}");
            }
            Ok(())
        };
        let calls = [(1, 16384, DType::F16), (1, 40000, DType::F32), (4, 9000, DType::F16)];
        calls.into_iter().try_for_each(work)?;
        thread::scope(|scope| {
            let threads: Vec<_> = calls.map(|call| scope.spawn(move || work(call))).into();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
        })
    })
}

#[test]
fn a_stream_that_is_captured_is_refused() -> Result<()> {
    on_gpu(|device| {
        let [q, k, v] = tensors(1, 9, 64, device, DType::F32)?;
        let stream = device.as_cuda_device()?.cuda_stream();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).expect("nothing is captured yet");
        let result = flash_attn(&q, &k, &v, 0.125, true);
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).expect("an empty graph");
        let want = "stream: got one that is being captured; allowed: one that is not";
        assert_eq!(refusal(result), want);
        flash_attn(&q, &k, &v, 0.125, true).map(drop)
    })
}

#[test]
fn sequences_that_begin_nowhere_near_sixteen_bytes_are_refused() -> Result<()> {
    on_gpu(|device| {
        let of = |heads| noise((4, heads, 5), 1, device);
        let (q, k, starts) = (of(3)?, of(1)?, Tensor::new(&[0u32, 1, 4], device)?);
        let result = flash_attn_varlen(&q, &k, &k, &starts, &starts, 3, 3, 1., true);
        let want = "q: got 3 heads over 1 of 5 F32; \
                    allowed: rows of a multiple of 16 bytes, on a GPU";
        assert_eq!(refusal(result), want);
        Ok(())
    })
}

#[test]
fn tensors_of_other_devices_are_refused() -> Result<()> {
    on_gpu(|device| {
        let (again, dtype) = (Device::new_cuda(0)?, DType::F32);
        let [q, k, v] = tensors(3, 3, 64, device, dtype)?;
        let rope = Rope::of_frequency(10_000., 64, 8, dtype, &Device::Cpu)?;
        let attention = Attention::new(6, 2, 64);
        let text = refusal(KvCache::new(&attention.clone().rope(rope), 2, 8, dtype, device));
        let want = "cos: got a tensor on Cpu; allowed: Cuda { gpu_id: 0 }, where the KV cache is";
        assert_eq!(text, want);
        let mut cache = KvCache::new(&attention, 2, 8, dtype, &again)?;
        let text = refusal(cache.attend(&q, &k, &v));
        let want = "query: got a tensor of a device on Cuda { gpu_id: 0 }; \
                    allowed: one of the device of the KV cache, on Cuda { gpu_id: 0 }";
        assert_eq!(text, want);
        let mut cache = KvCache::new(&attention, 2, 8, dtype, &Device::Cpu)?;
        let text = refusal(cache.attend(&q, &k, &v));
        assert_eq!(text, "query: got a tensor on a GPU; allowed: one where the KV cache is");
        assert_eq!(cache.lengths(), [0, 0]);
        let text = refusal(flash_attn(&q, &k.to_device(&Device::Cpu)?, &v, 1., true));
        assert!(text.contains("device mismatch"), "{text}");
        Ok(())
    })
}
