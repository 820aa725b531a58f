//! The PTX shipped inside this library, and the modules that a GPU has compiled from it.

use super::deferred::Deferred;
use super::error::{Code, CudaVersion, DriverError};
use super::kernel::Kernel;
use super::raw::{self, Failure, module::Code as Loaded, report};
use super::sys::RawFunction;
use gqa_kernels::registry::{self, Entry};
use gqa_plan::plan::Capability;
use gqa_ptx::Constants;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One PTX module as it is shipped.
#[derive(Debug)]
pub struct Shipped {
    /// Kernels it holds.
    pub family: &'static str,
    /// Target, such as `sm_80`; with an `a` it runs on that architecture only, with an `f` on those
    /// of its family.
    pub arch: &'static str,
    /// PTX version, such as `8.0`.
    pub ptx_version: &'static str,
    files: &'static [File],
}

/// Kernels whose PTX is packed together, beside that of other modules.
#[derive(Debug)]
struct File {
    /// The kernels' names. A float16 kernel without its own PTX also has the name of its bfloat16
    /// twin, from whose PTX [`gqa_ptx::as_f16`] makes it.
    kernels: &'static [(&'static str, Option<&'static str>)],
    /// As `gqa_ptx::pack` makes it.
    packed: &'static [u8],
}

impl File {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        self.kernels.iter().map(|&(name, _)| name)
    }
}

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The PTX modules inside this library.
pub fn shipped() -> &'static [Shipped] {
    SHIPPED
}

impl Shipped {
    /// Name of the module.
    pub fn name(&self) -> String {
        format!("{}.{}", self.family, self.arch)
    }

    /// Whether a device of that compute capability runs the module.
    pub fn runs_on(&self, sm: u32) -> bool {
        registry::runs_on(self.arch, sm)
    }

    /// Names of its kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &'static str> {
        self.files.iter().flat_map(File::names)
    }

    /// The PTX of one kernel; `None` where another module has it. The driver compiles all of a
    /// text, so the text holds that kernel alone.
    ///
    /// # Errors
    ///
    /// None, unless this program was damaged after it was built.
    pub fn ptx(&self, kernel: &str) -> std::io::Result<Option<String>> {
        let of_file = |file: &'static File| {
            let (_, twin) = file.kernels.iter().find(|(name, _)| *name == kernel)?;
            Some((file, *twin))
        };
        let Some((file, twin)) = self.files.iter().find_map(of_file) else {
            return Ok(None);
        };
        let texts = unpacked(file.packed)?;
        let name = twin.unwrap_or(kernel);
        let text = gqa_ptx::section(&texts, self.arch, name);
        let text = text.and_then(|text| gqa_ptx::alone(text, name));
        Ok(if twin.is_some() { text.map(|text| gqa_ptx::as_f16(&text)) } else { text })
    }

    /// First CUDA version whose driver compiles it.
    pub fn needs(&self) -> CudaVersion {
        let (major, minor) = self.ptx_version.split_once('.').unwrap_or((self.ptx_version, "0"));
        let number = |text: &str| text.parse::<u32>().unwrap_or(u32::MAX / 100);
        CudaVersion::for_ptx(number(major) * 10 + number(minor).min(9))
    }

    /// The best module for an entry on a device that its driver can compile.
    fn find(
        entry: &'static Entry,
        sm: u32,
        driver: CudaVersion,
    ) -> Result<&'static Self, DriverError> {
        let holds =
            |module: &&Self| module.runs_on(sm) && module.kernels().any(|name| name == entry.name);
        let mut modules: Vec<_> = SHIPPED.iter().filter(holds).collect();
        modules.sort_by_key(|module| Reverse(registry::number(module.arch)));
        // Code compiled for GPUs without clusters would take each CTA for a cluster of one.
        if entry.max_cluster > 1 {
            modules.truncate(1);
        }
        let best = modules.iter().find(|module| module.needs() <= driver);
        best.copied().ok_or_else(|| match modules.iter().min_by_key(|module| module.needs()) {
            Some(module) => DriverError::DriverTooOld {
                have: driver,
                need: module.needs(),
                module: module.name(),
            },
            None => DriverError::MissingKernel { entry: entry.name, sm },
        })
    }
}

/// The PTX that devices of that compute capability, times ten, get of an entry.
pub(super) fn text(
    entry: &'static Entry,
    sm: u32,
    driver: CudaVersion,
) -> Result<String, DriverError> {
    let missing = DriverError::MissingKernel { entry: entry.name, sm };
    let text = Shipped::find(entry, sm, driver)?.ptx(entry.name);
    text.ok().flatten().ok_or(missing)
}

/// The text of a file. The last one is kept, because a layer's kernels are often of one file.
fn unpacked(packed: &'static [u8]) -> std::io::Result<Arc<str>> {
    static LAST: Mutex<Option<(&[u8], Arc<str>)>> = Mutex::new(None);
    if let Some((last, text)) = &*lock(&LAST)
        && std::ptr::eq(*last, packed)
    {
        return Ok(text.clone());
    }
    let text: Arc<str> = gqa_ptx::unpack(packed)?.into();
    *lock(&LAST) = Some((packed, text.clone()));
    Ok(text)
}

/// A slot for a kernel. Its lock is held while the kernel is compiled, so that threads wait only
/// for a kernel that they need themselves.
type Place = Arc<Mutex<Option<Kernel>>>;

/// Identifies a module: the entry's name, the module's target, and the folded constants.
type Key = (&'static str, &'static str, Constants);

/// The most specialized modules per device: a layer takes one for each of its kernels. They stay
/// loaded, because a captured graph may launch them as long as the device exists.
const MOST_FOLDED: usize = 256;

/// Changes the PTX of a kernel: maps its name and text to another text.
pub(super) type Rewrite = Box<dyn Fn(&str, String) -> String + Send + Sync>;

/// The loaded kernels of a device: a module for each kernel and each set of its constants.
pub(super) struct Modules {
    version: CudaVersion,
    /// Applied to PTX before it is assembled.
    rewrite: Option<Rewrite>,
    places: Mutex<HashMap<Key, Place>>,
    deferred: Mutex<HashMap<Key, Arc<Deferred>>>,
    /// Kernels whose folded PTX the driver has rejected.
    refused: Mutex<HashSet<Key>>,
}

impl Modules {
    pub(super) fn new(version: CudaVersion) -> Self {
        let (places, deferred, refused) = Default::default();
        Self { version, rewrite: None, places, deferred, refused }
    }

    /// Assembles changed PTX instead of the shipped PTX.
    pub(super) fn rewritten(self, rewrite: Rewrite) -> Self {
        Self { rewrite: Some(rewrite), ..self }
    }

    pub(super) fn version(&self) -> CudaVersion {
        self.version
    }

    /// The kernel for compute capability `sm`, times ten, which is the device's or an older one;
    /// compiled and loaded at the first request. Also whether `constants` are folded into it: not
    /// if the device already has the maximum of such modules, or if the driver refuses the
    /// specialized text. The device's context must be entered.
    pub(super) fn kernel(
        &self,
        entry: &'static Entry,
        sm: u32,
        constants: &Constants,
    ) -> Result<(Kernel, bool), DriverError> {
        let shipped = Shipped::find(entry, sm, self.version)?;
        if let Some(place) = self.place_of_folded((entry.name, shipped.arch), constants) {
            match self.loaded(&place, entry, sm, shipped, constants) {
                Ok(kernel) => return Ok((kernel, true)),
                Err(error) => {
                    tracing::warn!(entry = entry.name, %error, "folded PTX is not used");
                    lock(&self.refused).insert((entry.name, shipped.arch, constants.clone()));
                }
            }
        }
        let general = Constants::default();
        let key = (entry.name, shipped.arch, general.clone());
        let place = lock(&self.places).entry(key).or_default().clone();
        Ok((self.loaded(&place, entry, sm, shipped, &general)?, false))
    }

    /// The slot of a specialized kernel; `None` without constants, or if the maximum is reached.
    fn place_of_folded(
        &self,
        (entry, arch): (&'static str, &'static str),
        constants: &Constants,
    ) -> Option<Place> {
        let key = (entry, arch, constants.clone());
        if constants.is_empty() || lock(&self.refused).contains(&key) {
            return None;
        }
        let mut places = lock(&self.places);
        let folded = places.keys().filter(|(.., constants)| !constants.is_empty()).count();
        let is_there = places.contains_key(&key);
        (is_there || folded < MOST_FOLDED).then(|| places.entry(key).or_default().clone())
    }

    /// The kernel that is specialized once launched often enough; plans with equal constants share
    /// it.
    pub(super) fn deferred(
        &self,
        entry: &'static Entry,
        sm: u32,
        constants: Constants,
    ) -> Result<Arc<Deferred>, DriverError> {
        let key = (entry.name, Shipped::find(entry, sm, self.version)?.arch, constants);
        let mut all = lock(&self.deferred);
        if all.len() >= MOST_FOLDED {
            // Plans that are loaded keep theirs.
            all.retain(|_, deferred| Arc::strong_count(deferred) > 1);
        }
        let make = |key: &Key| Arc::new(Deferred::new(entry, sm, key.2.clone()));
        Ok(Arc::clone(all.entry(key).or_insert_with_key(make)))
    }

    fn loaded(
        &self,
        place: &Place,
        entry: &'static Entry,
        sm: u32,
        shipped: &Shipped,
        constants: &Constants,
    ) -> Result<Kernel, DriverError> {
        let mut place = lock(place);
        match *place {
            Some(kernel) => Ok(kernel),
            None => Ok(*place.insert(self.load(entry, sm, shipped, constants)?)),
        }
    }

    fn load(
        &self,
        entry: &'static Entry,
        sm: u32,
        shipped: &Shipped,
        constants: &Constants,
    ) -> Result<Kernel, DriverError> {
        let started = std::time::Instant::now();
        let missing = || DriverError::MissingKernel { entry: entry.name, sm };
        let name = CString::new(entry.name).map_err(|_| missing())?;
        let loaded = load(shipped, &name, constants, self)?;
        let (code, function) = loaded.ok_or_else(missing)?;
        let cluster = if Capability::Clusters.is_of(sm) { entry.max_cluster } else { 1 };
        // SAFETY: the function was just loaded.
        let allowed = unsafe { raw::module::allow(function, entry.shared_bytes, cluster) };
        allowed.inspect_err(|_| unload(code))?;
        let seconds = started.elapsed().as_secs_f64();
        let folded = !constants.is_empty();
        tracing::debug!(
            entry = entry.name,
            module = shipped.name(),
            folded,
            seconds,
            "compiled PTX"
        );
        Ok(Kernel { code, function })
    }

    /// Unloads all modules. The device's context must be entered.
    pub(super) fn unload(&self) {
        for (_, place) in lock(&self.places).drain() {
            lock(&place).take().into_iter().for_each(|kernel| unload(kernel.code));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unloads code whose function is not used again.
fn unload(code: Loaded) {
    // SAFETY: made by `load`; its function is not used again.
    report(unsafe { raw::module::unload(code) });
}

/// The kernel with folded constants, in a module of its own; `None` where the shipped text lacks
/// it.
fn load(
    shipped: &Shipped,
    name: &CStr,
    constants: &Constants,
    modules: &Modules,
) -> Result<Option<(Loaded, RawFunction)>, DriverError> {
    let rejected = |code, log| DriverError::PtxRejected { module: shipped.name(), code, log };
    let unreadable =
        |error: &dyn std::fmt::Display| rejected(Code::INVALID_IMAGE, error.to_string());
    let entry = name.to_str().map_err(|error| unreadable(&error))?;
    let Some(text) = shipped.ptx(entry).map_err(|error| unreadable(&error))? else {
        return Ok(None);
    };
    let text = match constants.is_empty() {
        true => text,
        false => gqa_ptx::fold(&text, entry, constants),
    };
    let text = match &modules.rewrite {
        None => text,
        Some(rewrite) => rewrite(entry, text),
    };
    let text = CString::new(text).map_err(|error| unreadable(&error))?;
    raw::module::load(&text, name).map(Some).map_err(|(Failure { code, .. }, log)| match code {
        Code::UNSUPPORTED_PTX_VERSION => DriverError::DriverTooOld {
            have: modules.version,
            need: shipped.needs(),
            module: shipped.name(),
        },
        _ => rejected(code, log),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(arch: &'static str) -> Shipped {
        Shipped { family: "tiled", arch, ptx_version: "8.0", files: &[] }
    }

    #[test]
    fn architecture_specific_modules_run_on_that_architecture_only() {
        let runs = |arch, sms: [u32; 5]| sms.map(|sm| module(arch).runs_on(sm));
        let sms = [70, 80, 90, 100, 120];
        assert_eq!(runs("sm_70", sms), [true; 5]);
        assert_eq!(runs("sm_80", sms), [false, true, true, true, true]);
        assert_eq!(runs("sm_90a", sms), [false, false, true, false, false]);
        assert_eq!(runs("sm_100f", [90, 100, 103, 110, 120]), [false, true, true, false, false]);
        assert_eq!(runs("sm_103f", [90, 100, 103, 110, 120]), [false, false, true, false, false]);
        assert!(registry::number("sm_100f") > registry::number("sm_90"));
        assert!(registry::number("sm_90a") > registry::number("sm_80"));
        assert!(registry::number("sm_90a") > registry::number("sm_90"));
    }

    #[test]
    fn kernels_with_clusters_are_not_replaced_by_those_without() {
        let find = |name, sm, version| {
            Shipped::find(registry::find(name).unwrap(), sm, CudaVersion::for_ptx(version))
        };
        let arch = |name, sm, version| find(name, sm, version).unwrap().arch;
        let step = "gqa_decode_f16_d128_r8";
        assert_eq!([arch(step, 80, 70), arch(step, 90, 81)], ["sm_80", "sm_90"]);
        assert!(matches!(find(step, 90, 80), Err(DriverError::DriverTooOld { .. })));
        assert!(matches!(find(step, 75, 81), Err(DriverError::MissingKernel { .. })));
        let prompt = "gqa_tiled_f16_d128";
        assert_eq!([arch(prompt, 90, 80), arch(prompt, 90, 70)], ["sm_90a", "sm_80"]);
    }

    #[test]
    fn a_module_names_the_driver_that_it_needs() {
        assert_eq!(module("sm_90a").needs().to_string(), "12.0");
    }

    #[test]
    fn shipped_modules_hold_the_kernels_they_name() {
        // For each file, the number of kernels over all modules that have PTX of their own.
        let mut named = HashMap::new();
        for module in shipped() {
            assert!(module.kernels().next().is_some(), "{}", module.name());
            for File { kernels, packed } in module.files {
                let own = kernels.iter().filter(|(_, twin)| twin.is_none()).count();
                named.entry(packed.as_ptr()).or_insert((packed, 0)).1 += own;
                for (kernel, twin) in *kernels {
                    let text = module.ptx(kernel).unwrap().unwrap();
                    assert!(twin.is_none() || !text.contains("bf16"), "{kernel}");
                    assert!(text.contains(&format!(".visible .entry {kernel}(")), "{kernel}");
                    assert_eq!(text.matches(".entry ").count(), 1, "{kernel}");
                    assert!(text.starts_with(".version ") && text.ends_with("}\n"), "{kernel}");
                    assert!(text.contains(&format!("\n.target {}\n", module.arch)), "{kernel}");
                }
            }
            assert_eq!(module.ptx("gqa").unwrap(), None);
        }
        for (packed, own) in named.into_values() {
            assert_eq!(gqa_ptx::unpack(packed).unwrap().matches(".entry ").count(), own);
        }
    }

    #[test]
    fn every_kernel_is_shipped() {
        let shipped: std::collections::HashSet<_> =
            shipped().iter().flat_map(Shipped::kernels).collect();
        let missing = gqa_kernels::registry::entries().find(|entry| !shipped.contains(entry.name));
        assert!(missing.is_none(), "{missing:?}");
    }
}
