//! Checks for lines of at most 100 columns where rustfmt does not: comments and Markdown.

use crate::place;
use anyhow::{Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// The most columns of a line, as rustfmt has it for code.
const MOST: usize = 100;
/// Folders that are not checked, beside hidden ones: build products and measurements.
const LEFT_OUT: [&str; 5] = ["target", "bundle", "dist", "results", "node_modules"];

/// Fails if a comment in Rust or a line of Markdown is longer.
pub fn check() -> Result<()> {
    let mut files = Vec::new();
    collect(&place::root(), &mut files)?;
    let mut long = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file)?;
        let name = file.strip_prefix(place::root()).unwrap_or(file).display();
        let is_rust = file.extension().is_some_and(|extension| extension == "rs");
        long.extend(too_long(&text, is_rust).map(|number| format!("{name}:{number}")));
    }
    if !long.is_empty() {
        bail!("longer than {MOST} columns:\n  {}", long.join("\n  "));
    }
    println!("{} files", files.len());
    Ok(())
}

/// All Rust and Markdown below a folder.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_left_out = name.starts_with('.') || LEFT_OUT.contains(&&*name);
        if path.is_dir() && !is_left_out {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "md") {
            files.push(path);
        }
    }
    Ok(())
}

/// Numbers of the lines that are too long. Rows of tables, lines with links and code in Markdown
/// are exempt.
fn too_long(text: &str, is_rust: bool) -> impl Iterator<Item = usize> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let words = line.trim_start();
        let prose = words.trim_start_matches(['/', '!']).trim_start();
        is_code ^= !is_rust && prose.starts_with("```");
        let is_checked = if is_rust { words.starts_with("//") } else { !is_code };
        let may_be_long = prose.starts_with('|') || line.contains("](") || line.contains("://");
        (is_checked && !may_be_long && line.chars().count() > MOST).then_some(index + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::too_long;

    #[test]
    fn comments_and_prose_are_checked_and_tables_links_and_code_are_not() {
        let words = "word ".repeat(20);
        let rust = format!("let x = 1; {words}\n//! {words}\n    // {words}\n/// | {words}\n");
        assert_eq!(too_long(&rust, true).collect::<Vec<_>>(), [2, 3]);
        let code = format!("```\n{words}\n```\n");
        let markdown = format!("{words}.\n| {words}\n[a](b) {words}\n{code}short\n");
        assert_eq!(too_long(&markdown, false).collect::<Vec<_>>(), [1]);
    }
}
