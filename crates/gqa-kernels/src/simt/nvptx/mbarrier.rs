//! mbarriers: barriers in shared memory that count arrivals and bytes. SM 90.

use core::arch::asm;

/// Initialises the barrier at `address`, with `arrivals` expected per phase.
#[inline(always)]
pub fn mbarrier_init(address: u32, arrivals: u32) {
    // SAFETY: eight aligned bytes of the CTA's shared memory.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(reg32) address, in(reg32) arrivals, options(nostack))
    }
}

/// Makes initialised barriers visible to TMA; a CTA barrier must follow.
#[inline(always)]
pub fn fence_mbarrier_init() {
    // SAFETY: a fence.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
}

/// Arrives once.
#[inline(always)]
pub fn mbarrier_arrive(address: u32) {
    // SAFETY: an initialised barrier.
    unsafe { asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(reg32) address, options(nostack)) }
}

/// Arrives once and adds `bytes` to the bytes that the phase expects.
#[inline(always)]
pub fn mbarrier_arrive_expect(address: u32, bytes: u32) {
    // SAFETY: an initialised barrier.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};",
            in(reg32) address, in(reg32) bytes, options(nostack))
    }
}

/// Waits until the phase with parity `parity` has completed.
#[inline(always)]
#[allow(named_asm_labels)]
pub fn mbarrier_wait(address: u32, parity: u32) {
    // SAFETY: an initialised barrier; the label is local to the braces.
    unsafe {
        asm!("{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{}], {}; @!done bra WAIT; }}",
            in(reg32) address, in(reg32) parity, options(nostack))
    }
}

/// Whether the phase with parity `parity` has completed: 1 or 0. The thread can do other work until
/// it needs the answer.
#[inline(always)]
pub fn mbarrier_test(address: u32, parity: u32) -> u32 {
    let done;
    // SAFETY: an initialised barrier.
    unsafe {
        asm!("{{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [{1}], {2}; selp.u32 {0}, 1, 0, done; }}",
            out(reg32) done, in(reg32) address, in(reg32) parity, options(nostack))
    };
    done
}

/// [`mbarrier_wait`], unless [`mbarrier_test`] has answered 1.
#[inline(always)]
#[allow(named_asm_labels)]
pub fn mbarrier_wait_unless(tested: u32, address: u32, parity: u32) {
    // SAFETY: an initialised barrier; the labels are local to the braces.
    unsafe {
        asm!("{{ .reg .pred done; setp.ne.u32 done, {}, 0; @done bra DONE; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [{}], {}; @!done bra WAIT; DONE: }}",
            in(reg32) tested, in(reg32) address, in(reg32) parity, options(nostack))
    }
}

/// Arrives once at a peer's barrier and releases this thread's accesses to the threads that wait
/// there.
#[inline(always)]
pub fn mbarrier_arrive_peer(address: u32) {
    // SAFETY: an initialised barrier of a CTA that has started and has not exited.
    unsafe {
        asm!("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{}];", in(reg32) address, options(nostack))
    }
}

/// [`mbarrier_arrive_peer`] of a thread that has read: it releases no writes to peers, and so needs
/// no fence of the whole GPU.
#[inline(always)]
pub fn mbarrier_arrive_peer_after_reads(address: u32) {
    // SAFETY: as above.
    unsafe {
        asm!("mbarrier.arrive.shared::cluster.b64 _, [{}];", in(reg32) address, options(nostack))
    }
}

/// [`mbarrier_arrive_peer`] that also adds `bytes` to the bytes that the phase expects.
#[inline(always)]
pub fn mbarrier_arrive_expect_peer(address: u32, bytes: u32) {
    // SAFETY: as above.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [{}], {};",
            in(reg32) address, in(reg32) bytes, options(nostack))
    }
}

/// Waits until the phase with parity `parity` has completed, and acquires the accesses that peers
/// made before they arrived.
#[inline(always)]
#[allow(named_asm_labels)]
pub fn mbarrier_wait_cluster(address: u32, parity: u32) {
    // SAFETY: an initialised barrier of this CTA; the label is local to the braces.
    unsafe {
        asm!("{{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{}], {}; @!done bra WAIT; }}",
            in(reg32) address, in(reg32) parity, options(nostack))
    }
}
