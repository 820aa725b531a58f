//! `cargo xtask release`: dates the unreleased section of CHANGELOG.md, commits and tags it.

use crate::place;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;

const UNRELEASED: &str = "## Unreleased\n";

pub fn run() -> Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    release(&place::root(), version)?;
    println!("tagged v{version}; to publish it: git push origin HEAD v{version}");
    println!("then raise the version in Cargo.toml");
    Ok(())
}

/// Gives the unreleased section of CHANGELOG.md a version and a date, commits that, and tags the
/// commit.
///
/// # Errors
///
/// If nothing is unreleased, the tree has uncommitted changes, or the version has a tag.
fn release(root: &Path, version: &str) -> Result<()> {
    let git = |words: &[&str]| {
        let output = Command::new("git").args(words).current_dir(root).output();
        let output = output.context("cannot start git")?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        ensure!(output.status.success(), "git {}: {said}", words.join(" "));
        Ok::<_, anyhow::Error>(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let (tag, path) = (format!("v{version}"), root.join("CHANGELOG.md"));
    let changes = git(&["status", "--porcelain"])?;
    ensure!(changes.is_empty(), "the tree has uncommitted changes: {changes}");
    ensure!(git(&["tag", "--list", &tag])?.is_empty(), "{tag}: there is a tag of that name");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let date = git(&["show", "--no-patch", "--format=%cs", "HEAD"])?;
    let (dated, notes) = dated(&text, version, &date)?;
    fs::write(&path, dated)?;
    let subject = format!("Release {version}");
    git(&["commit", "--quiet", "--message", &subject, "CHANGELOG.md"])?;
    // Headings of the notes begin with #, which git takes for comments.
    let notes = format!("gqa {version}\n\n{notes}");
    git(&["tag", "--annotate", "--cleanup=verbatim", "--message", &notes, &tag]).map(drop)
}

/// The text with its unreleased section under that version and date, and that section.
fn dated(text: &str, version: &str, date: &str) -> Result<(String, String)> {
    let (before, rest) =
        text.split_once(UNRELEASED).context("CHANGELOG.md: no section ## Unreleased")?;
    let end = rest.find("\n## ").map_or(rest.len(), |at| at + 1);
    let notes = rest[..end].trim();
    if notes.is_empty() {
        bail!("CHANGELOG.md: nothing is unreleased");
    }
    let dated = format!("{before}{UNRELEASED}\n## {version} - {date}\n{rest}");
    Ok((dated, notes.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Changelog\n\n## Unreleased\n\n### Fixed\n\n- A thing.\n\n\
                        ## 0.1.0 - 2026-11-25\n\n- All.\n";

    #[test]
    fn what_is_unreleased_gets_a_version_and_a_date() {
        let (text, notes) = dated(TEXT, "0.2.0", "2026-12-01").unwrap();
        assert_eq!(notes, "### Fixed\n\n- A thing.");
        let head =
            "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2026-12-01\n\n### Fixed\n\n- A thing.";
        assert!(text.starts_with(head) && text.ends_with("## 0.1.0 - 2026-11-25\n\n- All.\n"));
        assert!(dated(&text, "0.3.0", "2026-12-02").is_err());
        assert!(dated("# Changelog\n", "0.3.0", "2026-12-02").is_err());
    }

    #[test]
    fn a_release_is_a_commit_and_a_tag() {
        let folder = std::env::temp_dir().join(format!("gqa-release-{}", std::process::id()));
        let root = crate::folder::fresh(&folder).unwrap();
        let git = |words: &[&str]| {
            let identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"];
            let output = Command::new("git").args(identity).args(words).current_dir(&root).output();
            String::from_utf8(output.unwrap().stdout).unwrap()
        };
        git(&["init", "--quiet"]);
        for (key, value) in [("user.name", "A"), ("user.email", "a@example.org")] {
            git(&["config", key, value]);
        }
        fs::write(root.join("CHANGELOG.md"), TEXT).unwrap();
        git(&["add", "CHANGELOG.md"]);
        git(&["commit", "--quiet", "--message", "All"]);
        release(&root, "0.2.0").unwrap();
        assert_eq!(git(&["describe", "--tags"]), "v0.2.0\n");
        assert!(git(&["tag", "--list", "--format=%(contents)", "v0.2.0"]).contains("### Fixed"));
        assert!(git(&["show", "HEAD:CHANGELOG.md"]).contains("## 0.2.0 - 20"));
        let again = release(&root, "0.2.0").unwrap_err().to_string();
        assert!(again.starts_with("v0.2.0: there is a tag"), "{again}");
        fs::write(root.join("CHANGELOG.md"), "").unwrap();
        let dirty = release(&root, "0.3.0").unwrap_err().to_string();
        assert!(dirty.starts_with("the tree has uncommitted changes"), "{dirty}");
        fs::remove_dir_all(root).unwrap();
    }
}
