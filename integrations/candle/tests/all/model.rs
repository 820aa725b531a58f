//! A small model of random numbers: it says the same through our kernels as through candle's own
//! attention.

use crate::devices::on_each;
use crate::llama::{Attend, Config, Llama, Logits, likeliest};
use crate::ways::{Dense, Flash, Paged, Unfused};
use candle::{DType, Device, IndexOp, Result, Tensor};

const CONTEXT: usize = 2200;

fn config() -> Config {
    Config {
        layers: 3,
        width: 96,
        hidden: 160,
        heads: 6,
        kv_heads: 2,
        head_size: 16,
        vocabulary: 211,
        theta: 10_000.,
        epsilon: 1e-5,
        context: CONTEXT,
    }
}

fn model(device: &Device) -> Result<Llama> {
    Llama::random(config(), DType::F32, device)
}

fn dense(batch: usize, device: &Device) -> Result<Dense> {
    Dense::new(&config(), batch, CONTEXT, DType::F32, device)
}

fn unfused(device: &Device) -> Result<Unfused> {
    Unfused::new(&config(), CONTEXT, DType::F32, device)
}

fn prompt(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (i * 7919 + seed * 104_729) % 211).collect()
}

fn row(tokens: &[u32], device: &Device) -> Result<Tensor> {
    Tensor::new(tokens, device)?.unsqueeze(0)
}

/// The likeliest tokens after a prompt that comes in chunks.
fn text(
    model: &mut Llama,
    attend: &mut dyn Attend,
    chunks: &[&[u32]],
    count: usize,
) -> Result<Vec<u32>> {
    let device = &model.device().clone();
    let (mut text, mut next) = (Vec::new(), 0);
    for chunk in chunks {
        next = likeliest(&model.forward(&row(chunk, device)?, attend, Logits::Last)?)?[0];
    }
    for _ in 0..count {
        text.push(next);
        next = likeliest(&model.forward(&row(&[next], device)?, attend, Logits::Last)?)?[0];
    }
    Ok(text)
}

/// Logits of all tokens of a text.
fn logits(model: &mut Llama, attend: &mut dyn Attend, tokens: &[u32]) -> Result<Tensor> {
    let device = &model.device().clone();
    model.forward(&row(tokens, device)?, attend, Logits::All)
}

fn apart(a: &Tensor, b: &Tensor) -> Result<f32> {
    (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

#[test]
fn greedy_text_is_that_of_candles_attention() -> Result<()> {
    on_each(|device| {
        let mut model = model(device)?;
        for seed in 0..5 {
            let prompt = prompt(seed, 20 + 13 * seed as usize);
            let want = text(&mut model, &mut unfused(device)?, &[&prompt], 64)?;
            assert_eq!(text(&mut model, &mut dense(1, device)?, &[&prompt], 64)?, want);
            let mut paged = Paged::new(&config(), 1, CONTEXT, DType::F32, device)?;
            assert_eq!(text(&mut model, &mut paged, &[&prompt], 64)?, want);
            if device.is_cpu() {
                let mut flash = Flash::new(&config(), CONTEXT, DType::F32, device)?;
                assert_eq!(text(&mut model, &mut flash, &[&prompt], 64)?, want);
            }
        }
        Ok(())
    })
}

#[test]
fn logits_are_those_of_candles_attention() -> Result<()> {
    on_each(|device| {
        let (mut model, tokens) = (model(device)?, prompt(7, 300));
        let want = logits(&mut model, &mut unfused(device)?, &tokens)?;
        let got = logits(&mut model, &mut dense(1, device)?, &tokens)?;
        let apart = apart(&got, &want)?;
        assert!(apart < 1e-3, "{apart}");
        Ok(())
    })
}

#[test]
fn a_prompt_in_chunks_gives_the_same_text() -> Result<()> {
    on_each(|device| {
        let (mut model, prompt) = (model(device)?, prompt(3, 150));
        let want = text(&mut model, &mut dense(1, device)?, &[&prompt], 40)?;
        for size in [1, 32, 77] {
            let chunks: Vec<_> = prompt.chunks(size).collect();
            assert_eq!(
                text(&mut model, &mut dense(1, device)?, &chunks, 40)?,
                want,
                "chunks of {size}"
            );
        }
        Ok(())
    })
}

#[test]
fn a_cache_carries_over_two_thousand_tokens() -> Result<()> {
    on_each(|device| {
        let (mut model, prompt) = (model(device)?, prompt(5, 2050));
        let chunks: Vec<_> = prompt.chunks(205).collect();
        let want = text(&mut model, &mut unfused(device)?, &chunks, 20)?;
        assert_eq!(text(&mut model, &mut dense(1, device)?, &chunks, 20)?, want);
        let mut paged = Paged::new(&config(), 1, CONTEXT, DType::F32, device)?;
        assert_eq!(text(&mut model, &mut paged, &chunks, 20)?, want);
        Ok(())
    })
}

#[test]
fn two_sequences_at_once_give_the_texts_of_each() -> Result<()> {
    on_each(|device| {
        let mut model = model(device)?;
        let prompts = [prompt(1, 50), prompt(2, 50)];
        let mut want = Vec::new();
        for prompt in &prompts {
            want.push(text(&mut model, &mut dense(1, device)?, &[prompt], 40)?);
        }
        let paged = Paged::new(&config(), 2, CONTEXT, DType::F32, device)?;
        let ways: [Box<dyn Attend>; 2] = [Box::new(dense(2, device)?), Box::new(paged)];
        for mut attend in ways {
            let mut texts = vec![Vec::new(), Vec::new()];
            let mut tokens = Tensor::stack(
                &[row(&prompts[0], device)?.i(0)?, row(&prompts[1], device)?.i(0)?],
                0,
            )?;
            for _ in 0..40 {
                let next = likeliest(&model.forward(&tokens, &mut *attend, Logits::Last)?)?;
                texts.iter_mut().zip(&next).for_each(|(text, next)| text.push(*next));
                tokens = Tensor::new(next, device)?.unsqueeze(1)?;
            }
            assert_eq!(texts, want);
        }
        Ok(())
    })
}
