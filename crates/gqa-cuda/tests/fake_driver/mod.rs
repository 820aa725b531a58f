//! Runs a test in a process of its own, with the fake driver in place of NVIDIA's.

use libloading::Library;
use std::ffi::{OsStr, OsString, c_int, c_void};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

const SOURCE: &str = include_str!("libcuda.rs");
/// Set in the process that has the fake driver.
const INSIDE: &str = "TEST_WITH_FAKE_DRIVER";

/// The driver's functions that tests ask.
pub struct Fake(Library);

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $kind:ty)?) $(-> $result:ty)? = $symbol:literal;)*) => {
        impl Fake {$(
            $(#[$doc])*
            pub fn $name(&self $(, $argument: $kind)?) $(-> $result)? {
                // SAFETY: the fake driver has that function with these types.
                unsafe {
                    let function: libloading::Symbol<'_, extern "C" fn($($kind)?) $(-> $result)?> =
                        self.0.get($symbol).expect("a function of the fake driver");
                    function($($argument)?)
                }
            }
        )*}
    };
}
functions! {
    /// How often the primary context is retained.
    retained() -> usize = b"fake_retained";
    /// Uses of the primary context while nothing retains it.
    stale() -> usize = b"fake_stale";
    /// Work in the stream being captured, or captured last.
    nodes() -> usize = b"fake_nodes";
    /// Launches of uncaptured kernels and of graphs.
    launched() -> usize = b"fake_launched";
    /// Waits for a stream.
    waits() -> usize = b"fake_waits";
    /// Modules that were loaded.
    modules() -> usize = b"fake_modules";
    /// Parameter loads in the text of the module loaded last.
    parameter_loads() -> usize = b"fake_parameter_loads";
    /// Makes the assembler refuse texts with fewer parameter loads.
    refuse_fewer_loads(least: usize) = b"fake_refuse_fewer_loads";
    /// Lets a capture take so long to begin.
    delay_captures(milliseconds: usize) = b"fake_delay_captures";
    /// Makes the launch of that number fail, counted from now.
    fail_launch(number: usize) = b"fake_fail_launch";
}

impl Fake {
    /// Retains the primary context, as another library does.
    pub fn retain(&self) -> *mut c_void {
        let mut context = std::ptr::null_mut();
        // SAFETY: a function of the fake driver, with the driver's types.
        let status = unsafe {
            let retain: libloading::Symbol<'_, extern "C" fn(*mut *mut c_void, c_int) -> c_int> =
                self.0.get(b"cuDevicePrimaryCtxRetain").expect("a function of the fake driver");
            retain(&raw mut context, 0)
        };
        assert_eq!(status, 0);
        context
    }

    /// Gives one count of the primary context back.
    pub fn release(&self) {
        // SAFETY: as in `retain`.
        let status = unsafe {
            let release: libloading::Symbol<'_, extern "C" fn(c_int) -> c_int> =
                self.0.get(b"cuDevicePrimaryCtxRelease_v2").expect("a function of the fake driver");
            release(0)
        };
        assert_eq!(status, 0);
    }
}

/// Runs `body`, a closure of a test, with the fake driver and these environment variables. Without
/// a rustc to compile the driver, prints a message and runs nothing.
pub fn with_fake_driver<F: FnOnce(&Fake)>(variables: &[(&str, &str)], body: F) {
    if std::env::var_os(INSIDE).is_some() {
        // SAFETY: the fake driver's initialisers do nothing.
        return body(&Fake(unsafe { Library::new("libcuda.so.1") }.expect("the fake driver")));
    }
    let Some(folder) = compiled() else {
        println!("SKIPPED: no rustc to compile the fake driver");
        return;
    };
    // `driver::the_test::{{closure}}`
    let name = std::any::type_name::<F>().split("::").nth(1).expect("the name of a test");
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = [folder].into_iter().chain(std::env::split_paths(&folders));
    let program = std::env::current_exe().expect("this program");
    let mut test = Command::new(program);
    test.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    test.env_remove("GQA_CHECK").envs(variables.iter().copied()).env(INSIDE, "1");
    test.env("LD_LIBRARY_PATH", std::env::join_paths(folders).expect("a list of folders"));
    let output = test.output().expect("this program again");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "no test {name}: {stdout}");
}

/// The folder with the fake driver.
fn compiled() -> Option<PathBuf> {
    static COMPILING: Mutex<()> = Mutex::new(());
    let _guard = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut hash = DefaultHasher::new();
    SOURCE.hash(&mut hash);
    let folders = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = folders.join(format!("fake-driver-{:016x}", hash.finish()));
    if folder.join("libcuda.so.1").is_file() {
        return Some(folder);
    }
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    if Command::new(&rustc).arg("--version").output().is_err() {
        return None;
    }
    // Another process may compile it at the same time.
    fs::create_dir_all(&folder).expect("a folder for the fake driver");
    let part = folder.join(format!("{}.so", std::process::id()));
    let source = folder.join(format!("{}.rs", std::process::id()));
    fs::write(&source, SOURCE).expect("a place for its source");
    let mut compile = Command::new(rustc);
    compile.args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort"]);
    compile.arg("-Clink-arg=-Wl,-soname,libcuda.so.1").args([source.as_os_str(), OsStr::new("-o")]);
    let output = compile.arg(&part).output().expect("rustc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(&part, folder.join("libcuda.so.1")).expect("the fake driver");
    fs::remove_file(source).expect("its source");
    Some(folder)
}
