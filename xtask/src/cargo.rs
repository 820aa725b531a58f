//! The cargo that runs this program.

use crate::place;
use std::env;
use std::ffi::OsString;
use std::process::Command;

/// A command of that cargo, in the repository's root.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    command.current_dir(place::root());
    command
}

/// Integrations that are not built or tested with the workspace.
const EXCLUDED: [&str; 4] = ["--exclude", "gqa-ort", "--exclude", "gqa-python"];

/// A command of that cargo over all crates except the integrations.
pub fn over_workspace(words: &[&str]) -> Command {
    let mut command = cargo();
    command.args(words).arg("--workspace").args(EXCLUDED);
    command
}
