//! Kernels whose waits have a time limit.
//!
//! A kernel polls barriers in shared memory in a loop. If the awaited arrival never comes, the
//! kernel hangs, and with it the program. [`bound`] changes the PTX so that a kernel stops polling
//! some time after it began and continues with whatever is in memory: its results are wrong, but it
//! ends. Only tests of kernels on GPUs on which they never ran launch this text. All other programs
//! launch the shipped text, without any cost.

use std::fmt::Write;

/// As the kernels end such a wait: `simt/nvptx/mbarrier.rs` of gqa-kernels.
const AGAIN: &str = "@!done bra WAIT;";
/// Its question.
const ASKED: &str = "mbarrier.try_wait.";
/// Its register.
const DECLARED: &str = ".reg .pred done;";

/// Changes the text of a single kernel so that its waits for barriers in shared memory end
/// `nanoseconds`, less than 4 seconds, after a thread began. A text without such waits is returned
/// unchanged. Hardware barriers of a CTA or cluster have no limit.
pub fn bound(ptx: &str, nanoseconds: u32) -> String {
    if !ptx.contains(ASKED) {
        return ptx.to_owned();
    }
    let late = format!(
        "mov.u32 now, %globaltimer_lo; sub.u32 now, now, begun; setp.gt.u32 late, now, \
         {nanoseconds}; or.pred done, done, late; {AGAIN}"
    );
    let mut bounded = String::with_capacity(ptx.len() + ptx.len() / 16);
    let mut is_entry = false;
    for line in ptx.split_inclusive('\n') {
        is_entry |= line.contains(".entry ");
        if line.contains(ASKED) {
            let declared = format!("{DECLARED} .reg .pred late; .reg .b32 now;");
            bounded.push_str(&line.replacen(DECLARED, &declared, 1).replacen(AGAIN, &late, 1));
            continue;
        }
        bounded.push_str(line);
        if is_entry && line.trim_end() == "{" {
            is_entry = false;
            let begun = "\t.reg .b32 begun;\n\tmov.u32 begun, %globaltimer_lo;";
            let _ = writeln!(bounded, "{begun}");
        }
    }
    bounded
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = concat!(
        ".version 8.0\n.visible .entry k(\n\t.param .b64 k_param_0\n)\n{\n\t.reg .b32 %r<3>;\n",
        "\t{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%r1], %r2; ",
        "@!done bra WAIT; }\n\tret;\n}\n",
    );

    #[test]
    fn a_wait_ends_some_time_after_the_kernel_began() {
        let bounded = bound(KERNEL, 5_000);
        let wait = "{ .reg .pred done; .reg .pred late; .reg .b32 now; \
                    WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%r1], %r2; \
                    mov.u32 now, %globaltimer_lo; sub.u32 now, now, begun; \
                    setp.gt.u32 late, now, 5000; or.pred done, done, late; @!done bra WAIT; }";
        assert!(bounded.contains(wait), "{bounded}");
        let begins = "{\n\t.reg .b32 begun;\n\tmov.u32 begun, %globaltimer_lo;\n\t.reg .b32 %r<3>;";
        assert!(bounded.contains(begins), "{bounded}");
        assert_eq!(bounded.matches("begun;\n").count(), 1);
    }

    #[test]
    fn a_kernel_that_never_waits_stays_as_it_is() {
        let other = KERNEL.replace("mbarrier.try_wait", "mbarrier.test_wait");
        assert_eq!(bound(&other, 5_000), other);
    }
}
