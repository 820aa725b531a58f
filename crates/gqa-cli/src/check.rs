//! `gqa check`: one line per case, then the totals.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use gqa_host::backend::Backend;
use gqa_onnx::{Case, Checked, Comparison, Limits, OutputCheck, find_cases};

use crate::backend::{self, Choice};
use crate::options::magnitude;
use crate::usage::{Usage, one_line};

/// Arguments of `gqa check`.
#[derive(clap::Args)]
pub struct Args {
    /// Where to compute; auto is the GPU if there is a usable one, else the CPU.
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    backend: Choice,
    /// Relative tolerance for every output [default: per case, else per element type].
    #[arg(long, value_parser = magnitude::<f64>)]
    rtol: Option<f64>,
    /// Absolute tolerance for every output [default: per case, else per element type].
    #[arg(long, value_parser = magnitude::<f64>)]
    atol: Option<f64>,
    /// Cases, or folders of cases.
    #[arg(required = true)]
    path: Vec<PathBuf>,
}

/// Runs all cases.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut cases = Vec::new();
    for path in &args.path {
        cases.extend(find_cases(path).map_err(|e| Usage(e.to_string()))?);
    }
    let limits = Limits { absolute: args.atol, relative: args.rtol };
    let backend = backend::select(args.backend)?;
    eprintln!("checking on {}", backend.name());
    let mut out = std::io::stdout().lock();
    let mut passed = 0;
    for case in &cases {
        let line = match check(case, backend.as_ref(), limits) {
            Ok(checked) if checked.passed() => {
                passed += 1;
                ok_line(&case.name, &checked)
            }
            Ok(checked) => fail_line(&case.name, &checked),
            Err(reason) => format!("error {}: {reason}", case.name),
        };
        writeln!(out, "{}", one_line(&line))?;
    }
    let failed = cases.len() - passed;
    writeln!(out, "{passed} passed, {failed} failed")?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A defect that one case brings to light must not hide the results of the others.
fn check(case: &Case, backend: &dyn Backend, limits: Limits) -> Result<Checked, String> {
    match catch_unwind(AssertUnwindSafe(|| case.check(backend, limits))) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err(format!("the {} back end panicked", backend.name())),
    }
}

fn ok_line(name: &str, checked: &Checked) -> String {
    let found = checked.outputs.iter().filter_map(|output| output.found.as_ref().ok());
    let (abs, rel) = found.fold((0.0f64, 0.0f64), |(abs, rel), found| {
        (abs.max(found.max_abs), rel.max(found.max_rel))
    });
    format!("ok {name} max_abs={abs:.3e} max_rel={rel:.3e}")
}

fn fail_line(name: &str, checked: &Checked) -> String {
    let reasons: Vec<_> = checked.outputs.iter().filter_map(failure).collect();
    format!("FAIL {name} {}", reasons.join("; "))
}

/// What is wrong with an output.
fn failure(output: &OutputCheck) -> Option<String> {
    match &output.found {
        Err(kind) => Some(format!("{}: {kind}", output.name)),
        Ok(Comparison { worst: Some(worst), failed, compared, .. }) => Some(format!(
            "{}: worst element {:?}: got {}, want {} ({failed} of {compared} out of tolerance)",
            output.name, worst.index, worst.got, worst.want
        )),
        Ok(_) => None,
    }
}
