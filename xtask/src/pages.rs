//! Step "pages": commands and code on the pages run as they are printed.
//!
//! A fenced block is Rust, Python or commands. rustdoc compiles the Rust, as documentation tests of
//! a crate, and `--integrations` runs the Python. Commands that end in seconds are run here. For
//! commands that measure or need a GPU only the arguments are checked. All other commands are on a
//! list with the reason. In text, verbs of `cargo gqa` and `cargo xtask` must exist, and printed
//! dependencies must resolve. `--full` runs whole programs and compares their output.

use crate::cargo::{cargo, over_workspace};
use crate::folder;
use crate::place;
use crate::step::shown;
use anyhow::{Context, Result, bail, ensure};
use clap::CommandFactory;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Commands that no step runs, and why. An entry that is on no page is an error.
const ELSEWHERE: &[(&str, &str)] = &[
    ("bench/gpu.sh", "a GPU and hours"),
    ("cargo gqa profile", "a GPU"),
    ("cargo gqa bench", "minutes; tests/cli.rs of gqa-cli runs small ones"),
    ("cargo install", "minutes, and a folder of the user's"),
    ("cargo nextest run", "the step tests runs these tests"),
    ("cargo test", "the step tests runs these tests"),
    ("cargo xtask", "each verb is a step, or minutes"),
    ("cargo run --release -p gqa-host", "a GPU"),
    ("compute-sanitizer", "a GPU"),
    ("python3 bench/", "a GPU, or other libraries"),
    ("torchrun", "GPUs, one for each process"),
    ("uv pip compile", "a registry; it writes the lists that are checked in"),
];

/// Pages whose code other tests run, and which tests.
const OTHERS: &[(&str, &str)] = &[
    ("docs/perf-log.md", "history"),
    ("docs/python.md", "crates/gqa-python/tests"),
    ("integrations/candle/README.md", "the step candle"),
    ("docs/onnxruntime.md", "the step ONNX Runtime"),
];

/// Files with the pages that rustdoc compiles.
const WITH_PAGES: [&str; 3] =
    ["crates/gqa-host/src/lib.rs", "crates/gqa-sim/src/lib.rs", "integrations/candle/src/lib.rs"];

/// A fenced block.
#[derive(Debug)]
pub struct Block {
    /// Path from the repository's root.
    page: String,
    /// Where it begins.
    line: usize,
    /// The language after the fence.
    language: String,
    /// The lines between the fences.
    pub text: String,
}

impl Block {
    fn place(&self) -> String {
        format!("{}:{}", self.page, self.line)
    }
}

/// What is done with a command.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    Run,
    /// Only verb and options are checked.
    Parse,
    /// Not run here, for the reason in [`ELSEWHERE`].
    Elsewhere,
}

/// All of it.
pub fn check() -> Result<()> {
    let pages = pages()?;
    let blocks = pages.iter().map(|page| blocks_of(page)).collect::<Result<Vec<_>>>()?;
    let blocks: Vec<_> = blocks.into_iter().flatten().collect();
    known(&blocks)?;
    package("README.md")?;
    let scratch = Scratch::new()?;
    for page in pages.iter().filter(|page| others(page).is_none()) {
        for verb in verbs(&text(page)?) {
            scratch.bash(&format!("cargo {verb} --help")).with_context(|| page.clone())?;
        }
    }
    for block in blocks.iter().filter(|block| is_shell(block) && others(&block.page).is_none()) {
        for command in commands(&block.text) {
            let run = match way(&command)? {
                Way::Run => scratch.bash(&command),
                Way::Parse => scratch.bash(&format!("{command} --help")),
                Way::Elsewhere => Ok(()),
            };
            run.with_context(|| block.place())?;
        }
    }
    Ok(())
}

/// Builds the programs of README.md and engines.md with the dependencies that README.md prints, and
/// compares their output with the block after each program.
pub fn programs() -> Result<()> {
    let folder = package("README.md")?;
    let mut printed = Vec::new();
    for (name, page) in [("readme", "README.md"), ("engines", "docs/engines.md")] {
        let blocks = blocks_of(page)?;
        let program = blocks.windows(2).find(|pair| {
            pair[0].language == "rust" && pair[0].text.contains("fn main") && is_text(&pair[1])
        });
        let pair = program.with_context(|| format!("{page} has no program"))?;
        let (program, text) = (&pair[0], &pair[1]);
        let file = folder.join(format!("src/bin/{name}.rs"));
        fs::create_dir_all(folder.join("src/bin"))?;
        fs::write(file, &program.text)?;
        printed.push((name, text.place(), text.text.clone()));
    }
    for (name, place, want) in printed {
        let mut run = Command::new(cargo().get_program());
        run.args(["run", "--offline", "--quiet", "--bin", name]).current_dir(&folder);
        run.env("CARGO_TARGET_DIR", place::target().join("pages-programs"));
        let output = run.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
        same(&place, &String::from_utf8_lossy(&output.stdout), &want)?;
    }
    Ok(())
}

/// Runs the two scripts and the commands of the page for ONNX Runtime, with that library instead of
/// an installed wheel.
pub fn onnx_runtime(python: &Path, library: &Path) -> Result<()> {
    let folder = folder::fresh(&place::target().join("pages-onnxruntime"))?;
    let installed = folder.join("gqa_onnxruntime");
    folder::copy(&place::root().join("crates/gqa-ort/python/gqa_onnxruntime"), &installed)?;
    fs::copy(library, installed.join("libgqa_ort.so"))?;
    let blocks = blocks_of("docs/onnxruntime.md")?;
    let scripts = blocks.iter().filter(|block| block.language == "python");
    for (name, script) in ["model.py", "run.py"].iter().zip(scripts) {
        fs::write(folder.join(name), &script.text)?;
    }
    let commands = blocks.iter().find(|block| is_shell(block) && block.text.contains("run.py"));
    let printed = blocks.iter().find(|block| is_text(block)).context("no output on the page")?;
    let bin = python.parent().context("python is in no folder")?;
    let mut bash = Command::new("bash");
    bash.args(["-e", "-c", &commands.context("no command runs run.py")?.text]);
    bash.current_dir(&folder).env("PATH", in_front(bin)?);
    let output = bash.output().context("cannot start bash")?;
    let said = [output.stderr, output.stdout].concat();
    same(&printed.place(), &String::from_utf8_lossy(&said), &printed.text)
}

/// Checks candle's page: the printed dependencies resolve, and the example, which the tests have
/// built, has the printed options. The page's programs are documentation tests.
pub fn candle() -> Result<()> {
    const PAGE: &str = "integrations/candle/README.md";
    package(PAGE)?;
    let example = place::root().join("integrations/candle/target/debug/examples/smollm2");
    for block in blocks_of(PAGE)?.iter().filter(|block| is_shell(block)) {
        for command in commands(&block.text) {
            let Some((cargo, options)) = command.split_once(" --example smollm2 -- ") else {
                continue;
            };
            // RUSTFLAGS may precede the command.
            let flags =
                cargo.split_once("\" ").filter(|(flags, _)| flags.starts_with("RUSTFLAGS=\""));
            let cargo = flags.map_or(cargo, |(_, cargo)| cargo);
            ensure!(cargo.starts_with("cargo run --release"), "{}: {cargo}", block.place());
            let line = format!("'{}' {options} --help > /dev/null", example.display());
            let status = Command::new("bash").args(["-c", &line]).status()?;
            ensure!(status.success(), "{}: {command}", block.place());
        }
    }
    Ok(())
}

/// Resolves the dependencies that a page prints, in a package beside `gqa`, the repository.
fn package(page: &str) -> Result<PathBuf> {
    let blocks = blocks_of(page)?;
    let tables = blocks.iter().filter(|block| block.language == "toml");
    let tables: Vec<_> = tables.map(|block| &*block.text).collect();
    ensure!(!tables.is_empty(), "{page} prints no dependencies");
    let name = page.to_lowercase().replace(['/', '.'], "-");
    // Outside of this workspace.
    let folder = folder::fresh(&std::env::temp_dir().join("gqa-pages").join(&name))?;
    let head = format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n\n");
    fs::write(folder.join("Cargo.toml"), head + &tables.join("\n"))?;
    let lock = place::root().join(page).with_file_name("Cargo.lock");
    fs::copy(lock, folder.join("Cargo.lock"))?;
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/lib.rs"), "")?;
    symlink(place::root(), folder.join("gqa"))?;
    let mut tree = Command::new(cargo().get_program());
    tree.args(["tree", "--offline", "--quiet", "--depth", "1"]).current_dir(&folder);
    shown(&mut tree).with_context(|| page.to_owned())?;
    Ok(folder)
}

/// An error if a program's output is not what the page prints.
fn same(place: &str, got: &str, want: &str) -> Result<()> {
    ensure!(got.trim() == want.trim(), "{place}: prints\n{want}\nand not\n{got}");
    Ok(())
}

/// PATH with that folder in front.
fn in_front(folder: &Path) -> Result<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = [folder.to_owned()].into_iter().chain(std::env::split_paths(&path));
    Ok(std::env::join_paths(paths)?)
}

/// The pages of the repository, without its history.
fn pages() -> Result<Vec<String>> {
    let root = place::root();
    let mut pages: Vec<String> =
        ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "integrations/candle/README.md"]
            .map(str::to_owned)
            .into();
    for entry in fs::read_dir(root.join("docs"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".md") {
            pages.push(format!("docs/{name}"));
        }
    }
    pages.retain(|page| others(page) != Some("history"));
    pages.sort();
    Ok(pages)
}

fn text(page: &str) -> Result<String> {
    fs::read_to_string(place::root().join(page)).with_context(|| page.to_owned())
}

fn others(page: &str) -> Option<&'static str> {
    OTHERS.iter().find_map(|(name, by)| (*name == page).then_some(*by))
}

/// The fenced blocks of a page.
///
/// # Errors
///
/// Where it cannot be read, or a block has no end.
pub fn blocks_of(page: &str) -> Result<Vec<Block>> {
    blocks(page, &text(page)?)
}

fn blocks(page: &str, text: &str) -> Result<Vec<Block>> {
    let (mut blocks, mut open) = (Vec::new(), None::<(Block, usize)>);
    for (number, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        open = match (open, line.trim_start().strip_prefix("```")) {
            (None, Some(language)) => {
                let (page, language) = (page.to_owned(), language.to_owned());
                Some((Block { page, line: number + 1, language, text: String::new() }, indent))
            }
            (Some((block, _)), Some("")) => {
                blocks.push(block);
                None
            }
            (Some((mut block, indent)), _) => {
                block.text.push_str(line.get(indent..).unwrap_or_default());
                block.text.push('\n');
                Some((block, indent))
            }
            (None, None) => None,
        };
    }
    match open {
        None => Ok(blocks),
        Some((block, _)) => bail!("{}: a block that does not end", block.place()),
    }
}

fn is_text(block: &Block) -> bool {
    block.language == "text"
}

fn is_shell(block: &Block) -> bool {
    matches!(&*block.language, "sh" | "bash")
}

/// An error if nothing runs or compiles a block, if nothing runs a command and no list exempts it,
/// or if a line of a list is unused.
fn known(blocks: &[Block]) -> Result<()> {
    let mut compiled = BTreeSet::new();
    for file in WITH_PAGES {
        let text = text(file)?;
        let pages = text.split("include_str!(\"").skip(1).filter_map(|rest| rest.split('"').next());
        compiled.extend(pages.map(|page| page.trim_start_matches("../").to_owned()));
    }
    let is_compiled = |block: &Block| compiled.iter().any(|page| block.page.ends_with(page));
    let mut used = BTreeSet::new();
    for block in blocks {
        match block.language.split(',').next().unwrap_or_default() {
            "rust" if is_compiled(block) && !block.language.contains("ignore") => {}
            "python" if others(&block.page).is_some() => {}
            "toml" | "text" => {}
            "sh" | "bash" => {
                for command in commands(&block.text) {
                    if others(&block.page).is_none() {
                        way(&command).with_context(|| block.place())?;
                        used.extend(listed(&command));
                    }
                }
            }
            other => bail!("{}: nothing runs a block of {other:?}", block.place()),
        }
    }
    let unused = ELSEWHERE.iter().find(|(prefix, _)| !used.contains(prefix));
    ensure!(unused.is_none(), "on no page: {unused:?}");
    Ok(())
}

/// The commands of a block: lines that belong together, without comments.
fn commands(text: &str) -> Vec<String> {
    let whole = text.replace("\\\n", " ");
    let bare = whole.lines().map(|line| line.split(" #").next().unwrap_or_default().trim());
    let commands = bare.filter(|line| !line.is_empty() && !line.starts_with('#'));
    commands.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// What is done with a command.
fn way(command: &str) -> Result<Way> {
    let words: Vec<_> = command.split(' ').skip_while(is_variable).collect();
    match (&words[..], listed(command)) {
        (["cargo", "gqa" | "gqa-sim", ..], Some(_)) => Ok(Way::Parse),
        (["cargo", "gqa" | "gqa-sim", ..] | ["python3", "-c", ..], None) => Ok(Way::Run),
        (["cargo", "xtask", words @ ..], Some(_)) => {
            let words = ["cargo xtask"].iter().chain(words);
            crate::Cli::command().try_get_matches_from(words).context("no such command")?;
            Ok(Way::Elsewhere)
        }
        (words, Some(_)) => {
            for pair in words.windows(2).filter(|pair| matches!(pair[0], "-p" | "--package")) {
                let folder = place::root().join("crates").join(pair[1]);
                ensure!(folder.is_dir() || pair[1] == "gqa-tests", "no package {}", pair[1]);
            }
            Ok(Way::Elsewhere)
        }
        (_, None) => {
            bail!("{command}: nothing runs it; run it in a test, or exempt it in {}", file!())
        }
    }
}

/// Whether a word sets an environment variable.
fn is_variable(word: &&str) -> bool {
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    word.split_once('=').is_some_and(|(name, _)| is_name(name))
}

/// The line of [`ELSEWHERE`] that a command is on.
fn listed(command: &str) -> Option<&'static str> {
    let words: Vec<_> = command.split(' ').skip_while(is_variable).collect();
    let command = words.join(" ");
    ELSEWHERE.iter().map(|(prefix, _)| *prefix).find(|prefix| command.starts_with(prefix))
}

/// Verbs that the text of a page names between backquotes: `gqa explain`, `xtask ptx`.
fn verbs(text: &str) -> BTreeSet<String> {
    let quoted = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let verb = |code: &str| {
        let words: Vec<_> = code.split_whitespace().collect();
        let words = words.strip_prefix(&["cargo"]).unwrap_or(&words);
        let is_verb = |word: &str| {
            word.starts_with(|c: char| c.is_ascii_lowercase())
                && word.chars().all(|c| c.is_ascii_lowercase() || c == '-')
        };
        match *words {
            ["gqa", "bench", mode, ..] if is_verb(mode) => Some(format!("gqa bench {mode}")),
            [name @ ("gqa" | "gqa-sim" | "xtask"), verb, ..] if is_verb(verb) => {
                Some(format!("{name} {verb}"))
            }
            _ => None,
        }
    };
    quoted.filter_map(verb).collect()
}

/// A folder that looks like the repository, in which commands may leave files, with a `cargo` that
/// runs the programs that are already built.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        // The tests have built it.
        shown(&mut over_workspace(&["build", "--quiet", "--bin", "gqa"]))?;
        let folder = folder::fresh(&place::target().join("pages"))?;
        for entry in fs::read_dir(place::root())? {
            let name = entry?.file_name();
            if !matches!(name.to_str(), Some(".git" | "target")) {
                symlink(place::root().join(&name), folder.join(&name))?;
            }
        }
        let bin = folder::fresh(&folder.join("bin"))?;
        let (gqa, xtask) = (place::target().join("debug/gqa"), std::env::current_exe()?);
        let script = format!(
            "#!/bin/sh\nverb=$1\nshift\ncase $verb in\ngqa|gqa-sim) exec '{}' \"$@\";;\n\
             xtask) exec '{}' \"$@\";;\nesac\nexit 1\n",
            gqa.display(),
            xtask.display()
        );
        let cargo = bin.join("cargo");
        fs::write(&cargo, script)?;
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755))?;
        Ok(Self(folder))
    }

    /// Runs a line as it is printed.
    fn bash(&self, line: &str) -> Result<()> {
        let (program, _) = line.split_once(' ').unwrap_or((line, ""));
        if program == "python3" && !has_numpy() {
            println!("skipped, because python3 has no numpy: {line}");
            return Ok(());
        }
        println!("{line}");
        let mut bash = Command::new("bash");
        bash.args(["-c", line]).current_dir(&self.0).env("PATH", in_front(&self.0.join("bin"))?);
        let output = bash.output().context("cannot start bash")?;
        let said = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
        ensure!(output.status.success(), "{line}: {}: {}", output.status, said());
        Ok(())
    }
}

fn has_numpy() -> bool {
    let output = Command::new("python3").args(["-c", "import numpy"]).output();
    output.is_ok_and(|output| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_taken_apart() {
        let text = "Text `gqa explain` and\n\n1. list:\n   ```sh\n   # why\n   A=1 cargo gqa \
                    \\\n      check x # what\n   ```\n```rust,no_run\nx\n```\n";
        let blocks = blocks("page.md", text).unwrap();
        let languages: Vec<_> = blocks.iter().map(|block| (&*block.language, block.line)).collect();
        assert_eq!(languages, [("sh", 4), ("rust,no_run", 9)]);
        assert_eq!(commands(&blocks[0].text), ["A=1 cargo gqa check x"]);
        assert_eq!(verbs(text).into_iter().collect::<Vec<_>>(), ["gqa explain"]);
        assert!(super::blocks("page.md", "```sh\nx\n").is_err());
    }

    #[test]
    fn each_command_is_run_or_on_a_list() {
        assert_eq!(way("X=1 cargo gqa-sim check x").unwrap(), Way::Run);
        assert_eq!(way("cargo gqa bench decode --size 1x8").unwrap(), Way::Parse);
        assert_eq!(way("cargo xtask ptx --family tiled").unwrap(), Way::Elsewhere);
        for wrong in ["rm -r /", "cargo xtask ptz", "cargo test -p gqa-hosts", "cargo frobnicate"] {
            assert!(way(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn blocks_and_commands_of_all_pages_are_known() {
        let pages = pages().unwrap();
        let blocks = pages.iter().flat_map(|page| blocks_of(page).unwrap());
        known(&blocks.collect::<Vec<_>>()).unwrap();
    }
}
