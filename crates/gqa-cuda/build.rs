//! Embeds the shipped PTX: a table row for each module of `ptx/manifest.json`, with the files of
//! its kernels. A file that is missing, or is another than the list says, ends the build.

use gqa_ptx::{Manifest, Module};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{env, fs};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=ptx");
    let folder = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("ptx");
    let modules = Manifest::read(&folder.join("manifest.json"))?.modules;
    if modules.is_empty() {
        return Err(format!("{} lists no PTX: run `cargo xtask ptx`", folder.display()).into());
    }
    let files: BTreeSet<_> =
        modules.iter().flat_map(|module| &module.kernels).map(|kernel| &kernel.file).collect();
    // Modules share files, which the library has once.
    let places: BTreeMap<_, _> = files.into_iter().enumerate().map(|(i, file)| (file, i)).collect();
    let packed = places.iter().map(|(file, i)| {
        format!("static PACKED_{i}: &[u8] = include_bytes!({:?});\n", folder.join(file))
    });
    let packed = packed.collect::<String>();
    let row = |module| row(&folder, module, &places);
    let rows = modules.iter().map(row).collect::<Result<String>>()?;
    let table = format!("{packed}static SHIPPED: &[Shipped] = &[\n{rows}];\n");
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("ptx.rs"), table)?;
    Ok(())
}

fn row(folder: &Path, module: &Module, places: &BTreeMap<&String, usize>) -> Result<String> {
    let mut files: BTreeMap<usize, Vec<(&str, Option<&str>)>> = BTreeMap::new();
    for kernel in &module.kernels {
        kernel.read(folder)?;
        let row = (kernel.name.as_str(), kernel.twin.as_deref());
        files.entry(places[&kernel.file]).or_default().push(row);
    }
    let files = files.iter().map(|(i, kernels)| {
        format!("        File {{ kernels: &{kernels:?}, packed: PACKED_{i} }},\n")
    });
    let files = files.collect::<String>();
    let Module { family, arch, ptx, .. } = module;
    Ok(format!(
        "    Shipped {{ family: {family:?}, arch: {arch:?}, ptx_version: {ptx:?}, files: &[\n{files}    ] }},\n"
    ))
}
