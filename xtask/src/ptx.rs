//! `cargo xtask ptx`: from the kernels to ptx/, and whether the two still agree.

use crate::module::Module;
use crate::parallel::longest_first;
use crate::place;
use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;
use gqa_ptx::{Manifest, Toolchain, post, read_compressed, sha256, source_hash, write_compressed};
use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

#[derive(ClapArgs, Default)]
pub struct Args {
    /// Head size 128 only: for short rounds, not for shipping.
    #[arg(long, conflicts_with = "check")]
    quick: bool,
    /// Write nothing; compare what the kernels give with ptx/, byte for byte.
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
    /// What `cargo xtask test` asks for.
    pub fn check_everything() -> Self {
        Self { check: true, ..Self::default() }
    }

    fn modules(&self) -> Vec<Module> {
        let chosen = |list: &[String], name: &str| {
            list.is_empty() || list.iter().any(|chosen| chosen == name)
        };
        Module::all()
            .filter(|m| chosen(&self.arch, m.arch) && chosen(&self.family, m.family_name()))
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

fn write(compiled: Vec<Compiled>, args: &Args) -> Result<()> {
    fs::create_dir_all(place::shipped()).context("cannot make ptx/")?;
    let mut manifest = if args.is_everything() {
        Manifest::default()
    } else {
        Manifest::read(&place::manifest())?
    };
    for Compiled { row, text, .. } in compiled {
        write_compressed(&place::shipped().join(&row.file), &text)?;
        manifest.put(row);
    }
    for file in strays(&manifest)? {
        fs::remove_file(place::shipped().join(&file))
            .with_context(|| format!("cannot remove ptx/{file}"))?;
        println!("{file:28} removed: no module of that name");
    }
    Ok(manifest.write(&place::manifest())?)
}

/// Compiles modules of one state of the source.
struct Compiler {
    toolchain: Toolchain,
    quick: bool,
    source: String,
}

/// A module as it would be shipped.
struct Compiled {
    row: gqa_ptx::Module,
    text: String,
    warnings: String,
}

impl Compiler {
    fn new(toolchain: Toolchain, quick: bool) -> Result<Self> {
        Ok(Self { toolchain, quick, source: source_hash(&place::kernels())? })
    }

    fn compile_all(&self, modules: &[Module]) -> Result<Vec<Compiled>> {
        let shipped = |module: &Module| place::shipped().join(module.file());
        let length = |module: &Module| fs::metadata(shipped(module)).map_or(0, |file| file.len());
        let compiled = longest_first(modules.to_vec(), length, |module| self.compile(module));
        let compiled = compiled.into_iter().collect::<Result<Vec<_>>>()?;
        warn(&compiled);
        Ok(compiled)
    }

    fn compile(&self, module: Module) -> Result<Compiled> {
        let started = Instant::now();
        let built = module.build(&self.toolchain, self.quick)?;
        let row = gqa_ptx::Module {
            file: module.file(),
            family: module.family_name().into(),
            arch: module.arch.into(),
            ptx: post::version(&built.ptx)
                .with_context(|| format!("{}: the PTX has no .version", module.name()))?
                .into(),
            compiler: self.toolchain.version().into(),
            source: self.source.clone(),
            sha256: sha256(built.ptx.as_bytes()),
            entries: post::entry_names(&built.ptx),
        };
        let (entries, kib) = (row.entries.len(), built.ptx.len() / 1024);
        println!(
            "{:28} {entries:3} entries {kib:6} KiB {:6.1} s",
            module.name(),
            started.elapsed().as_secs_f32()
        );
        Ok(Compiled { row, text: built.ptx, warnings: built.warnings })
    }
}

/// Shows warnings, of which most are the same for every module.
fn warn(compiled: &[Compiled]) {
    let all = compiled.iter().flat_map(|module| module.warnings.split("\n\n"));
    let different: BTreeSet<_> = all.filter(|warning| !warning.trim().is_empty()).collect();
    different.iter().for_each(|warning| eprintln!("{warning}\n"));
}

/// Compressed PTX in ptx/ that the manifest does not name.
fn strays(manifest: &Manifest) -> Result<Vec<String>> {
    let mut strays = Vec::new();
    for entry in fs::read_dir(place::shipped()).context("cannot list ptx/")? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        if file.ends_with(".ptx.gz") && manifest.module(&file).is_none() {
            strays.push(file);
        }
    }
    Ok(strays)
}

fn check(compiled: Vec<Compiled>, modules: &[Module], args: &Args) -> Result<()> {
    let manifest = Manifest::read(&place::manifest())?;
    let mut problems = Vec::new();
    for Compiled { row, text, .. } in compiled {
        problems.extend(
            difference(&manifest, &row, &text)?
                .map(|problem| format!("  ptx/{}: {problem}", row.file)),
        );
    }
    if args.is_everything() {
        problems.extend(rows_without_module(&manifest, modules));
        problems.extend(
            strays(&manifest)?.iter().map(|file| format!("  ptx/{file}: not in ptx/manifest.json")),
        );
    }
    if problems.is_empty() {
        return Ok(());
    }
    bail!(
        "ptx/ is not what the kernels give:\n{}\nrun `cargo xtask ptx` and `cargo xtask ratchet --bless`, look at what changed, and \
         commit ptx/",
        problems.join("\n")
    )
}

fn rows_without_module(manifest: &Manifest, modules: &[Module]) -> Vec<String> {
    let known = |file: &str| modules.iter().any(|module| module.file() == file);
    let unknown = manifest.modules.iter().filter(|row| !known(&row.file));
    unknown.map(|row| format!("  ptx/{}: the registry has no such module", row.file)).collect()
}

/// How what is shipped differs from a fresh build; `None` if it does not, or if another compiler made it, which may write other text
/// for the same source.
fn difference(manifest: &Manifest, fresh: &gqa_ptx::Module, text: &str) -> Result<Option<String>> {
    let Some(row) = manifest.module(&fresh.file) else {
        return Ok(Some("not in ptx/manifest.json".into()));
    };
    let shipped = read_compressed(&place::shipped().join(&row.file))?;
    if sha256(shipped.as_bytes()) != row.sha256 {
        return Ok(Some("not the text that ptx/manifest.json names".into()));
    }
    if row.source != fresh.source {
        let same = if shipped == text { ", which gives the same PTX" } else { "" };
        return Ok(Some(format!("made from another state of crates/gqa-kernels{same}")));
    }
    if shipped == text {
        return Ok(
            (row.entries != fresh.entries).then(|| "ptx/manifest.json names other entries".into())
        );
    }
    if row.compiler != fresh.compiler {
        println!("  bytes not compared: ptx/{} is by {}", row.file, row.compiler);
        return Ok((row.entries != fresh.entries).then(|| "other entries".into()));
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
