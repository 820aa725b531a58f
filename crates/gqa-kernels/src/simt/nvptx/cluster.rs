//! CTAs of a cluster: their barrier and distributed shared memory. SM 90. For older GPUs a cluster
//! is one CTA, and the functions for peers are not called.

use bytemuck::Pod;
use core::arch::asm;
use core::mem::transmute_copy;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.read.ptx.sreg.cluster.ctarank"]
    fn rank() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.cluster.nctarank"]
    fn size() -> u32;
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.aligned"]
    fn arrive();
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.relaxed.aligned"]
    fn arrive_relaxed();
    #[link_name = "llvm.nvvm.barrier.cluster.wait.aligned"]
    fn wait();
}

/// Whether the target has clusters.
const HAS_CLUSTERS: bool = cfg!(target_feature = "sm_90");

/// Rank of the CTA within the cluster.
#[inline(always)]
pub fn cluster_rank() -> u32 {
    // SAFETY: reading a special register has no precondition.
    if HAS_CLUSTERS { unsafe { rank() } } else { 0 }
}

/// CTAs of the cluster.
#[inline(always)]
pub fn cluster_size() -> u32 {
    // SAFETY: as above.
    if HAS_CLUSTERS { unsafe { size() } } else { 1 }
}

/// Arrives at the cluster barrier and releases this thread's memory accesses.
#[inline(always)]
pub fn cluster_arrive() {
    // SAFETY: kernels call this in uniform control flow, alternating with the wait.
    unsafe { arrive() }
}

/// Arrives at the cluster barrier without releasing memory accesses. Peers learn only that the CTA
/// has started, and see the mbarriers whose initialisation this thread has fenced.
#[inline(always)]
pub fn cluster_arrive_relaxed() {
    // SAFETY: as above.
    unsafe { arrive_relaxed() }
}

/// Waits until all threads of the cluster have arrived.
#[inline(always)]
pub fn cluster_wait() {
    // SAFETY: as above.
    unsafe { wait() }
}

/// The address in the CTA of rank `rank` that corresponds to `address` in this CTA's shared memory:
/// an address in the cluster's shared window.
#[inline(always)]
pub fn peer_address(address: u32, rank: u32) -> u32 {
    let peer;
    // SAFETY: computes an address.
    unsafe {
        asm!("mapa.shared::cluster.u32 {}, {}, {};", out(reg32) peer, in(reg32) address, in(reg32) rank,
            options(pure, nomem, nostack))
    };
    peer
}

/// Loads a value of 4 or 8 bytes, aligned to its size, from a peer.
#[inline(always)]
pub fn ld_peer<T: Pod>(address: u32) -> T {
    const { assert!(matches!(size_of::<T>(), 4 | 8)) };
    // SAFETY: the address lies in a peer's shared memory, where no Rust object lives; every bit
    // pattern is a valid T.
    unsafe {
        if size_of::<T>() == 4 {
            let v: u32;
            asm!("ld.shared::cluster.b32 {}, [{}];", out(reg32) v, in(reg32) address, options(readonly, nostack));
            return transmute_copy(&v);
        }
        let v: u64;
        asm!("ld.shared::cluster.b64 {}, [{}];", out(reg64) v, in(reg32) address, options(readonly, nostack));
        transmute_copy(&v)
    }
}

/// Stores a value of 4 or 8 bytes, aligned to its size, in a peer.
#[inline(always)]
pub fn st_peer<T: Pod>(address: u32, value: T) {
    const { assert!(matches!(size_of::<T>(), 4 | 8)) };
    // SAFETY: the address lies in a peer's shared memory, where no Rust object lives; each arm
    // reads as many bits of the value as it has.
    unsafe {
        if size_of::<T>() == 4 {
            let v = transmute_copy::<T, u32>(&value);
            asm!("st.shared::cluster.b32 [{}], {};", in(reg32) address, in(reg32) v, options(nostack));
            return;
        }
        let v = transmute_copy::<T, u64>(&value);
        asm!("st.shared::cluster.b64 [{}], {};", in(reg32) address, in(reg64) v, options(nostack));
    }
}

/// Loads 16 bytes, aligned to 16 bytes, from a peer.
#[inline(always)]
pub fn ld_peer_vec(address: u32) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the address lies in a peer's shared memory.
    unsafe {
        asm!("ld.shared::cluster.v4.b32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address, options(readonly, nostack));
    }
    [a, b, c, d]
}

/// Stores 16 bytes, aligned to 16 bytes, in a peer.
#[inline(always)]
pub fn st_peer_vec(address: u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the address lies in a peer's shared memory.
    unsafe {
        asm!("st.shared::cluster.v4.b32 [{}], {{{}, {}, {}, {}}};",
            in(reg32) address, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
    }
}

/// Stores 4 bytes in a peer asynchronously and completes them on its mbarrier.
#[inline(always)]
pub fn st_async(address: u32, value: u32, barrier: u32) {
    // SAFETY: address and barrier lie in the same peer, whose barrier expects the bytes.
    unsafe {
        asm!("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [{}], {}, [{}];",
            in(reg32) address, in(reg32) value, in(reg32) barrier, options(nostack));
    }
}

/// As [`st_async`], 8 bytes, aligned to 8 bytes.
#[inline(always)]
pub fn st_async_vec2(address: u32, [a, b]: [u32; 2], barrier: u32) {
    // SAFETY: as above.
    unsafe {
        asm!("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [{}], {{{}, {}}}, [{}];",
            in(reg32) address, in(reg32) a, in(reg32) b, in(reg32) barrier, options(nostack));
    }
}

/// As [`st_async`], 16 bytes, aligned to 16 bytes.
#[inline(always)]
pub fn st_async_vec(address: u32, [a, b, c, d]: [u32; 4], barrier: u32) {
    // SAFETY: as above.
    unsafe {
        asm!("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{}], {{{}, {}, {}, {}}}, [{}];",
            in(reg32) address, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, in(reg32) barrier, options(nostack));
    }
}
