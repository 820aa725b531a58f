//! SmolLM2 generates text through gqa's kernels, or through candle's own attention.
//!
//! `cargo run --release --example smollm2 -- --model FILE.gguf --prompt TEXT --tokens N`; the
//! README of the crate says where the file comes from. Prints the text as it comes, and then tokens
//! per second and what attention took of the time.

mod clock;
mod llama;
mod options;
mod text;
mod ways;

use candle::quantized::gguf_file::Content;
use candle::{DType, Device, Result, Tensor};
use clap::Parser;
use llama::{Attend, Config, Llama, Logits, Weights, likeliest};
use options::{Args, Number, Place, Way, check_room, first_line, invalid, of_file};
use std::fs::File;
use std::io::{BufReader, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use text::{Stream, Text, asked};

impl Way {
    /// Room for `capacity` tokens of a sequence.
    fn attend(
        self,
        config: &Config,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Box<dyn Attend>> {
        Ok(match self {
            Self::Gqa => Box::new(ways::Dense::new(config, 1, capacity, dtype, device)?),
            Self::GqaPaged => Box::new(ways::Paged::new(config, 1, capacity, dtype, device)?),
            Self::Candle => Box::new(ways::Unfused::new(config, capacity, dtype, device)?),
            Self::CandleFlash if dtype == DType::F32 && device.is_cpu() => {
                Box::new(ways::Flash::new(config, capacity, dtype, device)?)
            }
            Self::CandleFlash => {
                return Err(invalid("--attention", self, "others, unless on the CPU in float32"));
            }
        })
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("smollm2: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let device = match args.device {
        Place::Cpu => Device::Cpu,
        Place::Cuda => Device::new_cuda(0).map_err(|error| {
            invalid("--device", "cuda", format!("cpu, as {}", first_line(error)))
        })?,
    };
    let dtype = match args.dtype {
        Number::Float32 => DType::F32,
        Number::Float16 => DType::F16,
        Number::Bfloat16 => DType::BF16,
    };
    let quantized = !args.dense && dtype == DType::F32;
    let weights = if quantized { Weights::Quantized } else { Weights::Dense(dtype) };
    let Some(path) = &args.model else {
        let context = args.context.unwrap_or(8192);
        check_room("--context", context, [args.tokens, llama_3_2_1b().context])?;
        let mut model = Llama::random(llama_3_2_1b(), dtype, &device)?;
        return measure(&mut model, args, context, dtype);
    };
    let (mut model, text) = of_file("--model", path, read(path, weights, &device))?;
    if let Some(context) = args.context {
        check_room("--context", context, [args.tokens, model.config.context])?;
        return measure(&mut model, args, context, dtype);
    }
    args.attention.iter().try_for_each(|&way| match &args.perplexity {
        Some(path) => perplexity(&mut model, &text, way, path, dtype),
        None => generate(&mut model, &text, way, args, dtype),
    })
}

/// The model of a GGUF file, and its tokenizer.
fn read(path: &Path, weights: Weights, device: &Device) -> Result<(Llama, Text)> {
    let mut reader = BufReader::new(File::open(path)?);
    let file = Content::read(&mut reader).map_err(|error| {
        candle::Error::Msg(format!("got no GGUF file: {}; allowed: one", first_line(error)))
    })?;
    Ok((Llama::from_gguf(&file, &mut reader, weights, device)?, Text::of(&file)?))
}

fn llama_3_2_1b() -> Config {
    Config {
        layers: 16,
        width: 2048,
        hidden: 8192,
        heads: 32,
        kv_heads: 8,
        head_size: 64,
        vocabulary: 128_256,
        theta: 500_000.,
        epsilon: 1e-5,
        context: 131_072,
    }
}

/// Tokens of one sequence.
fn row(tokens: &[u32], device: &Device) -> Result<Tensor> {
    Tensor::new(tokens, device)?.unsqueeze(0)
}

/// Prints the likeliest text.
fn generate(model: &mut Llama, text: &Text, way: Way, args: &Args, dtype: DType) -> Result<()> {
    let device = &model.device().clone();
    let prompt = if args.chat { asked(&args.prompt) } else { args.prompt.clone() };
    let prompt = text.tokens(&prompt)?;
    if prompt.is_empty() {
        return Err(invalid("--prompt", "no token", "1 or more"));
    }
    check_room("--tokens", args.tokens, [prompt.len(), model.config.context])?;
    let capacity = prompt.len() + args.tokens;
    let mut attend = way.attend(&model.config, capacity, dtype, device)?;
    if !args.chat {
        print!("{}", args.prompt);
    }
    let mut part = Part::begin();
    let logits = model.forward(&row(&prompt, device)?, &mut *attend, Logits::Last)?;
    let mut token = likeliest(&logits)?[0];
    let prefill = part.end(model, prompt.len())?;
    part = Part::begin();
    let (mut stream, mut steps) = (Stream::default(), 0);
    for _ in 0..args.tokens {
        if text.is_end(token) {
            break;
        }
        print!("{}", stream.add(text, token)?);
        std::io::stdout().flush()?;
        let logits = model.forward(&row(&[token], device)?, &mut *attend, Logits::Last)?;
        token = likeliest(&logits)?[0];
        steps += 1;
    }
    let decode = part.end(model, steps)?;
    println!();
    eprintln!("{way} prefill {prefill}");
    eprintln!("{way} decode  {decode}");
    Ok(())
}

/// Prints the mean negative log-likelihood of a text's tokens, by windows of up to 1,024 of them.
fn perplexity(model: &mut Llama, text: &Text, way: Way, path: &Path, dtype: DType) -> Result<()> {
    let device = &model.device().clone();
    let read = of_file("--perplexity", path, std::fs::read_to_string(path))?;
    let tokens = text.tokens(&read)?;
    if tokens.len() < 2 {
        let got = format!("{} tokens in {}", tokens.len(), path.display());
        return Err(invalid("--perplexity", got, "a text of 2 tokens or more"));
    }
    let (mut sum, mut count) = (0., 0);
    for window in tokens.chunks(1024).filter(|window| window.len() > 1) {
        let (given, wanted) = (&window[..window.len() - 1], &window[1..]);
        let mut attend = way.attend(&model.config, given.len(), dtype, device)?;
        let logits = model.forward(&row(given, device)?, &mut *attend, Logits::All)?.squeeze(0)?;
        let likelihoods = candle_nn::ops::log_softmax(&logits, 1)?;
        let wanted = Tensor::new(wanted, device)?.unsqueeze(1)?;
        sum -= likelihoods.gather(&wanted, 1)?.sum_all()?.to_scalar::<f32>()?;
        count += given.len();
    }
    let mean = sum / count as f32;
    println!(
        "{way} {count} tokens: mean negative log-likelihood {mean:.5}, perplexity {:.4}",
        mean.exp()
    );
    Ok(())
}

/// Prefill of so many tokens, and decode of some behind them: medians.
fn measure(model: &mut Llama, args: &Args, context: usize, dtype: DType) -> Result<()> {
    let device = &model.device().clone();
    let steps = args.tokens;
    let vocabulary = model.config.vocabulary as u32;
    let tokens: Vec<u32> = (0..context as u32).map(|i| i * 7919 % vocabulary).collect();
    let mut took: Vec<_> = args.attention.iter().map(|way| (*way, [vec![], vec![]])).collect();
    for _ in 0..args.repeat {
        for (way, [prefills, decodes]) in &mut took {
            let mut attend = way.attend(&model.config, context + steps, dtype, device)?;
            let part = Part::begin();
            let mut logits = model.forward(&row(&tokens, device)?, &mut *attend, Logits::Last)?;
            let mut token = likeliest(&logits)?;
            prefills.push(part.end(model, context)?);
            for _ in 0..steps {
                let part = Part::begin();
                logits = model.forward(&row(&token, device)?, &mut *attend, Logits::Last)?;
                token = likeliest(&logits)?;
                decodes.push(part.end(model, 1)?);
            }
        }
    }
    for (way, [prefills, decodes]) in took {
        println!("{way:12} prefill of {context:5} {}", median(prefills));
        println!("{way:12} decode after {context:3} {}", median(decodes));
    }
    Ok(())
}

/// Something that is measured.
struct Part(Instant);

impl Part {
    fn begin() -> Self {
        Self(Instant::now())
    }

    fn end(&self, model: &mut Llama, tokens: usize) -> Result<Took> {
        let all = self.0.elapsed();
        Ok(Took { tokens, all, attention: model.attention.take()? })
    }
}

/// What some tokens took.
#[derive(Clone, Copy)]
struct Took {
    tokens: usize,
    all: Duration,
    attention: Duration,
}

fn median(mut took: Vec<Took>) -> Took {
    took.sort_by_key(|took| took.all);
    took[took.len() / 2]
}

impl std::fmt::Display for Took {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [all, attention] = [self.all, self.attention].map(|time| time.as_secs_f64());
        let (rate, share) = (self.tokens as f64 / all, 100. * attention / all);
        write!(
            f,
            "{:5} tokens, {rate:8.1} tokens/s, {:8.2} ms, attention {:8.2} ms ({share:.0} %)",
            self.tokens,
            1e3 * all,
            1e3 * attention
        )
    }
}
