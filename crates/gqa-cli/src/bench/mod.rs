//! `gqa bench`: medians with their spread, checked against the reference in the same process.
//!
//! On a GPU the calls are captured in a CUDA graph that walks over several sets of buffers, so that
//! no call finds its inputs in the L2 cache, and the graph is replayed. Elsewhere each run is timed
//! by the wall clock.

mod ceiling;
mod figures;
mod html;
pub mod measure;
mod model;
mod peers;
mod plot;
mod provenance;
mod record;
mod report;
mod sizes;

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use gqa_host::DType;
use indicatif::{ProgressBar, ProgressStyle};

use crate::backend::{Choice, Machine};
use crate::input::Noise;
use crate::options::{count, whole};
use crate::oracle::Computed;
use crate::shape::{Layer, Shape};
use crate::usage::Usage;
use ceiling::Ceilings;
use measure::measure;
use peers::Peers;
pub use provenance::Provenance;
pub use record::Record;
use report::{Failed, Report, Table};
pub use sizes::Row;
use sizes::{Selection, Size};

/// What is measured.
#[derive(clap::Subcommand)]
pub enum Mode {
    /// Many query rows: prefill, or a chunk of it.
    Prefill(Prefill),
    /// Few query rows against a long cache: decode steps.
    Decode(Decode),
}

/// Arguments of `gqa bench prefill`.
#[derive(clap::Args)]
pub struct Prefill {
    /// Sequences x rows, several separated by commas [default: 32x512,8x2048,2x8192,1x16384 on a
    /// GPU, else 1x128,1x512].
    #[arg(long, value_delimiter = ',')]
    size: Vec<Size>,
    /// Rows in the cache before.
    #[arg(long, default_value_t = 0, value_parser = whole(0..=(1u64 << 31) - 1))]
    past_length: u64,
    #[command(flatten)]
    common: Common,
}

/// Arguments of `gqa bench decode`.
#[derive(clap::Args)]
pub struct Decode {
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
    /// Where to compute; auto is the GPU if there is a usable one, else the CPU.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,
    /// Timed runs of each size; fewer if they take longer than ten seconds.
    #[arg(long, default_value_t = 30, value_parser = count(100_000))]
    runs: u64,
    /// Rows compared with the reference after the runs.
    #[arg(long, default_value_t = 32, value_parser = count(100_000))]
    checked_rows: u64,
    /// Print one JSON document, with where the numbers come from, instead of a table.
    #[arg(long)]
    json: bool,
    /// Write a CSV file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write tables and figures as one HTML file.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write the figures as SVG and PNG into this folder.
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// Compare with a file that bench/peers.py wrote, of caches that hold numbers.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kv_cache", "block_size"])]
    against: Option<PathBuf>,
    #[command(flatten)]
    selection: Selection,
}

impl Mode {
    fn common(&self) -> &Common {
        match self {
            Self::Prefill(prefill) => &prefill.common,
            Self::Decode(decode) => &decode.common,
        }
    }

    fn kind(&self) -> report::Mode {
        match self {
            Self::Prefill(_) => report::Mode::Prefill,
            Self::Decode(_) => report::Mode::Decode,
        }
    }

    /// The calls to be measured.
    fn rows(&self, machine: &Machine) -> Vec<Row> {
        let shape = |layer: Layer, size: Size| match self {
            Self::Prefill(prefill) => {
                Shape::new(layer, size.batch, size.length, prefill.past_length as usize)
            }
            Self::Decode(decode) => {
                Shape::new(layer, size.batch, decode.query_length as usize, size.length)
            }
        };
        let given = match self {
            Self::Prefill(prefill) => &prefill.size,
            Self::Decode(decode) => &decode.size,
        };
        let sizes = if given.is_empty() { self.defaults(machine) } else { given.clone() };
        self.common().selection.rows(&sizes, shape)
    }

    /// Sizes that are telling on a GPU, or done in seconds elsewhere.
    fn defaults(&self, machine: &Machine) -> Vec<Size> {
        let sizes: &[(usize, usize)] = match (self, machine) {
            (Self::Prefill(_), Machine::Gpu(_)) => &[(32, 512), (8, 2048), (2, 8192), (1, 16384)],
            (Self::Prefill(_), Machine::Host(_)) => &[(1, 128), (1, 512)],
            (Self::Decode(_), Machine::Gpu(_)) => {
                &[(1, 1024), (1, 8192), (8, 8192), (32, 2048), (32, 8192)]
            }
            (Self::Decode(_), Machine::Host(_)) => &[(1, 512), (1, 4096)],
        };
        sizes.iter().map(|&(batch, length)| Size { batch, length }).collect()
    }
}

/// Measures every size.
pub fn run(mode: &Mode) -> Result<ExitCode> {
    let common = mode.common();
    common.check_files()?;
    let peers = common.against.as_deref().map(Peers::read).transpose()?;
    let (machine, device) = Machine::select(common.backend)?;
    let mut report = Report {
        mode: mode.kind(),
        provenance: Provenance::new(&machine, device),
        ceilings: ceilings(&machine, common.runs, peers.as_ref())?,
        results: Vec::new(),
        failed: Vec::new(),
        peers: peers.as_ref().map(|peers| peers.provenance.clone()).unwrap_or_default(),
    };
    let rows = mode.rows(&machine);
    if rows.is_empty() {
        let longest = common.selection.longest();
        return Err(Usage(format!("--size, --length: got too many tokens; allowed: {longest}, the most that one of the models takes")).into());
    }
    measure_all(rows, common, &machine, &mut report);
    report.provenance.finish();
    if let Some(peers) = &peers {
        report.results.iter_mut().for_each(|record| peers.join(record));
    }
    print(&report, common.json)?;
    common.write(&report)?;
    Ok(report.exit_code())
}

/// The roofline of a GPU, including what the peers' run measured, or of the CPU if enough timed
/// runs are requested. The simulator and the reference have none.
fn ceilings(machine: &Machine, runs: u64, peers: Option<&Peers>) -> Result<Option<Ceilings>> {
    let tries = runs.min(Ceilings::MOST_TRIES);
    let mut ceilings = match machine {
        Machine::Gpu(gpu) => Ceilings::of_gpu(gpu, tries)?,
        Machine::Host(backend) if backend.name() == "cpu" => {
            return Ok(Some(Ceilings::of_cpu(tries)));
        }
        Machine::Host(_) => return Ok(None),
    };
    if let Some(peers) = peers {
        peers.raise(&mut ceilings);
    }
    Ok(Some(ceilings))
}

/// A call that cannot be measured does not keep the others from being measured.
fn measure_all(rows: Vec<Row>, common: &Common, machine: &Machine, report: &mut Report) {
    let bar = ProgressBar::new(rows.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {msg} {elapsed}") {
        bar.set_style(style);
    }
    for row in rows {
        let Shape { batch, query_length, past_length, .. } = row.shape;
        let (model, dtype) = (row.model.unwrap_or("layer"), DType::from(row.shape.layer.dtype));
        let call = format!("{model} {dtype} {batch} x {query_length} past {past_length}");
        bar.set_message(call.clone());
        let (runs, checked_rows) = (common.runs as usize, common.checked_rows as usize);
        match one(machine, &row, runs, checked_rows, report.ceilings.as_ref()) {
            Ok(record) => {
                log(&bar, &format!("{call}: {:.1} us, {}", record.median_us, record.verdict()));
                report.results.push(record);
            }
            Err(reason) => {
                let reason = format!("{reason:#}");
                log(&bar, &format!("{call}: {reason}"));
                report.failed.push(Failed { call, reason });
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
}

/// Where no bar is shown, such as in a file, a line for each call.
fn log(bar: &ProgressBar, line: &str) {
    if bar.is_hidden() {
        eprintln!("{}", crate::usage::one_line(line));
    }
}

/// Measures one call in a number of runs, then checks a number of its rows.
pub fn one(
    machine: &Machine,
    row: &Row,
    runs: usize,
    checked_rows: usize,
    ceilings: Option<&Ceilings>,
) -> Result<Record> {
    let (shape, mut noise) = (&row.shape, Noise::new(1));
    let problem = shape.problem()?;
    let mut tensors = match machine {
        Machine::Gpu(_) => shape.tensors_for_gpu(&problem, &mut noise)?,
        Machine::Host(_) => shape.tensors(&problem, &mut noise)?,
    };
    let measured = measure(machine, &problem, &mut tensors, runs)?;
    let computed =
        Computed { shape, problem: &problem, tensors: &tensors, past_length: shape.past_length };
    let sampled = computed.sample(checked_rows, &mut noise)?;
    Ok(Record::new(row, &problem, ceilings, measured, sampled))
}

fn print(report: &Report, json: bool) -> Result<()> {
    if json {
        say!("{}", serde_json::to_string_pretty(report)?);
        return Ok(());
    }
    for (name, value) in report.provenance.lines() {
        say!("{name:<21} {value}");
    }
    if let Some(Ceilings { memory, half, single }) = &report.ceilings {
        say!("{:<21} {:.0} GB/s ({})", "Memory", memory.per_second * 1e-9, memory.source);
        for (name, rate) in [("Arithmetic, 16-bit", half), ("Arithmetic, float32", single)] {
            say!("{name:<21} {:.2} TFLOP/s ({})", rate.per_second * 1e-12, rate.source);
        }
    }
    say!("");
    for line in Table::results(report.mode, &report.results).lines() {
        say!("{line}");
    }
    for kernels in report.kernels() {
        say!("kernels: {kernels}");
    }
    if let Some(note) = report.note_of_roofline() {
        say!("roofline: {note}");
    }
    if let Some(table) = Table::side_by_side(report.mode, &report.results) {
        say!("");
        for line in table.lines() {
            say!("{line}");
        }
    }
    for failed in &report.failed {
        say!("not measured: {}: {}", failed.call, crate::usage::one_line(&failed.reason));
    }
    Ok(())
}

impl Common {
    /// Errs where a file cannot be written, which is to be known before minutes are spent.
    fn check_files(&self) -> Result<()> {
        for (option, path) in [("--csv", &self.csv), ("--report", &self.report)] {
            let Some(path) = path else { continue };
            let is_new = !path.exists();
            let opened = OpenOptions::new().append(true).create(true).open(path);
            opened.with_context(|| format!("{option} {}", path.display()))?;
            if is_new {
                std::fs::remove_file(path)?;
            }
        }
        self.plots.as_deref().map_or(Ok(()), figures::make_folder)
    }

    fn write(&self, report: &Report) -> Result<()> {
        if let Some(path) = &self.csv {
            report.write_csv(path)?;
        }
        if let Some(folder) = &self.plots {
            report.write_plots(folder)?;
        }
        if let Some(path) = &self.report {
            let page = html::page(report)?;
            std::fs::write(path, page).with_context(|| format!("--report {}", path.display()))?;
        }
        Ok(())
    }
}
