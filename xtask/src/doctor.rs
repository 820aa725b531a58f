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

/// Whether every module is there and was compiled from this source.
fn shipped() -> Result<String> {
    let (manifest, source) = (Manifest::read(&place::manifest())?, source_hash(&place::kernels())?);
    let stale: Vec<_> =
        manifest.modules.iter().filter(|row| row.source != source).map(|row| row.name()).collect();
    let missing: Vec<_> =
        Module::all().map(Module::name).filter(|name| manifest.module(name).is_none()).collect();
    Ok(state(manifest.modules.len(), &missing, &stale))
}

/// Says which modules are missing or were compiled from another source.
fn state(modules: usize, missing: &[String], stale: &[String]) -> String {
    let named = [("MISSING", missing), ("STALE, compiled from another source", stale)];
    let wrong: Vec<_> = named
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("{what}: {}", names.join(", ")))
        .collect();
    match wrong.is_empty() {
        true => format!("{modules} modules, compiled from this source"),
        false => format!("{}; run `cargo xtask ptx`", wrong.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_modules_are_not_called_missing() {
        let [tiled, decode] = ["tiled.sm_80", "decode.sm_90"].map(|name| vec![name.to_owned()]);
        assert_eq!(state(40, &[], &[]), "40 modules, compiled from this source");
        let stale = state(40, &[], &tiled);
        assert!(stale.starts_with("STALE") && stale.contains("tiled.sm_80"), "{stale}");
        assert!(!stale.contains("MISSING"), "{stale}");
        let both = state(39, &decode, &tiled);
        assert!(both.starts_with("MISSING: decode.sm_90; STALE"), "{both}");
        assert!(both.ends_with("run `cargo xtask ptx`"), "{both}");
    }
}
