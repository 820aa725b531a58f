//! Checks the machine code of Hopper's mainloops for what PTX does not show: copies to uniform
//! registers, and early waits for products. Both have made prefill several per cent slower without
//! a failing test.

use crate::place;
use anyhow::{Result, bail, ensure};
use gqa_ptx::{Loop, Nvdisasm};
use std::path::PathBuf;

/// With more copies to uniform registers, a mainloop copies the products' descriptors, which should
/// already be in such registers (`docs/results/2026-11-27-h100-float8`).
const MOST_COPIES: usize = 9;

/// Entries, without their element type, that must issue at least this many exponentials before they
/// wait for the output (`docs/results/2026-11-28-h100-late-wait`).
const LATE_WAITS: [(&str, usize); 6] = [
    ("gqa_hopper_d128", 32),
    ("gqa_hopper_d128_k176", 44),
    ("gqa_hopper_split_d128", 32),
    ("gqa_hopper_paged_d128", 32),
    ("gqa_hopper_quantized_d128", 32),
    ("gqa_hopper_paged_quantized_d128", 32),
];

/// Checks the binaries of modules assembled for Hopper. Without a disassembler it says so and
/// succeeds.
pub fn check(cubins: &[PathBuf]) -> Result<()> {
    if cubins.is_empty() {
        return Ok(());
    }
    let nvdisasm = match Nvdisasm::find_or_install(&place::cuda_tools()) {
        Ok(found) => found,
        Err(reason) => {
            println!("Hopper's mainloops are not checked: {reason}");
            return Ok(());
        }
    };
    let mut loops = Vec::new();
    for cubin in cubins {
        let found = nvdisasm.loops(cubin)?;
        // A disassembler with another output format must not pass as a check without problems.
        ensure!(!found.is_empty(), "{}: no loop over key tiles was found", cubin.display());
        loops.extend(found);
    }
    table(&loops);
    let problems: Vec<_> = loops.iter().filter_map(problem).collect();
    if problems.is_empty() {
        Ok(())
    } else {
        bail!("loops over key tiles:\n  {}", problems.join("\n  "))
    }
}

fn table(loops: &[Loop]) {
    println!(
        "{:44} {:>12} {:>8} {:>6} {:>12}  exponentials ahead of waits",
        "loop of", "instructions", "products", "copies", "exponentials"
    );
    for Loop { entry, instructions, products, uniform_copies, exponentials, waits } in loops {
        let waits: Vec<_> = waits.iter().map(usize::to_string).collect();
        println!(
            "{entry:44} {instructions:12} {products:8} {uniform_copies:6} {exponentials:12}  {}",
            waits.join(", ")
        );
    }
}

fn problem(found: &Loop) -> Option<String> {
    let Loop { entry, uniform_copies, waits, .. } = found;
    if *uniform_copies > MOST_COPIES {
        return Some(format!(
            "{entry} has {uniform_copies} copies to uniform registers; allowed: {MOST_COPIES}"
        ));
    }
    let name = without_type(entry);
    let (_, least) = LATE_WAITS.iter().find(|row| row.0 == name)?;
    let last = waits.last().copied().unwrap_or(0);
    (last < *least).then(|| {
        format!("{entry} waits for its output after {last} exponentials; allowed: {least} or more")
    })
}

fn without_type(entry: &str) -> String {
    entry.replace("_bf16", "").replace("_f16", "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use gqa_kernels::registry;

    #[test]
    fn late_waits_are_of_entries_that_there_are() {
        for (name, _) in LATE_WAITS {
            assert!(registry::entries().any(|entry| without_type(entry.name) == name), "{name}");
        }
    }

    #[test]
    fn copies_and_early_waits_are_problems() {
        let found = |uniform_copies, wait| Loop {
            entry: "gqa_hopper_bf16_d128".into(),
            uniform_copies,
            waits: vec![0, wait],
            ..Loop::default()
        };
        assert_eq!(problem(&found(MOST_COPIES, 40)), None);
        assert!(problem(&found(MOST_COPIES + 1, 40)).is_some_and(|text| text.contains("copies")));
        assert!(problem(&found(1, 13)).is_some_and(|text| text.contains("after 13 ")));
        let other = Loop { entry: "gqa_hopper_bf16_d64".into(), ..found(1, 0) };
        assert_eq!(problem(&other), None);
    }
}
