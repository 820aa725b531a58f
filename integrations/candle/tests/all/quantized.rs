//! Quantized KV caches against attention over what rounding leaves of keys and values.

use crate::definition::{Definition, noise};
use crate::devices::on_each;
use crate::refusal::refusal;
use candle::{DType, Device, Result, Tensor};
use gqa_candle::{Attention, KvCache, PagedKvCache, QuantFormat};

const HEADS: [usize; 2] = [6, 2];
const SIZE: usize = 32;
const TOKENS: usize = 24;
/// Each format, and the largest of its values that keys and values shall need.
const FORMATS: [(QuantFormat, f64); 4] = [
    (QuantFormat::Int8, 127.),
    (QuantFormat::Float8, 16.),
    (QuantFormat::Int4, 7.),
    (QuantFormat::Float4, 6.),
];

/// The number of float8e4m3fn that is nearest: three bits behind the leading one, and steps of 2^-9
/// below 2^-6.
fn float8(x: f64) -> f64 {
    let exponent = x.abs().max(2f64.powi(-6)).log2().floor();
    let step = (exponent - 3.).exp2();
    ((x / step).round_ties_even() * step).clamp(-448., 448.)
}

/// The number of float4e2m1 that is nearest: one bit behind the leading one, and steps of a half
/// below 2.
fn float4(x: f64) -> f64 {
    let exponent = x.abs().max(1.).log2().floor();
    let step = (exponent - 1.).exp2();
    ((x / step).round_ties_even() * step).clamp(-6., 6.)
}

/// What is left of `x` where it is divided by a scale and rounded.
fn rounded(format: QuantFormat, x: f32, scale: f32) -> f32 {
    let (quotient, scale) = (f64::from(x / scale), f64::from(scale));
    let code = match format {
        QuantFormat::Int8 => quotient.round_ties_even().clamp(-128., 127.),
        QuantFormat::Int4 => quotient.round_ties_even().clamp(-8., 7.),
        QuantFormat::Float8 => float8(quotient),
        QuantFormat::Float4 => float4(quotient),
    };
    (code * scale) as f32
}

/// Scales of some shape, with which numbers from -1 to 1 nearly reach to `most`.
fn scales(shape: &[usize], most: f64, seed: u32, device: &Device) -> Result<Tensor> {
    (noise(shape, seed, device)? * (0.2 / most))? + 1.2 / most
}

/// The same numbers, (batch, tokens, KV heads, size), rounded.
fn all_rounded(format: QuantFormat, x: &Tensor, scale: &Tensor) -> Result<Tensor> {
    let (numbers, scale) = (x.flatten_all()?.to_vec1::<f32>()?, scale.flatten_all()?);
    let (scale, channels) = (scale.to_vec1::<f32>()?, HEADS[1] * SIZE);
    let each = channels / scale.len();
    let left = numbers.iter().enumerate();
    let left = left.map(|(i, x)| rounded(format, *x, scale[i % channels / each]));
    Tensor::from_iter(left, x.device())?.reshape(x.shape())
}

fn apart(got: &Tensor, want: &Tensor) -> Result<f32> {
    let (got, want) = (got.to_device(&Device::Cpu)?, want.to_device(&Device::Cpu)?);
    (got - want)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()
}

#[test]
fn caches_hold_what_rounding_leaves() -> Result<()> {
    on_each(|device| {
        let of = |heads, seed| noise((2, TOKENS, heads, SIZE), seed, device);
        let [q, k, v] = [of(HEADS[0], 1)?, of(HEADS[1], 2)?, of(HEADS[1], 3)?];
        let whole = |k: &Tensor, v: &Tensor| {
            Definition::new(1. / (SIZE as f32).sqrt(), [None, Some(0)]).batch(&q, k, v)
        };
        let exact = whole(&k, &v)?;
        for (format, most) in FORMATS {
            for shape in [&[1][..], &HEADS[1..], &[HEADS[1], SIZE]] {
                let (k_scale, v_scale) =
                    (scales(shape, most, 4, device)?, scales(shape, most, 5, device)?);
                let want = whole(
                    &all_rounded(format, &k, &k_scale)?,
                    &all_rounded(format, &v, &v_scale)?,
                )?;
                assert!(apart(&exact, &want)? > 1e-3, "rounding is felt");
                let attention = Attention::new(HEADS[0], HEADS[1], SIZE);
                let attention = attention.quantized(format, &k_scale, &v_scale)?;
                for got in [dense(&attention, [&q, &k, &v])?, paged(&attention, [&q, &k, &v])?] {
                    let apart = apart(&got, &want)?;
                    assert!(apart < 5e-5, "{format} with scales {shape:?}: {apart}");
                }
            }
        }
        Ok(())
    })
}

/// Prompts, then decode steps.
fn dense(attention: &Attention, all: [&Tensor; 3]) -> Result<Tensor> {
    let mut cache = KvCache::new(attention, 2, TOKENS, DType::F32, all[0].device())?;
    let (mut outputs, mut first) = (Vec::new(), 0);
    for tokens in [TOKENS - 2, 1, 1] {
        let [q, k, v] = all.map(|tensor| tensor.narrow(1, first, tokens));
        outputs.push(cache.attend(&q?, &k?, &v?)?);
        first += tokens;
    }
    Tensor::cat(&outputs, 1)
}

/// The same over blocks.
fn paged(attention: &Attention, all: [&Tensor; 3]) -> Result<Tensor> {
    let mut cache = PagedKvCache::new(attention, 8, 16, DType::F32, all[0].device())?;
    let sequences = [cache.begin(), cache.begin()];
    let (mut outputs, mut first) = (Vec::new(), 0);
    for tokens in [TOKENS - 2, 1, 1] {
        let [q, k, v] = all.map(|tensor| tensor.narrow(1, first, tokens)?.flatten(0, 1));
        let batch = sequences.map(|sequence| (sequence, tokens));
        let output = cache.attend(&q?, &k?, &v?, &batch)?;
        outputs.push(output.reshape((2, tokens, HEADS[0], SIZE))?);
        first += tokens;
    }
    Tensor::cat(&outputs, 1)
}

#[test]
fn bad_scales_are_refused_by_name() -> Result<()> {
    on_each(|device| {
        let one = Tensor::ones(1, DType::F32, device)?;
        let with = |k_scale: &Tensor, v_scale: &Tensor| {
            Attention::new(HEADS[0], HEADS[1], SIZE).quantized(QuantFormat::Int8, k_scale, v_scale)
        };
        let text = refusal(with(&Tensor::ones(3, DType::F32, device)?, &one));
        assert_eq!(text, "k_scale: got [3]; allowed: 1, 2 or 64 elements");
        let text = refusal(with(&one, &Tensor::ones(2, DType::F32, device)?));
        assert_eq!(text, "v_scale: got [2]; allowed: 1 elements, as k_scale");
        let text = refusal(with(&one.to_dtype(DType::BF16)?, &one));
        assert_eq!(text, "k_scale: got BF16; allowed: F32");
        for number in [0., f32::NAN, f32::INFINITY, 1e-40] {
            let text = refusal(with(&one, &Tensor::new(&[number], device)?));
            let want = "allowed: finite numbers other than 0, none subnormal";
            assert!(text.starts_with("v_scale: got ") && text.ends_with(want), "{text}");
        }
        // Blocks of such rows are not whole vectors.
        let attention = Attention::new(HEADS[0], HEADS[1], 24);
        let attention = attention.quantized(QuantFormat::Int8, &one, &one)?;
        let text = refusal(PagedKvCache::new(&attention, 4, 16, DType::F32, device));
        assert!(text.contains("head_size"), "{text}");
        KvCache::new(&attention, 1, 16, DType::F32, device)?;
        Ok(())
    })
}
