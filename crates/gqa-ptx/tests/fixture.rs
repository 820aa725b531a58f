//! Builds `tests/fixture` to PTX with the compiler found here; without one, prints a message and
//! passes.

use gqa_ptx::{Builder, Built, Error, Ptxas, Target, Toolchain, alone, as_f16, inspect, post};
use std::path::Path;
use std::sync::LazyLock;
use std::{env, fs};

const KRATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixture");
const TARGET_DIR: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/fixture");
const SM_80: Target =
    Target { name: "fixture.sm_80", features: &[], cfg: &[], cpu: "sm_80", ptx: None };

static TOOLCHAIN: LazyLock<Option<Toolchain>> = LazyLock::new(|| {
    Toolchain::find().inspect_err(|error| eprintln!("SKIPPED, no device toolchain: {error}")).ok()
});

fn build(target: &Target) -> Option<Result<Built, Error>> {
    Some(Builder::new(TOOLCHAIN.as_ref()?, KRATE, TARGET_DIR).build(target))
}

/// Stripped PTX for that target.
fn ptx(target: &Target) -> Option<String> {
    Some(post::strip(&build(target)?.unwrap().ptx))
}

#[test]
fn the_compiler_does_what_kernels_rely_on() {
    let Some(built) = build(&Target { name: "habits", ..SM_80 }) else { return };
    let Built { ptx, warnings } = built.unwrap();
    assert_eq!(warnings, "");
    let ptx = post::strip(&ptx);
    let counts = inspect::count(&ptx);
    let count = |entry: &str, name: &str| counts[entry].get(name).copied().unwrap_or(0);
    let local = |entry| count(entry, inspect::LOCAL_BYTES);

    assert_eq!(
        post::entry_names(&ptx),
        ["accumulate", "checked", "divergent", "divergent_asm", "dynamic_shared", "scale"]
    );
    assert_eq!(post::version(&ptx), Some("7.0"));
    assert_eq!(
        (count("scale", "ld.global.v4.b32"), count("scale", "st.global.v4.b32"), local("scale")),
        (1, 1, 0)
    );
    assert_eq!(
        count("divergent", "bar.sync"),
        1,
        "a barrier was copied into both arms of a branch"
    );
    assert_eq!(
        count("divergent_asm", "barrier.sync.aligned"),
        1,
        "a collective in asm! was copied"
    );
    assert_eq!(
        (
            count("accumulate", "shfl.sync.bfly.b32"),
            count("accumulate", "ld.global.b32"),
            local("accumulate")
        ),
        (5, 64, 0)
    );
    assert_eq!(count("dynamic_shared", "ldmatrix.sync.aligned.m8n8.x2.shared.b16"), 1);
    assert!(count("checked", "trap") > 0);
    for (entry, counts) in &counts {
        let calls = counts
            .keys()
            .filter(|name| name.starts_with("call") || inspect::is_generic_access(name));
        assert_eq!(calls.collect::<Vec<_>>(), [""; 0], "{entry}");
    }
}

#[test]
fn features_and_versions_are_passed_on() {
    let target = Target {
        name: "features",
        features: &["undivided"],
        cfg: &[],
        cpu: "sm_90a",
        ptx: Some(83),
    };
    let Some(ptx) = ptx(&target) else { return };
    assert!(post::entry_names(&ptx).contains(&"undivided".to_owned()));
    assert!(ptx.starts_with(".version 8.3\n.target sm_90a\n"), "{ptx}");
}

#[test]
fn an_error_in_the_crate_is_reported_as_the_compiler_put_it() {
    let Some(result) = build(&Target { name: "broken", features: &["broken"], ..SM_80 }) else {
        return;
    };
    let error = result.unwrap_err().to_string();
    assert!(
        error.starts_with("compiling broken failed") && error.contains("broken on purpose"),
        "{error}"
    );
}

#[test]
fn the_same_source_elsewhere_gives_the_same_bytes() {
    let Some(here) = ptx(&Target { name: "here", ..SM_80 }) else { return };
    let copy = Path::new(TARGET_DIR).join("copy/fixture");
    fs::create_dir_all(copy.join("src")).unwrap();
    for file in ["Cargo.toml", "src/lib.rs"] {
        fs::copy(Path::new(KRATE).join(file), copy.join(file)).unwrap();
    }
    let target = Target { name: "there", ..SM_80 };
    let there = Builder::new(TOOLCHAIN.as_ref().unwrap(), copy, TARGET_DIR).build(&target).unwrap();
    assert_eq!(post::strip(&there.ptx), here);
}

#[test]
fn the_assembler_accepts_what_was_written_into_the_text() {
    let Some(text) = ptx(&Target { name: "assembled", ..SM_80 }) else { return };
    let ptxas = match Ptxas::find(Path::new(TARGET_DIR)) {
        Ok(ptxas) => ptxas,
        Err(error) => return eprintln!("SKIPPED, no ptxas: {error}"),
    };
    let bounds = post::Bounds { max_threads: Some(256), min_blocks: Some(4) };
    let text = post::set_bounds(&text, "accumulate", bounds).unwrap();
    let text = post::align_parameter(&text, "scale", 2, 64).unwrap();
    let path = Path::new(TARGET_DIR).join("ptx/assembled.ptx");
    fs::write(&path, text).unwrap();
    let report = ptxas.assemble(&path, "sm_80").unwrap();
    let accumulate = &report.usage[0];
    assert_eq!((accumulate.entry.as_str(), accumulate.stack), ("accumulate", 0));
    assert!(
        (1..=64).contains(&accumulate.registers),
        "256 threads, 4 blocks: 64 registers at most, got {accumulate:?}"
    );
    assert_eq!(report.warnings, [""; 0]);
}

#[test]
fn twins_have_one_text_that_the_assembler_takes_for_both_types() {
    for (name, cpu, gpu, sm) in
        [("twins.70", "sm_70", "sm_75", 70), ("twins.80", "sm_80", "sm_80", 80)]
    {
        let target = Target { name, features: &["twins"], cfg: &[], cpu, ptx: None };
        let Some(text) = ptx(&target) else { return };
        let text = post::lower_elements(&post::number_labels_alone(&text), sm);
        let [bf16, f16] = ["twin_bf16", "twin_f16"].map(|name| alone(&text, name).unwrap());
        assert!(bf16.matches("{ .reg .b32 bf16").count() >= 4, "{bf16}");
        assert_eq!(as_f16(&bf16), f16);
        let ptxas = match Ptxas::find(Path::new(TARGET_DIR)) {
            Ok(ptxas) => ptxas,
            Err(error) => return eprintln!("SKIPPED, no ptxas: {error}"),
        };
        for (text, kernel) in [(bf16, "twin_bf16"), (f16, "twin_f16")] {
            let path = Path::new(TARGET_DIR).join(format!("ptx/{name}.{kernel}.ptx"));
            fs::write(&path, text).unwrap();
            let report = ptxas.assemble(&path, gpu).unwrap();
            assert_eq!(report.usage[0].entry, kernel);
            assert_eq!(report.warnings, [""; 0]);
        }
    }
}
