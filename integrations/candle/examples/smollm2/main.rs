//! SmolLM2 generates text through gqa's kernels, or through candle's own attention.
//!
//! `cargo run --release --example smollm2 -- --model FILE.gguf --prompt TEXT --tokens N`; the
//! README of the crate says where the file comes from. Prints the text as it comes, and then tokens
//! per second and what attention took of the time.

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
    #[arg(long, value_enum, default_value_t = Way::Gqa)]
    attention: Way,
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
        let model = Llama::random(llama_3_2_1b(), dtype, &device)?;
        return measure(model, &args, args.context.unwrap_or(8192), dtype, &device);
    };
    let mut reader = BufReader::new(File::open(path)?);
    let file = Content::read(&mut reader)?;
    let model = Llama::from_gguf(&file, &mut reader, weights, &device)?;
    match (args.context, &args.perplexity) {
        (Some(context), _) => measure(model, &args, context, dtype, &device),
        (None, Some(text)) => perplexity(model, &Text::of(&file)?, &args, text, dtype, &device),
        (None, None) => generate(model, &Text::of(&file)?, &args, dtype, &device),
    }
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
fn generate(
    mut model: Llama,
    text: &Text,
    args: &Args,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let prompt = if args.chat { asked(&args.prompt) } else { args.prompt.clone() };
    let prompt = text.tokens(&prompt)?;
    let capacity = prompt.len() + args.tokens;
    if capacity > model.config.context {
        candle::bail!("{capacity} tokens; the model takes {}", model.config.context);
    }
    let mut attend = args.attention.attend(&model.config, capacity, dtype, device)?;
    if !args.chat {
        print!("{}", args.prompt);
    }
    let mut part = Part::begin(&mut model);
    let logits = model.forward(&row(&prompt, device)?, &mut *attend, Logits::Last)?;
    let mut token = likeliest(&logits)?[0];
    let prefill = part.end(&mut model, prompt.len());
    part = Part::begin(&mut model);
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
    let decode = part.end(&mut model, steps);
    println!();
    eprintln!("prefill {prefill}");
    eprintln!("decode  {decode}");
    Ok(())
}

/// Prints the mean negative log-likelihood of a text's tokens, by windows of up to 1,024 of them.
fn perplexity(
    mut model: Llama,
    text: &Text,
    args: &Args,
    path: &PathBuf,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let tokens = text.tokens(&std::fs::read_to_string(path)?)?;
    let (mut sum, mut count) = (0., 0);
    for window in tokens.chunks(1024).filter(|window| window.len() > 1) {
        let (given, wanted) = (&window[..window.len() - 1], &window[1..]);
        let mut attend = args.attention.attend(&model.config, given.len(), dtype, device)?;
        let logits = model.forward(&row(given, device)?, &mut *attend, Logits::All)?.squeeze(0)?;
        let likelihoods = candle_nn::ops::log_softmax(&logits, 1)?;
        let wanted = Tensor::new(wanted, device)?.unsqueeze(1)?;
        sum -= likelihoods.gather(&wanted, 1)?.sum_all()?.to_scalar::<f32>()?;
        count += given.len();
    }
    let mean = sum / count as f32;
    println!(
        "{count} tokens: mean negative log-likelihood {mean:.5}, perplexity {:.4}",
        mean.exp()
    );
    Ok(())
}

/// Prefill of so many tokens, and decode of some behind them: medians.
fn measure(
    mut model: Llama,
    args: &Args,
    context: usize,
    dtype: DType,
    device: &Device,
) -> Result<()> {
    let steps = args.tokens;
    let vocabulary = model.config.vocabulary as u32;
    let tokens: Vec<u32> = (0..context as u32).map(|i| i * 7919 % vocabulary).collect();
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    for _ in 0..args.repeat {
        let capacity = context + steps;
        let mut attend = args.attention.attend(&model.config, capacity, dtype, device)?;
        let part = Part::begin(&mut model);
        let mut logits = model.forward(&row(&tokens, device)?, &mut *attend, Logits::Last)?;
        let mut token = likeliest(&logits)?;
        prefills.push(part.end(&mut model, context));
        for _ in 0..steps {
            let part = Part::begin(&mut model);
            logits = model.forward(&row(&token, device)?, &mut *attend, Logits::Last)?;
            token = likeliest(&logits)?;
            decodes.push(part.end(&mut model, 1));
        }
    }
    let way =
        args.attention.to_possible_value().map_or_else(String::new, |way| way.get_name().into());
    println!("{way:12} prefill of {context:5} {}", median(prefills));
    println!("{way:12} decode after {context:3} {}", median(decodes));
    Ok(())
}

/// Something that is measured.
struct Part(Instant);

impl Part {
    fn begin(model: &mut Llama) -> Self {
        model.attention = Duration::ZERO;
        Self(Instant::now())
    }

    fn end(&self, model: &mut Llama, tokens: usize) -> Took {
        Took { tokens, all: self.0.elapsed(), attention: model.attention }
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
