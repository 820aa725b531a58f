//! Counts the instructions that a GPU will execute, in the PTX of each entry.

use crate::text::{EntryText, entries};
use std::collections::BTreeMap;

/// How often each instruction occurs in an entry, by its full name, e.g. `ld.global.v4.b32`; and
/// [`LOCAL_BYTES`].
pub type Counts = BTreeMap<String, u64>;

/// Counted like an instruction: bytes of local memory that the entry declares.
pub const LOCAL_BYTES: &str = ".local bytes";

/// Instructions that decide about correctness or speed: collectives, matrix and copy instructions,
/// memory accesses, calls, aborts, and the slow functions. Plain arithmetic and moves change with
/// every compiler and are not counted.
const COUNTED: [&str; 31] = [
    "atom",
    "bar",
    "barrier",
    "call",
    "cp",
    "div",
    "elect",
    "ex2",
    "fence",
    "griddepcontrol",
    "ld",
    "ldmatrix",
    "ldu",
    "lg2",
    "match",
    "mbarrier",
    "membar",
    "mma",
    "movmatrix",
    "prefetch",
    "rcp",
    "red",
    "redux",
    "rem",
    "setmaxnreg",
    "shfl",
    "st",
    "tcgen05",
    "trap",
    "vote",
    "wgmma",
];

/// Counts of every entry. Comments must be stripped: [`crate::post::strip`].
pub fn count(ptx: &str) -> BTreeMap<String, Counts> {
    entries(ptx)
        .into_iter()
        .map(|entry| (entry.name.to_owned(), count_entry(ptx, &entry)))
        .collect()
}

fn count_entry(ptx: &str, entry: &EntryText) -> Counts {
    let mut counts = Counts::new();
    for statement in ptx[entry.body.clone()].split([';', '\n']) {
        if let Some(bytes) = local_bytes(statement) {
            *counts.entry(LOCAL_BYTES.into()).or_default() += bytes;
        } else if let Some(name) = opcode(statement).filter(|name| is_counted(name)) {
            *counts.entry(name.into()).or_default() += 1;
        }
    }
    counts
}

/// 64 of `.local .align 4 .b8 __local_depot0[64]`.
fn local_bytes(statement: &str) -> Option<u64> {
    let (_, after) = statement.trim_start().strip_prefix(".local ")?.split_once('[')?;
    after.split_once(']')?.0.parse().ok()
}

/// First word of a statement that is neither a label nor a predicate.
fn opcode(statement: &str) -> Option<&str> {
    let is_opcode = |word: &&str| !word.starts_with('@') && !word.ends_with(':');
    statement.trim_start_matches(['{', ' ', '\t']).split_whitespace().find(is_opcode)
}

fn is_counted(name: &str) -> bool {
    let first = name.split('.').next().unwrap_or(name);
    COUNTED.contains(&first) && !name.starts_with("ld.param")
}

/// Whether an instruction accesses memory through generic addresses: slower than global or shared,
/// and a sign that the compiler lost a pointer's origin.
pub fn is_generic_access(name: &str) -> bool {
    let mut words = name.split('.');
    let access = matches!(words.next(), Some("ld" | "st" | "atom" | "red"));
    let spaces = ["global", "shared", "shared::cta", "shared::cluster", "local", "const", "param"];
    access && !words.any(|word| spaces.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::SAMPLE;

    #[test]
    fn what_matters_is_counted_by_full_name() {
        let counts = count(SAMPLE);
        let expected = [
            (LOCAL_BYTES, 64),
            ("bar.sync", 1),
            ("ld.global.v4.b32", 1),
            ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 1),
            ("shfl.sync.bfly.b32", 1),
            ("st.b32", 1),
            ("st.global.b32", 1),
            ("trap", 1),
        ];
        assert_eq!(counts["scale"], expected.map(|(name, n)| (name.to_owned(), n)).into());
        assert_eq!(counts["scale_more"], [("barrier.sync.aligned".to_owned(), 1)].into());
    }

    #[test]
    fn generic_accesses_are_told_apart() {
        for name in ["ld.b32", "st.v4.b32", "ld.volatile.b32", "atom.add.f32"] {
            assert!(is_generic_access(name), "{name}");
        }
        for name in
            ["ld.global.b32", "st.shared.v4.b32", "ldmatrix.sync", "red.global.add.f32", "bar.sync"]
        {
            assert!(!is_generic_access(name), "{name}");
        }
    }
}
