//! The stored cases of the `onnx` package, which `tests/make_onnx_cases.py` makes, and those of
//! edges, on every back end.

use gqa_host::backend::Backend;
use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::cuda::Cuda;
use gqa_host::backend::sim::Sim;
use gqa_host::plan::{DeviceInfo, PlanOptions};
use gqa_host::reference::Reference;
use gqa_onnx::{Limits, find_cases};
use std::path::Path;

/// All cases of a folder pass.
fn check(folder: &str, count: usize, backend: &dyn Backend) {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("cases").join(folder);
    let cases = find_cases(&cases).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(cases.len(), count, "cases in {folder}");
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| match case.check(backend, Limits::default()) {
            Ok(checked) if checked.passed() => None,
            Ok(checked) => Some(format!("{}: {:?}", case.name, checked.outputs)),
            Err(error) => Some(format!("{}: {error}", case.name)),
        })
        .collect();
    let (failed, name) = (failures.len(), backend.name());
    assert!(failures.is_empty(), "{failed} of {count} on {name}:\n{}", failures.join("\n"));
}

#[test]
#[ignore = "needs a GPU"]
fn all_on_a_gpu() {
    let cuda = Cuda::new(PlanOptions::default()).expect("a GPU");
    let folders = [("gqa", 191), ("paged", 25), ("attention", 93), ("rotary_embedding", 8)];
    for (folder, count) in folders.into_iter().chain([("tensor_scatter", 3), ("edges", 94)]) {
        check(folder, count, &cuda);
    }
}

#[test]
fn attention_on_reference() {
    check("attention", 93, &Reference);
}

#[test]
fn attention_on_cpu() {
    check("attention", 93, &Cpu::default());
}

#[test]
fn attention_on_sim() {
    check("attention", 93, &Sim::default());
}

/// Every case that memory-efficient attention takes, and all others, without it.
#[test]
fn attention_on_sim_unfused() {
    let options = PlanOptions {
        disable_flash_attention: true,
        disable_memory_efficient_attention: true,
        ..PlanOptions::default()
    };
    check("attention", 93, &Sim::default().with_options(options));
}

#[test]
fn rotary_embedding_on_every_back_end() {
    for backend in [&Reference as &dyn Backend, &Cpu::default(), &Sim::default()] {
        check("rotary_embedding", 8, backend);
    }
}

#[test]
fn tensor_scatter_on_every_back_end() {
    for backend in [&Reference as &dyn Backend, &Cpu::default(), &Sim::default()] {
        check("tensor_scatter", 3, backend);
    }
}

#[test]
fn float64_where_it_is_computed() {
    for backend in [&Reference as &dyn Backend, &Cpu::default()] {
        check("float64", 9, backend);
    }
}

#[test]
fn edges_on_reference() {
    check("edges", 94, &Reference);
}

#[test]
fn edges_on_cpu() {
    check("edges", 94, &Cpu::default());
}

#[test]
fn edges_on_sim() {
    check("edges", 94, &Sim::default());
}

/// With a launch for each duty, and on a GPU without tensor cores for these types.
#[test]
fn edges_on_sim_otherwise() {
    let options = PlanOptions { disable_fused_kv: true, ..PlanOptions::default() };
    check("edges", 94, &Sim::default().with_options(options));
    let device = DeviceInfo::known("v100").expect("a known device");
    check("edges", 94, &Sim::default().with_device(device));
}
