//! `GQA_LOG`.

use gqa_host::Error;
use std::env;
use tracing::Level;

/// Log lines go to stderr: warnings, or what `GQA_LOG` asks for.
pub fn start() -> Result<(), Error> {
    let wanted = env::var_os("GQA_LOG").unwrap_or_else(|| "warn".into());
    let known = wanted.to_str().filter(|wanted| !wanted.contains(|c: char| c.is_ascii_digit()));
    let level: Option<Level> = known.and_then(|wanted| wanted.parse().ok());
    let level = level.ok_or_else(|| Error::Switch {
        name: "GQA_LOG",
        got: wanted.to_string_lossy().into_owned(),
        allowed: "error, warn, info, debug, trace",
    })?;
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
    // The second session finds what the first one has started.
    let _ = lines.without_time().try_init();
    Ok(())
}
