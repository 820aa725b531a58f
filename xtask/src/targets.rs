//! Other systems that the library and the program must compile for.

use crate::cargo::cargo;
use crate::step::shown;
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;

const TARGETS: [&str; 2] = ["aarch64-unknown-linux-gnu", "x86_64-pc-windows-msvc"];

/// Checks the code for the targets whose standard library rustup has installed.
pub fn check() -> Result<Option<String>> {
    let libraries = libraries()?;
    let (installed, missing): (Vec<_>, Vec<_>) =
        TARGETS.into_iter().partition(|target| libraries.join(target).is_dir());
    for target in &installed {
        let crates = ["--package", "gqa-host", "--package", "gqa-cli"];
        let features = ["--no-default-features", "--features", "gqa-host/cuda"];
        shown(cargo().args(["check", "--target", target]).args(crates).args(features))?;
    }
    let missing = missing.join(" ");
    Ok((!missing.is_empty()).then(|| format!("rustup target add {missing}")))
}

/// Where the compiler has the standard libraries of all targets.
fn libraries() -> Result<PathBuf> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output();
    let output = output.context("cannot start rustc")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sysroot = String::from_utf8(output.stdout)?;
    Ok(PathBuf::from(sysroot.trim()).join("lib/rustlib"))
}
