//! GPUs through the CUDA driver: devices, memory, streams, graphs, and plans put into streams.
//!
//! Two levels. A [`LoadedPlan`] takes a stream, device pointers and a workspace that belong to the
//! caller, allocates nothing and never waits, so a CUDA graph can capture it and replay it after
//! `seqlens_k` has changed in place; a [`Recording`] does the same as a graph of its own, for less
//! of the processor's time. On top of it [`Call`] owns its memory and is safe; a [`Graph`] captures
//! calls.
//!
//! ```no_run
//! use gqa_cuda::{Call, Device, Graph, Stream};
//! # fn example(plan: gqa_plan::plan::Plan, query: &gqa_tensor::Tensor) -> gqa_tensor::Result<()> {
//! use gqa_plan::plan::TensorId;
//! let device = Device::open(0)?;
//! let stream = Stream::new(&device)?;
//! let call = std::sync::Arc::new(Call::new(&device, plan)?);
//! call.upload(TensorId::Query, query, &stream)?;
//! let mut graph = Graph::capture(&stream, &[call.clone()])?;
//! let seconds = stream.timed(|| graph.replay(&stream))?;
//! let output = call.download(TensorId::Output, &stream)?;
//! # let _ = (seconds, output);
//! # Ok(())
//! # }
//! ```

mod arguments;
mod call;
mod check;
mod constants;
#[cfg(feature = "cust")]
mod cust;
mod deferred;
mod device;
mod error;
mod kernel;
mod loaded;
mod memory;
mod modules;
mod overlap;
mod peers;
mod range;
mod raw;
mod recording;
mod side_stream;
mod stream;
mod sys;
mod tensor_map;
mod trust;
mod views;

pub use call::{Call, Graph};
pub use constants::constants;
pub use device::{Device, device_count, driver_version};
pub use error::{Code, CudaVersion, DriverError};
pub use loaded::LoadedPlan;
pub use memory::DeviceTensor;
pub use modules::{Shipped, shipped};
pub use peers::{Exchange, PartShape, PartTensors, PeerMerge};
pub use recording::Recording;
pub use stream::{Event, Stream};
pub use trust::remembered;
pub use views::{DeviceView, Views, Workspace};
