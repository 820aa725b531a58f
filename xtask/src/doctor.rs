//! `cargo xtask doctor`: the tools found, and whether the shipped PTX matches this source.

use crate::module::Module;
use crate::{place, test};
use anyhow::Result;
use gqa_ptx::{Manifest, Ptxas, Toolchain, source_hash};
use std::fmt::Display;
use std::process::Command;

pub fn run() -> Result<()> {
    line("device toolchain", Toolchain::find());
    line(
        "ptxas",
        Ptxas::find(&place::cuda_tools())
            .and_then(|ptxas| Ok(format!("{}, {}", ptxas.version()?, ptxas.path().display()))),
    );
    line("cargo", first_line("cargo", &["--version"]));
    line("rustup", first_line("rustup", &["--version"]));
    line("python", first_line("python3", &["--version"]));
    line("pip", first_line("python3", &["-m", "pip", "--version"]));
    line(
        "nextest",
        test::has_nextest()
            .then_some("installed")
            .ok_or("not installed; `cargo test` takes its place"),
    );
    line("shipped PTX", shipped());
    Ok(())
}

fn line(name: &str, found: Result<impl Display, impl Display>) {
    match found {
        Ok(found) => println!("{name:18} {found}"),
        Err(reason) => println!("{name:18} MISSING: {reason}"),
    }
}

fn first_line(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(if output.status.success() {
        &output.stdout
    } else {
        &output.stderr
    })
    .into_owned();
    let first = text.lines().next().unwrap_or_default().to_owned();
    if output.status.success() { Ok(first) } else { Err(first) }
}

fn shipped() -> Result<String> {
    let (manifest, source) = (Manifest::read(&place::manifest())?, source_hash(&place::kernels())?);
    let stale: Vec<_> =
        manifest.modules.iter().filter(|row| row.source != source).map(|row| row.name()).collect();
    let missing: Vec<_> =
        Module::all().map(Module::name).filter(|name| manifest.module(name).is_none()).collect();
    anyhow::ensure!(missing.is_empty(), "{} not built; run `cargo xtask ptx`", missing.join(", "));
    anyhow::ensure!(
        stale.is_empty(),
        "{} of another source; run `cargo xtask ptx`",
        stale.join(", ")
    );
    Ok(format!("{} modules, of this source", manifest.modules.len()))
}
