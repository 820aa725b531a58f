//! The PTX that a crate ships: packed files of kernels, and a list of them with their origin.

use crate::error::{Error, Result};
use crate::packed::{pack, unpack};
use crate::text::apart;
use crate::twin::as_f16;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

/// The list, `manifest.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// In the order of their names.
    pub modules: Vec<Module>,
}

/// Kernels that were compiled together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// What its kernels have in common.
    pub family: String,
    /// GPU it is for, e.g. `sm_80`: the folder of its files, beside the list.
    pub arch: String,
    /// PTX version, e.g. `7.0`: decides which drivers load it.
    pub ptx: String,
    /// Compiler it was made with.
    pub compiler: String,
    /// [`source_hash`] of the crate it was made from.
    pub source: String,
    /// [`sha256`] of the text with all kernels.
    pub sha256: String,
    /// `sha256` of the text that ptxas last accepted; empty if none.
    #[serde(default)]
    pub assembled: String,
    /// In the order of the text.
    pub kernels: Vec<Kernel>,
}

/// A kernel, and the file that holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Entry name.
    pub name: String,
    /// The path of its file, relative to the list's folder.
    pub file: String,
    /// [`sha256`] of the file.
    pub sha256: String,
    /// The kernel for bfloat16 whose text the file holds in place of this one's: [`as_f16`] of it
    /// is this one's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub twin: Option<String>,
}

impl Manifest {
    /// Reads a file; empty if there is none.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read, or is not a manifest.
    pub fn read(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Ok(Self::default());
        }
        let text = fs::read_to_string(path).map_err(Error::io("read", path))?;
        serde_json::from_str(&text).map_err(|source| Error::Format { path: path.into(), source })
    }

    /// Writes a file.
    ///
    /// # Errors
    ///
    /// Where the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|source| Error::Format { path: path.into(), source })?;
        fs::write(path, text + "\n").map_err(Error::io("write", path))
    }

    /// The module of that name.
    pub fn module(&self, name: &str) -> Option<&Module> {
        self.modules.iter().find(|module| module.name() == name)
    }

    /// Adds a module, in place of the one with the same name.
    pub fn put(&mut self, module: Module) {
        self.modules.retain(|other| other.name() != module.name());
        self.modules.push(module);
        self.modules.sort_by_key(Module::name);
    }
}

impl Module {
    /// Such as `tiled.sm_80`.
    pub fn name(&self) -> String {
        format!("{}.{}", self.family, self.arch)
    }

    /// Whether ptxas has accepted this very text.
    pub fn is_assembled(&self) -> bool {
        self.assembled == self.sha256
    }

    /// Writes all kernels of a text to files in the list's folder, each kernel a whole PTX text,
    /// [packed](pack). Kernels that differ only in the 16-bit type, the output type, padding or the
    /// tile share a file. A kernel for float16 is left out where [`as_f16`] makes exactly its text
    /// of that of its twin for bfloat16.
    ///
    /// # Errors
    ///
    /// Where a file cannot be written, and where the text cannot be split.
    pub fn write(&mut self, folder: &Path, ptx: &str) -> Result<()> {
        let folder_of_files = folder.join(&self.arch);
        fs::create_dir_all(&folder_of_files).map_err(Error::io("make", &folder_of_files))?;
        let (header, kernels) = apart(ptx);
        let file = |kernel: &str| format!("{}/{}.{EXTENSION}", self.arch, common_name(kernel));
        let twins = twins(&kernels);
        let mut texts: BTreeMap<String, String> = BTreeMap::new();
        for (name, text) in kernels.iter().filter(|(name, _)| !twins.contains_key(*name)) {
            texts.entry(file(name)).or_insert_with(|| header.into()).push_str(text);
        }
        let mut hashes = BTreeMap::new();
        for (file, text) in texts {
            let path = folder.join(&file);
            let bytes = pack(&text).map_err(Error::io("pack", &path))?;
            fs::write(&path, &bytes).map_err(Error::io("write", &path))?;
            hashes.insert(file, sha256(&bytes));
        }
        let kernel = |(name, _): (&str, &str)| {
            let file = file(name);
            let twin = twins.get(name).map(|&twin| twin.to_owned());
            Kernel { name: name.into(), sha256: hashes[&file].clone(), file, twin }
        };
        self.kernels = kernels.into_iter().map(kernel).collect();
        Ok(())
    }

    /// The text of all kernels.
    ///
    /// # Errors
    ///
    /// Where a file is missing or damaged.
    pub fn read(&self, folder: &Path) -> Result<String> {
        let files: BTreeMap<_, _> =
            self.kernels.iter().map(|kernel| (&kernel.file, kernel)).collect();
        let (mut ptx, mut texts) = (String::new(), HashMap::new());
        for kernel in files.into_values() {
            let path = folder.join(&kernel.file);
            let text = unpack(&kernel.read(folder)?).map_err(Error::io("unpack", &path))?;
            let (header, kernels) = apart(&text);
            ptx = header.to_owned();
            texts
                .extend(kernels.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())));
        }
        for Kernel { name, file, twin, .. } in &self.kernels {
            let missing = || Error::Damaged { path: folder.join(file) };
            let text = texts.get(twin.as_ref().unwrap_or(name)).ok_or_else(missing)?;
            match twin {
                Some(_) => ptx.push_str(&as_f16(text)),
                None => ptx.push_str(text),
            }
        }
        Ok(ptx)
    }
}

impl Kernel {
    /// The bytes of its file.
    ///
    /// # Errors
    ///
    /// Where the file is missing, or its checksum differs from the list's.
    pub fn read(&self, folder: &Path) -> Result<Vec<u8>> {
        let path = folder.join(&self.file);
        let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
        if sha256(&bytes) != self.sha256 {
            return Err(Error::Damaged { path });
        }
        Ok(bytes)
    }
}

/// The kernels for float16 whose texts are made of those for bfloat16, with the names of these.
fn twins<'a>(kernels: &[(&'a str, &'a str)]) -> HashMap<&'a str, &'a str> {
    let texts: HashMap<&'a str, &'a str> = kernels.iter().copied().collect();
    let twin = |&(name, text): &(&'a str, &'a str)| {
        let (f16, own) = texts.get_key_value(as_f16(name).as_str())?;
        (*f16 != name && *own == as_f16(text)).then_some((*f16, name))
    };
    kernels.iter().filter_map(twin).collect()
}

/// Of files of kernels.
pub const EXTENSION: &str = "ptx.packed";

/// A kernel's name without the 16-bit element type, the output type, the mark for padded heads, and
/// the suffix behind the head size.
fn common_name(kernel: &str) -> String {
    let is_head_size =
        |word: &str| word.strip_prefix('d').is_some_and(|size| size.parse::<u32>().is_ok());
    let is_shared = |word: &&str| !["f16", "bf16", "out32", "out8", "padded"].contains(word);
    let words: Vec<_> = kernel.split('_').filter(is_shared).collect();
    let end = words.iter().position(|word| is_head_size(word)).map_or(words.len(), |at| at + 1);
    words[..end].join("_")
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 over the names and contents of all files in a crate's `Cargo.toml` and `src`: tells
/// whether PTX was made from this source without compiling it.
///
/// # Errors
///
/// Where a source cannot be read.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::SAMPLE;

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

    fn module(family: &str, arch: &str) -> Module {
        let text = |text: &str| text.to_owned();
        Module {
            family: family.into(),
            arch: arch.into(),
            ptx: text("7.0"),
            compiler: text("rustc"),
            source: text("s"),
            sha256: text("h"),
            assembled: text(""),
            kernels: vec![Kernel {
                name: text("e"),
                file: text("sm/e"),
                sha256: text("h"),
                twin: None,
            }],
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
    fn kernels_come_back_from_their_files() {
        let Folder(folder) = &Folder::new("kernels");
        let ptx = SAMPLE.replace("scale_more", "add_bf16_d64_r8");
        let third =
            SAMPLE[SAMPLE.find(".visible").unwrap()..].replace("scale_more", "add_f16_d64_r16_w4");
        let ptx = ptx + &third.replace("scale", "last");
        let mut module = module("f", "sm_80");
        module.write(folder, &ptx).unwrap();
        let names: Vec<_> = module.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names, ["scale", "add_bf16_d64_r8", "last", "add_f16_d64_r16_w4"]);
        assert_eq!(module.read(folder).unwrap(), ptx);
        let path = folder.join("sm_80/add_d64.ptx.packed");
        let shared = unpack(&fs::read(&path).unwrap()).unwrap();
        assert!(shared.starts_with(".version ") && shared.ends_with("}\n"), "{shared}");
        assert_eq!(shared.matches(".entry add_").count(), 2);

        let mut bytes = fs::read(&path).unwrap();
        bytes.push(0);
        fs::write(&path, bytes).unwrap();
        let error = module.read(folder).unwrap_err().to_string();
        assert!(error.contains("add_d64.ptx.packed is damaged"), "{error}");
        fs::remove_file(&path).unwrap();
        assert!(module.read(folder).unwrap_err().to_string().contains("cannot read"));
    }

    #[test]
    fn a_twin_is_left_out_where_its_text_follows() {
        let Folder(folder) = &Folder::new("twins");
        let start = SAMPLE.find(".visible").unwrap();
        let one = &SAMPLE[start..SAMPLE.find(".visible .entry scale_more").unwrap()];
        let kernel = |name: &str, text: &str| text.replace("scale", name);
        let ptx = [
            SAMPLE[..start].to_owned(),
            kernel("same_bf16", &one.replace("f16.f16", "bf16.bf16")),
            kernel("same_f16", one),
            // Multiplies in float16, whatever its elements are.
            kernel("less_bf16", one),
            kernel("less_f16", &one.replace("%r19", "%r20")),
            kernel("lone_f16", one),
        ]
        .concat();
        let mut module = module("f", "sm_80");
        module.write(folder, &ptx).unwrap();
        let twins: Vec<_> = module.kernels.iter().map(|kernel| kernel.twin.as_deref()).collect();
        assert_eq!(twins, [None, Some("same_bf16"), None, None, None]);
        let file = fs::read(folder.join("sm_80/same.ptx.packed")).unwrap();
        assert!(!unpack(&file).unwrap().contains("same_f16"));
        assert_eq!(module.read(folder).unwrap(), ptx);
    }

    #[test]
    fn a_manifest_comes_back_with_modules_replaced_by_name() {
        let Folder(folder) = &Folder::new("manifest");
        let path = folder.join("manifest.json");
        let mut manifest = Manifest::read(&path).unwrap();
        let newer = Module { assembled: "h".into(), ..module("b", "sm_80") };
        for module in [module("b", "sm_80"), module("a", "sm_70"), newer.clone()] {
            manifest.put(module);
        }
        manifest.write(&path).unwrap();
        let read = Manifest::read(&path).unwrap();
        assert!(newer.is_assembled());
        assert_eq!(read.modules, [module("a", "sm_70"), newer]);
        assert_eq!(read.module("a.sm_70").map(Module::is_assembled), Some(false));
    }
}
