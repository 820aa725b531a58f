//! `cargo xtask wheel`: `dist/gqa-*.whl`, the package for Python, and `dist/gqa_onnxruntime-*.whl`,
//! the library for ONNX Runtime as a Python package, each tried in a fresh virtual environment.

use crate::cargo::cargo;
use crate::step::shown;
use crate::{folder, pip, place};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The most bytes of a wheel.
const MOST_BYTES: u64 = 12 << 20;

/// A Python package.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Package {
    /// `gqa`, for Python.
    Python,
    /// `gqa_onnxruntime`, the library for ONNX Runtime.
    Onnxruntime,
}

impl Package {
    /// The prefix of its wheels' names.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Python => "gqa-",
            Self::Onnxruntime => "gqa_onnxruntime-",
        }
    }

    /// Builds its wheel into a folder and tests it.
    fn make(self, dist: &Path) -> Result<()> {
        match self {
            Self::Python => {
                let (_, wheel) = python_wheel(dist)?.context("cannot install maturin")?;
                check_size(&wheel)?;
                try_python(&wheel)
            }
            Self::Onnxruntime => {
                let wheel = build(&onnx_runtime_library()?, dist)?;
                check_size(&wheel)?;
                try_onnx_runtime(&wheel)
            }
        }
    }
}

/// Makes the wheels of these packages, or of all if none is named. Wheels of other packages are not
/// touched.
pub fn run(which: &[Package]) -> Result<()> {
    let dist = place::root().join("dist");
    fs::create_dir_all(&dist)?;
    for package in Package::value_variants() {
        if which.is_empty() || which.contains(package) {
            older(&dist, *package)?.iter().try_for_each(fs::remove_file)?;
            package.make(&dist)?;
        }
    }
    Ok(())
}

/// The wheels of a package in a folder.
fn older(dist: &Path, package: Package) -> Result<Vec<PathBuf>> {
    let files = fs::read_dir(dist)?.map(|file| file.map(|file| file.path()));
    let is_its = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(package.prefix()))
    };
    Ok(files.collect::<Result<Vec<_>, _>>()?.into_iter().filter(is_its).collect())
}

fn check_size(wheel: &Path) -> Result<()> {
    let bytes = fs::metadata(wheel)?.len();
    println!("{}: {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    ensure!(bytes <= MOST_BYTES, "the wheel has {bytes} bytes; allowed: {MOST_BYTES}");
    Ok(())
}

fn build(library: &Path, dist: &Path) -> Result<PathBuf> {
    let source = folder::fresh(&place::target().join("wheel"))?;
    folder::copy(&place::root().join("crates/gqa-ort/python"), &source)?;
    fs::copy(place::root().join("docs/onnxruntime.md"), source.join("README.md"))?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(place::root().join(licence), source.join(licence))?;
    }
    let packed = source.join("gqa_onnxruntime/libgqa_ort.so");
    shown(Command::new("strip").arg("--strip-all").arg("-o").arg(&packed).arg(library))?;
    let python = pip::environment("wheel", "setuptools")?.context("cannot install setuptools")?;
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]);
    pip.arg("--wheel-dir").arg(dist);
    pip.env("GQA_VERSION", env!("CARGO_PKG_VERSION")).env("GQA_PLATFORM", platform(&packed)?);
    shown(pip.arg(&source))?;
    older(dist, Package::Onnxruntime)?.pop().context("pip made no wheel")
}

/// The platform tag of the wheel, from the C library version that the library needs.
fn platform(library: &Path) -> Result<String> {
    let output = Command::new("objdump").arg("-T").arg(library).output();
    let output = output.context("cannot start objdump, of binutils")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (major, minor) = newest(&String::from_utf8_lossy(&output.stdout))
        .context("the library needs no symbol of glibc")?;
    Ok(format!("manylinux_{major}_{minor}_{ARCH}"))
}

/// The newest C library version in a list of symbols.
fn newest(symbols: &str) -> Option<(u32, u32)> {
    let version = |text: &str| {
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let mut numbers = text[..end].split('.').map_while(|number| number.parse().ok());
        Some((numbers.next()?, numbers.next()?))
    };
    symbols.split("GLIBC_").skip(1).filter_map(version).max()
}

/// A fresh virtual environment with the wheel and the packages that users and the tests need.
fn installed(name: &str, list: &str, wheel: &Path) -> Result<PathBuf> {
    let environment = place::target().join("python").join(name);
    if environment.exists() {
        fs::remove_dir_all(environment)?;
    }
    let python = pip::environment(name, list)?.with_context(|| format!("no {list} packages"))?;
    pip::install_wheel(&python, wheel)?;
    Ok(python)
}

/// Runs the page's code and the examples with the wheel.
fn try_python(wheel: &Path) -> Result<()> {
    let python = installed("python-wheel-tried", "python", wheel)?;
    let tests = place::root().join("crates/gqa-python/tests/test_page.py");
    shown(Command::new(python).args(["-m", "pytest", "--quiet", "-rs"]).arg(tests))
}

/// Compares the library with PyPI's onnxruntime.
fn try_onnx_runtime(wheel: &Path) -> Result<()> {
    let python = installed("wheel-tried", "onnxruntime", wheel)?;
    let library = library_in(&python)?;
    let tests = place::root().join("tests/ort.py");
    shown(Command::new(python).arg(tests).arg(library).args(["RandomModel", "Nodes"]))
}

/// Installs the library as users do, by its wheel, and returns its path.
pub fn installed_library(python: &Path, library: &Path) -> Result<PathBuf> {
    let wheel = build(library, &folder::fresh(&place::target().join("onnxruntime-wheel"))?)?;
    pip::install_wheel(python, &wheel)?;
    library_in(python)
}

/// The path of the installed wheel's library.
fn library_in(python: &Path) -> Result<PathBuf> {
    let code = "import gqa_onnxruntime, onnxruntime; \
                gqa_onnxruntime.register(onnxruntime.SessionOptions()); \
                print(gqa_onnxruntime.library_path())";
    let output = Command::new(python).args(["-c", code]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().into())
}

/// Builds the Python package's release wheel into a folder; returns the wheel and the interpreter
/// that tests it; `None` where there is no python3, or no registry can be reached.
pub fn python_wheel(folder: &Path) -> Result<Option<(PathBuf, PathBuf)>> {
    let Some(python) = pip::environment("gqa", "python")? else { return Ok(None) };
    let mut maturin = Command::new(&python);
    maturin.args(["-m", "maturin", "build", "--release", "--locked", "--out"]).arg(folder);
    shown(maturin.current_dir(place::root().join("crates/gqa-python")))?;
    let is_ours = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("gqa-"))
    };
    let files = fs::read_dir(folder)?.map(|file| file.map(|file| file.path()));
    let files = files.collect::<Result<Vec<_>, _>>()?;
    let wheel = files.into_iter().find(is_ours).context("maturin made no wheel")?;
    Ok(Some((python, wheel)))
}

/// Builds the library in release mode, as shipped.
pub fn onnx_runtime_library() -> Result<PathBuf> {
    shown(cargo().args(["build", "--release", "--package", "gqa-ort"]))?;
    let library = place::target().join("release/libgqa_ort.so");
    ensure!(library.is_file(), "no {}", library.display());
    Ok(library)
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
