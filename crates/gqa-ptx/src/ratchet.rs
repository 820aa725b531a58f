//! Instruction counts, frozen in a file.
//!
//! A compiler may copy a barrier into a branch, turn a wide load into narrow ones, or move an array
//! to local memory, and results stay right on a lucky day. Exact counts per entry make each such
//! change visible in review.

use crate::error::{Error, Result};
use crate::inspect::{Counts, count};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Counts by module, then by entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ratchet(BTreeMap<String, BTreeMap<String, Counts>>);

impl Ratchet {
    /// Reads a file; empty if there is none.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read, or has another format.
    pub fn read(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Ok(Self::default());
        }
        let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
        serde_json::from_str(&text).map_err(|source| Error::Format { path: path.into(), source })
    }

    /// Writes a file.
    ///
    /// # Errors
    ///
    /// Where the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| Error::Format { path: path.into(), source })?;
        fs::write(path, text + "\n").map_err(Error::io("write", path))
    }

    /// Adds a module's counts.
    pub fn add(&mut self, module: &str, ptx: &str) {
        self.0.insert(module.into(), count(ptx));
    }

    /// Every (module, entry, counts).
    pub fn entries(&self) -> impl Iterator<Item = (&str, &str, &Counts)> {
        self.0.iter().flat_map(|(module, entries)| {
            entries.iter().map(move |(entry, counts)| (module.as_str(), entry.as_str(), counts))
        })
    }

    /// One line per count in which `now` differs from this, or per entry that is new or gone; empty
    /// if nothing differs.
    pub fn differences(&self, now: &Self) -> Vec<String> {
        let (old, new) = (self.by_entry(), now.by_entry());
        let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
        keys.into_iter().flat_map(|key| changes(key, old.get(key), new.get(key))).collect()
    }

    fn by_entry(&self) -> BTreeMap<(&str, &str), &Counts> {
        self.entries().map(|(module, entry, counts)| ((module, entry), counts)).collect()
    }
}

fn changes(
    &(module, entry): &(&str, &str),
    old: Option<&&Counts>,
    new: Option<&&Counts>,
) -> Vec<String> {
    let (Some(old), Some(new)) = (old, new) else {
        return vec![format!("{module} {entry}: {}", if new.is_some() { "new" } else { "gone" })];
    };
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let value = |counts: &Counts, name| counts.get(name).copied().unwrap_or(0);
    let values = names.into_iter().map(|name| (name, value(old, name), value(new, name)));
    let changed = values.filter(|(_, before, after)| before != after);
    changed
        .map(|(name, before, after)| format!("{module} {entry}: {name} {before} -> {after}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::SAMPLE;

    fn ratchet(ptx: &str) -> Ratchet {
        let mut ratchet = Ratchet::default();
        ratchet.add("m", ptx);
        ratchet
    }

    #[test]
    fn mutated_ptx_is_caught() {
        let mutations = [
            ("\tbar.sync \t0;\n", "\tbar.sync \t0;\n\tbar.sync \t0;\n", "m scale: bar.sync 1 -> 2"),
            ("ld.global.v4.b32", "ld.global.b32", "m scale: ld.global.v4.b32 1 -> 0"),
            ("__local_depot0[64]", "__local_depot0[128]", "m scale: .local bytes 64 -> 128"),
            ("@%p2 shfl.sync.bfly.b32", "@%p2 mov.b32", "m scale: shfl.sync.bfly.b32 1 -> 0"),
            (".entry scale_more(", ".entry scale_less(", "m scale_more: gone"),
            (".entry scale_more(", ".entry scale_less(", "m scale_less: new"),
        ];
        for (from, to, expected) in mutations {
            let mutated = SAMPLE.replacen(from, to, 1);
            assert_ne!(mutated, SAMPLE);
            let differences = ratchet(SAMPLE).differences(&ratchet(&mutated));
            assert!(
                differences.iter().any(|line| line == expected),
                "{expected} not in {differences:?}"
            );
        }
        assert_eq!(ratchet(SAMPLE).differences(&ratchet(SAMPLE)), [""; 0]);
    }

    #[test]
    fn a_file_gives_back_what_was_written() {
        let path = std::env::temp_dir().join(format!("ratchet-{}.json", std::process::id()));
        let written = ratchet(SAMPLE);
        written.write(&path).unwrap();
        assert_eq!(Ratchet::read(&path).unwrap(), written);
        fs::write(&path, "[]").unwrap();
        assert!(Ratchet::read(&path).unwrap_err().to_string().contains("regenerate it"));
        fs::remove_file(&path).unwrap();
        assert_eq!(Ratchet::read(&path).unwrap(), Ratchet::default());
    }
}
