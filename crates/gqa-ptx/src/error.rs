//! What can go wrong, each with the way out.

use std::io;
use std::path::PathBuf;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The oldest rustc 1.x that works: its LLVM (22) supports Hopper and Blackwell, and its cargo
/// supports `panic = "immediate-abort"`.
pub(crate) const MINIMUM_MINOR: u32 = 95;

/// Everything this crate reports.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No compiler that can build device code.
    #[error(
        "no rustc here can build for nvptx64-nvidia-cuda, which takes version 1.{minimum} or newer and the source of its library.\n\
         {tried}\n\
         Install one of the two and run this again:\n  \
           rustup component add rust-src\n  \
           apt-get install --no-install-recommends rustc-web cargo-web rust-web-src    (Debian 12, as root)",
        minimum = MINIMUM_MINOR
    )]
    NoToolchain {
        /// One line per place or installer tried.
        tried: String,
    },
    /// A program of the CUDA toolkit is missing.
    #[error(
        "no {name} here: not in PATH, CUDA_HOME, /usr/local/cuda, {folder}, nor a Python package.\n{tried}\n\
         `pip install {package}` brings one, so does any CUDA toolkit",
        folder = folder.display()
    )]
    NoCudaTool {
        /// The program.
        name: &'static str,
        /// The Python package that holds it.
        package: &'static str,
        /// Where an installed one would lie.
        folder: PathBuf,
        /// What installing it said, if that was tried.
        tried: String,
    },
    /// A program could not be started.
    #[error("cannot start `{program}`: {source}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A program ended with an error.
    #[error("{what} failed: `{command}` ended with {status}\n{output}")]
    Failed {
        /// What it was run for.
        what: String,
        /// Command line.
        command: String,
        /// Exit status.
        status: std::process::ExitStatus,
        /// What it wrote, standard error last.
        output: String,
    },
    /// The compiler ended well and wrote no PTX.
    #[error("building {module} ended well but left no {path}: the crate must be a library with `extern \"ptx-kernel\"` functions", path = path.display())]
    NoPtx {
        /// The module.
        module: String,
        /// Where it should lie.
        path: PathBuf,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// Read, write, …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file does not follow its format.
    #[error("{path} has another format: {source}; regenerate it", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// A file's checksum differs from the manifest's.
    #[error("{path} is damaged: its SHA-256 is not the manifest's", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// PTX without the entry asked for.
    #[error("no entry `{entry}` in the PTX, which has: {}", has.join(", "))]
    NoEntry {
        /// The entry asked for.
        entry: String,
        /// The entries there are.
        has: Vec<String>,
    },
    /// An entry without the parameter asked for.
    #[error(
        "entry `{entry}` has no parameter {index} that is an aligned block of bytes; its parameters are:\n{has}"
    )]
    NoParameter {
        /// The entry.
        entry: String,
        /// The parameter asked for, from 0.
        index: usize,
        /// The signature.
        has: String,
    },
    /// A text without a directive that every PTX module has.
    #[error("the PTX has no line that starts with `{start}`")]
    NoDirective {
        /// The directive.
        start: String,
    },
    /// ptxas wrote something else than expected.
    #[error("ptxas reported nothing on entry `{entry}` for {arch}; it wrote:\n{output}")]
    NoReport {
        /// The entry.
        entry: String,
        /// GPU.
        arch: String,
        /// What ptxas wrote.
        output: String,
    },
}

impl Error {
    /// For `map_err` on file operations.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
