//! NVIDIA's assembler: the compiler that the driver runs on PTX, and the only source of registers
//! and spills per entry.

use crate::command::run;
use crate::cuda_tool::CudaTool;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

const TOOL: CudaTool = CudaTool {
    name: "ptxas",
    package: "nvidia-cuda-nvcc==13.0.88",
    requirements: include_str!("../requirements/ptxas.txt"),
};

/// The assembler.
#[derive(Clone, Debug)]
pub struct Ptxas {
    path: PathBuf,
}

/// What an entry takes on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The entry.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack frame of a thread.
    pub stack: u32,
    /// Bytes of registers stored to local memory.
    pub spill_stores: u32,
    /// Bytes of registers loaded back.
    pub spill_loads: u32,
    /// Static shared memory in bytes; ptxas does not know dynamic shared memory.
    pub shared: u32,
}

/// What the assembler said about one module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// In the order of their names.
    pub usage: Vec<Usage>,
    /// Warnings and performance advisories (`C75xx`), as they were printed.
    pub warnings: Vec<String>,
}

impl Ptxas {
    /// Looks in `PATH`, `CUDA_HOME`, `CUDA_PATH`, the usual place of a toolkit, a virtual
    /// environment in `folder`, or the Python packages here, in this order.
    ///
    /// # Errors
    ///
    /// Where there is none; the error lists the places searched.
    pub fn find(folder: &Path) -> Result<Self> {
        TOOL.find(folder).map(|path| Self { path })
    }

    /// [`Self::find`]; if that fails, installs the Python package into a virtual environment in
    /// `folder`.
    ///
    /// # Errors
    ///
    /// Where there is none and it cannot be installed.
    pub fn find_or_install(folder: &Path) -> Result<Self> {
        TOOL.find_or_install(folder).map(|path| Self { path })
    }

    /// Its version line.
    ///
    /// # Errors
    ///
    /// Where it cannot be started, or says no version.
    pub fn version(&self) -> Result<String> {
        let (text, _) =
            run("asking ptxas for its version", Command::new(&self.path).arg("--version"))?;
        Ok(text.lines().find(|line| line.contains("release")).unwrap_or("unknown").trim().into())
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Assembles a PTX file for a GPU such as `sm_90a`; the binary goes beside it.
    ///
    /// # Errors
    ///
    /// Where it refuses the file, with what it said, and where its report cannot be read.
    pub fn assemble(&self, ptx: &Path, arch: &str) -> Result<Report> {
        let mut command = Command::new(&self.path);
        command
            .arg(format!("-arch={arch}"))
            .args(["-v", "-o"])
            .arg(ptx.with_extension(format!("{arch}.cubin")))
            .arg(ptx);
        let (stdout, stderr) = run(&format!("assembling {}", ptx.display()), &mut command)?;
        parse(&(stdout + &stderr), arch)
    }
}

/// Reads what `ptxas -v` prints.
fn parse(output: &str, arch: &str) -> Result<Report> {
    let mut report = Report::default();
    let mut entry = None;
    for line in output.lines() {
        if let Some(name) = line
            .split_once("Compiling entry function '")
            .and_then(|(_, rest)| rest.split('\'').next())
        {
            entry = Some(name.to_owned());
        } else if is_warning(line) {
            report.warnings.push(line.trim().into());
        } else if line.contains("bytes stack frame")
            && let Some(entry) = &entry
        {
            report.usage.push(frame(entry, line));
        } else if line.contains(": Used ")
            && let Some(usage) = report.usage.last_mut()
        {
            usage.registers = number_before(line, " registers");
            usage.shared = number_before(line, " bytes smem");
        }
    }
    if let Some(entry) = entry.filter(|_| report.usage.iter().all(|usage| usage.registers == 0)) {
        return Err(Error::NoReport { entry, arch: arch.into(), output: output.into() });
    }
    report.usage.sort_by(|a, b| a.entry.cmp(&b.entry));
    Ok(report)
}

fn frame(entry: &str, line: &str) -> Usage {
    Usage {
        entry: entry.into(),
        stack: number_before(line, " bytes stack frame"),
        spill_stores: number_before(line, " bytes spill stores"),
        spill_loads: number_before(line, " bytes spill loads"),
        ..Usage::default()
    }
}

fn is_warning(line: &str) -> bool {
    line.contains("warning") || line.contains("(C7")
}

/// 14 of `Used 14 registers, …` before ` registers`; 0 where the unit is not named.
fn number_before(line: &str, unit: &str) -> u32 {
    let before = line.split_once(unit).map_or("", |(before, _)| before);
    before.rsplit([' ', '\t']).next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tiled' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to spills in the function 'tiled'
ptxas info    : Function properties for tiled
    512 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 512 bytes cumulative stack size, 1024 bytes smem, 408 bytes cmem[0]
ptxas info    : Compile time = 2.101 ms
ptxas info    : Compiling entry function 'general' for 'sm_90a'
ptxas info    : Function properties for general
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 27 registers, used 0 barriers
";

    #[test]
    fn the_report_is_read() {
        let report = parse(OUTPUT, "sm_90a").unwrap();
        let general = Usage { entry: "general".into(), registers: 27, ..Usage::default() };
        let tiled = Usage {
            entry: "tiled".into(),
            registers: 168,
            stack: 512,
            spill_stores: 16,
            spill_loads: 24,
            shared: 1024,
        };
        assert_eq!(report.usage, [general, tiled]);
        assert_eq!(report.warnings.len(), 1);
        assert!(report.warnings[0].contains("C7510"));
    }

    #[test]
    fn another_format_is_an_error_not_a_clean_report() {
        let output = "ptxas info : Compiling entry function 'tiled' for 'sm_90a'\nregisters: 5\n";
        assert!(parse(output, "sm_90a").unwrap_err().to_string().contains("`tiled` for sm_90a"));
    }
}
