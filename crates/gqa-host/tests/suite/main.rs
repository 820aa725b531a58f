//! Tests of gqa-host without a GPU, in one program: separate programs would each link the whole
//! crate.

#[cfg(feature = "sim")]
mod attention;
mod attention_plan;
mod cpu;
mod engine;
mod external;
#[cfg(feature = "cuda")]
mod folded;
mod io;
mod paged;
mod plan;
#[cfg(feature = "sim")]
mod quantized_output;
mod reference;
#[cfg(feature = "sim")]
mod row_scales;
#[cfg(feature = "sim")]
mod rows;
#[cfg(feature = "sim")]
mod sim_backend;
#[cfg_attr(not(feature = "sim"), allow(dead_code, reason = "the simulator's steps use all of it"))]
mod step;
#[cfg(feature = "sim")]
mod trials;
mod validate;
mod views;
