//! A tree mask on every back end, against the f64 reference: trees of drafts, and random masks.

use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions, plan};
use gqa_tests::{Parity, TreeCase, any_dtype, heads_up_to, parity, tree_steps, trees};
use proptest::strategy::Strategy;

fn on(device: DeviceInfo) -> Sim {
    Sim::default().with_device(device)
}

#[test]
fn on_the_cpu() {
    parity("cpu, trees", 1500, trees(any_dtype(), heads_up_to(256), 70), &Cpu::default());
}

#[test]
fn decode_takes_trees() {
    parity("sim, trees", 200, tree_steps(200), &Sim::default());
}

#[test]
fn decode_takes_trees_in_clusters_and_splits() {
    for (cluster, splits) in [(8, 1), (1, 5), (2, 3)] {
        let (cluster, splits) = (Some(cluster), Some(splits));
        let options = PlanOptions { cluster, splits, ..PlanOptions::default() };
        parity(
            "sim, trees in clusters",
            30,
            tree_steps(300),
            &Sim::default().with_options(options),
        );
    }
}

#[test]
fn decode_takes_trees_in_two_blocks_to_a_multiprocessor() {
    let device = DeviceInfo { multiprocessors: 1, ..DeviceInfo::h200() };
    let backend = on(device.clone());
    let takes_halves = move |case: &TreeCase| {
        let plan = plan(&case.problem().unwrap(), &device, &PlanOptions::default()).unwrap();
        plan.launches().iter().any(|launch| launch.entry().name.ends_with("_w4"))
    };
    let steps = tree_steps(200).prop_filter("blocks of their own", takes_halves);
    parity("sim, trees in halves", 60, steps, &backend);
}

#[test]
fn decode_takes_trees_on_blackwell() {
    let device = DeviceInfo::known("rtx5090").expect("a known device");
    parity("sim, rtx5090, trees", 60, tree_steps(200), &on(device));
}

/// Other types, head sizes, blocks and GPUs: a mask over all keys.
#[test]
fn other_kernels_take_trees_as_masks() {
    let all = || trees(any_dtype(), heads_up_to(256), 60);
    parity("sim, any trees", 120, all(), &Sim::default());
    let device = DeviceInfo::known("a100").expect("a known device");
    parity("sim, a100, any trees", 80, all(), &on(device));
    let options = PlanOptions { disable_flash_attention: true, ..PlanOptions::default() };
    parity("sim, trees without tensor cores", 40, all(), &Sim::default().with_options(options));
}
