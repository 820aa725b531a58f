//! The options of the program, and errors that name them.

use candle::Error;
use clap::{Parser, ValueEnum};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// What the program is to do.
#[derive(Parser)]
pub struct Args {
    /// A GGUF file of a model of Llama's architecture; without one, a model of random numbers with
    /// the shape of Llama 3.2 1B is measured.
    #[arg(long)]
    pub model: Option<PathBuf>,
    #[arg(long, default_value = "The capital of France is")]
    pub prompt: String,
    /// Puts the prompt as a question, in the model's chat template.
    #[arg(long, requires = "model")]
    pub chat: bool,
    /// Tokens to generate.
    #[arg(long, default_value_t = 64, value_parser = count, allow_negative_numbers = true)]
    pub tokens: usize,
    /// One or several, with commas between: each generates the text, and measurements take turns.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "gqa")]
    pub attention: Vec<Way>,
    #[arg(long, value_enum, default_value_t = Place::Cpu)]
    pub device: Place,
    /// Element type of activations, and of dense weights.
    #[arg(long, value_enum, default_value_t = Number::Float32)]
    pub dtype: Number,
    /// Weights in the element type, rather than quantized as in the file.
    #[arg(long)]
    pub dense: bool,
    /// Prints the mean negative log-likelihood of this text's tokens instead of generating some.
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with_all = ["context", "chat"])]
    pub perplexity: Option<PathBuf>,
    /// Measures so many tokens of context instead of generating text: prefill of as many, and
    /// decode behind them.
    #[arg(long, value_parser = count, allow_negative_numbers = true)]
    pub context: Option<usize>,
    /// Repetitions of a measurement; its result is their median.
    #[arg(long, default_value_t = 5, value_parser = count, allow_negative_numbers = true)]
    pub repeat: usize,
}

/// `--attention`.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Way {
    /// gqa's kernels, over a KV cache in place.
    Gqa,
    /// gqa's kernels, over a paged KV cache.
    GqaPaged,
    /// What candle-transformers' models do.
    Candle,
    /// candle-nn's flash attention, on the CPU.
    CandleFlash,
}

/// `--device`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Place {
    Cpu,
    Cuda,
}

/// `--dtype`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Number {
    Float32,
    Float16,
    Bfloat16,
}

impl Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self.to_possible_value();
        f.pad(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// Tokens or repetitions.
fn count(text: &str) -> Result<usize, String> {
    const MOST: usize = 1 << 20;
    let number = text.parse().ok().filter(|number| (1..=MOST).contains(number));
    number.ok_or_else(|| format!("allowed: 1 to {MOST}"))
}

/// An error about an option's value.
pub fn invalid(option: &str, got: impl Display, allowed: impl Display) -> Error {
    Error::Msg(format!("{option}: got {got}; allowed: {allowed}"))
}

/// What a file gave, or an error that names its option and path.
pub fn of_file<T>(option: &str, path: &Path, result: Result<T, impl Display>) -> Result<T, Error> {
    result
        .map_err(|error| Error::Msg(format!("{option} {}: {}", path.display(), first_line(error))))
}

/// What an error says, without the trace that candle adds where `RUST_BACKTRACE` is set.
pub fn first_line(error: impl Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Errs unless a model that takes `most` tokens of a sequence takes as many as `option` asks for,
/// beside others.
pub fn check_room(option: &str, got: usize, [others, most]: [usize; 2]) -> Result<(), Error> {
    if got.saturating_add(others) <= most {
        return Ok(());
    }
    let room = most.saturating_sub(others);
    Err(invalid(option, got, format!("up to {room}, as the model takes {most} with {others} more")))
}
