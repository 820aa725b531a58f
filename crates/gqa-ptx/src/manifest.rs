//! The PTX a repository ships: compressed files and a list of what they hold and come from.

use crate::{Error, Result};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The list, `manifest.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// In the order of their files.
    pub modules: Vec<Module>,
}

/// One file of PTX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Name of the gzip file, beside the manifest.
    pub file: String,
    /// Group of kernels it holds.
    pub family: String,
    /// GPU it is for, e.g. `sm_80`.
    pub arch: String,
    /// PTX version, e.g. `7.0`: decides which drivers load it.
    pub ptx: String,
    /// Compiler it was made with.
    pub compiler: String,
    /// [`source_hash`] of the crate it was made from.
    pub source: String,
    /// [`sha256`] of the text.
    pub sha256: String,
    /// Entry names.
    pub entries: Vec<String>,
}

impl Manifest {
    /// Of a file; empty where there is none.
    pub fn read(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Ok(Self::default());
        }
        let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
        serde_json::from_str(&text).map_err(|source| Error::Format { path: path.into(), source })
    }

    /// Into a file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| Error::Format { path: path.into(), source })?;
        fs::write(path, text + "\n").map_err(Error::io("write", path))
    }

    /// The module in that file.
    pub fn module(&self, file: &str) -> Option<&Module> {
        self.modules.iter().find(|module| module.file == file)
    }

    /// Adds a module, in place of the one with the same file.
    pub fn put(&mut self, module: Module) {
        self.modules.retain(|other| other.file != module.file);
        self.modules.push(module);
        self.modules.sort_by(|a, b| a.file.cmp(&b.file));
    }
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 over the names and contents of all files in a crate's `Cargo.toml` and `src`: says whether PTX is of this source without
/// compiling it.
pub fn source_hash(krate: &Path) -> Result<String> {
    let mut files = vec![krate.join("Cargo.toml")];
    collect(&krate.join("src"), &mut files)?;
    let mut named = Vec::new();
    for file in files {
        let text = fs::read(&file).map_err(Error::io("read", &file))?;
        let name = file.strip_prefix(krate).unwrap_or(&file).to_string_lossy().replace('\\', "/");
        named.push((name, sha256(&text)));
    }
    named.sort();
    Ok(sha256(
        named.iter().map(|(name, hash)| format!("{hash}  {name}\n")).collect::<String>().as_bytes(),
    ))
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// Writes text as gzip, without time or name, so that the same text gives the same file.
pub fn write_compressed(path: &Path, text: &str) -> Result<()> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let bytes = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    bytes.and_then(|bytes| fs::write(path, bytes)).map_err(Error::io("write", path))
}

/// Reads text written by [`write_compressed`].
pub fn read_compressed(path: &Path) -> Result<String> {
    let file = fs::File::open(path).map_err(Error::io("open", path))?;
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text).map_err(Error::io("decompress", path))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);
    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("gqa-ptx-{name}-{}", std::process::id()));
            fs::create_dir_all(path.join("src/inner")).unwrap();
            Self(path)
        }
    }
    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn module(file: &str, arch: &str) -> Module {
        let text = |text: &str| text.to_owned();
        Module {
            file: file.into(),
            family: text("f"),
            arch: arch.into(),
            ptx: text("7.0"),
            compiler: text("rustc"),
            source: text("s"),
            sha256: text("h"),
            entries: vec![text("e")],
        }
    }

    #[test]
    fn sha256_is_the_known_one() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn the_source_hash_sees_names_contents_and_folders() {
        let Folder(krate) = &Folder::new("hash");
        fs::write(krate.join("Cargo.toml"), "[package]").unwrap();
        fs::write(krate.join("src/inner/a.rs"), "fn a() {}").unwrap();
        let first = source_hash(krate).unwrap();
        fs::rename(krate.join("src/inner/a.rs"), krate.join("src/inner/b.rs")).unwrap();
        let renamed = source_hash(krate).unwrap();
        fs::write(krate.join("src/inner/b.rs"), "fn b() {}").unwrap();
        let changed = source_hash(krate).unwrap();
        fs::write(krate.join("unrelated"), "x").unwrap();
        assert_eq!(source_hash(krate).unwrap(), changed);
        assert!(first != renamed && renamed != changed);
    }

    #[test]
    fn compressed_text_comes_back_and_is_reproducible() {
        let Folder(folder) = &Folder::new("gzip");
        let (a, b) = (folder.join("a"), folder.join("b"));
        let text = ".version 7.0\n".repeat(100);
        write_compressed(&a, &text).unwrap();
        write_compressed(&b, &text).unwrap();
        assert_eq!(read_compressed(&a).unwrap(), text);
        assert_eq!(fs::read(&a).unwrap(), fs::read(&b).unwrap());
        assert!(fs::metadata(&a).unwrap().len() < 100);
        fs::write(&a, "no gzip").unwrap();
        assert!(read_compressed(&a).unwrap_err().to_string().contains("decompress"));
    }

    #[test]
    fn a_manifest_comes_back_with_modules_replaced_by_file() {
        let Folder(folder) = &Folder::new("manifest");
        let path = folder.join("manifest.json");
        let mut manifest = Manifest::read(&path).unwrap();
        for (file, arch) in [("b", "sm_80"), ("a", "sm_70"), ("b", "sm_90a")] {
            manifest.put(module(file, arch));
        }
        manifest.write(&path).unwrap();
        let read = Manifest::read(&path).unwrap();
        assert_eq!(read.modules, [module("a", "sm_70"), module("b", "sm_90a")]);
        assert_eq!(read.module("b").map(|module| module.arch.as_str()), Some("sm_90a"));
    }
}
