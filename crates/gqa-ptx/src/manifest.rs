//! The PTX that a crate ships: packed files of kernels, and a list of them with their origin.

use crate::error::{Error, Result};
use crate::packed::{pack, unpack};
use crate::text::{apart, sections};
use crate::twin::as_f16;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
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
    /// GPU it is for, e.g. `sm_80`.
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

    /// Adds modules with their texts, in place of those with the same names, and returns the texts
    /// of all files that change, by their paths: what [`write_packed`] takes.
    ///
    /// Kernels that differ only in the GPU, the 16-bit type, the output type, padding, the tile, or
    /// in whether the KV cache is paged, share a file: it has a whole PTX text for each module. A
    /// kernel for float16 is left out where [`as_f16`] makes exactly its text of that of its twin
    /// for bfloat16.
    ///
    /// # Errors
    ///
    /// Where another module of such a file cannot be read.
    pub fn put(
        &mut self,
        folder: &Path,
        modules: Vec<(Module, String)>,
    ) -> Result<BTreeMap<String, String>> {
        let mut texts = HashMap::new();
        let mut changed = BTreeSet::new();
        for (mut module, text) in modules {
            module.kernels = kernels_of(&text);
            changed.extend(module.kernels.iter().map(|kernel| kernel.file.clone()));
            texts.insert(module.name(), text);
            self.modules.retain(|other| other.name() != module.name());
            self.modules.push(module);
        }
        self.modules.sort_by_key(Module::name);
        let mut files: BTreeMap<String, String> = BTreeMap::new();
        for module in &self.modules {
            let is_changed = |kernel: &Kernel| changed.contains(&kernel.file);
            if !module.kernels.iter().any(is_changed) {
                continue;
            }
            let text = match texts.remove(&module.name()) {
                Some(text) => text,
                None => module.read(folder)?,
            };
            for (file, text) in module.by_file(&text) {
                if changed.contains(file) {
                    files.entry(file.into()).or_default().push_str(&text);
                }
            }
        }
        Ok(files)
    }

    /// Notes the checksum of a file.
    pub fn note(&mut self, file: &str, sha256: &str) {
        let kernels = self.modules.iter_mut().flat_map(|module| &mut module.kernels);
        for kernel in kernels.filter(|kernel| kernel.file == file) {
            kernel.sha256 = sha256.into();
        }
    }
}

/// Writes a file of kernels, [packed](pack); returns its checksum.
///
/// # Errors
///
/// Where it cannot be written.
pub fn write_packed(folder: &Path, file: &str, text: &str) -> Result<String> {
    let path = folder.join(file);
    let bytes = pack(text).map_err(Error::io("pack", &path))?;
    fs::write(&path, &bytes).map_err(Error::io("write", &path))?;
    Ok(sha256(&bytes))
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

    /// The parts of its text, by the files that have them.
    fn by_file<'a>(&'a self, text: &str) -> BTreeMap<&'a str, String> {
        let (header, texts) = apart(text);
        let mut files: BTreeMap<&str, String> = BTreeMap::new();
        for (kernel, (_, text)) in self.kernels.iter().zip(texts) {
            if kernel.twin.is_none() {
                files.entry(&kernel.file).or_insert_with(|| header.into()).push_str(text);
            }
        }
        files
    }

    /// The text of all kernels.
    ///
    /// # Errors
    ///
    /// Where a file is missing or damaged.
    pub fn read(&self, folder: &Path) -> Result<String> {
        let files: BTreeMap<_, _> =
            self.kernels.iter().map(|kernel| (&kernel.file, kernel)).collect();
        let own: HashSet<_> = self.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        let (mut ptx, mut texts) = (String::new(), HashMap::new());
        for kernel in files.into_values() {
            let path = folder.join(&kernel.file);
            let text = unpack(&kernel.read(folder)?).map_err(Error::io("unpack", &path))?;
            for (header, kernels) in sections(&text, &self.arch).map(apart) {
                for (name, text) in kernels.into_iter().filter(|(name, _)| own.contains(name)) {
                    ptx = header.to_owned();
                    texts.insert(name.to_owned(), text.to_owned());
                }
            }
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

/// The rows of a text's kernels, without the checksums of their files.
fn kernels_of(ptx: &str) -> Vec<Kernel> {
    let (_, texts) = apart(ptx);
    let twins = twins(&texts);
    let kernel = |&(name, _): &(&str, &str)| Kernel {
        name: name.into(),
        file: format!("{}.{EXTENSION}", common_name(name)),
        sha256: String::new(),
        twin: twins.get(name).map(|&twin| twin.to_owned()),
    };
    texts.iter().map(kernel).collect()
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

/// A kernel's name without the 16-bit element type, the marks for padded heads and paged KV caches,
/// and the suffix behind the head size.
fn common_name(kernel: &str) -> String {
    const SHARED: [&str; 4] = ["f16", "bf16", "padded", "paged"];
    let is_head_size =
        |word: &str| word.strip_prefix('d').is_some_and(|size| size.parse::<u32>().is_ok());
    let is_shared = |word: &&str| !SHARED.contains(word);
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
            kernels: vec![],
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
        let mut manifest = Manifest::default();
        written(&mut manifest, folder, module("f", "sm_80"), &ptx);
        let module = &manifest.modules[0];
        let names: Vec<_> = module.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        assert_eq!(names, ["scale", "add_bf16_d64_r8", "last", "add_f16_d64_r16_w4"]);
        assert_eq!(module.read(folder).unwrap(), ptx);
        let path = folder.join("add_d64.ptx.packed");
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
        let mut manifest = Manifest::default();
        written(&mut manifest, folder, module("f", "sm_80"), &ptx);
        let module = &manifest.modules[0];
        let twins: Vec<_> = module.kernels.iter().map(|kernel| kernel.twin.as_deref()).collect();
        assert_eq!(twins, [None, Some("same_bf16"), None, None, None]);
        let file = fs::read(folder.join("same.ptx.packed")).unwrap();
        assert!(!unpack(&file).unwrap().contains("same_f16"));
        assert_eq!(module.read(folder).unwrap(), ptx);
    }

    /// Puts a module into the list, and its kernels into files.
    fn written(manifest: &mut Manifest, folder: &Path, module: Module, ptx: &str) {
        for (file, text) in manifest.put(folder, vec![(module, ptx.into())]).unwrap() {
            let sha256 = write_packed(folder, &file, &text).unwrap();
            manifest.note(&file, &sha256);
        }
    }

    #[test]
    fn modules_share_files() {
        let Folder(folder) = &Folder::new("shared");
        let mut manifest = Manifest::default();
        let newer = SAMPLE.replace("sm_80", "sm_90").replace("7.0", "8.1");
        let paged = SAMPLE.replace("scale", "scale_paged");
        written(&mut manifest, folder, module("a", "sm_80"), SAMPLE);
        written(&mut manifest, folder, module("a", "sm_90"), &newer);
        written(&mut manifest, folder, module("b", "sm_80"), &paged);
        let changed = newer.replace("64;", "96;");
        written(&mut manifest, folder, module("a", "sm_90"), &changed);
        let files = fs::read_dir(folder)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().path().to_string_lossy().ends_with(EXTENSION));
        assert_eq!(files.count(), 2);
        for (name, text) in [("a.sm_80", SAMPLE), ("a.sm_90", &changed), ("b.sm_80", &paged)] {
            assert_eq!(manifest.module(name).unwrap().read(folder).unwrap(), text);
        }
    }

    #[test]
    fn a_manifest_comes_back_with_modules_replaced_by_name() {
        let Folder(folder) = &Folder::new("manifest");
        let path = folder.join("manifest.json");
        let mut manifest = Manifest::read(&path).unwrap();
        let newer = Module { assembled: "h".into(), ..module("b", "sm_80") };
        for module in [module("b", "sm_80"), module("a", "sm_70"), newer.clone()] {
            manifest.put(folder, vec![(module, String::new())]).unwrap();
        }
        manifest.write(&path).unwrap();
        let read = Manifest::read(&path).unwrap();
        assert!(newer.is_assembled());
        assert_eq!(read.modules, [module("a", "sm_70"), newer]);
        assert_eq!(read.module("a.sm_70").map(Module::is_assembled), Some(false));
    }
}
