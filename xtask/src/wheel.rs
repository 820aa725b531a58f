//! `cargo xtask wheel`: `dist/gqa_onnxruntime-*.whl`, the library for ONNX Runtime as a Python
//! package, tried in a fresh virtual environment, and `dist/gqa-*.whl`, the package for Python.

use crate::integrations::{onnx_runtime_library, python_wheel};
use crate::step::shown;
use crate::{folder, pip, place};
use anyhow::{Context, Result, ensure};
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a wheel may have.
const MOST_BYTES: u64 = 12 << 20;

pub fn run() -> Result<()> {
    let wheel = build(&onnx_runtime_library()?)?;
    check_size(&wheel)?;
    try_out(&wheel)?;
    let python = python_wheel(&place::root().join("dist"))?;
    check_size(&python.context("cannot install maturin")?.1)
}

fn check_size(wheel: &Path) -> Result<()> {
    let bytes = fs::metadata(wheel)?.len();
    println!("{}: {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    ensure!(bytes <= MOST_BYTES, "{bytes} bytes, of which {MOST_BYTES} are allowed");
    Ok(())
}

fn build(library: &Path) -> Result<PathBuf> {
    let source = folder::fresh(&place::target().join("wheel"))?;
    folder::copy(&place::root().join("crates/gqa-ort/python"), &source)?;
    fs::copy(place::root().join("docs/onnxruntime.md"), source.join("README.md"))?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(place::root().join(licence), source.join(licence))?;
    }
    let packed = source.join("gqa_onnxruntime/libgqa_ort.so");
    shown(Command::new("strip").arg("--strip-all").arg("-o").arg(&packed).arg(library))?;
    let dist = folder::fresh(&place::root().join("dist"))?;
    let python = pip::environment("wheel", "setuptools")?.context("cannot install setuptools")?;
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]);
    pip.arg("--wheel-dir").arg(&dist);
    pip.env("GQA_VERSION", env!("CARGO_PKG_VERSION")).env("GQA_PLATFORM", platform(&packed)?);
    shown(pip.arg(&source))?;
    let wheel = fs::read_dir(&dist)?.next().context("pip made no wheel")??;
    Ok(wheel.path())
}

/// The systems that have what the library needs of the C library, as wheels name them.
fn platform(library: &Path) -> Result<String> {
    let output = Command::new("objdump").arg("-T").arg(library).output();
    let output = output.context("cannot start objdump, of binutils")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (major, minor) = newest(&String::from_utf8_lossy(&output.stdout))
        .context("the library needs nothing of the C library")?;
    Ok(format!("manylinux_{major}_{minor}_{ARCH}"))
}

/// The newest version of the C library in a list of symbols.
fn newest(symbols: &str) -> Option<(u32, u32)> {
    let version = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let mut numbers = text[..end].split('.').map_while(|number| number.parse().ok());
        Some((numbers.next()?, numbers.next()?))
    };
    symbols.split("GLIBC_").skip(1).filter_map(version).max()
}

/// Installs it as a user does, beside PyPI's onnxruntime, and compares the two there.
fn try_out(wheel: &Path) -> Result<()> {
    let name = "wheel-tried";
    let environment = place::target().join("python").join(name);
    if environment.exists() {
        fs::remove_dir_all(environment)?;
    }
    // What a user installs beside it, and what the tests need.
    let python = pip::environment(name, "onnxruntime")?.context("cannot install onnxruntime")?;
    pip::install_wheel(&python, wheel)?;
    let code = "import gqa_onnxruntime, onnxruntime; \
                gqa_onnxruntime.register(onnxruntime.SessionOptions()); \
                print(gqa_onnxruntime.library_path())";
    let output = Command::new(&python).args(["-c", code]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let library = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let tests = place::root().join("tests/ort.py");
    shown(Command::new(python).arg(tests).args([&library, "RandomModel", "Nodes"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let symbols = "(GLIBC_2.2.5) malloc\n(GLIBC_2.34) dlsym\n (GLIBC_2.4) x\n(GCC_3.0) y";
        assert_eq!(newest(symbols), Some((2, 34)));
        assert_eq!(newest("(GCC_3.0) y"), None);
    }
}
