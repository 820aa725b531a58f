//! candle-transformers' own llama, as its users have it, with random weights of the shape of Llama
//! 3.2 1B: prefill and decode with candle's own attention and, with feature `flash-attn`, with
//! candle-flash-attn's functions. `[patch.crates-io]` decides whether these functions are gqa's.

mod weights;

use candle::{D, DType, Device, Result, Tensor};
use candle_transformers::models::llama::{Cache, Config, Llama};
use clap::{Parser, ValueEnum};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Args {
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    device: Place,
    /// Element type of weights and activations.
    #[arg(long, value_enum, default_value_t = Number::Float32)]
    dtype: Number,
    /// Prompts of so many tokens, with commas between.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1024",
        value_parser = count,
        allow_negative_numbers = true
    )]
    context: Vec<usize>,
    /// Tokens to decode behind each prompt.
    #[arg(long, default_value_t = 16, value_parser = count, allow_negative_numbers = true)]
    tokens: usize,
    /// Repetitions; the result is their median.
    #[arg(long, default_value_t = 5, value_parser = count, allow_negative_numbers = true)]
    repeat: usize,
    /// Layers, where they are to be fewer than the model's 16.
    #[arg(long, default_value_t = 16, value_parser = count, allow_negative_numbers = true)]
    layers: usize,
    /// Leaves out candle's own attention, whose scores are a matrix of float32 for each head.
    #[arg(long)]
    only_flash: bool,
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

/// Tokens, repetitions or layers; the model takes sequences of 131,072 tokens, and has positions
/// for as many of `--context` with `--tokens`.
fn count(text: &str) -> std::result::Result<usize, String> {
    const MOST: usize = 1 << 16;
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number));
    number.ok_or_else(|| format!("allowed: 1 to {MOST}"))
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
    let builder = weights::random(dtype, &device);
    let ways = [false, true].into_iter().filter(|flash| match flash {
        true => cfg!(feature = "flash-attn"),
        false => !args.only_flash,
    });
    let models = ways.map(|flash| {
        let config = llama_3_2_1b(args.layers, flash);
        Ok(Model { llama: Llama::load(builder.clone(), &config)?, config, dtype })
    });
    let models = models.collect::<Result<Vec<_>>>()?;
    args.context.iter().try_for_each(|context| {
        measure(&models, *context, &args, &device)?;
        alone(*context, &args, dtype, &device)
    })
}

struct Model {
    llama: Llama,
    config: Config,
    dtype: DType,
}

fn llama_3_2_1b(layers: usize, use_flash_attn: bool) -> Config {
    Config {
        hidden_size: 2048,
        intermediate_size: 8192,
        vocab_size: 128_256,
        num_hidden_layers: layers,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        use_flash_attn,
        rms_norm_eps: 1e-5,
        rope_theta: 500_000.,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 131_072,
        tie_word_embeddings: true,
    }
}

/// What a prompt takes, and each token behind it; the models take turns.
fn measure(models: &[Model], context: usize, args: &Args, device: &Device) -> Result<()> {
    let tokens: Vec<u32> = (0..context as u32).map(|i| i * 7919 % 128_256).collect();
    let prompt = Tensor::new(tokens, device)?.unsqueeze(0)?;
    let mut took = vec![[vec![], vec![]]; models.len()];
    let mut logits = Vec::new();
    for _ in 0..args.repeat {
        logits.clear();
        for (model, [prefills, decodes]) in models.iter().zip(&mut took) {
            let mut cache = Cache::new(true, model.dtype, &model.config, device)?;
            let mut step = |tokens: &Tensor, position| {
                let begun = Instant::now();
                let logits = model.llama.forward(tokens, position, &mut cache)?;
                let likeliest = logits.argmax(D::Minus1)?;
                device.synchronize()?;
                Ok::<_, candle::Error>((logits, likeliest.unsqueeze(0)?, begun.elapsed()))
            };
            let (first, mut token, time) = step(&prompt, 0)?;
            prefills.push(time);
            logits.push(first);
            for i in 0..args.tokens {
                let (_, next, time) = step(&token, context + i)?;
                token = next;
                decodes.push(time);
            }
        }
    }
    for (model, [prefills, decodes]) in models.iter().zip(took) {
        let way = if model.config.use_flash_attn { "flash-attn" } else { "own" };
        println!("{way:10} prefill of {context:5}    {:9.3} ms", median(prefills));
        println!("{way:10} decode after {context:5}  {:9.3} ms", median(decodes));
    }
    if let [own, flash] = &logits[..] {
        let apart = (own - flash)?.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
        let norm = own.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
        println!("logits after {context} apart by {:.1e} of their norm", apart / norm);
    }
    Ok(())
}

/// What candle-flash-attn's function takes by itself, for a prompt and for a token behind it.
#[cfg(feature = "flash-attn")]
fn alone(context: usize, args: &Args, dtype: DType, device: &Device) -> Result<()> {
    const CALLS: u32 = 20;
    let tensor =
        |rows, heads| Tensor::randn(0f32, 1., (1, rows, heads, 64), device)?.to_dtype(dtype);
    for (what, rows, kv_heads) in
        [("prefill", context, 8), ("decode", 1, 8), ("decode, KV heads repeated", 1, 32)]
    {
        let (q, k, v) = (tensor(rows, 32)?, tensor(context, kv_heads)?, tensor(context, kv_heads)?);
        let call = || candle_flash_attn::flash_attn(&q, &k, &v, 0.125, rows > 1);
        call()?;
        let times = (0..args.repeat).map(|_| {
            device.synchronize()?;
            let begun = Instant::now();
            (0..CALLS).try_for_each(|_| call().map(drop))?;
            device.synchronize()?;
            Ok(begun.elapsed() / CALLS)
        });
        let time = median(times.collect::<Result<_>>()?);
        println!("flash_attn {what} of {context}: {:9.1} us", 1e3 * time);
    }
    Ok(())
}

#[cfg(not(feature = "flash-attn"))]
fn alone(_: usize, _: &Args, _: DType, _: &Device) -> Result<()> {
    Ok(())
}

/// Milliseconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    1e3 * times[times.len() / 2].as_secs_f64()
}
