//! `GQA_LOG`.

use gqa_host::Error;
use gqa_host::plan::environment;

/// Log lines go to stderr: warnings, or what `GQA_LOG` asks for.
pub fn start() -> Result<(), Error> {
    let level = environment::log_level()?;
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
    // The second session finds what the first one has started.
    let _ = lines.without_time().try_init();
    Ok(())
}
