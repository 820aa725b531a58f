//! The error type of all crates: it names the argument, the value and the allowed values.

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An attribute or input has an unsupported value, type or shape.
    #[error("{argument}: got {got}; allowed: {allowed}")]
    Invalid {
        /// ONNX name of the attribute or input.
        argument: &'static str,
        /// What the caller gave.
        got: String,
        /// What the operator takes.
        allowed: String,
    },
    /// No kernel supports the problem on that device with these options.
    #[error("no kernel takes this call: {0}")]
    NoKernel(String),
    /// A new tensor does not fit in memory.
    #[error("{argument}: got {bytes} bytes; allowed: what fits in memory")]
    OutOfMemory {
        /// ONNX name of the tensor, or its purpose.
        argument: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// An environment variable has an invalid value.
    #[error("environment variable {name}: got {got:?}; allowed: {allowed}")]
    Switch {
        /// The variable that was set.
        name: &'static str,
        /// Its value.
        got: String,
        /// What it takes.
        allowed: &'static str,
    },
    /// The GPU's driver or the simulated machine failed. Its error is the [cause](Error::cause).
    #[error(transparent)]
    Machine(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// An [`Error::Invalid`].
    pub fn invalid(argument: &'static str, got: impl ToString, allowed: impl ToString) -> Self {
        Self::Invalid { argument, got: got.to_string(), allowed: allowed.to_string() }
    }

    /// An [`Error::Machine`].
    pub fn machine(cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Machine(Box::new(cause))
    }

    /// The machine's error, if it has type `E`.
    pub fn cause<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Machine(cause) => cause.downcast_ref(),
            _ => None,
        }
    }
}
