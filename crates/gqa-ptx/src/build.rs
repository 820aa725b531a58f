//! Compiling a device crate to PTX.

use crate::command::run;
use crate::error::{Error, Result};
use crate::toolchain::Toolchain;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;

/// Arguments of the LLVM back end.
///
/// - Arrays indexed by a loop stay in registers only if the loop is unrolled whole.
/// - LLVM does not know that `asm!` is collective and would copy a small block that holds one into
///   both arms of a branch.
const LLVM_ARGS: &str = "-Cllvm-args=-unroll-threshold=1000000 -unroll-full-max-count=1024 -simplifycfg-max-small-block-size=0";

/// Arguments of rustc besides the target's.
///
/// - `JumpThreading` works on MIR, where nothing is convergent, and copies calls of collectives
///   (intrinsics too) into both arms of a branch: one barrier becomes two, one per side of a
///   divergent branch.
/// - The target's linker is not needed for PTX text; `true` is a program that does nothing and
///   succeeds.
const RUSTC_ARGS: [&str; 3] = ["-Zmir-enable-passes=-JumpThreading", "-Clinker=true", LLVM_ARGS];

/// The release profile of device code, whatever the workspace says. Panics trap at once: no
/// unwinding, no messages.
const PROFILE: [(&str, &str); 8] = [
    ("PANIC", "immediate-abort"),
    ("LTO", "fat"),
    ("CODEGEN_UNITS", "1"),
    ("OPT_LEVEL", "3"),
    ("DEBUG", "false"),
    ("DEBUG_ASSERTIONS", "false"),
    ("OVERFLOW_CHECKS", "false"),
    ("INCREMENTAL", "false"),
];

/// What to compile for.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// Names the output, e.g. `tiled.sm_80`.
    pub name: &'a str,
    /// Cargo features of the crate; its default features are off.
    pub features: &'a [&'a str],
    /// Conditions for `cfg` in the crate, such as `ptx_module="tiled"`.
    pub cfg: &'a [&'a str],
    /// GPU, e.g. `sm_80`.
    pub cpu: &'a str,
    /// PTX version times ten, for `asm!` instructions that need a newer one; `None` is the lowest
    /// version that supports the GPU, which the oldest drivers load.
    pub ptx: Option<u32>,
}

/// A compiled crate.
#[derive(Clone, Debug)]
pub struct Built {
    /// PTX text as the compiler wrote it.
    pub ptx: String,
    /// Compiler warnings; empty if none.
    pub warnings: String,
}

/// Compiles one device crate.
#[derive(Clone, Debug)]
pub struct Builder<'a> {
    toolchain: &'a Toolchain,
    krate: PathBuf,
    target_dir: PathBuf,
}

impl<'a> Builder<'a> {
    /// For the crate whose `Cargo.toml` lies in `krate`; build products go to `target_dir`, which
    /// should be device code's own.
    pub fn new(
        toolchain: &'a Toolchain,
        krate: impl Into<PathBuf>,
        target_dir: impl Into<PathBuf>,
    ) -> Self {
        Self { toolchain, krate: krate.into(), target_dir: target_dir.into() }
    }

    /// Compiles the crate to PTX. The same source and compiler give the same bytes, wherever the
    /// crate lies.
    ///
    /// # Errors
    ///
    /// Where cargo cannot be started or fails, with what it said, and where it left no PTX.
    pub fn build(&self, target: &Target) -> Result<Built> {
        let path = self.output(target)?;
        let what = format!("compiling {}", target.name);
        let (_, warnings) = run(&what, &mut self.command(target, &path)?)?;
        let ptx = fs::read_to_string(&path)
            .map_err(|_| Error::NoPtx { module: target.name.into(), path })?;
        Ok(Built { ptx, warnings })
    }

    /// The path where rustc writes the PTX; output of an earlier build is removed.
    fn output(&self, target: &Target) -> Result<PathBuf> {
        let folder =
            absolute(&self.target_dir).map_err(Error::io("find", &self.target_dir))?.join("ptx");
        fs::create_dir_all(&folder).map_err(Error::io("make", &folder))?;
        let path = folder.join(format!("{}.ptx", target.name));
        if path.exists() {
            fs::remove_file(&path).map_err(Error::io("remove", &path))?;
        }
        Ok(path)
    }

    fn command(&self, target: &Target, output: &Path) -> Result<Command> {
        let krate = absolute(&self.krate).map_err(Error::io("find", &self.krate))?;
        let mut command = self.toolchain.cargo();
        self.set_environment(&mut command);
        command.current_dir(&krate).args([
            "rustc",
            "--quiet",
            "--lib",
            "--release",
            "--crate-type=cdylib",
        ]);
        command.args([
            "--target=nvptx64-nvidia-cuda",
            "-Zbuild-std=core",
            "-Zpanic-immediate-abort",
        ]);
        command.args(["--no-default-features", "--features", &target.features.join(",")]);
        command.arg("--target-dir").arg(&self.target_dir);
        command.arg("--").args(RUSTC_ARGS).arg(format!("-Ctarget-cpu={}", target.cpu));
        command.args(target.cfg.iter().map(|condition| format!("--cfg={condition}")));
        command.args(target.ptx.map(|version| format!("-Ctarget-feature=+ptx{version}")));
        command.arg(joined("--emit=asm=", output, "")).arg(joined(
            "--remap-path-prefix=",
            &krate,
            "=.",
        ));
        Ok(command)
    }

    /// Flags and wrappers meant for host code stay out, so that the result depends on the crate and
    /// the compiler alone.
    fn set_environment(&self, command: &mut Command) {
        let host = |name: &str| {
            name.starts_with("CARGO_PROFILE_")
                || [
                    "RUSTFLAGS",
                    "CARGO_ENCODED_RUSTFLAGS",
                    "CARGO_BUILD_RUSTFLAGS",
                    "CARGO_BUILD_TARGET",
                ]
                .contains(&name)
                || name.ends_with("WRAPPER")
        };
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(host)) {
            command.env_remove(name);
        }
        for (key, value) in PROFILE {
            command.env(format!("CARGO_PROFILE_RELEASE_{key}"), value);
        }
    }
}

fn joined(before: &str, path: &Path, after: &str) -> OsString {
    let mut word = OsString::from(before);
    word.push(path);
    word.push(after);
    word
}
