//! Why a file or a model cannot be used.

use std::fmt::Display;
use std::path::{Path, PathBuf};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a file, a model or a call was refused. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error text: part of the message, so that `source` is not set.
        reason: std::io::Error,
    },
    /// A file's content is not what it should be.
    #[error("{subject}: got {got}; allowed: {allowed}")]
    Invalid {
        /// The file, tensor, attribute or part of the model.
        subject: String,
        /// What is there.
        got: String,
        /// What may be there.
        allowed: String,
    },
    /// The operator refuses the call, or computing it failed.
    #[error(transparent)]
    Operator(#[from] gqa_host::Error),
}

impl Error {
    /// An [`Error::Invalid`].
    pub(crate) fn invalid(subject: impl Display, got: impl Display, allowed: impl Display) -> Self {
        Self::Invalid {
            subject: subject.to_string(),
            got: got.to_string(),
            allowed: allowed.to_string(),
        }
    }

    /// An [`Error::Io`].
    pub(crate) fn io(path: &Path, reason: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), reason }
    }
}
