//! `cargo xtask embed`: tests the packages as an engine uses them, outside of this workspace.
//!
//! Packages the crates, unpacks them, and builds the workspace of `xtask/embed/` beside them: a
//! program that uses gqa and cudarc, which links libcuda (a stub that is made here), and a library
//! for other languages.

use crate::cargo::cargo;
use crate::gpu::has_gpu;
use crate::step::shown;
use crate::{folder, place};
use anyhow::{Context, Result, bail, ensure};
use gqa_ptx::Manifest;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The published crates, in the order of their dependencies.
const CRATES: [&str; 10] = [
    "gqa-tensor",
    "gqa-cpu",
    "gqa-sim",
    "gqa-kernels",
    "gqa-ptx",
    "gqa-plan",
    "gqa-cuda",
    "gqa-host",
    "gqa-onnx",
    "gqa-cli",
];
/// The registry's limit for a package.
const MOST_BYTES: u64 = 10 << 20;

pub fn run() -> Result<()> {
    // A folder without this workspace's settings above it. Earlier build products are reused.
    let folder = env::temp_dir().join("gqa-embed");
    let crates = folder::fresh(&folder.join("crates"))?;
    package()?;
    for name in CRATES {
        unpack(name, &crates)?;
    }
    let workspace = folder::fresh(&folder.join("engine"))?;
    folder::copy(&place::root().join("xtask/embed"), &workspace)?;
    let stub = stub(&workspace, &folder::fresh(&folder.join("stub"))?)?;
    build(&workspace, &folder, &stub)?;
    let built = folder.join("target/debug");
    for order in [["gqa", "cudarc"], ["cudarc", "gqa"]] {
        program(&built.join("program"), order, &stub)?;
    }
    leaves_the_driver_alone(&built.join("libplugin.so"))?;
    counts_all_kernels(&crates, &folder)
}

/// Packages all crates as they are now, committed or not.
fn package() -> Result<()> {
    let mut command = cargo();
    command.args(["package", "--no-verify", "--allow-dirty", "--quiet"]);
    CRATES.iter().for_each(|name| {
        command.args(["--package", name]);
    });
    shown(&mut command)
}

/// Unpacks a package into a folder of its name.
fn unpack(name: &str, crates: &Path) -> Result<()> {
    let file = format!("{name}-{}.crate", env!("CARGO_PKG_VERSION"));
    let package = place::target().join("package").join(&file);
    let bytes = fs::metadata(&package).with_context(|| format!("no {file}"))?.len();
    println!("{file:28} {:8.1} KiB", bytes as f64 / 1024.0);
    ensure!(bytes <= MOST_BYTES, "{file} has {bytes} bytes; allowed: {MOST_BYTES}");
    // Unpacked with new dates: files in a package all have one date, and cargo would consider them
    // built.
    shown(Command::new("tar").arg("-xzmf").arg(&package).arg("-C").arg(crates))?;
    let unpacked = crates.join(format!("{name}-{}", env!("CARGO_PKG_VERSION")));
    fs::rename(&unpacked, crates.join(name)).with_context(|| format!("cannot rename {name}"))
}

/// A stub libcuda.so without a GPU, for the linker and for machines without a driver: every
/// function that cudarc loads returns CUDA_ERROR_NO_DEVICE.
fn stub(workspace: &Path, folder: &Path) -> Result<PathBuf> {
    let mut metadata = outside(workspace);
    let output = metadata.args(["metadata", "--format-version=1"]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let cudarc = packages.iter().find(|package| package["name"] == "cudarc");
    let manifest = cudarc.and_then(|cudarc| cudarc["manifest_path"].as_str());
    let source = Path::new(manifest.context("no cudarc")?).with_file_name("src/driver/sys/mod.rs");
    let text =
        fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let names: BTreeSet<&str> = text.split("fn cu").skip(1).filter_map(name).collect();
    ensure!(!names.is_empty(), "{} names no functions of the driver", source.display());
    let function = |name: &&str| {
        format!("#[unsafe(no_mangle)]\npub extern \"C\" fn cu{name}() -> i32 {{ 100 }}\n")
    };
    let code = folder.join("stub.rs");
    fs::write(&code, names.iter().map(function).collect::<String>())?;
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition=2024", "--crate-type=cdylib", "-Anon_snake_case"]);
    rustc.arg("-Clink-arg=-Wl,-soname,libcuda.so.1").arg(&code);
    shown(rustc.arg("-o").arg(folder.join("libcuda.so")))?;
    fs::copy(folder.join("libcuda.so"), folder.join("libcuda.so.1"))?;
    Ok(folder.into())
}

/// The rest of a driver function's name, at the start of what follows `cu`.
fn name(text: &str) -> Option<&str> {
    let name = text.split('(').next()?;
    name.starts_with(|c: char| c.is_ascii_uppercase()).then_some(name)
}

/// A cargo without this workspace's settings.
fn outside(folder: &Path) -> Command {
    let mut command = cargo();
    command.current_dir(folder).env_remove("CARGO_TARGET_DIR").env_remove("RUSTFLAGS");
    command
}

fn build(workspace: &Path, folder: &Path, stub: &Path) -> Result<()> {
    let mut command = outside(workspace);
    command.env("RUSTFLAGS", format!("-Lnative={}", stub.display()));
    shown(command.args(["build", "--workspace", "--target-dir"]).arg(folder.join("target")))
}

/// Checks that both libraries find the GPU, or both find none, in either order.
fn program(program: &Path, order: [&str; 2], stub: &Path) -> Result<()> {
    let mut command = Command::new(program);
    command.args(order);
    if !has_gpu() {
        command.env("LD_LIBRARY_PATH", stub);
    }
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let wanted = match has_gpu() {
        true => ["gqa: decoded", "cudarc: copied"],
        false => ["gqa: no GPU", "cudarc: no GPU"],
    };
    for line in ["cpu: "].into_iter().chain(wanted) {
        ensure!(text.lines().any(|said| said.starts_with(line)), "{order:?}: no line `{line}…`");
    }
    Ok(())
}

/// Checks that the library exports no driver function and does not link libcuda.
fn leaves_the_driver_alone(library: &Path) -> Result<()> {
    let tool = |program: &str, option: &str| -> Result<String> {
        let output = Command::new(program).arg(option).arg(library).output();
        let output = output.with_context(|| format!("cannot start {program}, of binutils"))?;
        ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let symbols = tool("nm", "--dynamic")?;
    ensure!(symbols.contains(" plugin_gpus"), "{} lacks plugin_gpus", library.display());
    let of_driver = |line: &&str| line.split(' ').next_back().is_some_and(is_of_driver);
    if let Some(symbol) = symbols.lines().find(of_driver) {
        bail!("{} exports a function of the driver: {symbol}", library.display());
    }
    let needed = tool("readelf", "--dynamic")?;
    ensure!(!needed.contains("libcuda"), "{} needs libcuda", library.display());
    println!("{}: exports no function of the driver, does not link libcuda", library.display());
    Ok(())
}

/// `cuInit`, but not `current`.
fn is_of_driver(symbol: &str) -> bool {
    symbol.strip_prefix("cu").and_then(name).is_some()
}

/// Installs `gqa` from the packages and runs `gqa doctor`.
fn counts_all_kernels(crates: &Path, folder: &Path) -> Result<()> {
    let patch = |name: &str| {
        format!("patch.crates-io.{name}.path={:?}", crates.join(name).display().to_string())
    };
    let mut install = outside(crates);
    install.args(["install", "--debug", "--no-default-features", "--force", "--quiet", "--path"]);
    install.arg(crates.join("gqa-cli")).arg("--root").arg(folder.join("installed"));
    install.arg("--target-dir").arg(folder.join("target"));
    CRATES.iter().filter(|name| **name != "gqa-cli").for_each(|name| {
        install.args(["--config", &patch(name)]);
    });
    shown(&mut install)?;
    let output = Command::new(folder.join("installed/bin/gqa")).arg("doctor").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let manifest = Manifest::read(&place::manifest())?;
    let kernels: usize = manifest.modules.iter().map(|module| module.kernels.len()).sum();
    let line = format!("ptx      {kernels} kernels in all");
    ensure!(text.lines().any(|said| said == line), "gqa doctor has no line `{line}`:\n{text}");
    println!("gqa doctor: {kernels} kernels");
    Ok(())
}
