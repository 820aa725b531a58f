//! The one error type of all crates: it names the argument, what was got and what is allowed.

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An attribute or input has a value, type or shape the operator does not take.
    #[error("{argument}: got {got}; allowed: {allowed}")]
    Invalid {
        /// ONNX name of the attribute or input.
        argument: &'static str,
        /// What the caller gave.
        got: String,
        /// What the operator takes.
        allowed: String,
    },
    /// No kernel takes the problem on that device with these options.
    #[error("no kernel takes this call: {0}")]
    NoKernel(String),
    /// A tensor that is to be made does not fit in memory.
    #[error("{argument}: got {bytes} bytes; allowed: what fits in memory")]
    OutOfMemory {
        /// ONNX name of the tensor, or what it is made for.
        argument: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// An environment switch has a value that it does not take.
    #[error("environment variable {name}: got {got:?}; allowed: {allowed}")]
    Switch {
        /// The variable that was set.
        name: &'static str,
        /// Its value.
        got: String,
        /// What it takes.
        allowed: &'static str,
    },
    /// What computes the call failed: a GPU's driver, or the simulated machine. Its error is the
    /// [cause](Error::cause).
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

    /// What failed, where that is an error of type `E` of a machine.
    pub fn cause<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match self {
            Self::Machine(cause) => cause.downcast_ref(),
            _ => None,
        }
    }
}
