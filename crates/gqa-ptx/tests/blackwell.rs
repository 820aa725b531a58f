//! Builds `tests/blackwell` to PTX and assembles it for the GPUs that have tensor memory; without a
//! compiler or an assembler, prints a message and passes.

use gqa_ptx::{Builder, Ptxas, Target, Toolchain, inspect, post};
use std::fs;
use std::path::Path;

const KRATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/blackwell");
const TARGET_DIR: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/fixture");

const ENTRIES: [&str; 2] = ["tile_bf16", "tile_f16"];
/// Threads of a CTA.
const THREADS: u32 = 128;

/// Instructions of an entry: a copy of a collective would hang or race.
const COUNTS: [(&str, u64); 10] = [
    ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", 1),
    ("tcgen05.dealloc.cta_group::1.sync.aligned.b32", 1),
    ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned", 1),
    ("tcgen05.mma.cta_group::1.kind::f16", 16),
    ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64", 2),
    ("tcgen05.ld.sync.aligned.32x32b.x32.b32", 8),
    ("tcgen05.wait::ld.sync.aligned", 8),
    ("tcgen05.wait::st.sync.aligned", 1),
    ("tcgen05.fence::before_thread_sync", 3),
    ("tcgen05.fence::after_thread_sync", 4),
];

#[test]
fn kernels_with_tensor_memory_assemble_without_spills() {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error) => return eprintln!("SKIPPED, no device toolchain: {error}"),
    };
    for (name, gpu) in [("blackwell.sm_100a", "sm_100a"), ("blackwell.sm_103a", "sm_103a")] {
        let target = Target { name, features: &[], cfg: &[], cpu: gpu, ptx: None };
        let built = Builder::new(&toolchain, KRATE, TARGET_DIR).build(&target).unwrap();
        let text = post::strip(&built.ptx);
        let mut text = post::lower_elements(&post::number_labels_alone(&text), 100);
        assert_eq!(post::entry_names(&text), ENTRIES);
        for (entry, counts) in inspect::count(&text) {
            let count = |name: &str| counts.get(name).copied().unwrap_or(0);
            assert_eq!(count(inspect::LOCAL_BYTES), 0, "{entry}");
            for (name, expected) in COUNTS {
                assert_eq!(count(name), expected, "{entry}: {name}");
            }
        }
        let ptxas = match Ptxas::find(Path::new(TARGET_DIR)) {
            Ok(ptxas) => ptxas,
            Err(error) => return eprintln!("SKIPPED, no ptxas: {error}"),
        };
        for entry in ENTRIES {
            let bounds = post::Bounds { max_threads: Some(THREADS), min_blocks: Some(1) };
            text = post::set_bounds(&text, entry, bounds).unwrap();
        }
        let path = Path::new(TARGET_DIR).join(format!("ptx/{name}.assembled.ptx"));
        fs::write(&path, text).unwrap();
        let report = ptxas.assemble(&path, gpu).unwrap();
        assert_eq!(report.usage.len(), ENTRIES.len());
        for usage in &report.usage {
            let lost = (usage.stack, usage.spill_stores, usage.spill_loads);
            assert_eq!(lost, (0, 0, 0), "{usage:?}");
        }
        assert_eq!(report.warnings, [""; 0]);
    }
}
