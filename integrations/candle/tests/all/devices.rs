//! Where tests run.

use candle::{Device, Result};

/// Runs a test on the CPU, and with feature `cuda` on a GPU, where there is one.
pub fn on_each(test: impl Fn(&Device) -> Result<()>) -> Result<()> {
    test(&Device::Cpu)?;
    #[cfg(feature = "cuda")]
    on_gpu(test)?;
    Ok(())
}

/// Runs a test on a GPU, where there is one.
#[cfg(feature = "cuda")]
pub fn on_gpu(test: impl Fn(&Device) -> Result<()>) -> Result<()> {
    match Device::new_cuda(0) {
        Ok(gpu) => test(&gpu),
        Err(error) => {
            eprintln!("SKIPPED: no GPU: {error}");
            Ok(())
        }
    }
}
