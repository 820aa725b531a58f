//! Every kernel of the project, written once.
//!
//! Built for `nvptx64-nvidia-cuda` this crate is `no_std` and its entry points become PTX. Built
//! for the host, the same functions run on [`gqa_sim`], a CUDA-like machine on the CPU, which runs
//! their tests at every commit.
//!
//! Reading order: [`registry`] (which kernels exist), [`params`] (their parameters), [`concept`]
//! (the semantics of attention), [`attention`] and [`prologue`] (the algorithms), [`tile`]
//! (fragments and copies), [`simt`] (the machine).
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, link_llvm_intrinsics, repr_simd, stdarch_nvptx),
    allow(internal_features)
)]
#![allow(clippy::too_many_arguments, reason = "a kernel's pointers are separate parameters")]

pub mod attention;
pub mod concept;
pub mod num;
pub mod params;
pub mod prologue;
pub mod registry;
pub mod simt;
pub mod tile;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    simt::trap()
}
