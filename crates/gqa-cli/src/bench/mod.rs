//! `gqa bench`: medians with their spread, checked against the reference in the same process.
//!
//! On a GPU the calls are captured in a CUDA graph that walks over several sets of buffers, so that no call finds its inputs in the
//! second-level cache, and the graph is replayed. Elsewhere each run is timed by the wall clock.

mod measure;
mod report;

use std::process::ExitCode;
use std::str::FromStr;

use anyhow::Result;

use crate::Usage;
use crate::backend::{Choice, Machine};
use crate::input::Noise;
use crate::oracle::Computed;
use crate::shape::{Layer, Shape, count};
use measure::measure;
use report::{Record, Report};

/// What is measured.
#[derive(clap::Subcommand)]
pub enum Mode {
    /// Many query rows: a prompt, or a chunk of one.
    Prompt(Prompt),
    /// Few query rows against a long cache.
    Token(Token),
}

/// Arguments of `gqa bench prompt`.
#[derive(clap::Args)]
pub struct Prompt {
    /// Sequences x rows, several separated by commas [default: 32x512,8x2048,2x8192,1x16384 on a GPU, else 1x128,1x512].
    #[arg(long, value_delimiter = ',')]
    size: Vec<Size>,
    /// Rows in the cache before.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1 << 31))]
    past_length: u64,
    #[command(flatten)]
    common: Common,
}

/// Arguments of `gqa bench token`.
#[derive(clap::Args)]
pub struct Token {
    /// Sequences x rows in the cache before, several separated by commas
    /// [default: 1x1024,1x8192,8x8192,32x2048,32x8192 on a GPU, else 1x512,1x4096].
    #[arg(long, value_delimiter = ',')]
    size: Vec<Size>,
    /// New rows of each sequence.
    #[arg(long, default_value_t = 1, value_parser = count(1 << 20))]
    query_length: u64,
    #[command(flatten)]
    common: Common,
}

/// What both modes take.
#[derive(clap::Args)]
struct Common {
    /// cuda, cpu, or auto: the GPU if there is a usable one, else the CPU.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,
    /// Timed runs of each size; on a CPU fewer if they take longer than ten seconds.
    #[arg(long, default_value_t = 30, value_parser = count(100_000))]
    runs: u64,
    /// Rows compared with the reference after the runs.
    #[arg(long, default_value_t = 32, value_parser = count(100_000))]
    checked_rows: u64,
    /// Print one JSON document instead of lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layer: Layer,
}

/// `BATCHxLENGTH`.
#[derive(Clone, Copy, Debug)]
struct Size {
    batch: usize,
    length: usize,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = || "a size is BATCHxLENGTH, such as 8x2048, both at least 1".to_owned();
        let (batch, length) = text.split_once('x').ok_or_else(allowed)?;
        let number = |text: &str| text.parse::<u32>().ok().filter(|&n| n > 0).map(|n| n as usize);
        number(batch)
            .zip(number(length))
            .map(|(batch, length)| Self { batch, length })
            .ok_or_else(allowed)
    }
}

/// Measures every size.
pub fn run(mode: &Mode) -> Result<ExitCode> {
    let (name, common, sizes) = match mode {
        Mode::Prompt(prompt) => ("prompt", &prompt.common, &prompt.size),
        Mode::Token(token) => ("token", &token.common, &token.size),
    };
    if matches!(common.backend, Choice::Sim | Choice::Reference) {
        return Err(Usage(
            format!("--backend: got {:?}; allowed: auto, cuda, cpu", common.backend).to_lowercase(),
        )
        .into());
    }
    let (machine, device) = Machine::select(common.backend)?;
    let mut report = Report::new(name, device, common.json)?;
    for size in if sizes.is_empty() { defaults(mode, &machine) } else { sizes.clone() } {
        let shape = match mode {
            Mode::Prompt(prompt) => {
                Shape::new(common.layer, size.batch, size.length, prompt.past_length as usize)
            }
            Mode::Token(token) => {
                Shape::new(common.layer, size.batch, token.query_length as usize, size.length)
            }
        };
        report.add(one(&machine, &shape, common)?)?;
    }
    report.finish()
}

/// Sizes that are telling on a GPU, or done in seconds on a CPU.
fn defaults(mode: &Mode, machine: &Machine) -> Vec<Size> {
    let sizes: &[(usize, usize)] = match (mode, machine) {
        (Mode::Prompt(_), Machine::Gpu(_)) => &[(32, 512), (8, 2048), (2, 8192), (1, 16384)],
        (Mode::Prompt(_), Machine::Host(_)) => &[(1, 128), (1, 512)],
        (Mode::Token(_), Machine::Gpu(_)) => {
            &[(1, 1024), (1, 8192), (8, 8192), (32, 2048), (32, 8192)]
        }
        (Mode::Token(_), Machine::Host(_)) => &[(1, 512), (1, 4096)],
    };
    sizes.iter().map(|&(batch, length)| Size { batch, length }).collect()
}

/// One size: measured, then checked.
fn one(machine: &Machine, shape: &Shape, common: &Common) -> Result<Record> {
    let mut noise = Noise::new(1);
    let problem = shape.problem()?;
    let mut tensors = shape.tensors(&problem, &mut noise)?;
    let measured = measure(machine, &problem, &mut tensors, common.runs as usize)?;
    let computed =
        Computed { shape, problem: &problem, tensors: &tensors, past_length: shape.past_length };
    let sampled = computed.sample(common.checked_rows as usize, &mut noise)?;
    Ok(Record::new(shape, &problem, measured, sampled))
}
