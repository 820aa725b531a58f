//! KV caches against attention over all that was appended.

use crate::definition::{Definition, noise};
use crate::devices::on_each;
use crate::refusal::refusal;
use candle::{DType, Device, Result, Tensor};
use gqa_candle::{Attention, KvCache, PagedKvCache, Rope};

const HEADS: [usize; 2] = [6, 2];
const SIZE: usize = 16;

fn check(got: &Tensor, want: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!(got.dims(), want.dims());
    let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let apart = (got - want.to_device(&Device::Cpu)?)?.abs()?.flatten_all()?.max(0)?;
    let apart = apart.to_scalar::<f32>()?;
    assert!(apart < tolerance, "{apart}");
    Ok(())
}

fn rope(device: &Device) -> Result<Rope> {
    Rope::of_frequency(10_000., SIZE, 64, DType::F32, device)
}

/// Halves of (batch, tokens, heads, size) rotated as Llama does, from position 0 on.
fn rotated(x: &Tensor) -> Result<Tensor> {
    let (tokens, half) = (x.dim(1)?, SIZE / 2);
    let angle = |i: usize| {
        let frequency = 10_000f32.powf(-2. * (i % half) as f32 / SIZE as f32);
        (i / half) as f32 * frequency
    };
    let table = |f: fn(f32) -> f32| {
        let values = (0..tokens * half).map(|i| f(angle(i)));
        Tensor::from_iter(values, x.device())?.reshape((1, tokens, 1, half))
    };
    let (cos, sin) = (table(f32::cos)?, table(f32::sin)?);
    let (x1, x2) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
    let left = (x1.broadcast_mul(&cos)? - x2.broadcast_mul(&sin)?)?;
    let right = (x2.broadcast_mul(&cos)? + x1.broadcast_mul(&sin)?)?;
    Tensor::cat(&[left, right], 3)
}

fn tensors(batch: usize, tokens: usize, device: &Device) -> Result<[Tensor; 3]> {
    let shape = |heads| (batch, tokens, heads, SIZE);
    Ok([
        noise(shape(HEADS[0]), 1, device)?,
        noise(shape(HEADS[1]), 2, device)?,
        noise(shape(HEADS[1]), 3, device)?,
    ])
}

/// Output of all tokens at once.
fn whole([q, k, v]: &[Tensor; 3], left: Option<usize>) -> Result<Tensor> {
    let scale = 1. / (SIZE as f32).sqrt();
    Definition::new(scale, [left, Some(0)]).batch(&rotated(q)?, &rotated(k)?, v)
}

#[test]
fn chunks_of_any_length_are_the_whole() -> Result<()> {
    on_each(|device| {
        let all = tensors(2, 40, device)?;
        for (window, chunks) in
            [(None, vec![40]), (None, vec![17, 1, 1, 20, 1]), (Some(5), vec![1, 30, 9])]
        {
            let mut attention = Attention::new(HEADS[0], HEADS[1], SIZE).rope(rope(device)?);
            if let Some(keys) = window {
                attention = attention.window(keys);
            }
            let mut cache = KvCache::new(&attention, 2, 48, DType::F32, device)?;
            let (mut outputs, mut first) = (Vec::new(), 0);
            for tokens in chunks {
                // Views of what a fused projection leaves.
                let [q, k, v] = all.each_ref().map(|tensor| tensor.narrow(1, first, tokens));
                outputs.push(cache.attend(&q?, &k?, &v?)?);
                first += tokens;
                assert_eq!(cache.lengths(), [first; 2]);
            }
            check(&Tensor::cat(&outputs, 1)?, &whole(&all, window.map(|keys| keys - 1))?, 2e-5)?;
        }
        Ok(())
    })
}

#[test]
fn sequences_of_different_lengths() -> Result<()> {
    on_each(|device| {
        let all = tensors(2, 12, device)?;
        let attention = Attention::new(HEADS[0], HEADS[1], SIZE).rope(rope(device)?);
        let mut cache = KvCache::new(&attention, 2, 48, DType::F32, device)?;
        let [q, k, v] = all.each_ref().map(|tensor| tensor.narrow(1, 0, 9));
        let prompt = cache.attend_padded(&q?, &k?, &v?, &[9, 4])?;
        assert_eq!(cache.lengths(), [9, 4]);
        // The tokens of the second sequence go on at place 4 with what is row 9.
        let [q, k, v] = all.each_ref().map(|tensor| tensor.narrow(1, 9, 1));
        let step = cache.attend(&q?, &k?, &v?)?;
        for (b, length) in [(0, 9), (1, 4)] {
            let own = all.each_ref().map(|tensor| -> Result<Tensor> {
                let own = tensor.narrow(0, b, 1)?;
                Tensor::cat(&[own.narrow(1, 0, length)?, own.narrow(1, 9, 1)?], 1)
            });
            let [q, k, v] = own;
            let want = whole(&[q?, k?, v?], None)?;
            let tokens = prompt.narrow(0, b, 1)?.narrow(1, 0, length)?;
            check(&tokens, &want.narrow(1, 0, length)?, 2e-5)?;
            check(&step.narrow(0, b, 1)?, &want.narrow(1, length, 1)?, 2e-5)?;
        }
        Ok(())
    })
}

#[test]
fn truncated_tokens_are_forgotten() -> Result<()> {
    on_each(|device| {
        let all = tensors(1, 20, device)?;
        let attention = Attention::new(HEADS[0], HEADS[1], SIZE).rope(rope(device)?);
        let mut cache = KvCache::new(&attention, 1, 20, DType::F32, device)?;
        let part = |first, n| all.each_ref().map(|tensor| tensor.narrow(1, first, n).unwrap());
        let attend = |cache: &mut KvCache, [q, k, v]: [Tensor; 3]| cache.attend(&q, &k, &v);
        attend(&mut cache, part(0, 10))?;
        attend(&mut cache, part(15, 5))?;
        cache.truncate(10);
        let got = attend(&mut cache, part(10, 10))?;
        check(&got, &whole(&all, None)?.narrow(1, 10, 10)?, 2e-5)
    })
}

#[test]
fn half_precision() -> Result<()> {
    on_each(|device| {
        let all = tensors(1, 30, device)?;
        let want = whole(&all, None)?;
        for (dtype, tolerance) in [(DType::F16, 5e-3), (DType::BF16, 4e-2)] {
            let rope = Rope::of_frequency(10_000., SIZE, 30, dtype, device)?;
            let attention = Attention::new(HEADS[0], HEADS[1], SIZE).rope(rope);
            let mut cache = KvCache::new(&attention, 1, 30, dtype, device)?;
            let cast = |first, n| all.each_ref().map(|t| t.narrow(1, first, n)?.to_dtype(dtype));
            let [q, k, v] = cast(0, 29);
            let prompt = cache.attend(&q?, &k?, &v?)?;
            let [q, k, v] = cast(29, 1);
            let step = cache.attend(&q?, &k?, &v?)?;
            check(&Tensor::cat(&[prompt, step], 1)?, &want, tolerance)?;
        }
        Ok(())
    })
}

#[test]
fn a_paged_cache_is_a_dense_one() -> Result<()> {
    on_each(|device| {
        let all = tensors(3, 40, device)?;
        let attention = Attention::new(HEADS[0], HEADS[1], SIZE).rope(rope(device)?);
        let mut cache = PagedKvCache::new(&attention, 12, 8, DType::F32, device)?;
        let sequences = [cache.begin(), cache.begin(), cache.begin()];
        let want = whole(&all, None)?;
        let mut lengths = [0; 3];
        // Prompts, decode steps, and one sequence whose prompt goes on beside the others' steps.
        for tokens in [[20, 7, 0], [1, 1, 9], [1, 1, 1], [0, 5, 1], [3, 0, 2]] {
            let parts = |t: &Tensor| {
                let parts = (0..3).map(|b| t.get(b)?.narrow(0, lengths[b], tokens[b]));
                Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
            };
            let [q, k, v] = all.each_ref().map(parts);
            let batch: Vec<_> = sequences.into_iter().zip(tokens).collect();
            let got = cache.attend(&q?, &k?, &v?, &batch)?;
            check(&got, &parts(&want)?, 2e-5)?;
            (0..3).for_each(|b| lengths[b] += tokens[b]);
            assert_eq!(sequences.map(|sequence| cache.length(sequence).unwrap()), lengths);
        }
        // 25, 14 and 13 tokens in blocks of 8.
        assert_eq!(cache.free_blocks(), 12 - 4 - 2 - 2);
        assert!(cache.end(sequences[0]) && !cache.end(sequences[0]));
        assert_eq!((cache.free_blocks(), cache.length(sequences[0])), (8, None));
        Ok(())
    })
}

/// Without a rotary embedding, whose positions end sooner.
#[test]
fn more_tokens_than_kernels_count_are_refused() -> Result<()> {
    on_each(|device| {
        let [q, k, v] = tensors(1, 5, device)?;
        let (q, k, v) = (q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?);
        let attention = Attention::new(HEADS[0], HEADS[1], SIZE);
        let mut cache = PagedKvCache::new(&attention, 4, 4, DType::F32, device)?;
        let (first, second) = (cache.begin(), cache.begin());
        cache.attend(&q, &k, &v, &[(first, 5)])?;
        for tokens in [usize::MAX, usize::MAX - 4, 1 << 32, i32::MAX as usize - 4] {
            let text = refusal(cache.attend(&q, &k, &v, &[(first, tokens)]));
            let want = format!(
                "batch: got {tokens} tokens of {first:?}, which has 5; \
                 allowed: up to 2147483647 in all, the tokens that kernels count"
            );
            assert_eq!(text, want);
        }
        let text = refusal(cache.attend(&q, &k, &v, &[(second, 6), (first, usize::MAX)]));
        assert!(text.contains("the tokens that kernels count"), "{text}");
        assert_eq!((cache.length(first), cache.length(second)), (Some(5), Some(0)));
        assert_eq!(cache.free_blocks(), 2);
        Ok(())
    })
}

#[test]
fn bad_input_is_refused_by_name_and_changes_nothing() -> Result<()> {
    on_each(|device| {
        let attention = Attention::new(HEADS[0], HEADS[1], SIZE).rope(rope(device)?);
        let [q, k, v] = tensors(1, 5, device)?;
        let mut cache = KvCache::new(&attention, 1, 8, DType::F32, device)?;
        cache.attend(&q, &k, &v)?;
        let text = refusal(cache.attend(&q, &k, &v));
        let want = "tokens: got 5 for sequence 0, which has 5; allowed: up to 8 in all, the capacity of the KV cache";
        assert_eq!(text, want);
        let text = refusal(cache.attend(&q, &k.narrow(1, 0, 4)?, &v));
        assert_eq!(
            text,
            "key: got [1, 4, 2, 16]; allowed: [1, 5, 2, 16], (batch, tokens, heads, size)"
        );
        let text = refusal(cache.attend(&q, &k.to_dtype(DType::BF16)?, &v));
        assert_eq!(text, "key: got BF16; allowed: F32");
        let text = refusal(cache.attend(&q.squeeze(0)?, &k, &v));
        assert!(text.starts_with("query: got [5, 6, 16]"), "{text}");
        let text = refusal(cache.attend_padded(&q, &k, &v, &[3]));
        assert!(text.contains("padded prompts begin their sequences"), "{text}");
        assert_eq!(cache.lengths(), [5]);

        let new =
            |attention: &Attention, dtype| refusal(KvCache::new(attention, 1, 100, dtype, device));
        let text = new(&attention, DType::F32);
        assert!(text.starts_with("cos: got 64 positions; allowed: 100 or more"), "{text}");
        assert!(new(&attention, DType::BF16).starts_with("cos: got F32"));
        assert!(new(&attention, DType::U8).starts_with("dtype: got U8; allowed: F32, F16 or BF16"));
        let text = new(&Attention::new(5, 2, SIZE), DType::F32);
        assert_eq!(text, "kv_heads: got 2; allowed: a divisor of query_heads = 5");

        let (q, k, v) = (q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?);
        let mut cache = PagedKvCache::new(&attention, 2, 4, DType::F32, device)?;
        let (first, second) = (cache.begin(), cache.begin());
        cache.attend(&q, &k, &v, &[(first, 5)])?;
        let text = refusal(cache.attend(&q, &k, &v, &[(second, 5)]));
        assert!(
            text.contains("which take 2 more blocks; allowed: 0 blocks, which are free"),
            "{text}"
        );
        let text = refusal(cache.attend(&q, &k, &v, &[(first, 2), (first, 3)]));
        assert!(text.ends_with("allowed: each sequence once"), "{text}");
        // Lengths that overflow in the call's sum, in a sequence's sum, and in kernels' counts.
        for (batch, most) in [
            (vec![(first, usize::MAX), (second, 6)], usize::MAX),
            (vec![(first, usize::MAX - 4)], usize::MAX - 4),
            (vec![(first, 1 << 32)], 1 << 32),
        ] {
            let text = refusal(cache.attend(&q, &k, &v, &batch));
            let want =
                format!("batch: got {most} tokens of {first:?}, which has 5; allowed: up to ");
            assert!(text.starts_with(&want), "{text}");
        }
        cache.end(second);
        let text = refusal(cache.attend(&q, &k, &v, &[(second, 5)]));
        assert!(text.ends_with("allowed: sequences that this KV cache has begun"), "{text}");
        assert_eq!((cache.length(first), cache.free_blocks()), (Some(5), 0));
        Ok(())
    })
}
