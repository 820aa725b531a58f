//! `cargo xtask test`: the first step of CI; the second is the same with `--integrations`.

use crate::cargo::{cargo, over_workspace};
use crate::gpu::has_gpu;
use crate::integrations;
use crate::step::{Steps, shown};
use crate::{columns, deny, embed, pages, place, ptx, ptxas, ratchet, targets};
use anyhow::Result;
use clap::Args as ClapArgs;
use gqa_ptx::Toolchain;
use std::env;
use std::hash::{BuildHasher, RandomState};
use std::process::{Command, Stdio};

#[derive(ClapArgs)]
pub struct Args {
    /// Also compile and assemble all PTX, run four times as many random calls, build without the
    /// simulator, for other targets and from packages.
    #[arg(long)]
    full: bool,
    /// Only test the integrations, which are built or installed first.
    #[arg(long, conflicts_with = "full")]
    integrations: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let mut steps = Steps::default();
    if args.integrations {
        integrations::run(&mut steps);
        return steps.finish();
    }
    steps.run("device toolchain", || {
        println!("{}", Toolchain::find_or_install()?);
        Ok(())
    });
    steps.run("format", || {
        shown(cargo().args(["fmt", "--all", "--check"]))?;
        columns::check()
    });
    steps.run("clippy", || {
        shown(over_workspace(&["clippy"]).args(["--all-targets", "--", "-Dwarnings"]))
    });
    if args.full {
        steps.run("clippy without the simulator", without_simulator);
        steps.run_or_skip("other targets", targets::check);
    }
    steps.run("ptx as shipped", || ptx::check_shipped(args.full));
    steps.run_or_skip("ptxas", || ptxas::check(args.full));
    steps.run("ratchet", || ratchet::run(false));
    steps.run("tests", || tests(Where::Anywhere, args.full));
    steps.run_or_skip("tests on a GPU", gpu_tests);
    steps.run_or_skip("licences and sources", deny::check);
    steps.run_or_skip("advisories", deny::advisories);
    steps.run_or_skip("node cases as stored", node_cases);
    steps.run_or_skip("bench scripts", bench_scripts);
    steps.run("pages", pages::check);
    steps.run("documentation tests", || shown(over_workspace(&["test"]).arg("--doc")));
    if args.full {
        steps.run("programs on pages", pages::programs);
        steps.run("use from packages", embed::run);
    }
    steps.run("documentation", || {
        shown(over_workspace(&["doc"]).arg("--no-deps").env("RUSTDOCFLAGS", "-Dwarnings"))
    });
    steps.finish()
}

/// Builds `cargo gqa` and the library without the simulator, which all other steps include.
fn without_simulator() -> Result<()> {
    let clippy = |target: &[&str]| {
        let command = [&["clippy", "--no-default-features"], target, &["--", "-Dwarnings"]];
        shown(cargo().args(command.concat()))
    };
    clippy(&["--package", "gqa-cli", "--bins"])?;
    clippy(&["--package", "gqa-host", "--lib"])
}

/// Runs the tests. Tests that need a GPU are ignored unless requested. They spend most of their
/// time in the reference, so four at a time share the GPU; each is a process of its own.
enum Where {
    Anywhere,
    Gpu,
}

fn tests(place: Where, full: bool) -> Result<()> {
    let nextest = has_nextest();
    let mut command = over_workspace(if nextest { &["nextest", "run"] } else { &["test"] });
    command.args(match (nextest, place) {
        (true, Where::Anywhere) => &[][..],
        (true, Where::Gpu) => &["--run-ignored=only", "--test-threads=4"],
        (false, Where::Anywhere) => &["--all-targets"],
        (false, Where::Gpu) => &["--tests", "--", "--ignored"],
    });
    let seed = env::var("PROPTEST_RNG_SEED");
    let seed = seed.unwrap_or_else(|_| RandomState::new().hash_one(()).to_string());
    println!("random tests draw from PROPTEST_RNG_SEED={seed}");
    if full {
        command.env("PARITY_FULL", "1");
    }
    shown(command.env("PROPTEST_RNG_SEED", seed))
}

fn gpu_tests() -> Result<Option<String>> {
    if !has_gpu() {
        return Ok(Some("no NVIDIA GPU".to_owned()));
    }
    tests(Where::Gpu, true).map(|()| None)
}

/// Regenerates the `onnx` package's node cases, if python3 has that version of the package.
fn node_cases() -> Result<Option<String>> {
    let script = |option| {
        let mut command = Command::new("python3");
        command.current_dir(place::root()).args(["tests/make_onnx_cases.py", option]);
        command
    };
    let listed = script("--list").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !listed.is_ok_and(|status| status.success()) {
        return Ok(Some("no python3 with the onnx package that made them".to_owned()));
    }
    shown(&mut script("--check")).map(|()| None)
}

/// Runs the tests of the scripts in bench/, which need no GPU.
fn bench_scripts() -> Result<Option<String>> {
    let python = || {
        let mut command = Command::new("python3");
        command.current_dir(place::root());
        command
    };
    let version = python().arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !version.is_ok_and(|status| status.success()) {
        return Ok(Some("no python3".to_owned()));
    }
    let tests = ["-m", "unittest", "discover", "--start-directory", "bench"];
    shown(python().args(tests)).map(|()| None)
}

/// Whether cargo-nextest is installed.
pub fn has_nextest() -> bool {
    let probe =
        cargo().args(["nextest", "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    probe.is_ok_and(|status| status.success())
}
