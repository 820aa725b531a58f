//! From a Rust crate to checked PTX, with no CUDA toolkit: as `cuda_builder` is for rust-cuda, on
//! rustc's own `nvptx64-nvidia-cuda` target.
//!
//! 1. [`Toolchain`] finds (or installs) a compiler that has the source of `core`, which that target
//!    needs.
//! 2. [`Builder`] compiles a crate of `extern "ptx-kernel"` functions to one PTX text,
//!    reproducibly.
//! 3. [`post`] writes into the PTX what Rust has no words for: launch bounds, cluster shapes,
//!    parameter alignment.
//! 4. [`inspect`] counts what matters per entry (barriers, matrix instructions, access widths,
//!    local memory); [`Ratchet`] freezes the counts in a file.
//! 5. [`Ptxas`] assembles the PTX for a GPU and reports registers, spills and warnings;
//!    [`Nvdisasm`] reads what it made of loops over matrix products.
//! 6. [`Manifest`] lists the kernels a crate ships, with what they were made from; each is a file
//!    of its own, made small by [`pack`].
//!
//! A crate that only reads shipped PTX uses this one without the default feature `build`: for
//! [`unpack`], for [`fold`], which folds parameters into the text as constants, for [`bound`],
//! whose kernels do not hang, and for [`as_f16`], which makes a kernel for float16 of one for
//! bfloat16.
//!
//! ```no_run
//! # fn main() -> Result<(), gqa_ptx::Error> {
//! use gqa_ptx::{Builder, Target, Toolchain, post};
//! let toolchain = Toolchain::find_or_install()?;
//! let builder = Builder::new(&toolchain, "path/to/crate", "target/ptx");
//! let target = Target { name: "kernels", features: &[], cfg: &[], cpu: "sm_80", ptx: None };
//! let built = builder.build(&target)?;
//! let bounds = post::Bounds { max_threads: Some(128), ..Default::default() };
//! println!("{}", post::set_bounds(&built.ptx, "my_kernel", bounds)?);
//! # Ok(())
//! # }
//! ```

#![warn(clippy::missing_errors_doc)]

mod bound;
mod fold;
mod packed;
mod text;
mod twin;
pub use {
    bound::bound,
    fold::{Constants, fold},
    packed::unpack,
    text::{alone, section},
    twin::as_f16,
};

#[cfg(feature = "build")]
mod build;
#[cfg(feature = "build")]
mod command;
#[cfg(feature = "build")]
mod cuda_tool;
#[cfg(feature = "build")]
mod error;
#[cfg(feature = "build")]
pub mod inspect;
#[cfg(feature = "build")]
mod manifest;
#[cfg(feature = "build")]
mod nvdisasm;
#[cfg(feature = "build")]
pub mod post;
#[cfg(feature = "build")]
mod ptxas;
#[cfg(feature = "build")]
mod ratchet;
#[cfg(feature = "build")]
mod toolchain;

#[cfg(feature = "build")]
pub use self::{
    build::{Builder, Built, Target},
    error::{Error, Result},
    manifest::{Kernel, Manifest, Module, sha256, source_hash, write_packed},
    nvdisasm::{Loop, Nvdisasm},
    packed::pack,
    ptxas::{Ptxas, Report, Usage},
    ratchet::Ratchet,
    toolchain::Toolchain,
};
