//! From a Rust crate to checked PTX, with no CUDA toolkit: what `cuda_builder` is to rust-cuda, on rustc's own
//! `nvptx64-nvidia-cuda` target.
//!
//! 1. [`Toolchain`] finds (or installs) a compiler that has the source of `core`, which that target needs.
//! 2. [`Builder`] compiles a crate of `extern "ptx-kernel"` functions to one PTX text, reproducibly.
//! 3. [`post`] writes into the PTX what Rust has no words for: launch bounds, cluster shapes, parameter alignment.
//! 4. [`inspect`] counts what matters per entry (barriers, matrix instructions, access widths, local memory); [`Ratchet`]
//!    freezes the counts in a file.
//! 5. [`Ptxas`] assembles the PTX for a GPU and reports registers, spills and warnings.
//! 6. [`Manifest`] lists the modules a repository ships, compressed, with what they were made from.
//!
//! ```no_run
//! # fn main() -> Result<(), gqa_ptx::Error> {
//! use gqa_ptx::{Builder, Target, Toolchain, post};
//! let toolchain = Toolchain::find_or_install()?;
//! let builder = Builder::new(&toolchain, "path/to/crate", "target/ptx");
//! let built = builder.build(&Target { name: "kernels", features: &[], cpu: "sm_80", ptx: None })?;
//! let bounds = post::Bounds { max_threads: Some(128), ..Default::default() };
//! println!("{}", post::set_bounds(&built.ptx, "my_kernel", bounds)?);
//! # Ok(())
//! # }
//! ```

mod build;
mod command;
mod error;
pub mod inspect;
mod manifest;
pub mod post;
mod ptxas;
mod ratchet;
mod text;
mod toolchain;

pub use build::{Builder, Built, Target};
pub use error::Error;
pub use manifest::{Manifest, Module, read_compressed, sha256, source_hash, write_compressed};
pub use ptxas::{Ptxas, Report, Usage};
pub use ratchet::Ratchet;
pub use toolchain::Toolchain;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
