//! Finding a compiler for device code.
//!
//! Device code needs `core` compiled for `nvptx64-nvidia-cuda`, which no distribution ships as a
//! binary. Any stable toolchain can compile it if its library source is there: rustup's with the
//! component `rust-src`, or a distribution's.

use crate::command::run;
use crate::error::{Error, MINIMUM_MINOR, Result};
use std::env::consts::EXE_SUFFIX;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian 12's packages of a current compiler.
const DEBIAN_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

/// A compiler, its cargo and its library source.
#[derive(Clone, Debug)]
pub struct Toolchain {
    sysroot: PathBuf,
    version: String,
}

impl Toolchain {
    /// The first usable toolchain: the one that the current folder selects, else the system's.
    ///
    /// # Errors
    ///
    /// Where the compiler or the source of `core` is missing.
    pub fn find() -> Result<Self> {
        let mut tried = Vec::new();
        for (place, sysroot) in candidates() {
            match sysroot.and_then(Self::at) {
                Ok(toolchain) => return Ok(toolchain),
                Err(reason) => tried.push(format!("  {place}: {reason}")),
            }
        }
        Err(Error::NoToolchain { tried: tried.join("\n") })
    }

    /// [`Self::find`], after [`Self::install`] if that finds nothing.
    ///
    /// # Errors
    ///
    /// Where something is missing and rustup cannot install it.
    pub fn find_or_install() -> Result<Self> {
        Self::find().or_else(|_| Self::install())
    }

    /// Adds the library source to the rustup toolchain; where that fails, installs Debian's
    /// packages (as root).
    ///
    /// # Errors
    ///
    /// Where rustup cannot be started, or fails.
    pub fn install() -> Result<Self> {
        let mut tried = Vec::new();
        for (name, install) in
            [("rustup", with_rustup as fn() -> Result<()>), ("apt-get", with_apt)]
        {
            match install().and_then(|()| Self::find()) {
                Ok(toolchain) => return Ok(toolchain),
                Err(error) => tried.push(format!(
                    "  {name}: {}",
                    error.to_string().trim_end().replace('\n', "\n    ")
                )),
            }
        }
        Err(Error::NoToolchain { tried: tried.join("\n") })
    }

    /// The toolchain in that sysroot, or why it cannot be used.
    fn at(sysroot: PathBuf) -> Result<Self, String> {
        let rustc = binary(&sysroot, "rustc");
        let (version, _) = run("asking rustc for its version", Command::new(&rustc).arg("-vV"))
            .map_err(|e| e.to_string())?;
        let minor =
            minor(&version).ok_or_else(|| format!("{} gives no version", rustc.display()))?;
        if minor < MINIMUM_MINOR {
            return Err(format!("{} is 1.{minor}, older than 1.{MINIMUM_MINOR}", rustc.display()));
        }
        for file in [library(&sysroot).join("core/src/lib.rs"), binary(&sysroot, "cargo")] {
            if !file.exists() {
                return Err(format!("rustc 1.{minor} is there, {} is not", file.display()));
            }
        }
        Ok(Self { sysroot, version: summary(&version) })
    }

    /// Names the compiler and its LLVM, for manifests.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Its cargo, told to use its rustc and to accept unstable options.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(binary(&self.sysroot, "cargo"));
        command.env("RUSTC", binary(&self.sysroot, "rustc")).env("RUSTC_BOOTSTRAP", "1");
        command
    }
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.version, self.sysroot.display())
    }
}

fn candidates() -> [(&'static str, Result<PathBuf, String>); 2] {
    let selected =
        run("asking rustc for its sysroot", Command::new("rustc").args(["--print", "sysroot"]));
    let selected =
        selected.map(|(path, _)| PathBuf::from(path.trim())).map_err(|error| error.to_string());
    [("rustc in PATH", selected), ("the system's rustc", Ok(PathBuf::from("/usr")))]
}

fn binary(sysroot: &Path, name: &str) -> PathBuf {
    sysroot.join("bin").join(format!("{name}{EXE_SUFFIX}"))
}

fn library(sysroot: &Path) -> PathBuf {
    sysroot.join("lib/rustlib/src/rust/library")
}

/// 95 of `rustc 1.95.0 (…)`.
fn minor(version: &str) -> Option<u32> {
    version.strip_prefix("rustc 1.")?.split('.').next()?.parse().ok()
}

/// `rustc 1.95.0 (59807616e 2026-04-14), LLVM 22.1.2` of what `rustc -vV` prints.
fn summary(version: &str) -> String {
    let first = version.lines().next().unwrap_or_default();
    let llvm =
        version.lines().find_map(|line| line.strip_prefix("LLVM version: ")).unwrap_or("unknown");
    format!("{first}, LLVM {llvm}")
}

fn with_rustup() -> Result<()> {
    run("adding rust-src", Command::new("rustup").args(["component", "add", "rust-src"])).map(drop)
}

fn with_apt() -> Result<()> {
    let install = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command.args(["install", "--yes", "--no-install-recommends"]).args(DEBIAN_PACKAGES);
        run("installing a compiler", &mut command).map(drop)
    };
    // A fresh image has no package lists.
    install().or_else(|_| {
        run("reading the package lists", Command::new("apt-get").arg("update"))?;
        install()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\nrelease: 1.95.0\nLLVM version: 22.1.2\n";

    #[test]
    fn versions_are_read() {
        assert_eq!(minor(VERSION), Some(95));
        assert_eq!(minor("rustc 2.0.0"), None);
        assert_eq!(summary(VERSION), "rustc 1.95.0 (59807616e 2026-04-14), LLVM 22.1.2");
    }

    #[test]
    fn a_folder_without_a_compiler_says_so() {
        let reason = Toolchain::at(PathBuf::from("/nonexistent")).unwrap_err();
        assert!(reason.contains("/nonexistent/bin/rustc"), "{reason}");
    }

    #[test]
    fn the_error_names_both_ways() {
        let text = Error::NoToolchain { tried: "  rustc in PATH: too old".into() }.to_string();
        assert!(
            text.contains("rustup component add rust-src")
                && text.contains("rust-web-src")
                && text.contains("too old"),
            "{text}"
        );
    }
}
