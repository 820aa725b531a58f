//! `cargo xtask ptx`: compiles the kernels to the PTX that gqa-cuda ships, or checks that the two
//! agree.

use crate::module::Module;
use crate::parallel::longest_first;
use crate::place;
use anyhow::{Context, Result, bail, ensure};
use clap::Args as ClapArgs;
use gqa_ptx::{Manifest, Toolchain, post, sha256, source_hash, write_packed};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

#[derive(ClapArgs, Default)]
pub struct Args {
    /// Head size 128 only: for short rounds, not for release.
    #[arg(long, conflicts_with = "check")]
    quick: bool,
    /// Writes nothing; compares fresh PTX with the shipped PTX, byte for byte.
    #[arg(long)]
    check: bool,
    /// Only modules for this GPU, e.g. sm_90a.
    #[arg(long)]
    arch: Vec<String>,
    /// Only modules of this family, e.g. tiled.
    #[arg(long)]
    family: Vec<String>,
}

impl Args {
    fn check_everything() -> Self {
        Self { check: true, ..Self::default() }
    }

    fn modules(&self) -> Vec<Module> {
        let chosen = |list: &[String], name: &str| {
            list.is_empty() || list.iter().any(|chosen| chosen == name)
        };
        Module::all()
            .filter(|m| chosen(&self.arch, m.target.arch) && chosen(&self.family, m.family_name()))
            .collect()
    }

    fn is_everything(&self) -> bool {
        self.arch.is_empty() && self.family.is_empty()
    }
}

pub fn run(args: &Args) -> Result<()> {
    let toolchain = Toolchain::find_or_install()?;
    println!("{toolchain}");
    let modules = args.modules();
    if modules.is_empty() {
        let names: Vec<_> = Module::all().map(Module::name).collect();
        bail!("no module is chosen; there are {}", names.join(", "));
    }
    let compiled = Compiler::new(toolchain, args.quick)?.compile_all(&modules)?;
    if args.check { check(compiled, &modules, args) } else { write(compiled, args) }
}

/// The check of `cargo xtask test`: recompiles everything and reports differences if the manifest
/// is of other sources, or if `full`.
pub fn check_shipped(full: bool) -> Result<()> {
    let (manifest, source) = (Manifest::read(&place::manifest())?, source_hash(&place::kernels())?);
    let is_of_source =
        |module: Module| manifest.module(&module.name()).is_some_and(|row| row.source == source);
    if full || !Module::all().all(is_of_source) {
        return run(&Args::check_everything());
    }
    let damaged = manifest.modules.iter().filter_map(|row| match row.read(&place::shipped()) {
        Ok(text) if sha256(text.as_bytes()) == row.sha256 => None,
        Ok(_) => Some(format!("{}: not the text that the manifest names", row.name())),
        Err(error) => Some(format!("{}: {error}", row.name())),
    });
    let damaged: Vec<_> = damaged.collect();
    ensure!(damaged.is_empty(), "{}\nrun `cargo xtask ptx`", damaged.join("\n"));
    println!("{} modules, compiled from this source", manifest.modules.len());
    Ok(())
}

fn write(compiled: Vec<Compiled>, args: &Args) -> Result<()> {
    let mut manifest = Manifest::read(&place::manifest())?;
    if args.is_everything() {
        let is_known = |name: &str| Module::all().any(|module| module.name() == name);
        manifest.modules.retain(|row| is_known(&row.name()));
    }
    let modules = compiled.into_iter().map(|Compiled { row, text, .. }| (row, text)).collect();
    let files = manifest.put(&place::shipped(), modules)?.into_iter().collect();
    let length = |(_, text): &(String, String)| text.len() as u64;
    let written = longest_first(files, length, |(file, text)| {
        write_packed(&place::shipped(), &file, &text).map(|sha256| (file, sha256))
    });
    for written in written {
        let (file, sha256) = written?;
        manifest.note(&file, &sha256);
    }
    for file in strays(&manifest)? {
        fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
        println!("{} removed: no kernel of that name", file.display());
    }
    twins(&manifest);
    Ok(manifest.write(&place::manifest())?)
}

/// Prints how many float16 kernels are derived from their bfloat16 twins' PTX, and which are not
/// although they have a twin.
fn twins(manifest: &Manifest) {
    let of = |module: &gqa_ptx::Module| {
        let names: BTreeSet<_> = module.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        let has_twin = |name: &&str| {
            name.contains("_f16") && {
                let twin = name.replace("_f16", "_bf16");
                names.contains(twin.as_str())
            }
        };
        let own = module.kernels.iter().filter(|kernel| kernel.twin.is_none());
        own.map(|kernel| kernel.name.as_str())
            .filter(has_twin)
            .map(|name| format!("  {}: {name}", module.name()))
            .collect::<Vec<_>>()
    };
    let kernels = || manifest.modules.iter().flat_map(|module| &module.kernels);
    let twins = kernels().filter(|kernel| kernel.twin.is_some()).count();
    println!("{} kernels, {twins} of them derived from their twins' PTX", kernels().count());
    let own: Vec<_> = manifest.modules.iter().flat_map(of).collect();
    if !own.is_empty() {
        println!(
            "not derived, because they differ from their twins in more than the type:\n{}",
            own.join("\n")
        );
    }
}

/// Compiles modules of one state of the source.
struct Compiler {
    toolchain: Toolchain,
    quick: bool,
    source: String,
    /// The manifest before the run.
    shipped: Manifest,
}

/// A compiled module.
struct Compiled {
    row: gqa_ptx::Module,
    text: String,
    warnings: String,
}

impl Compiler {
    fn new(toolchain: Toolchain, quick: bool) -> Result<Self> {
        let shipped = Manifest::read(&place::manifest())?;
        Ok(Self { toolchain, quick, source: source_hash(&place::kernels())?, shipped })
    }

    fn compile_all(&self, modules: &[Module]) -> Result<Vec<Compiled>> {
        let length = |module: &Module| {
            self.shipped.module(&module.name()).map_or(0, |row| row.kernels.len() as u64)
        };
        let compiled = longest_first(modules.to_vec(), length, |module| self.compile(module));
        let compiled = compiled.into_iter().collect::<Result<Vec<_>>>()?;
        warn(&compiled);
        Ok(compiled)
    }

    /// The manifest's row if it describes this text.
    fn assembled(&self, module: Module, ptx: &str) -> String {
        let row =
            self.shipped.module(&module.name()).filter(|row| row.sha256 == sha256(ptx.as_bytes()));
        row.map(|row| row.assembled.clone()).unwrap_or_default()
    }

    fn compile(&self, module: Module) -> Result<Compiled> {
        let started = Instant::now();
        let built = module.build(&self.toolchain, self.quick)?;
        let row = gqa_ptx::Module {
            family: module.family_name().into(),
            arch: module.target.arch.into(),
            ptx: post::version(&built.ptx)
                .with_context(|| format!("{}: the PTX has no .version", module.name()))?
                .into(),
            compiler: self.toolchain.version().into(),
            source: self.source.clone(),
            sha256: sha256(built.ptx.as_bytes()),
            assembled: self.assembled(module, &built.ptx),
            kernels: Vec::new(),
        };
        let (entries, kib) = (post::entry_names(&built.ptx).len(), built.ptx.len() / 1024);
        println!(
            "{:28} {entries:3} entries {kib:6} KiB {:6.1} s",
            module.name(),
            started.elapsed().as_secs_f32()
        );
        Ok(Compiled { row, text: built.ptx, warnings: built.warnings })
    }
}

/// Prints warnings; most are the same for every module.
fn warn(compiled: &[Compiled]) {
    let all = compiled.iter().flat_map(|module| module.warnings.split("\n\n"));
    let different: BTreeSet<_> = all.filter(|warning| !warning.trim().is_empty()).collect();
    different.iter().for_each(|warning| eprintln!("{warning}\n"));
}

/// Files of kernels that the manifest does not list.
fn strays(manifest: &Manifest) -> Result<Vec<PathBuf>> {
    let kernels = manifest.modules.iter().flat_map(|module| &module.kernels);
    let mut named: BTreeSet<_> =
        kernels.map(|kernel| place::shipped().join(&kernel.file)).collect();
    named.insert(place::manifest());
    Ok(entries(&place::shipped())?.into_iter().filter(|path| !named.contains(path)).collect())
}

/// The files in a folder.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>();
    list().with_context(|| format!("cannot list {}", folder.display()))
}

fn check(compiled: Vec<Compiled>, modules: &[Module], args: &Args) -> Result<()> {
    let manifest = Manifest::read(&place::manifest())?;
    let mut problems = Vec::new();
    for Compiled { row, text, .. } in compiled {
        problems.extend(
            difference(&manifest, &row, &text)?
                .map(|problem| format!("  {}: {problem}", row.name())),
        );
    }
    if args.is_everything() {
        problems.extend(rows_without_module(&manifest, modules));
        problems.extend(
            strays(&manifest)?
                .iter()
                .map(|file| format!("  {}: not in the manifest", file.display())),
        );
    }
    if problems.is_empty() {
        return Ok(());
    }
    bail!(
        "crates/gqa-cuda/ptx/ differs from what the kernels compile to:\n{}\nrun `cargo xtask ptx` \
         and `cargo xtask ratchet --bless`, read the difference, and commit it",
        problems.join("\n")
    )
}

fn rows_without_module(manifest: &Manifest, modules: &[Module]) -> Vec<String> {
    let known = |name: &str| modules.iter().any(|module| module.name() == name);
    let unknown = manifest.modules.iter().map(gqa_ptx::Module::name).filter(|name| !known(name));
    unknown.map(|name| format!("  {name}: the registry has no such module")).collect()
}

/// How the shipped PTX differs from a fresh build. `None` if it does not, or if it is of another
/// compiler version, which may write other text for the same source.
fn difference(manifest: &Manifest, fresh: &gqa_ptx::Module, text: &str) -> Result<Option<String>> {
    let Some(row) = manifest.module(&fresh.name()) else {
        return Ok(Some("not in the manifest".into()));
    };
    let shipped = row.read(&place::shipped())?;
    if sha256(shipped.as_bytes()) != row.sha256 {
        return Ok(Some("not the text that the manifest names".into()));
    }
    if row.source != fresh.source {
        let same = if shipped == text { ", which gives the same PTX" } else { "" };
        return Ok(Some(format!("made from another state of crates/gqa-kernels{same}")));
    }
    if shipped == text {
        return Ok(None);
    }
    if row.compiler != fresh.compiler {
        println!("  bytes not compared: {} is by {}", row.name(), row.compiler);
        let same = post::entry_names(&shipped) == post::entry_names(text);
        return Ok((!same).then(|| "other entries".into()));
    }
    Ok(Some(first_difference(&shipped, text)))
}

fn first_difference(shipped: &str, fresh: &str) -> String {
    let same = shipped.lines().zip(fresh.lines()).take_while(|(a, b)| a == b).count();
    let line = |text: &str| text.lines().nth(same).unwrap_or("(end)").trim().to_owned();
    format!(
        "differs from line {}: shipped `{}`, the kernels give `{}`",
        same + 1,
        line(shipped),
        line(fresh)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_shown() {
        assert_eq!(
            first_difference("a\nb\nc\n", "a\n x\nc\n"),
            "differs from line 2: shipped `b`, the kernels give `x`"
        );
        assert_eq!(
            first_difference("a\n", "a\nb\n"),
            "differs from line 2: shipped `(end)`, the kernels give `b`"
        );
    }

    #[test]
    fn modules_are_chosen_by_gpu_and_family() {
        let args = |arch: &[&str], family: &[&str]| Args {
            arch: arch.iter().map(|&s| s.to_owned()).collect(),
            family: family.iter().map(|&s| s.to_owned()).collect(),
            ..Args::default()
        };
        let names = |args: Args| args.modules().into_iter().map(Module::name).collect::<Vec<_>>();
        assert_eq!(names(args(&[], &[])).len(), Module::all().count());
        assert_eq!(names(args(&["sm_80"], &["tiled"])), ["tiled.sm_80"]);
        assert_eq!(names(args(&["sm_20"], &[])), [""; 0]);
    }
}
