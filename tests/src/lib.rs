//! Shared by the workspace's tests: random operator calls, poisoned outputs, comparison.

mod call;
mod case;
mod compare;

pub use call::Call;
pub use case::{Bias, Case, Positions, case, heads_up_to};
pub use compare::{Errors, Tolerance, compare};
