//! Test results in the user's cache directory: a file for each driver and kind of GPU. A line has a
//! kernel, a hash of its PTX and of the layer's features, and the state of the test:
//!
//! ```text
//! gqa_tiled_bf16_d128 0123456789abcdef begun
//! gqa_tiled_bf16_d128 0123456789abcdef agrees
//! ```
//!
//! The file is locked during a test. If it cannot be written or locked, a process knows only its
//! own tests.

use super::lock;
use crate::constants;
use crate::error::CudaVersion;
use crate::modules;
use gqa_plan::plan::{DeviceInfo, Launch};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a process waits while another one tests.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of tests without an end after which a kernel counts as wrong. More than one, because
/// a test may have been interrupted.
const ATTEMPTS: usize = 2;

/// The recorded result of a kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// The kernel agreed with simpler ones.
    Agrees,
    /// The kernel did not agree, or its tests did not end.
    Wrong(String),
}

/// The file, locked.
pub(super) struct Memory(File);

impl Memory {
    /// Opens the file of a kind of GPU; `None` if it cannot be created or locked.
    pub(super) fn open(kind: &str) -> Option<Self> {
        Self::open_in(&folder()?, kind)
    }

    fn open_in(folder: &Path, kind: &str) -> Option<Self> {
        fs::create_dir_all(folder).ok()?;
        let path = folder.join(format!("{kind}.txt"));
        let file = OpenOptions::new().read(true).append(true).create(true).open(path).ok()?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Some(Self(file)),
                Err(TryLockError::WouldBlock) if started.elapsed() < PATIENCE => {
                    sleep(Duration::from_millis(20));
                }
                Err(_) => return None,
            }
        }
    }

    /// The recorded result of the kernel with that hash.
    pub(super) fn told(&mut self, entry: &str, hash: u64) -> Option<Told> {
        let mut text = String::new();
        self.0.seek(SeekFrom::Start(0)).ok()?;
        self.0.read_to_string(&mut text).ok()?;
        said(&text, entry, hash)
    }

    /// Appends a line, at once.
    pub(super) fn write(&mut self, entry: &str, hash: u64, what: &str) {
        let line = format!("{entry} {hash:016x} {}\n", what.replace('\n', " "));
        let written = self.0.write_all(line.as_bytes()).and_then(|()| self.0.sync_data());
        if let Err(error) = written {
            tracing::debug!(%error, "what a test shows is not remembered");
        }
    }
}

fn said(text: &str, entry: &str, hash: u64) -> Option<Told> {
    let hash = format!("{hash:016x}");
    let mut begun = 0;
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        if (words.next(), words.next()) != (Some(entry), Some(&*hash)) {
            continue;
        }
        match words.next() {
            Some("begun") => begun += 1,
            Some("given up") => begun -= i32::from(begun > 0),
            Some("agrees") => return Some(Told::Agrees),
            Some(other) => {
                let why = other.strip_prefix("wrong: ").unwrap_or(other);
                return Some(Told::Wrong(why.to_owned()));
            }
            None => {}
        }
    }
    let unfinished = usize::try_from(begun).unwrap_or(0) >= ATTEMPTS;
    unfinished.then(|| Told::Wrong(format!("{ATTEMPTS} processes ended while they tested it")))
}

/// `$XDG_CACHE_HOME/gqa/trust`, `~/.cache/gqa/trust` where that is not set, or on Windows
/// `%LOCALAPPDATA%\gqa\trust`.
fn folder() -> Option<PathBuf> {
    let absolute = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let caches = match cfg!(windows) {
        true => absolute("LOCALAPPDATA"),
        false => absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache"))),
    };
    Some(caches?.join("gqa").join("trust"))
}

/// A file name for the kind of GPU and the driver version: each driver has its own compiler.
pub(super) fn kind(device: &DeviceInfo, driver: CudaVersion) -> String {
    let build = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let is_version =
        |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    let build = build.split_whitespace().find(is_version).unwrap_or("driver").to_owned();
    let name = format!("{} sm{} cuda{driver} {build}", device.name, device.sm);
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect()
}

/// A hash of the kernel's PTX for that GPU, of this library's version, and of the constants of the
/// layer, such as sinks, window or format: a test of one layer proves little about another.
pub(super) fn hash(launch: &Launch, sm: u32, driver: CudaVersion) -> u64 {
    static TEXTS: Mutex<BTreeMap<(&str, u32), u64>> = Mutex::new(BTreeMap::new());
    let entry = launch.entry();
    let text = *lock(&TEXTS).entry((entry.name, sm)).or_insert_with(|| {
        let text = modules::text(entry, sm, driver).unwrap_or_default();
        fnv(fnv(BASIS, text.bytes()), env!("CARGO_PKG_VERSION").bytes())
    });
    constants::of_layer(launch).bytes().fold(text, |hash, (parameter, offset, byte)| {
        let place = [parameter as u8, offset as u8, (offset >> 8) as u8];
        fnv(hash, place.into_iter().chain([byte]))
    })
}

/// Offset basis of FNV-1a.
const BASIS: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(hash: u64, bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The files with the results of all tests on this machine: name and text of each.
pub fn remembered() -> Vec<(String, String)> {
    let files = folder().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten();
    let read = |path: PathBuf| {
        let name = path.file_name()?.to_string_lossy().into_owned();
        Some((name, fs::read_to_string(path).ok()?))
    };
    let mut files: Vec<_> = files.flatten().filter_map(|file| read(file.path())).collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use gqa_plan::engine::{Dense, Heads, Layer};
    use gqa_plan::plan::{PlanOptions, plan};
    use gqa_plan::{DType, Sink};

    #[test]
    fn the_last_word_on_a_text_counts() {
        let text = "a 0000000000000001 begun\na 0000000000000001 agrees\n\
                    b 0000000000000001 begun\nb 0000000000000001 wrong: output, row 1\n\
                    c 0000000000000001 begun\nd 0000000000000001 begun\nd 0000000000000001 begun\n\
                    e 0000000000000001 begun\ne 0000000000000001 given up\n\
                    e 0000000000000001 begun\n";
        let wrong = |why: &str| Some(Told::Wrong(why.to_owned()));
        assert_eq!(said(text, "a", 1), Some(Told::Agrees));
        assert_eq!(said(text, "a", 2), None);
        assert_eq!(said(text, "b", 1), wrong("output, row 1"));
        assert_eq!(said(text, "c", 1), None);
        assert_eq!(said(text, "d", 1), wrong("2 processes ended while they tested it"));
        assert_eq!(said(text, "e", 1), None);
    }

    /// A process that wants to know what another one is testing waits for it.
    #[test]
    fn a_kernel_is_tested_once() {
        let folder = std::env::temp_dir().join(format!("gqa-trust-{}", std::process::id()));
        let mut first = Memory::open_in(&folder, "gpu").unwrap();
        assert_eq!(first.told("kernel", 7), None);
        first.write("kernel", 7, "begun");
        let told = std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let mut second = Memory::open_in(&folder, "gpu").unwrap();
                second.told("kernel", 7)
            });
            sleep(Duration::from_millis(100));
            assert!(!second.is_finished());
            first.write("kernel", 7, "agrees");
            drop(first);
            second.join().unwrap()
        });
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(told, Some(Told::Agrees));
        assert!(Memory::open_in(Path::new("/proc/none"), "gpu").is_none());
    }

    #[test]
    fn another_kernel_or_another_layer_has_another_hash() {
        let of = |device: &str, layer: &Layer, longest: usize| {
            let problem = layer.dense(Dense::decode(2, 4000).longest(longest)).unwrap();
            let device = DeviceInfo::known(device).unwrap();
            let plan = plan(&problem, &device, &PlanOptions::default()).unwrap();
            hash(&plan.launches()[0], device.sm, CudaVersion(13_000))
        };
        let layer = Layer::new(DType::BF16, Heads { query: 8, kv: 2, size: 128 });
        let first = of("a100", &layer, 300);
        assert_eq!(first, of("a100", &layer, 301));
        assert_ne!(first, of("b200", &layer, 300));
        assert_ne!(first, of("a100", &layer.clone().softcap(20.0), 300));
        assert_ne!(first, of("a100", &layer.clone().sink(Sink::PerHead), 300));
    }

    #[test]
    fn kinds_are_names_of_files() {
        let device = DeviceInfo { name: "NVIDIA GeForce/RTX 4090".into(), ..DeviceInfo::h200() };
        let kind = kind(&device, CudaVersion(12_080));
        assert!(kind.starts_with("NVIDIA-GeForce-RTX-4090-sm90-cuda12.8-"), "{kind}");
    }
}
