//! Paths of the workspace.

use std::env;
use std::path::PathBuf;

/// The workspace.
pub fn root() -> PathBuf {
    let xtask = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    xtask.parent().map(PathBuf::from).unwrap_or(xtask)
}

/// The device crate.
pub fn kernels() -> PathBuf {
    root().join("crates/gqa-kernels")
}

/// The shipped PTX.
pub fn shipped() -> PathBuf {
    root().join("crates/gqa-cuda/ptx")
}

/// The list of shipped PTX.
pub fn manifest() -> PathBuf {
    shipped().join("manifest.json")
}

/// The frozen instruction counts.
pub fn ratchet() -> PathBuf {
    root().join("xtask/ratchet.json")
}

/// Lists of Python packages, with hashes.
pub fn requirements() -> PathBuf {
    root().join("xtask/requirements")
}

/// Build products.
pub fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |folder| root().join(folder))
}

/// Where CUDA tools are installed if the machine has none.
pub fn cuda_tools() -> PathBuf {
    target().join("cuda-tools")
}
