//! NVIDIA's disassembler: what the assembler made of loops over matrix products.

use crate::command::run;
use crate::cuda_tool::CudaTool;
use crate::error::Result;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const TOOL: CudaTool = CudaTool {
    name: "nvdisasm",
    package: "nvidia-cuda-nvdisasm==13.5.37",
    requirements: include_str!("../requirements/nvdisasm.txt"),
};
/// The least number of exponentials in a loop over key tiles.
const LEAST_EXPONENTIALS: usize = 24;

/// The disassembler.
#[derive(Clone, Debug)]
pub struct Nvdisasm {
    path: PathBuf,
}

/// The shortest loop of an entry with `wgmma` and exponentials. Counts include instructions that
/// are rarely executed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loop {
    /// The entry.
    pub entry: String,
    /// All of them.
    pub instructions: usize,
    /// Matrix products (`GMMA`).
    pub products: usize,
    /// Copies of thread registers to uniform registers (`R2UR`).
    pub uniform_copies: usize,
    /// Exponentials (`MUFU.EX2`).
    pub exponentials: usize,
    /// For each wait for products, the exponentials ahead of it.
    pub waits: Vec<usize>,
}

impl Nvdisasm {
    /// Looks where `ptxas` is looked for; if that fails, installs the Python package into a virtual
    /// environment in `folder`.
    ///
    /// # Errors
    ///
    /// Where there is none and it cannot be installed.
    pub fn find_or_install(folder: &Path) -> Result<Self> {
        TOOL.find_or_install(folder).map(|path| Self { path })
    }

    /// The loops of all entries of a binary that have one.
    ///
    /// # Errors
    ///
    /// Where it refuses the file, with what it said.
    pub fn loops(&self, cubin: &Path) -> Result<Vec<Loop>> {
        let what = format!("disassembling {}", cubin.display());
        let (text, _) = run(&what, Command::new(&self.path).arg("-c").arg(cubin))?;
        Ok(entries(&text)
            .into_iter()
            .filter_map(|(entry, lines)| shortest(entry, &lines))
            .collect())
    }
}

/// Lines of each entry's instructions and labels.
fn entries(text: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut found = BTreeMap::<_, Vec<_>>::new();
    let mut entry = None;
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("//-----") {
            let section = rest.trim_matches(['-', ' ']);
            entry = section.strip_prefix(".text.");
        } else if let Some(entry) = entry {
            found.entry(entry).or_default().push(line.trim());
        }
    }
    found
}

fn shortest(entry: &str, lines: &[&str]) -> Option<Loop> {
    let mut instructions = Vec::new();
    let mut labels = BTreeMap::new();
    let mut loops = Vec::new();
    for line in lines {
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, instructions.len());
        } else if let Some(instruction) = instruction(line) {
            instructions.push(instruction);
            let begin = target(instruction).and_then(|label| labels.get(label));
            if let Some(&begin) = begin {
                loops.push(of(entry, &instructions[begin..]));
            }
        }
    }
    let over_keys = |of: &Loop| of.products > 0 && of.exponentials >= LEAST_EXPONENTIALS;
    loops.into_iter().filter(over_keys).min_by_key(|of| of.instructions)
}

/// `MUFU.EX2 R4, R4` of `/*0040*/ MUFU.EX2 R4, R4 ;`.
fn instruction(line: &str) -> Option<&str> {
    let (_, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    Some(rest.split_once(';')?.0.trim())
}

/// The label that a branch names.
fn target(instruction: &str) -> Option<&str> {
    let (_, label) = instruction.split_once("BRA").and_then(|(_, rest)| rest.split_once("`("))?;
    label.split_once(')').map(|(label, _)| label)
}

fn of(entry: &str, instructions: &[&str]) -> Loop {
    let mut of = Loop { entry: entry.into(), instructions: instructions.len(), ..Loop::default() };
    for instruction in instructions {
        let has = |name| instruction.contains(name);
        of.products += has("GMMA") as usize;
        of.uniform_copies += has("R2UR") as usize;
        of.exponentials += has("MUFU.EX2") as usize;
        if has("WARPGROUP.DEPBAR") {
            of.waits.push(of.exponentials);
        }
    }
    of
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry with a loop over keys around a shorter one, and one without.
    fn text() -> String {
        let exponentials = "        /*0010*/ MUFU.EX2 R4, R4 ;\n".repeat(LEAST_EXPONENTIALS);
        format!(
            "\
//--------------------- .text.attend --------------------------
.L_x_0:
        /*0000*/ HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0000*/ R2UR UR4, R20 ;
{exponentials}        /*0000*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
.L_x_1:
        /*0000*/ @!P0 BRA `(.L_x_1) ;
        /*0000*/ MUFU.EX2 R5, R5 ;
        /*0000*/ @P1 BRA `(.L_x_0) ;
        /*0000*/ EXIT ;
//--------------------- .text.copy --------------------------
.L_x_2:
        /*0000*/ @!P0 BRA `(.L_x_2) ;
//--------------------- .nv.info --------------------------
"
        )
    }

    #[test]
    fn the_shortest_loop_over_keys_is_counted() {
        let text = text();
        let loops: Vec<_> = entries(&text)
            .into_iter()
            .filter_map(|(entry, lines)| shortest(entry, &lines))
            .collect();
        let want = Loop {
            entry: "attend".into(),
            instructions: LEAST_EXPONENTIALS + 6,
            products: 1,
            uniform_copies: 1,
            exponentials: LEAST_EXPONENTIALS + 1,
            waits: vec![LEAST_EXPONENTIALS],
        };
        assert_eq!(loops, [want]);
    }
}
