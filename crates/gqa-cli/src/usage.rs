//! Mistakes in a command line, and how they are printed.

/// A mistake in the command line: exit code 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Text from files and the system may hold anything; one line stays one line.
pub fn one_line(text: &str) -> String {
    let words = text.split(char::is_control).map(str::trim).filter(|part| !part.is_empty());
    words.collect::<Vec<_>>().join(" ")
}
