//! Heads of 512 by wgmma on the simulated machine, against the f64 reference.

use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_kernels::registry::Family;
use gqa_tests::{
    Unchecked, case, half_dtype, heads_in, paged_reads, parity, reads_with_gaps, taken_by, wide,
    wide_paged, with_gaps,
};

fn h200(multiprocessors: u32, splits: Option<u32>) -> (DeviceInfo, Sim) {
    let device = DeviceInfo { multiprocessors, ..DeviceInfo::h200() };
    let options = PlanOptions { splits, ..PlanOptions::default() };
    (device.clone(), Sim::default().with_device(device).with_options(options))
}

/// With as many splits as suit the device, and with some.
const SPLITS: [(u32, Option<u32>); 3] = [(1, None), (132, None), (132, Some(3))];

#[test]
fn contiguous() {
    for (multiprocessors, splits) in SPLITS {
        let (device, sim) = h200(multiprocessors, splits);
        let cases = taken_by(wide(200), &device, Family::HopperWide);
        parity(&format!("sim, wide, splits {splits:?}"), 24, cases, &sim);
    }
}

#[test]
fn over_blocks() {
    for (multiprocessors, splits) in SPLITS {
        let (device, sim) = h200(multiprocessors, splits);
        let cases = taken_by(wide_paged(200), &device, Family::HopperWide);
        parity(&format!("sim, wide over blocks, splits {splits:?}"), 24, cases, &sim);
    }
}

/// Steps of few rows take one launch of `decode`.
#[test]
fn steps() {
    for (multiprocessors, splits) in SPLITS {
        let (device, sim) = h200(multiprocessors, splits);
        let contiguous =
            taken_by(case(half_dtype(), heads_in(512..=512), 200), &device, Family::Decode);
        parity(&format!("sim, wide steps, splits {splits:?}"), 16, contiguous, &sim);
        let paged = taken_by(wide_paged(200), &device, Family::Decode);
        parity(&format!("sim, wide steps over blocks, splits {splits:?}"), 16, paged, &sim);
    }
}

/// Whatever else a call has, another kernel takes it.
#[test]
fn as_planned() {
    let cases = case(half_dtype(), heads_in(512..=512), 40);
    parity("sim, wide, as planned", 40, cases, &Sim::default());
}

/// Tables that lead outside of the cache.
#[test]
fn gaps() {
    let (device, sim) = h200(132, Some(2));
    let cases = taken_by(with_gaps(wide_paged(150)), &device, Family::HopperWide);
    parity("sim, wide with gaps", 16, cases, &sim);
}

/// A call that appends nothing may have more tokens than keys, causal or not.
#[test]
fn tokens_without_a_key() {
    for splits in [None, Some(3)] {
        let options = PlanOptions { splits, ..PlanOptions::default() };
        let sim = Unchecked(Sim::default(), options);
        let reads = || paged_reads(half_dtype(), &[512], 40);
        parity(&format!("sim, wide, reads, splits {splits:?}"), 16, reads(), &sim);
        let gaps = reads_with_gaps(reads());
        parity(&format!("sim, wide, reads with gaps, splits {splits:?}"), 8, gaps, &sim);
    }
}
