//! Reads files and folders named by users: reading always terminates, and an error names the path
//! and the reason.

use std::fs::{File, FileType};
use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::error::{Error, Result};

/// The most that a protobuf message has.
pub(crate) const MESSAGE_BYTES: u64 = i32::MAX as u64;
/// More than any JSON file of a case needs.
pub(crate) const JSON_BYTES: u64 = 1 << 20;

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
///
/// Where the path is not a regular file (a folder, a pipe or a device), where the file is larger,
/// and where it cannot be read.
pub fn read_file(path: &Path, most: u64) -> Result<Vec<u8>> {
    let failed = |e| Error::io(path, e);
    let refused = |got: &dyn std::fmt::Display| {
        let allowed = format!("a regular file of at most {most} bytes");
        Err(Error::invalid(path.display(), got, allowed))
    };
    // Checked before opening, because opening a pipe waits for a writer.
    let found = std::fs::metadata(path).map_err(failed)?;
    if !found.is_file() {
        return refused(&what(found.file_type()));
    }
    if found.len() > most {
        return refused(&format_args!("{} bytes", found.len()));
    }
    // The reported length cannot be trusted: a file may grow, and files in /proc report 0.
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 <= most {
        true => Ok(bytes),
        false => refused(&format_args!("more than {most} bytes")),
    }
}

/// What is no regular file.
fn what(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    if kind.is_dir() { "a folder" } else { "no file" }
}

/// Whether a folder has an entry of that name, even a broken link.
///
/// # Errors
///
/// Where the entry cannot be examined.
pub(crate) fn has(folder: &Path, name: &str) -> Result<bool> {
    let path = folder.join(name);
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(e) => Err(Error::io(&path, e)),
    }
}

/// Whether that is a folder, or a link to one.
///
/// # Errors
///
/// Where the path cannot be examined.
pub(crate) fn is_folder(path: &Path) -> Result<bool> {
    match path.metadata() {
        Ok(found) => Ok(found.is_dir()),
        // A link that leads nowhere.
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(path, e)),
    }
}
