//! `gqa selftest`: whether the kernels are right on this machine, and how fast they are. Users of
//! GPUs that the project has not run on can attach the report to an issue.

mod calls;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use gqa_host::DType;

use crate::backend::{Choice, Machine};
use crate::bench::{self, Provenance, Record, Row};
use crate::doctor;
use crate::options::count;
use crate::shape::Shape;
use crate::usage::Usage;

/// Timed runs of a call.
const RUNS: usize = 5;

/// Arguments of `gqa selftest`.
#[derive(clap::Args)]
pub struct Args {
    /// Where to compute; auto is the GPU if there is a usable one, else the CPU.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,
    /// Rows of each call that are compared with the reference.
    #[arg(long, default_value_t = 64, value_parser = count(100_000))]
    checked_rows: u64,
    /// Only the calls whose line has this text, such as "64/8 x 64" or "int8-cache".
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Also write the report to this file, to attach it to an issue.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// Computes each call, compares it, and prints a line for it.
pub fn run(args: &Args) -> Result<ExitCode> {
    let calls = args.calls()?;
    let (machine, device) = Machine::select(args.backend)?;
    // Whether the file can be written is to be known before minutes are spent.
    args.write("")?;
    let mut report = Report::default();
    for (name, value) in Provenance::new(&machine, device).lines() {
        report.say(format!("{name:<21} {value}"))?;
    }
    report.say(String::new())?;
    for call in &calls {
        report.add(call, computed(&machine, call, args.checked_rows as usize))?;
    }
    report.say(String::new())?;
    for line in doctor::trust() {
        report.say(line)?;
    }
    report.say(report.summary(calls.len()))?;
    args.write(&report.text)?;
    Ok(if report.bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn computed(machine: &Machine, call: &Shape, checked_rows: usize) -> Result<Record> {
    bench::one(machine, &Row { model: None, shape: *call }, RUNS, checked_rows, None)
}

impl Args {
    /// Writes the report's file, if there is one.
    fn write(&self, text: &str) -> Result<()> {
        let Some(path) = &self.report else { return Ok(()) };
        fs::write(path, text).with_context(|| format!("--report {}", path.display()))
    }

    fn calls(&self) -> Result<Vec<Shape>> {
        let mut calls = calls::calls();
        if let Some(text) = &self.only {
            calls.retain(|call| described(call).contains(text.as_str()));
            if calls.is_empty() {
                let allowed = "text of a line of gqa selftest";
                return Err(Usage(format!("--only: got {text:?}; allowed: {allowed}")).into());
            }
        }
        Ok(calls)
    }
}

/// What is printed.
#[derive(Default)]
struct Report {
    text: String,
    /// Calls that are wrong, or did not run.
    bad: usize,
}

impl Report {
    fn say(&mut self, line: String) -> Result<()> {
        say!("{line}");
        self.text.push_str(&line);
        self.text.push('\n');
        Ok(())
    }

    fn add(&mut self, call: &Shape, outcome: Result<Record>) -> Result<()> {
        let (is_right, verdict) = match outcome {
            Ok(record) => {
                let is_right = record.elements_out_of_tolerance == 0;
                let verdict = record.verdict();
                let kernels = record.kernels.join(" ");
                (is_right, format!("{verdict}  {:9.1} us  {kernels}", record.median_us))
            }
            Err(reason) => {
                (false, format!("FAILED: {}", crate::usage::one_line(&format!("{reason:#}"))))
            }
        };
        self.bad += usize::from(!is_right);
        self.say(format!("{:<78} {verdict}", described(call)))
    }

    fn summary(&self, calls: usize) -> String {
        match self.bad {
            0 => format!("{calls} calls, all right"),
            bad => format!("{calls} calls, {bad} WRONG or failed: please open an issue with this"),
        }
    }
}

/// A call in words.
fn described(call: &Shape) -> String {
    let Shape { layer, batch, query_length, past_length, .. } = call;
    let dtype = DType::from(layer.dtype);
    let heads = format!("{}/{} x {}", layer.heads, layer.kv_heads, layer.head_size);
    let features = layer.features();
    format!("{dtype} {heads}: {batch} x {query_length} after {past_length}{features}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use gqa_host::Problem;
    use gqa_host::backend::{Backend, Io, cpu::Cpu};

    /// Leaves the last element of the output as it should not be, or fails.
    struct Faulty {
        fails: bool,
    }

    impl Backend for Faulty {
        fn name(&self) -> &'static str {
            "cpu"
        }

        fn run(&self, problem: &Problem, io: &mut Io<'_>) -> gqa_host::Result<()> {
            if self.fails {
                return Err(gqa_host::Error::NoKernel("a planted fault".to_owned()));
            }
            Cpu::default().run(problem, io)?;
            if let Some(byte) = io.output.bytes_mut()?.last_mut() {
                *byte ^= 0x70;
            }
            Ok(())
        }
    }

    #[test]
    fn faults_are_found() {
        let call = Shape { batch: 1, ..calls::calls()[0] };
        for (fails, word) in [(false, "WRONG: "), (true, "FAILED: ")] {
            let mut report = Report::default();
            let machine = Machine::Host(Box::new(Faulty { fails }));
            report.add(&call, computed(&machine, &call, 8)).unwrap();
            assert!(report.bad == 1 && report.text.contains(word), "{}", report.text);
            assert!(report.summary(1).contains("1 WRONG or failed"), "{}", report.summary(1));
        }
        let mut report = Report::default();
        let machine = Machine::Host(Box::new(Cpu::default()));
        report.add(&call, computed(&machine, &call, 8)).unwrap();
        assert!(report.bad == 0 && report.text.contains(" ok, "), "{}", report.text);
    }
}
