//! `GQA_LOG`, and what is wrong with other variables.

use gqa_host::Error;
use gqa_host::plan::{PlanOptions, environment};

/// Starts logging to stderr, at the level that `GQA_LOG` sets, warnings by default. First warns of
/// misspelt variables.
///
/// # Errors
///
/// Where one of our variables has a wrong value, whether calls are computed on a GPU or not.
pub fn start() -> Result<(), Error> {
    let level = environment::log_level()?;
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
    // The second session finds what the first one has started.
    let _ = lines.without_time().try_init();
    PlanOptions::from_env().map(drop)
}
