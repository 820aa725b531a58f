//! `cargo xtask bundle`: everything that a GPU machine without Rust or network needs to run the GPU
//! tests.

use crate::cargo::cargo;
use crate::step::shown;
use crate::{folder, place};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Test programs that need a GPU: (package, test).
const TESTS: &[(&str, &str)] =
    &[("gqa-host", "cuda"), ("gqa-host", "allocations"), ("gqa-tests", "gpu")];
const RUN: &str = "\
#!/usr/bin/env bash
# Runs every stored case, then the GPU tests, on a machine with an NVIDIA driver. The exit status is
# the number of failed steps.
cd \"$(dirname \"$0\")\" || exit
failed=0
export PARITY_FULL=1
step() { echo \"== $*\"; \"$@\" || { failed=$((failed + 1)); echo \"FAILED: $*\"; }; }
step ./gqa doctor
for cases in gqa paged attention rotary_embedding tensor_scatter edges; do
  step ./gqa check --backend cuda cases/$cases
done
for test in tests/*; do step \"$test\" --include-ignored; done
echo \"$failed steps failed\"
exit \"$failed\"
";

pub fn run() -> Result<()> {
    let bundle = place::root().join("bundle");
    folder::fresh(&bundle)?;
    folder::fresh(&bundle.join("tests"))?;
    program(&built(&["build", "--package", "gqa-cli", "--bin", "gqa"])?, &bundle.join("gqa"))?;
    for (package, test) in TESTS {
        let built = built(&["test", "--no-run", "--package", package, "--test", test])?;
        program(&built, &bundle.join("tests").join(test))?;
    }
    folder::copy(&place::root().join("tests/cases"), &bundle.join("cases"))?;
    script(&bundle.join("run.sh"))?;
    let bytes = folder::size(&bundle)?;
    println!("bundle/: {:.1} MiB; run ./run.sh there", bytes as f64 / f64::from(1 << 20));
    Ok(())
}

/// Runs a release build and returns the program it made.
fn built(arguments: &[&str]) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(arguments).args(["--release", "--message-format=json"]).stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo {} ended with {}", arguments.join(" "), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    executable(&text).with_context(|| format!("cargo {} made no program", arguments.join(" ")))
}

/// The last program in cargo's messages: dependencies come before it.
fn executable(messages: &str) -> Option<PathBuf> {
    let messages =
        messages.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.into_iter().find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// Copies a program without its symbols.
fn program(from: &Path, to: &Path) -> Result<()> {
    shown(Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(from))
}

fn script(path: &Path) -> Result<()> {
    fs::write(path, RUN).context("cannot write run.sh")?;
    #[cfg(unix)]
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .context("cannot make run.sh executable")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_the_last_one_named() {
        let messages = "\
{\"reason\":\"compiler-artifact\",\"executable\":\"/target/build-script\"}
{\"reason\":\"compiler-artifact\",\"executable\":\"/target/gqa\"}
{\"reason\":\"compiler-artifact\",\"executable\":null}
{\"reason\":\"build-finished\",\"success\":true}
";
        assert_eq!(executable(messages), Some("/target/gqa".into()));
        assert_eq!(executable("not json\n"), None);
    }
}
