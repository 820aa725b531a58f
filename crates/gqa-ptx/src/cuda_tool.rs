//! Programs of the CUDA toolkit, from wherever they are, or from PyPI.

use crate::command::run;
use crate::error::{Error, Result};
use std::env;
use std::env::consts::EXE_SUFFIX;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Prints the folder of the CUDA 13 Python packages.
const PACKAGE_FOLDER: &str = "import nvidia.cu13; print(next(iter(nvidia.cu13.__path__)))";

/// A program.
pub(crate) struct CudaTool {
    pub(crate) name: &'static str,
    /// The Python package that holds it.
    pub(crate) package: &'static str,
    /// The requirements file of that package: it and its dependencies, with hashes, for pip.
    pub(crate) requirements: &'static str,
}

impl CudaTool {
    /// Looks in `PATH`, `CUDA_HOME`, `CUDA_PATH`, the usual folder of a toolkit, a virtual
    /// environment in `folder`, and the Python packages here, in this order.
    pub(crate) fn find(&self, folder: &Path) -> Result<PathBuf> {
        let in_path = env::var_os("PATH")
            .map(|path| env::split_paths(&path).collect::<Vec<_>>())
            .unwrap_or_default();
        let homes = ["CUDA_HOME", "CUDA_PATH"]
            .into_iter()
            .filter_map(env::var_os)
            .map(|home| PathBuf::from(home).join("bin"));
        let toolkit = [PathBuf::from("/usr/local/cuda/bin")];
        let packages = [python(folder), PathBuf::from("python3")]
            .into_iter()
            .filter_map(|python| package_bin(&python));
        in_path
            .into_iter()
            .chain(homes)
            .chain(toolkit)
            .chain(packages)
            .map(|bin| bin.join(format!("{}{EXE_SUFFIX}", self.name)))
            .find(|path| path.is_file())
            .ok_or_else(|| self.missing(folder, String::new()))
    }

    /// [`Self::find`]; if that fails, installs the package into a virtual environment in `folder`.
    pub(crate) fn find_or_install(&self, folder: &Path) -> Result<PathBuf> {
        self.find(folder).or_else(|_| {
            self.install(folder).map_err(|error| self.missing(folder, error.to_string()))?;
            self.find(folder)
        })
    }

    fn missing(&self, folder: &Path, tried: String) -> Error {
        Error::NoCudaTool { name: self.name, package: self.package, folder: folder.into(), tried }
    }

    fn install(&self, folder: &Path) -> Result<()> {
        let venv = ["-m", "venv"];
        run("making a virtual environment", Command::new("python3").args(venv).arg(folder))?;
        let list = folder.join(format!("{}.txt", self.name));
        std::fs::write(&list, self.requirements).map_err(Error::io("write", &list))?;
        let mut pip = Command::new(python(folder));
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        pip.args(["--require-hashes", "--no-deps", "--requirement"]).arg(list);
        run(&format!("installing {}", self.name), &mut pip).map(drop)
    }
}

fn python(folder: &Path) -> PathBuf {
    folder.join("bin/python3")
}

fn package_bin(python: &Path) -> Option<PathBuf> {
    let (folder, _) =
        run("looking for Python packages", Command::new(python).args(["-c", PACKAGE_FOLDER]))
            .ok()?;
    Some(Path::new(folder.trim()).join("bin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_says_where_it_was_looked_for() {
        let tool =
            CudaTool { name: "no-such-program", package: "its-package==1", requirements: "" };
        let text = tool.find(Path::new("target/venv")).unwrap_err().to_string();
        for part in ["no-such-program", "target/venv", "its-package==1"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
