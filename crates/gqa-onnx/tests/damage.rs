//! Stored cases with damaged files: any content gives a value or an error, never a panic.

use std::path::{Path, PathBuf};

use gqa_host::backend::cpu::Cpu;
use gqa_onnx::{Case, Limits, find_cases};
use proptest::prelude::*;
use proptest::sample::Index;

/// One change to a file.
#[derive(Clone, Debug)]
enum Damage {
    /// Another byte.
    Byte(Index, u8),
    /// The end is missing.
    Cut(Index),
    /// Bytes that do not belong there.
    Insert(Index, Vec<u8>),
    /// A part twice.
    Repeat(Index, Index),
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        match self {
            Self::Byte(at, value) => {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            Self::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Self::Insert(at, more) => {
                let at = at.index(bytes.len());
                bytes.splice(at..at, more.iter().copied());
            }
            Self::Repeat(from, to) => {
                let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
                let part = bytes[from.min(to)..from.max(to)].to_vec();
                bytes.splice(from..from, part);
            }
        }
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<Index>;
    let bytes = proptest::collection::vec(any::<u8>(), 1..6);
    prop_oneof![
        4 => (index(), any::<u8>()).prop_map(|(at, value)| Damage::Byte(at, value)),
        1 => index().prop_map(Damage::Cut),
        1 => (index(), bytes).prop_map(|(at, more)| Damage::Insert(at, more)),
        1 => (index(), index()).prop_map(|(from, to)| Damage::Repeat(from, to)),
    ]
}

/// Files of a case, relative to its folder.
fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = vec![PathBuf::from("model.onnx")];
    for entry in std::fs::read_dir(folder.join("test_data_set_0"))? {
        files.push(Path::new("test_data_set_0").join(entry?.file_name()));
    }
    files.sort();
    Ok(files)
}

/// Checks a copy of the case in which one file is damaged.
fn check_damaged(case: &Case, file: Index, changes: &[Damage]) -> std::io::Result<()> {
    let copy = tempfile::tempdir()?;
    std::fs::create_dir(copy.path().join("test_data_set_0"))?;
    let files = files(&case.path)?;
    let damaged = file.get(&files);
    for file in &files {
        let mut bytes = std::fs::read(case.path.join(file))?;
        if file == damaged {
            changes.iter().for_each(|change| change.apply(&mut bytes));
        }
        std::fs::write(copy.path().join(file), bytes)?;
    }
    let case = Case { name: case.name.clone(), path: copy.path().to_owned() };
    // Passing, failing and an error are all valid results.
    let _ = case.check(&Cpu::default(), Limits::default());
    Ok(())
}

#[test]
fn damaged_cases_never_panic() -> Result<(), Box<dyn std::error::Error>> {
    let cases = find_cases(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases/gqa"))?;
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) };
    let strategy = (any::<Index>(), any::<Index>(), proptest::collection::vec(damage(), 1..4));
    proptest::test_runner::TestRunner::new(config).run(&strategy, |(case, file, changes)| {
        let checked = check_damaged(case.get(&cases), file, &changes);
        checked.map_err(|e| TestCaseError::fail(e.to_string()))
    })?;
    Ok(())
}
