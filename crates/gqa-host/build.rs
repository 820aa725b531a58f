//! Embeds the shipped PTX: one table row per module that `ptx/manifest.json` names.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::{env, fs};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> Result<()> {
    let folder = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../ptx");
    let manifest = folder.join("manifest.json");
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rerun-if-changed={}", manifest.display());
    // Before the first `cargo xtask ptx` there is nothing to embed, and the CUDA back end says so.
    let rows = if manifest.exists() {
        rows(&folder, &fs::read_to_string(&manifest)?)?
    } else {
        Vec::new()
    };
    let table = format!("static SHIPPED: &[Shipped] = &[\n{}];\n", rows.concat());
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("ptx.rs"), table)?;
    Ok(())
}

fn rows(folder: &Path, manifest: &str) -> Result<Vec<String>> {
    let manifest: Value = serde_json::from_str(manifest)?;
    let modules =
        manifest["modules"].as_array().ok_or("ptx/manifest.json has no list of modules")?;
    modules.iter().map(|module| row(folder, module)).collect()
}

fn row(folder: &Path, module: &Value) -> Result<String> {
    let text = |key: &str| {
        module[key].as_str().ok_or(format!("a module of ptx/manifest.json has no {key}"))
    };
    let file = folder.join(text("file")?);
    println!("cargo::rerun-if-changed={}", file.display());
    let entries =
        module["entries"].as_array().ok_or("a module of ptx/manifest.json has no entries")?;
    let entries: Vec<&str> = entries.iter().filter_map(Value::as_str).collect();
    Ok(format!(
        "    Shipped {{ family: {:?}, arch: {:?}, ptx_version: {:?}, entries: &{entries:?}, compressed: include_bytes!({:?}) }},\n",
        text("family")?,
        text("arch")?,
        text("ptx")?,
        file.canonicalize()?,
    ))
}
