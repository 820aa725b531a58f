//! Copies between global and shared memory by TMA: boxes of tensors, and contiguous bytes. SM 90.

use super::Global;
use bytemuck::Pod;
use core::arch::asm;

/// A tensor map: the description of a tensor and its boxes for TMA.
#[derive(Clone, Copy)]
pub struct TensorMap(u64);

/// A kernel parameter that holds a tensor map. The builder aligns it to 64 bytes, as TMA requires.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TensorMapParam([u64; 16]);

impl TensorMap {
    /// The map at address `address` of parameter memory.
    #[inline(always)]
    pub const fn at(address: u64) -> Self {
        Self(address)
    }
}

/// The tensor map in parameter number `$i` of kernel `$kernel`, by its address: TMA cannot use a
/// copy in local memory.
#[allow(unused_macros, reason = "few modules have kernels with tensor maps")]
macro_rules! tensor_map_param {
    ($kernel:ident, $i:literal) => {{
        let address: u64;
        // SAFETY: takes the address of a parameter.
        unsafe {
            core::arch::asm!(
                concat!("{{ .reg .b64 at; mov.b64 at, ", stringify!($kernel), "_param_", $i, "; cvta.param.u64 {}, at; }}"),
                out(reg64) address, options(pure, nomem, nostack)
            )
        };
        $crate::simt::TensorMap::at(address)
    }};
}
#[allow(unused_imports, reason = "few modules have kernels with tensor maps")]
pub(crate) use tensor_map_param;

/// Starts copying the map's box at `coordinates` (fastest dimension first) to shared memory and
/// completes the box's bytes on the barrier; elements outside the tensor become zero.
#[inline(always)]
pub fn tma_load(destination: u32, map: TensorMap, coordinates: [u32; 4], barrier: u32) {
    let [x, y, z, w] = coordinates;
    // SAFETY: the box fits at the destination; the barrier expects its bytes.
    unsafe {
        asm!("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}, {}, {}}}], [{}];",
            in(reg32) destination, in(reg64) map.0, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) w,
            in(reg32) barrier, options(nostack))
    }
}

/// As [`tma_load`] to the same address of every CTA of the cluster whose bit is in `mask`, which
/// completes on the barrier at the same address of that CTA.
#[inline(always)]
pub fn tma_load_multicast(
    destination: u32,
    map: TensorMap,
    coordinates: [u32; 4],
    barrier: u32,
    mask: u16,
) {
    let [x, y, z, w] = coordinates;
    // SAFETY: as above, in each of these CTAs.
    unsafe {
        asm!("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{}], [{}, {{{}, {}, {}, {}}}], [{}], {};",
            in(reg32) destination, in(reg64) map.0, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) w,
            in(reg32) barrier, in(reg16) mask, options(nostack))
    }
}

/// Starts copying a box from shared memory to the tensor; elements outside the tensor are not
/// written.
#[inline(always)]
pub fn tma_store(map: TensorMap, coordinates: [u32; 4], source: u32) {
    let [x, y, z, w] = coordinates;
    // SAFETY: the box lies in the CTA's shared memory.
    unsafe {
        asm!("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [{}, {{{}, {}, {}, {}}}], [{}];",
            in(reg64) map.0, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) w, in(reg32) source, options(nostack))
    }
}

/// L2 cache eviction policy for the data that a copy reads.
#[derive(Clone, Copy)]
pub struct CachePolicy(u64);

macro_rules! cache_policies {
    ($($(#[$doc:meta])* $name:ident = $policy:literal;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> CachePolicy {
            let policy;
            // SAFETY: registers only.
            unsafe {
                asm!(concat!("createpolicy.fractional.L2::", $policy, ".b64 {}, 1.0;"), out(reg64) policy,
                    options(pure, nomem, nostack))
            };
            CachePolicy(policy)
        }
    )*};
}
cache_policies! {
    /// For data that is not read again.
    evict_first = "evict_first";
    /// For data that other CTAs read soon.
    evict_last = "evict_last";
}

/// Starts copying `bytes` bytes from element `i` of `source` on to shared memory and completes them
/// on the barrier. Both addresses are aligned to 16 bytes; `bytes` is a multiple of 16.
#[inline(always)]
pub fn bulk_load<T: Pod>(destination: u32, source: Global<T>, i: usize, bytes: u32, barrier: u32) {
    // SAFETY: the bytes are bound and fit at the destination; the barrier expects them.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [{}];",
            in(reg32) destination, in(reg64) source.offset(i).0, in(reg32) bytes, in(reg32) barrier, options(nostack))
    }
}

/// [`bulk_load`] with an L2 cache policy.
#[inline(always)]
pub fn bulk_load_hinted<T: Pod>(
    destination: u32,
    source: Global<T>,
    i: usize,
    bytes: u32,
    barrier: u32,
    policy: CachePolicy,
) {
    // SAFETY: as above.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [{}], [{}], {}, [{}], {};",
            in(reg32) destination, in(reg64) source.offset(i).0, in(reg32) bytes, in(reg32) barrier, in(reg64) policy.0,
            options(nostack))
    }
}

/// Closes this thread's group of bulk stores.
#[inline(always)]
pub fn bulk_commit() {
    // SAFETY: no precondition.
    unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) }
}

/// Waits until this thread's bulk stores have read their shared memory.
#[inline(always)]
pub fn bulk_wait_read() {
    // SAFETY: no precondition.
    unsafe { asm!("cp.async.bulk.wait_group.read 0;", options(nostack)) }
}

/// Prefetches a map before its first use.
#[inline(always)]
pub fn prefetch_tensor_map(map: TensorMap) {
    // SAFETY: a hint.
    unsafe { asm!("prefetch.tensormap [{}];", in(reg64) map.0, options(nostack)) }
}

/// Orders this thread's writes to shared memory before later reads by the tensor cores and TMA; a
/// barrier between writers and readers must follow.
#[inline(always)]
pub fn fence_proxy_async() {
    // SAFETY: a fence.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}
