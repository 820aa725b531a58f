//! Shared by the workspace's tests: random operator calls, poisoned outputs, comparison with the reference.

mod call;
mod case;
mod compare;
mod parity;

pub use call::Call;
pub use case::{Bias, Case, Positions, case, heads_up_to, prompts};
pub use compare::{Errors, Tolerance, compare};
pub use parity::{any_dtype, check, half_dtype, parity};
