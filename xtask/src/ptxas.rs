//! `cargo xtask ptxas`: registers, spills and shared memory of each entry on each GPU.

use crate::loops;
use crate::parallel::longest_first;
use crate::place;
use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;
use gqa_kernels::registry::{self, Target, number};
use gqa_ptx::{Manifest, Module, Ptxas, Report, Usage};
use std::fs;
use std::path::PathBuf;

/// The oldest GPU that today's assembler supports; older targets are assembled for it.
const OLDEST: u32 = 75;
/// Targets besides a module's own. `sm_121a` is left out, because its machine code was that of
/// `sm_120a` in all of 214 entries.
const TARGETS: [&str; 5] = ["sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"];

/// Hot entries, without their element type, that may spill on a GPU, and how many bytes, stores and
/// loads together.
///
/// - Most decode and append kernels here spill as general text only. With a layer's constants
///   folded they do not, but for two of 4 bits (`crates/gqa-host/tests/suite/folded.rs`,
///   `docs/results/2026-11-28-h200-constants`) and `decode_d128_r32` over pages, by 28 bytes
///   (`docs/decisions.md`).
/// - On `sm_90` a decode kernel with spills was faster than the one with eight warps and without
///   (`docs/results/2026-11-26-h100-ampere`); other GPUs were not measured.
/// - On `sm_75` copies to shared memory go through registers.
/// - On Hopper float8 products at head size 256, and all tiles of head sizes 192 and 256, spill
///   where a key tile is masked or is the last one, more with splits, but not in the mainloop. Over
///   a quantized paged cache the scheduler's warp spills.
/// - `sm_120` lacks shared memory for `tiled_tma`, and `sm_89` for two CTAs with tiles of 64 keys.
/// - `append_dequantized` and `paged_append` are compiled for four CTAs per SM, which on Hopper is
///   faster with spills than three CTAs without (`docs/results/2026-11-28-h200-float8-keys`,
///   `2026-11-28-h200-batches`).
const SPILLS: [(&str, &str, u32); 109] = [
    ("gqa_append_dequantized", "sm_100a", 128),
    ("gqa_append_dequantized", "sm_103a", 128),
    ("gqa_append_dequantized", "sm_120a", 128),
    ("gqa_append_dequantized", "sm_75", 128),
    ("gqa_append_dequantized", "sm_80", 128),
    ("gqa_append_dequantized", "sm_89", 128),
    ("gqa_append_dequantized", "sm_90a", 128),
    ("gqa_append_quantized", "sm_100a", 12),
    ("gqa_append_quantized", "sm_103a", 12),
    ("gqa_append_quantized", "sm_120a", 280),
    ("gqa_append_quantized", "sm_90a", 12),
    ("gqa_decode_d128_r32", "sm_100a", 48),
    ("gqa_decode_d128_r32", "sm_103a", 56),
    ("gqa_decode_d128_r32", "sm_80", 80),
    ("gqa_decode_d128_r32", "sm_89", 88),
    ("gqa_decode_d128_r32", "sm_90", 64),
    ("gqa_decode_d128_r32_w4", "sm_100a", 32),
    ("gqa_decode_d128_r32_w4", "sm_103a", 32),
    ("gqa_decode_d128_r32_w4", "sm_120a", 52),
    ("gqa_decode_d128_r32_w4", "sm_80", 64),
    ("gqa_decode_d128_r32_w4", "sm_89", 72),
    ("gqa_decode_d128_r32_w4", "sm_90", 32),
    ("gqa_decode_d256_r64_mma", "sm_120a", 16),
    ("gqa_decode_d256_r64_mma_w4", "sm_120a", 8),
    ("gqa_decode_d256_r8", "sm_100a", 8),
    ("gqa_decode_d256_r8", "sm_103a", 8),
    ("gqa_decode_d256_r8", "sm_120a", 76),
    ("gqa_decode_d256_r8", "sm_80", 8),
    ("gqa_decode_d256_r8", "sm_89", 20),
    ("gqa_decode_d256_r8", "sm_90", 8),
    ("gqa_decode_i4_d128_r16_w4", "sm_120a", 264),
    ("gqa_decode_i4_d128_r16_w4", "sm_90", 232),
    ("gqa_decode_i4_d256_r16", "sm_100a", 120),
    ("gqa_decode_i4_d256_r16", "sm_103a", 136),
    ("gqa_decode_i4_d256_r16", "sm_120a", 176),
    ("gqa_decode_i4_d256_r16", "sm_80", 104),
    ("gqa_decode_i4_d256_r16", "sm_89", 104),
    ("gqa_decode_i4_d256_r16", "sm_90", 120),
    ("gqa_decode_i4_d256_r8", "sm_80", 8),
    ("gqa_decode_i4_d256_r8", "sm_90", 8),
    ("gqa_decode_padded_d256_r8_w4", "sm_100a", 28),
    ("gqa_decode_padded_d256_r8_w4", "sm_103a", 28),
    ("gqa_decode_padded_d256_r8_w4", "sm_120a", 112),
    ("gqa_decode_padded_d256_r8_w4", "sm_80", 8),
    ("gqa_decode_padded_d256_r8_w4", "sm_89", 8),
    ("gqa_decode_padded_d256_r8_w4", "sm_90", 24),
    ("gqa_decode_padded_i4_d128_r16_w4", "sm_120a", 40),
    ("gqa_decode_padded_i4_d128_r16_w4", "sm_90", 20),
    ("gqa_decode_q8_d128_r16", "sm_80", 8),
    ("gqa_decode_q8_d128_r8", "sm_120a", 8),
    ("gqa_decode_q8_d128_r8", "sm_80", 16),
    ("gqa_decode_q8_d128_r8", "sm_89", 24),
    ("gqa_float8_operands", "sm_90a", 8),
    ("gqa_hopper_d192", "sm_90a", 12),
    ("gqa_hopper_float8_d256", "sm_90a", 240),
    ("gqa_hopper_paged_d192", "sm_90a", 12),
    ("gqa_hopper_paged_quantized_d128", "sm_90a", 24),
    ("gqa_hopper_paged_quantized_d64", "sm_90a", 24),
    ("gqa_hopper_paged_quantized_f8_d128", "sm_90a", 96),
    ("gqa_hopper_paged_quantized_f8_d64", "sm_90a", 120),
    ("gqa_hopper_paged_quantized_split_d128", "sm_90a", 408),
    ("gqa_hopper_paged_quantized_split_d64", "sm_90a", 140),
    ("gqa_hopper_paged_quantized_split_f8_d128", "sm_90a", 468),
    ("gqa_hopper_paged_quantized_split_f8_d64", "sm_90a", 292),
    ("gqa_hopper_paged_split_d128", "sm_90a", 264),
    ("gqa_hopper_paged_split_d192", "sm_90a", 328),
    ("gqa_hopper_paged_split_d256", "sm_90a", 128),
    ("gqa_hopper_paged_split_d96", "sm_90a", 28),
    ("gqa_hopper_split_d128", "sm_90a", 40),
    ("gqa_hopper_split_d192", "sm_90a", 24),
    ("gqa_hopper_split_d64", "sm_90a", 24),
    ("gqa_hopper_wide", "sm_90a", 28),
    ("gqa_paged_append", "sm_100a", 12),
    ("gqa_paged_append", "sm_103a", 12),
    ("gqa_paged_append", "sm_120a", 12),
    ("gqa_paged_append", "sm_75", 20),
    ("gqa_paged_append", "sm_80", 20),
    ("gqa_paged_append", "sm_89", 12),
    ("gqa_paged_append", "sm_90a", 12),
    ("gqa_paged_append_quantized", "sm_100a", 64),
    ("gqa_paged_append_quantized", "sm_103a", 64),
    ("gqa_paged_append_quantized", "sm_120a", 32),
    ("gqa_paged_append_quantized", "sm_75", 40),
    ("gqa_paged_append_quantized", "sm_80", 24),
    ("gqa_paged_append_quantized", "sm_89", 24),
    ("gqa_paged_append_quantized", "sm_90a", 64),
    ("gqa_paged_gaps_f32", "sm_75", 160),
    ("gqa_paged_gaps_f32", "sm_80", 144),
    ("gqa_paged_gaps_f32", "sm_89", 144),
    ("gqa_qk_norm", "sm_100a", 8),
    ("gqa_qk_norm", "sm_103a", 8),
    ("gqa_qk_norm", "sm_80", 8),
    ("gqa_qk_norm", "sm_90a", 8),
    ("gqa_split_kv_d192", "sm_75", 148),
    ("gqa_tiled_d128", "sm_75", 92),
    ("gqa_tiled_d128_k64", "sm_89", 24),
    ("gqa_tiled_d160", "sm_75", 204),
    ("gqa_tiled_masked_d128", "sm_89", 24),
    ("gqa_tiled_masked_d256", "sm_120a", 16),
    ("gqa_tiled_paged_d128", "sm_80", 12),
    ("gqa_tiled_paged_d128", "sm_89", 24),
    ("gqa_tiled_paged_d256", "sm_103a", 12),
    ("gqa_tiled_paged_d256", "sm_120a", 12),
    ("gqa_tiled_paged_d256", "sm_89", 40),
    ("gqa_tiled_paged_d256", "sm_90a", 40),
    ("gqa_tiled_tma_d128", "sm_103a", 16),
    ("gqa_tiled_tma_d128", "sm_120a", 80),
    ("gqa_tiled_tma_d192", "sm_120a", 8),
    ("gqa_tiled_tma_d256", "sm_120a", 28),
];

#[derive(ClapArgs)]
pub struct Args {
    /// Only modules of this family, e.g. tiled.
    #[arg(long)]
    family: Vec<String>,
}

/// Assembles modules and records success in the manifest.
pub fn run(args: &Args) -> Result<()> {
    let ptxas = Ptxas::find_or_install(&place::cuda_tools())?;
    let mut manifest = Manifest::read(&place::manifest())?;
    let is_chosen =
        |module: &Module| args.family.is_empty() || args.family.contains(&module.family);
    let mut modules = manifest.modules.clone();
    modules.retain(is_chosen);
    let reports = assemble(&ptxas, &modules)?;
    table(&reports);
    judge(&reports)?;
    loops::check(&cubins_of_hopper(&modules))?;
    for module in manifest.modules.iter_mut().filter(|module| is_chosen(module)) {
        module.assembled = module.sha256.clone();
    }
    Ok(manifest.write(&place::manifest())?)
}

/// The check of `cargo xtask test`: assembles modules that changed since they were last assembled,
/// or all if `full`. `Some` is the reason why it was skipped.
pub fn check(full: bool) -> Result<Option<String>> {
    let mut modules = Manifest::read(&place::manifest())?.modules;
    modules.retain(|module| full || !module.is_assembled());
    if modules.is_empty() {
        println!("every module is unchanged since it was assembled; not assembled again");
        return Ok(None);
    }
    match Ptxas::find_or_install(&place::cuda_tools()) {
        Ok(ptxas) => {
            judge(&assemble(&ptxas, &modules)?)?;
            loops::check(&cubins_of_hopper(&modules))?;
            Ok(None)
        }
        Err(reason) => Ok(Some(reason.to_string())),
    }
}

/// ptxas's report on one module for one GPU.
struct Assembled {
    module: String,
    arch: String,
    report: Report,
}

/// Where modules are assembled.
fn assembled() -> PathBuf {
    place::target().join("ptx/assembled")
}

/// Binaries of the modules that use `wgmma`.
fn cubins_of_hopper(modules: &[Module]) -> Vec<PathBuf> {
    let hopper = modules.iter().filter(|module| module.family.starts_with("hopper"));
    let name = |module: &Module| format!("{}.{}.cubin", module.name(), module.arch);
    hopper.map(|module| assembled().join(name(module))).collect()
}

/// Assembles shipped modules, each for its own GPU and the newer ones it runs on.
fn assemble(ptxas: &Ptxas, modules: &[Module]) -> Result<Vec<Assembled>> {
    let folder = assembled();
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut jobs = Vec::new();
    for module in modules {
        let path = folder.join(format!("{}.ptx", module.name()));
        fs::write(&path, module.read(&place::shipped())?)?;
        jobs.extend(targets(module).into_iter().map(|arch| (module.name(), path.clone(), arch)));
    }
    let length =
        |(_, path, _): &(String, PathBuf, String)| fs::metadata(path).map_or(0, |file| file.len());
    let done = longest_first(jobs, length, |(module, path, arch)| {
        ptxas.assemble(&path, &arch).map(|report| Assembled { module, arch, report })
    });
    Ok(done.into_iter().collect::<Result<_, _>>()?)
}

/// The module's own GPU and the newer ones that run it; a module for a target with an `a` runs on
/// its own GPU only, and one for a target with an `f` on GPUs of its family. A GPU takes kernels
/// with clusters only from the newest module that it runs.
fn targets(module: &Module) -> Vec<String> {
    let (own, only) = number(&module.arch);
    if only {
        let runs = |arch: &&str| registry::runs_on(&module.arch, number(arch).0);
        return TARGETS.into_iter().filter(runs).map(str::to_owned).collect();
    }
    let mut entries = module.kernels.iter().filter_map(|kernel| registry::find(&kernel.name));
    let entry = entries.next();
    // A module for one architecture may need a newer driver than the machine has.
    let replaces = |other: &Target, sm: u32| {
        let (newer, only) = number(other.arch);
        newer > own && !only && other.runs_on(sm)
    };
    let replaced =
        |sm: u32| entry.is_some_and(|entry| entry.targets().any(|other| replaces(other, sm)));
    let is_newer = |arch: &&str| number(arch).0 > own && !replaced(number(arch).0);
    let newer = TARGETS.into_iter().filter(is_newer).map(str::to_owned);
    [format!("sm_{}", own.max(OLDEST))].into_iter().chain(newer).collect()
}

fn table(reports: &[Assembled]) {
    println!(
        "{:16} {:8} {:44} {:>5} {:>6} {:>13} {:>7}",
        "module", "GPU", "entry", "regs", "stack", "spill st/ld", "smem"
    );
    for Assembled { module, arch, report } in reports {
        for usage in &report.usage {
            let Usage { entry, registers, stack, spill_stores, spill_loads, shared } = usage;
            let shared = shared + registry::find(entry).map_or(0, |entry| entry.shared_bytes);
            let spills = format!("{spill_stores}/{spill_loads}");
            println!(
                "{module:16} {arch:8} {entry:44} {registers:5} {stack:6} {spills:>13} {shared:7}"
            );
        }
        report.warnings.iter().for_each(|warning| println!("{module:16} {arch:8} {warning}"));
    }
}

/// Fails if a hot entry spills more than is listed, has a stack frame, or made ptxas give up an
/// optimisation.
fn judge(reports: &[Assembled]) -> Result<()> {
    let problems: Vec<String> = reports.iter().flat_map(problems).collect();
    if problems.is_empty() {
        let entries: usize = reports.iter().map(|assembled| assembled.report.usage.len()).sum();
        println!(
            "{entries} assemblies; no hot entry spills more than is listed, or has a C75xx warning"
        );
        return Ok(());
    }
    bail!("hot entries must stay in registers:\n  {}", problems.join("\n  "))
}

fn problems(assembled: &Assembled) -> Vec<String> {
    let Assembled { module, arch, report } = assembled;
    let usage = report.usage.iter().filter(|usage| {
        let spilled = usage.spill_stores + usage.spill_loads;
        let tolerated = tolerated(&usage.entry, arch);
        is_hot(&usage.entry) && (spilled > tolerated || usage.stack > 0 && tolerated == 0)
    });
    let usage = usage.map(|u| {
        format!(
            "{module} on {arch}, {}: {} bytes of stack, spills {}/{}",
            u.entry, u.stack, u.spill_stores, u.spill_loads
        )
    });
    // A warning without an entry's name may concern any entry.
    let about_cold = |text: &str| {
        registry::entries().any(|entry| !entry.hot && text.contains(&format!("'{}'", entry.name)))
    };
    let warnings = report.warnings.iter().filter(|text| text.contains("(C75") && !about_cold(text));
    usage.chain(warnings.map(|text| format!("{module} on {arch}: {text}"))).collect()
}

/// Bytes that an entry may spill on a GPU, from [`SPILLS`].
fn tolerated(entry: &str, arch: &str) -> u32 {
    let name = entry.replace("_bf16", "").replace("_f16", "");
    let row = SPILLS.iter().find(|row| (row.0, row.1) == (name.as_str(), arch));
    row.map_or(0, |row| row.2)
}

fn is_hot(entry: &str) -> bool {
    registry::find(entry).is_some_and(|entry| entry.hot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gqa_ptx::Kernel;

    fn module(arch: &str) -> Module {
        let text = String::new;
        Module {
            family: text(),
            arch: arch.into(),
            ptx: text(),
            compiler: text(),
            source: text(),
            sha256: text(),
            assembled: text(),
            kernels: Vec::new(),
        }
    }

    #[test]
    fn modules_are_assembled_for_where_they_run() {
        let newer = ["sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"];
        assert_eq!(targets(&module("sm_70")), [&["sm_75"][..], &newer].concat());
        assert_eq!(targets(&module("sm_80")), [&["sm_80"][..], &newer].concat());
        assert_eq!(targets(&module("sm_90")), [&["sm_90"][..], &newer[2..]].concat());
        assert_eq!(targets(&module("sm_90a")), ["sm_90a"]);
        assert_eq!(targets(&module("sm_100f")), ["sm_100a", "sm_103a"]);
        let of = |name: &str, arch| {
            let kernel = Kernel { name: name.into(), ..Kernel::default() };
            targets(&Module { kernels: vec![kernel], ..module(arch) })
        };
        // GPUs covered by a newer target are left to it.
        assert_eq!(of("gqa_tiled_f16_d64", "sm_75"), ["sm_75"]);
        assert_eq!(of("gqa_decode_f16_d128_r8", "sm_80"), ["sm_80", "sm_89"]);
        // Except for modules that only one architecture runs, whose driver may be too old for them.
        assert_eq!(of("gqa_tiled_f16_d64", "sm_80"), [&["sm_80"][..], &newer].concat());
    }

    #[test]
    fn spills_and_warnings_of_hot_entries_are_problems() {
        let Some(hot) = registry::entries().find(|entry| entry.hot) else { return };
        let assembled = |usage: Usage, warnings: Vec<String>| Assembled {
            module: "m".into(),
            arch: "sm_90a".into(),
            report: Report { usage: vec![usage], warnings },
        };
        let entry = || hot.name.to_owned();
        let count = |usage, warnings| problems(&assembled(usage, warnings)).len();
        assert_eq!(count(Usage { entry: entry(), ..Usage::default() }, vec![]), 0);
        assert_eq!(count(Usage { entry: entry(), stack: 8, ..Usage::default() }, vec![]), 1);
        assert_eq!(count(Usage { entry: entry(), spill_loads: 8, ..Usage::default() }, vec![]), 1);
        let known = |bytes| {
            let entry = "gqa_tiled_masked_bf16_d256".to_owned();
            let usage = Usage { entry, stack: 8, spill_stores: bytes, ..Usage::default() };
            let on =
                |arch: &str| Assembled { arch: arch.into(), ..assembled(usage.clone(), vec![]) };
            ["sm_120a", "sm_90a"].map(|arch| problems(&on(arch)).len())
        };
        assert_eq!((known(16), known(17)), ([0, 1], [1, 1]));
        assert_eq!(count(Usage { entry: "cold".into(), stack: 8, ..Usage::default() }, vec![]), 0);
        assert_eq!(
            count(Usage { entry: entry(), ..Usage::default() }, vec!["(C7510) serialized".into()]),
            1
        );
    }
}
