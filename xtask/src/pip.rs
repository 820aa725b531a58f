//! Installs Python packages from a registry, with the hashes listed in `xtask/requirements`;
//! `docs/development.md` describes the lists.

use crate::place;
use anyhow::{Context, Result, bail};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// pip's message for a file whose hash is not in the list.
const OTHER_FILE: &str = "DO NOT MATCH THE HASHES";

/// The interpreter of a virtual environment with the packages of `requirements/LIST.txt`, which is
/// reused; `None` where there is no python3, or no registry can be reached.
///
/// # Errors
///
/// Where the registry serves a file whose hash is not in the list.
pub fn environment(name: &str, list: &str) -> Result<Option<PathBuf>> {
    let folder = place::target().join("python").join(name);
    let python = folder.join("bin/python");
    if !python.is_file() && !made(Command::new("python3").args(["-m", "venv"]).arg(&folder))? {
        return Ok(None);
    }
    let file = place::requirements().join(format!("{list}.txt"));
    let installed = made(pip(&python, &LISTED).arg(file))?;
    Ok(installed.then_some(python))
}

/// Installs a locally built wheel, whose requirements are already installed.
pub fn install_wheel(python: &Path, wheel: &Path) -> Result<()> {
    let built = ["install", "--no-index", "--no-deps", "--force-reinstall"];
    match made(pip(python, &built).arg(wheel))? {
        true => Ok(()),
        false => bail!("pip does not install {}", wheel.display()),
    }
}

/// A list includes all dependencies, so that pip must not add any.
const LISTED: [&str; 4] = ["install", "--require-hashes", "--no-deps", "--requirement"];

fn pip(python: &Path, arguments: &[&str]) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "--quiet", "--disable-pip-version-check"]).args(arguments);
    pip
}

/// Whether a Python program ran and succeeded; `false` if it is missing.
fn made(command: &mut Command) -> Result<bool> {
    let output = match command.stdin(Stdio::null()).output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error).context("cannot start python3"),
    };
    let said = String::from_utf8_lossy(&output.stderr);
    eprint!("{said}");
    if said.contains(OTHER_FILE) {
        bail!("a package's hash is not in xtask/requirements: {}", said.trim());
    }
    Ok(output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The requirement lists of this crate and of gqa-ptx, which installs CUDA tools.
    fn lists() -> Vec<PathBuf> {
        let folders = [place::requirements(), place::root().join("crates/gqa-ptx/requirements")];
        let files = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
        let files = files.map(|file| file.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|end| end == "txt")).collect()
    }

    #[test]
    fn every_package_has_one_version_and_hashes() {
        assert!(lists().len() > 5);
        for list in lists() {
            let text = fs::read_to_string(&list).unwrap().replace("\\\n", " ");
            let packages: Vec<_> = text
                .lines()
                .filter(|line| !line.trim_start().starts_with('#') && !line.trim().is_empty())
                .collect();
            assert!(!packages.is_empty(), "{}", list.display());
            for package in packages {
                let mut words = package.split_whitespace();
                assert!(words.next().unwrap().contains("=="), "{}: {package}", list.display());
                let hashes = words.filter_map(|word| word.strip_prefix("--hash=sha256:"));
                let hashes: Vec<_> = hashes.collect();
                let whole = hashes.iter().all(|hash| hash.len() == 64);
                assert!(whole && !hashes.is_empty(), "{}: {package}", list.display());
            }
        }
    }

    /// The `.in` file of each list is beside it.
    #[test]
    fn every_list_has_what_was_asked_for() {
        for list in lists() {
            let wanted = fs::read_to_string(list.with_extension("in")).unwrap();
            let text = fs::read_to_string(&list).unwrap();
            for package in wanted.lines() {
                let name = package.split(['=', '<', '>']).next().unwrap();
                let found = text.lines().any(|line| line.starts_with(&format!("{name}==")));
                assert!(found, "{}: {name}", list.display());
            }
        }
    }

    /// No other file of this crate starts pip.
    #[test]
    fn all_packages_come_from_lists() {
        let sources = fs::read_dir(place::root().join("xtask/src")).unwrap();
        for source in sources.map(|source| source.unwrap().path()) {
            let text = fs::read_to_string(&source).unwrap();
            let here = source.ends_with("pip.rs") || !text.contains("\"install\"");
            assert!(here || source.ends_with("embed.rs"), "{}", source.display());
        }
    }

    #[test]
    fn a_file_with_another_hash_is_an_error_and_no_skipped_step() {
        let mut other = Command::new("sh");
        other.args(["-c", &format!("echo 'ERROR: THESE PACKAGES {OTHER_FILE}' >&2; exit 1")]);
        assert!(made(&mut other).unwrap_err().to_string().contains(OTHER_FILE));
        assert!(!made(Command::new("sh").args(["-c", "exit 1"])).unwrap());
        assert!(!made(&mut Command::new("no-such-program")).unwrap());
        assert!(made(Command::new("sh").args(["-c", "echo a warning >&2"])).unwrap());
    }
}
