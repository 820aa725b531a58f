//! SmolLM2 generates text through gqa's kernels, or through candle's own attention.
//!
//! `cargo run --release --example smollm2 -- --model FILE.gguf --prompt TEXT --tokens N`; the
//! README of the crate says where the file comes from. Prints the text as it comes, and then tokens
//! per second and what attention took of the time.

mod clock;
mod llama;
mod text;
mod ways;

use candle::quantized::gguf_file::Content;
use candle::{DType, Device, Result, Tensor};
use clap::{Parser, ValueEnum};
use llama::{Attend, Config, Llama, Logits, Weights, likeliest};
use std::fs::File;
use std::io::{BufReader, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use text::{Stream, Text, asked};

#[derive(Parser)]
struct Args {
    /// A GGUF file of a model of Llama's architecture; without one, a model of random numbers with
    /// the shape of Llama 3.2 1B is measured.
    #[arg(long)]
    model: Option<PathBuf>,
    #[arg(long, default_value = "The capital of France is")]
    prompt: String,
    /// Puts the prompt as a question, in the model's chat template.
    #[arg(long)]
    chat: bool,
    /// Tokens to generate.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// One or several, with commas between: each generates the text, and measurements take turns.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "gqa")]
    attention: Vec<Way>,
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// Element type of activations, and of dense weights.
    #[arg(long, value_enum, default_value_t = Number::Float32)]
    dtype: Number,
    /// Weights in the element type, rather than quantized as in the file.
    #[arg(long)]
    dense: bool,
    /// Prints the mean negative log-likelihood of this text's tokens instead of generating some.
    #[arg(long)]
    perplexity: Option<PathBuf>,
    /// Measures so many tokens of context instead of generating text: prefill of as many, and
    /// decode behind them.
    #[arg(long)]
    context: Option<usize>,
    /// Repetitions of a measurement, of which the median counts.
    #[arg(long, default_value_t = 5)]
    repeat: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Way {
    /// gqa's kernels, over a KV cache in place.
    Gqa,
    /// gqa's kernels, over a paged KV cache.
    GqaPaged,
    /// What candle-transformers' models do.
    Candle,
    /// candle-nn's flash attention, on the CPU.
    CandleFlash,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Place {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Number {
    Float32,
    Float16,
    Bfloat16,
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self.to_possible_value();
        f.pad(value.as_ref().map_or("", |value| value.get_name()))
    }
}

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
                candle::bail!("candle's flash attention is for the CPU in float32")
            }
        })
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let device = match args.device {
        Place::Cpu => Device::Cpu,
        Place::Cuda => Device::new_cuda(0)?,
    };
    let dtype = match args.dtype {
        Number::Float32 => DType::F32,
        Number::Float16 => DType::F16,
        Number::Bfloat16 => DType::BF16,
    };
    let quantized = !args.dense && dtype == DType::F32;
    let weights = if quantized { Weights::Quantized } else { Weights::Dense(dtype) };
    let Some(path) = &args.model else {
        let mut model = Llama::random(llama_3_2_1b(), dtype, &device)?;
        return measure(&mut model, &args, args.context.unwrap_or(8192), dtype);
    };
    let mut reader = BufReader::new(File::open(path)?);
    let file = Content::read(&mut reader)?;
    let mut model = Llama::from_gguf(&file, &mut reader, weights, &device)?;
    if let Some(context) = args.context {
        return measure(&mut model, &args, context, dtype);
    }
    let text = Text::of(&file)?;
    args.attention.iter().try_for_each(|&way| match &args.perplexity {
        Some(path) => perplexity(&mut model, &text, way, path, dtype),
        None => generate(&mut model, &text, way, &args, dtype),
    })
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
    let capacity = prompt.len() + args.tokens;
    if capacity > model.config.context {
        candle::bail!("{capacity} tokens; the model takes {}", model.config.context);
    }
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
fn perplexity(
    model: &mut Llama,
    text: &Text,
    way: Way,
    path: &PathBuf,
    dtype: DType,
) -> Result<()> {
    let device = &model.device().clone();
    let tokens = text.tokens(&std::fs::read_to_string(path)?)?;
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
