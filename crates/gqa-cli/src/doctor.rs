//! `gqa doctor`: what is here, and what will be used.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use gqa_host::backend::cpu::Instructions;
use gqa_host::driver::{Device, device_count, driver_version, remembered, shipped};
use gqa_host::plan::{DeviceInfo, Family, PlanOptions, environment, is_proven};

/// Arguments of `gqa doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Also write to this file what is printed, with all that tests of kernels have shown here, to
    /// attach it to an issue.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// Prints the report. A machine without a GPU is not an error.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut report = Report::default();
    report.say(format!("gqa {}", env!("CARGO_PKG_VERSION")))?;
    let here = Instructions::all().iter().map(Instructions::to_string).collect::<Vec<_>>();
    let threads = rayon::current_num_threads();
    report.say(format!("cpu      {threads} threads, {}", here.join(", ")))?;
    report.say(match driver_version() {
        Ok(version) => format!("driver   CUDA {version}"),
        Err(reason) => format!("driver   none usable: {reason}"),
    })?;
    for ordinal in 0..device_count().unwrap_or(0) {
        report.device(ordinal)?;
    }
    report.kernels()?;
    report.settings()?;
    for line in trust() {
        report.say(line)?;
    }
    let known = DeviceInfo::known_names().collect::<Vec<_>>().join(", ");
    report.say(format!("explain  knows {known}"))?;
    report.say(match Device::open(0) {
        Ok(device) => format!("used     cuda, on {}", device.info().name),
        Err(reason) => format!("used     cpu, because there is no usable GPU ({reason})"),
    })?;
    if let Some(path) = &args.report {
        report.add_tests();
        fs::write(path, &report.text).with_context(|| format!("--report {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What tests of kernels at their first use have shown on this machine.
pub fn trust() -> Vec<String> {
    let mut lines = Vec::new();
    for (kind, text) in remembered() {
        let with = |what: &'static str| text.lines().filter(move |line| line.contains(what));
        let (right, wrong) = (with(" agrees").count(), with(" wrong: ").count());
        let kind = kind.trim_end_matches(".txt");
        lines.push(format!("trust    {kind}: {right} tests agree, {wrong} do not"));
        lines.extend(with(" wrong: ").map(|line| format!("trust    {line}")));
    }
    lines
}

/// What is printed, and written.
#[derive(Default)]
struct Report {
    text: String,
}

impl Report {
    fn say(&mut self, line: String) -> Result<()> {
        say!("{line}");
        self.text.push_str(&line);
        self.text.push('\n');
        Ok(())
    }

    fn device(&mut self, ordinal: u32) -> Result<()> {
        let device = match Device::open(ordinal) {
            Ok(device) => device,
            Err(reason) => return self.say(format!("gpu {ordinal}    not usable: {reason}")),
        };
        let info = device.info();
        self.say(format!("gpu {ordinal}    {info}, {} MiB", device.memory_bytes() >> 20))?;
        let proven = Family::ALL.into_iter().all(|family| is_proven(family, info.sm));
        self.say(match proven {
            true => format!("gpu {ordinal}    the project has run its kernels on such GPUs"),
            false => format!("gpu {ordinal}    kernels are tested at their first use (GQA_TRUST)"),
        })
    }

    /// PTX inside this program.
    fn kernels(&mut self) -> Result<()> {
        for module in shipped() {
            let (name, kernels) = (module.name(), module.kernels().count());
            self.say(format!("ptx      {name}: {kernels} kernels"))?;
        }
        let all: usize = shipped().iter().map(|module| module.kernels().count()).sum();
        self.say(format!("ptx      {all} kernels in all"))
    }

    /// Plan options that the environment sets.
    fn settings(&mut self) -> Result<()> {
        let is_set = |name: &&str| std::env::var_os(name).is_some();
        let names = environment::TABLE
            .iter()
            .flat_map(|variable| [Some(variable.name()), variable.alias])
            .flatten();
        let aids = environment::AIDS.iter().map(|(name, ..)| *name);
        let set: Vec<_> = names.chain(aids).filter(is_set).collect();
        self.say(match PlanOptions::from_env().and_then(|_| Instructions::from_env()) {
            Err(reason) => format!("options {reason}"),
            Ok(_) if set.is_empty() => "options none set".to_owned(),
            Ok(_) => format!("options {}", set.join(", ")),
        })
    }

    fn add_tests(&mut self) {
        for (kind, text) in remembered() {
            self.text.push_str(&format!("\n{kind}\n{text}"));
        }
        self.text.push_str("\nThe output of `gqa selftest` says which calls are right.\n");
    }
}
