//! Which back end computes.

use anyhow::{Context, Result};
use gqa_host::backend::cpu::{Cpu, Instructions};
#[cfg(feature = "sim")]
use gqa_host::backend::sim::Sim;
use gqa_host::backend::{Backend, cuda::Cuda};
use gqa_host::plan::PlanOptions;
use gqa_host::reference::Reference;

use crate::gpu::Gpu;

/// `--backend`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// The GPU if there is a usable one, else the CPU.
    #[default]
    Auto,
    /// Fast f32 on all cores.
    Cpu,
    /// The GPU's kernels on a simulated machine; slow.
    Sim,
    /// The GPU.
    Cuda,
    /// The f64 definition; slow.
    Reference,
}

/// The back end of that choice, or why it cannot be used.
pub fn select(choice: Choice) -> Result<Box<dyn Backend>> {
    let (options, cpu) = (PlanOptions::from_env()?, Cpu::new(Instructions::from_env()?));
    Ok(match choice {
        Choice::Auto => match Cuda::new(options) {
            Ok(cuda) => Box::new(cuda),
            Err(_) => Box::new(cpu),
        },
        Choice::Cpu => Box::new(cpu),
        #[cfg(feature = "sim")]
        Choice::Sim => Box::new(Sim::default().with_options(options)),
        #[cfg(not(feature = "sim"))]
        Choice::Sim => anyhow::bail!(
            "--backend sim: got a program without the simulator; allowed: one built with feature sim, as by cargo gqa-sim"
        ),
        Choice::Cuda => Box::new(Cuda::new(options).context("--backend cuda")?),
        Choice::Reference => Box::new(Reference),
    })
}

/// Where calls are timed.
pub enum Machine {
    /// A GPU, on whose memory calls work.
    Gpu(Gpu),
    /// A back end that works on host memory.
    Host(Box<dyn Backend>),
}

impl Machine {
    /// The machine of that choice, and in words what it is and why.
    pub fn select(choice: Choice) -> Result<(Self, String)> {
        // A switch that is wrong is a mistake, not a reason to take the CPU.
        PlanOptions::from_env()?;
        let gpu = match choice {
            Choice::Auto | Choice::Cuda => Gpu::open(),
            _ => return Ok((Self::Host(select(choice)?), format!("{choice:?}").to_lowercase())),
        };
        match (gpu, choice) {
            (Ok(gpu), _) => {
                let device = gpu.device.info().to_string();
                Ok((Self::Gpu(gpu), device))
            }
            (Err(_), Choice::Auto) => {
                let instructions = Instructions::from_env()?;
                let words = format!("cpu, {instructions}; no GPU: gqa doctor says why");
                Ok((Self::Host(Box::new(Cpu::new(instructions))), words))
            }
            (Err(reason), _) => Err(reason.context("--backend cuda")),
        }
    }
}
