//! Properties of a GPU for the planner. Known GPUs have names, so that plans can be made and
//! explained on a machine without one.

use std::borrow::Cow;
use std::fmt;

/// A GPU as the planner sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Name. A [known device](DeviceInfo::known) has the name that `--device` takes.
    pub name: Cow<'static, str>,
    /// Compute capability, times ten: 90 for 9.0.
    pub sm: u32,
    /// Number of SMs.
    pub multiprocessors: u32,
    /// Largest dynamic shared memory of a CTA, in bytes (the opt-in limit).
    pub shared_bytes: u32,
    /// Size of L2, in bytes.
    pub l2_bytes: u64,
    /// Device memory bandwidth, in bytes per second.
    pub bandwidth: f64,
    /// Dense float16 and bfloat16 matrix operations per second with float32 accumulation.
    pub tensor_flops: f64,
    /// float32 operations per second.
    pub f32_flops: f64,
}

/// Features that some GPUs have, beyond the minimum compute capability of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// Thread-block clusters, whose CTAs access each other's shared memory.
    Clusters,
    /// The tensor memory accelerator (TMA), which copies tiles between global and shared memory.
    Tma,
    /// Programmatic dependent launch: a kernel may start before the preceding one has ended.
    ProgrammaticLaunch,
    /// Register reallocation between warpgroups (`setmaxnreg`).
    RegisterHandover,
    /// Warpgroup matrix products (`wgmma`).
    Wgmma,
    /// Matrix products into tensor memory (`tcgen05`).
    Tcgen05,
}

impl Capability {
    /// Whether GPUs of that compute capability, times ten, have it.
    pub const fn is_of(self, sm: u32) -> bool {
        match self {
            Self::Clusters | Self::Tma | Self::ProgrammaticLaunch | Self::RegisterHandover => {
                sm >= 90
            }
            Self::Wgmma => sm == 90,
            Self::Tcgen05 => matches!(sm, 100..=119),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Clusters => "thread-block clusters",
            Self::Tma => "TMA",
            Self::ProgrammaticLaunch => "programmatic dependent launch",
            Self::RegisterHandover => "setmaxnreg",
            Self::Wgmma => "wgmma",
            Self::Tcgen05 => "tcgen05",
        })
    }
}

/// A row of the table: `[SMs, KiB of shared memory, MiB of L2]`, `[GB/s, tensor TFLOP/s, float32
/// TFLOP/s]`.
const fn row(name: &'static str, sm: u32, units: [u32; 3], rates: [f64; 3]) -> DeviceInfo {
    let [multiprocessors, shared_kib, l2_mib] = units;
    let [bandwidth, tensor, f32] = rates;
    DeviceInfo {
        name: Cow::Borrowed(name),
        sm,
        multiprocessors,
        shared_bytes: shared_kib << 10,
        l2_bytes: (l2_mib as u64) << 20,
        bandwidth: bandwidth * 1e9,
        tensor_flops: tensor * 1e12,
        f32_flops: f32 * 1e12,
    }
}

const H200: DeviceInfo = row("h200", 90, [132, 227, 60], [4800.0, 989.5, 66.9]);

/// Vendor figures; the B300 is assumed to have the B200's number of SMs and size of L2. A name that
/// contains another one precedes it.
static KNOWN: [DeviceInfo; 16] = [
    row("b300", 103, [148, 227, 126], [8000.0, 2250.0, 75.0]),
    row("b200", 100, [148, 227, 126], [8000.0, 2250.0, 80.0]),
    row("thor", 110, [20, 227, 32], [273.0, 258.0, 8.1]),
    row("rtx5090", 120, [170, 99, 96], [1792.0, 209.5, 104.8]),
    row("gb10", 121, [48, 99, 24], [273.0, 61.4, 30.7]),
    H200,
    row("h100", 90, [132, 227, 50], [3350.0, 989.5, 66.9]),
    row("l40s", 89, [142, 99, 96], [864.0, 362.0, 91.6]),
    row("l4", 89, [58, 99, 48], [300.0, 121.0, 30.3]),
    row("rtx4090", 89, [128, 99, 72], [1008.0, 165.2, 82.6]),
    row("orin", 87, [16, 163, 4], [204.8, 42.5, 5.3]),
    row("rtx3090", 86, [82, 99, 6], [936.0, 71.0, 35.6]),
    row("a100", 80, [108, 163, 40], [2039.0, 312.0, 19.5]),
    row("a10", 86, [72, 99, 6], [600.0, 125.0, 31.2]),
    row("t4", 75, [40, 64, 4], [320.0, 65.0, 8.1]),
    row("v100", 70, [80, 96, 6], [900.0, 125.0, 15.7]),
];

impl DeviceInfo {
    /// The device of that name, ignoring case and spaces; `None` if unknown.
    pub fn known(name: &str) -> Option<Self> {
        let wanted = squeeze(name);
        KNOWN.iter().find(|device| device.name == wanted).cloned()
    }

    /// Names that [`known`](Self::known) takes.
    pub fn known_names() -> impl Iterator<Item = &'static str> {
        KNOWN.iter().map(|device| match device.name {
            Cow::Borrowed(name) => name,
            Cow::Owned(_) => "",
        })
    }

    /// The H200, for which the kernels are tuned.
    pub fn h200() -> Self {
        H200
    }

    /// The same device with the table's rates, if the driver's name, architecture and size match a
    /// known device: the driver reports clocks, not attainable rates.
    pub fn with_known_rates(self) -> Self {
        let name = squeeze(&self.name);
        let same = |known: &&Self| {
            let sizes = (known.sm, known.multiprocessors) == (self.sm, self.multiprocessors);
            sizes && name.contains(&*known.name)
        };
        match KNOWN.iter().find(same) {
            Some(&Self { bandwidth, tensor_flops, f32_flops, .. }) => {
                Self { bandwidth, tensor_flops, f32_flops, ..self }
            }
            None => self,
        }
    }

    /// Peak (tensor, float32) FLOP/s of an architecture at that clock.
    pub fn peak_flops(sm: u32, multiprocessors: u32, clock_hz: f64) -> (f64, f64) {
        let (tensor, lanes) = per_clock(sm);
        let clocks = clock_hz * f64::from(multiprocessors);
        (clocks * tensor, clocks * lanes * 2.0)
    }

    /// Whether the GPU has that capability.
    pub const fn has(&self, capability: Capability) -> bool {
        capability.is_of(self.sm)
    }

    /// Compute capability as text, such as "9.0".
    pub fn capability(&self) -> String {
        capability(self.sm)
    }
}

/// 90 as "9.0".
pub fn capability(sm: u32) -> String {
    format!("{}.{}", sm / 10, sm % 10)
}

/// Tensor core operations and float32 lanes, per clock and SM.
fn per_clock(sm: u32) -> (f64, f64) {
    match sm {
        0..=75 => (1024.0, 64.0),
        80 => (2048.0, 64.0),
        87 => (2048.0, 128.0),
        90 => (4096.0, 128.0),
        100..=119 => (8192.0, 128.0),
        _ => (1024.0, 128.0),
    }
}

/// Lower case, letters and digits only.
fn squeeze(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_however_they_are_written() {
        assert_eq!(DeviceInfo::known("RTX 4090").map(|d| d.sm), Some(89));
        assert_eq!(DeviceInfo::known("h200"), Some(DeviceInfo::h200()));
        assert_eq!(DeviceInfo::known("voodoo2"), None);
        assert!(DeviceInfo::known_names().all(|name| DeviceInfo::known(name).is_some()));
    }

    #[test]
    fn capabilities_are_those_of_the_architecture() {
        use Capability::{Clusters, RegisterHandover, Tcgen05, Tma, Wgmma};
        let has = |name: &str| {
            let device = DeviceInfo::known(name).unwrap();
            [Clusters, Tma, RegisterHandover, Wgmma, Tcgen05].map(|what| device.has(what))
        };
        assert_eq!(has("a100"), [false; 5]);
        assert_eq!(has("h100"), [true, true, true, true, false]);
        for with_tensor_memory in ["b200", "b300", "thor"] {
            assert_eq!(has(with_tensor_memory), [true, true, true, false, true]);
        }
        assert_eq!(has("rtx5090"), [true, true, true, false, false]);
    }

    #[test]
    fn a_known_devices_rates_are_the_tables() {
        let read = |name: &'static str, multiprocessors| {
            DeviceInfo { name: name.into(), multiprocessors, bandwidth: 1.0, ..DeviceInfo::h200() }
                .with_known_rates()
                .bandwidth
        };
        assert_eq!(read("NVIDIA H200", 132), DeviceInfo::h200().bandwidth);
        assert_eq!(read("NVIDIA H100 80GB HBM3", 132), 3350e9);
        assert_eq!(read("NVIDIA H100 PCIe", 114), 1.0);
    }

    #[test]
    fn an_architecture_has_a_peak_per_clock() {
        let clocks = [("a100", 1.41e9), ("orin", 1.3e9), ("thor", 1.575e9)];
        for (name, clock) in clocks {
            let device = DeviceInfo::known(name).unwrap();
            let (tensor, f32) = DeviceInfo::peak_flops(device.sm, device.multiprocessors, clock);
            let is_near = |peak: f64, known: f64| (peak / known - 1.0).abs() < 0.01;
            assert!(
                is_near(tensor, device.tensor_flops) && is_near(f32, device.f32_flops),
                "{name}"
            );
        }
    }
}
