//! A CUDA-like machine on the CPU that reports what would be undefined behaviour on hardware.
//!
//! [`launch`] runs a kernel, a plain function, once for every thread of a grid. Threads are
//! coroutines that yield only where CUDA threads wait for each other; CTAs run in parallel.
//! [`device`] has the functions that kernels call. Instructions of a whole warp need the whole
//! warp, shared memory knows who wrote and read each byte, copies arrive when they are waited for,
//! and every broken rule stops the launch with a [`Fault`] that names the threads and the place.
//!
//! ```
//! use gqa_sim::{Arg, Launch, device, launch};
//!
//! let (input, mut output) = ([1.0f32; 64], [0.0f32; 1]);
//! let shape = Launch { name: "sum", threads: 64, shared_bytes: 8, seed: 7, ..Launch::default() };
//! let report = launch(&shape, &|arguments| {
//!     let mut sum = arguments.global::<f32>(0).load(device::thread_idx() as usize);
//!     for mask in [16, 8, 4, 2, 1] {
//!         sum += device::shfl_xor_f32(sum, mask);
//!     }
//!     if device::lane() == 0 {
//!         device::st_shared(device::shared_base() + 4 * device::warp(), sum);
//!     }
//!     device::sync_threads();
//!     if device::thread_idx() == 0 {
//!         let base = device::shared_base();
//!         let sum = device::ld_shared::<f32>(base) + device::ld_shared::<f32>(base + 4);
//!         arguments.global::<f32>(1).store(0, sum);
//!     }
//! }, &[Arg::read(&input), Arg::write(&mut output)])?;
//! assert_eq!((output, report.barriers), ([64.0], 1));
//! # Ok::<(), gqa_sim::Fault>(())
//! ```

#![warn(clippy::missing_errors_doc)]

mod arguments;
mod arithmetic;
mod blackwell;
mod block;
mod cluster;
mod collective;
mod communicate;
mod copy;
pub mod device;
mod execute;
mod fault;
mod global;
mod hopper;
mod instruction;
mod launch;
mod matrix;
mod memory;
mod panics;
mod run;
mod schedule;
mod shared;
mod stack;

pub use arguments::{Arg, Arguments};
pub use fault::{Agent, Fault, FaultKind, Hazard, Place, Standstill, Threads};
pub use hopper::{Swizzle, TensorLayout};
pub use launch::{Launch, MAX_SHARED_BYTES, Report};
pub use run::{Loop, launch, launch_by};
pub use schedule::Kernel;

/// The example of the page is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/simulator.md")]
struct Page;
