//! The machine's GPU.

use std::process::Command;

/// Whether there is an NVIDIA GPU.
pub fn has_gpu() -> bool {
    // It comes with the driver.
    let listed = Command::new("nvidia-smi").arg("--list-gpus").output();
    listed.is_ok_and(|listed| listed.status.success() && !listed.stdout.is_empty())
}
