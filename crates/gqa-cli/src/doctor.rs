//! `gqa doctor`: what is here, and what will be used.

use std::process::ExitCode;

use anyhow::Result;
use gqa_host::backend::cpu::Instructions;
use gqa_host::driver::{Device, device_count, driver_version, shipped};
use gqa_host::plan::{DeviceInfo, PlanOptions, environment};

/// Prints the report. A machine without a GPU is not an error.
pub fn run() -> Result<ExitCode> {
    say!("gqa {}", env!("CARGO_PKG_VERSION"));
    let here = Instructions::all().iter().map(Instructions::to_string).collect::<Vec<_>>();
    say!("cpu      {} threads, {}", rayon::current_num_threads(), here.join(", "));
    match driver_version() {
        Ok(version) => say!("driver   CUDA {version}"),
        Err(reason) => say!("driver   none usable: {reason}"),
    }
    for ordinal in 0..device_count().unwrap_or(0) {
        match Device::open(ordinal) {
            Ok(device) => {
                say!("gpu {ordinal}    {}, {} MiB", device.info(), device.memory_bytes() >> 20)
            }
            Err(reason) => say!("gpu {ordinal}    not usable: {reason}"),
        }
    }
    kernels()?;
    settings()?;
    say!("explain  knows {}", DeviceInfo::known_names().collect::<Vec<_>>().join(", "));
    match Device::open(0) {
        Ok(device) => say!("used     cuda, on {}", device.info().name),
        Err(reason) => say!("used     cpu, because there is no usable GPU ({reason})"),
    }
    Ok(ExitCode::SUCCESS)
}

/// PTX inside this program.
fn kernels() -> Result<()> {
    for module in shipped() {
        say!("ptx      {}: {} kernels", module.name(), module.kernels().count());
    }
    let all: usize = shipped().iter().map(|module| module.kernels().count()).sum();
    say!("ptx      {all} kernels in all");
    Ok(())
}

/// Plan options that the environment sets.
fn settings() -> Result<()> {
    let is_set = |name: &&str| std::env::var_os(name).is_some();
    let names = environment::TABLE
        .iter()
        .flat_map(|variable| [Some(variable.name()), variable.alias])
        .flatten();
    let aids = environment::AIDS.iter().map(|(name, ..)| *name);
    let set: Vec<_> = names.chain(aids).filter(is_set).collect();
    match PlanOptions::from_env().and_then(|_| Instructions::from_env()) {
        Err(reason) => say!("options {reason}"),
        Ok(_) if set.is_empty() => say!("options none set"),
        Ok(_) => say!("options {}", set.join(", ")),
    }
    Ok(())
}
