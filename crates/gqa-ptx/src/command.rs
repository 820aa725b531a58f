//! Running other programs.

use crate::error::{Error, Result};
use std::process::{Command, Output};

/// Runs to the end and returns what was written to (standard output, standard error).
pub(crate) fn run(what: &str, command: &mut Command) -> Result<(String, String)> {
    let Output { status, stdout, stderr } = command.output().map_err(|source| Error::Start {
        program: command.get_program().to_string_lossy().into_owned(),
        source,
    })?;
    let (stdout, stderr) = (lossy(&stdout), lossy(&stderr));
    if status.success() {
        return Ok((stdout, stderr));
    }
    Err(Error::Failed {
        what: what.into(),
        command: shown(command),
        status,
        output: stdout + &stderr,
    })
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
