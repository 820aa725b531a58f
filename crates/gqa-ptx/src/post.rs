//! Sets directives in the PTX text that Rust cannot express.

use crate::error::{Error, Result};
use crate::text::{apart, entries, entry_named};
use crate::twin;
use std::fmt::Write;

/// Performance directives of an entry; `None` leaves one out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// `.maxntid`: launches with more threads per CTA fail, and the assembler may give each thread
    /// more registers.
    pub max_threads: Option<u32>,
    /// `.minnctapersm`: CTAs that must fit on an SM together.
    pub min_blocks: Option<u32>,
}

impl Bounds {
    fn directives(&self) -> String {
        let mut text = String::new();
        let numbers = [(".maxntid", self.max_threads), (".minnctapersm", self.min_blocks)];
        for (directive, value) in
            numbers.into_iter().filter_map(|(directive, value)| Some((directive, value?)))
        {
            let _ = writeln!(text, "{directive} {value}");
        }
        text
    }
}

/// Removes comments, blank lines and trailing blanks. The other functions of this module need such
/// text.
pub fn strip(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    for line in ptx.lines() {
        let line = line.split_once("//").map_or(line, |(code, _)| code).trim_end();
        if !line.is_empty() {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// Renumbers labels within each function. rustc's labels carry the function's number, which changes
/// with every function in front of it.
pub fn number_labels_alone(ptx: &str) -> String {
    const LABEL: &str = "$L__BB";
    let mut parts = ptx.split(LABEL);
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
        text.push_str(LABEL);
        text.push_str(rest);
    }
    text
}

/// The PTX with instructions of a GPU (compute capability, times ten) in place of the operations on
/// 16-bit elements that the kernels write as one statement.
pub fn lower_elements(ptx: &str, sm: u32) -> String {
    twin::lower(ptx, sm)
}

/// The PTX for another target, in a version of PTX (times ten) that knows it: `sm_100f` for what
/// was compiled for `sm_100a`. It then runs on all GPUs of the family that have what it uses, which
/// the assembler checks.
///
/// # Errors
///
/// Where the text names no target and version.
pub fn set_target(ptx: &str, arch: &str, version: u32) -> Result<String> {
    let line = |start: &str| {
        let missing = || Error::NoDirective { start: start.into() };
        ptx.lines().find(|line| line.starts_with(start)).ok_or_else(missing)
    };
    let (old_version, old_target) = (line(".version ")?, line(".target ")?);
    let version = format!(".version {}.{}", version / 10, version % 10);
    Ok(ptx.replacen(old_version, &version, 1).replacen(old_target, &format!(".target {arch}"), 1))
}

/// The PTX with those directives on an entry.
///
/// # Errors
///
/// Where the text has no such entry.
pub fn set_bounds(ptx: &str, entry: &str, bounds: Bounds) -> Result<String> {
    let after_signature = entry_named(ptx, entry)?.signature.end + 1;
    let (before, after) = ptx.split_at(after_signature);
    Ok(format!("{before}\n{}{}", bounds.directives(), after.trim_start()))
}

/// The PTX with parameter `index` of an entry, a block of bytes, aligned to `bytes`: a tensor map
/// passed by value needs 64, and rustc aligns to 16 at most.
///
/// # Errors
///
/// Where the text has no such entry, or that has no such parameter.
pub fn align_parameter(ptx: &str, entry: &str, index: usize, bytes: u32) -> Result<String> {
    let signature = entry_named(ptx, entry)?.signature;
    let parameters = &ptx[signature.clone()];
    let missing =
        || Error::NoParameter { entry: entry.into(), index, has: parameters.trim().into() };
    let mut split: Vec<String> = parameters.split(',').map(str::to_owned).collect();
    let parameter = split.get_mut(index).ok_or_else(missing)?;
    *parameter = realigned(parameter, bytes).ok_or_else(missing)?;
    Ok(format!("{}{}{}", &ptx[..signature.start], split.join(","), &ptx[signature.end..]))
}

/// `.param .align 8 .b8 name[128]` with another alignment.
fn realigned(parameter: &str, bytes: u32) -> Option<String> {
    let (before, after) = parameter.split_once(".param .align ")?;
    let (_, after) = after.split_once(' ')?;
    Some(format!("{before}.param .align {bytes} {after}"))
}

/// Keeps only the named entries of the PTX.
pub fn keep(ptx: &str, is_wanted: impl Fn(&str) -> bool) -> String {
    let (header, entries) = apart(ptx);
    let wanted = entries.into_iter().filter(|(name, _)| is_wanted(name)).map(|(_, text)| text);
    [header].into_iter().chain(wanted).collect()
}

/// Names of the entries, in order.
pub fn entry_names(ptx: &str) -> Vec<String> {
    entries(ptx).iter().map(|entry| entry.name.to_owned()).collect()
}

/// `7.0` of `.version 7.0`.
pub fn version(ptx: &str) -> Option<&str> {
    ptx.lines().find_map(|line| line.strip_prefix(".version ")).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::SAMPLE;

    #[test]
    fn a_target_takes_the_place_of_another() {
        let family = set_target(SAMPLE, "sm_100f", 88).unwrap();
        assert!(family.contains(".version 8.8\n.target sm_100f\n"), "{family}");
        assert_eq!(entry_names(&family), entry_names(SAMPLE));
        assert!(set_target("", "sm_100f", 88).is_err());
    }

    #[test]
    fn bounds_follow_the_signature_of_their_entry_only() {
        let bounds = Bounds { max_threads: Some(128), min_blocks: Some(2) };
        let text = set_bounds(SAMPLE, "scale", bounds).unwrap();
        let directives = ".maxntid 128\n.minnctapersm 2\n";
        assert!(text.contains(&format!("scale_param_1[40]\n)\n{directives}{{\n")), "{text}");
        assert_eq!(text.replacen(directives, "", 1), SAMPLE);
    }

    #[test]
    fn entries_that_are_not_wanted_leave() {
        let kept = keep(SAMPLE, |name| name == "scale_more");
        assert_eq!((entry_names(&kept), version(&kept)), (vec!["scale_more".into()], Some("7.0")));
        assert_eq!(keep(SAMPLE, |_| true), SAMPLE);
    }

    #[test]
    fn no_bounds_change_nothing() {
        assert_eq!(set_bounds(SAMPLE, "scale_more", Bounds::default()).unwrap(), SAMPLE);
    }

    #[test]
    fn a_parameter_is_aligned_by_its_place() {
        let text = align_parameter(SAMPLE, "scale", 1, 64).unwrap();
        assert!(text.contains(".param .align 64 .b8 scale_param_1[40]"), "{text}");
        assert!(text.contains(".param .align 8 .b8 scale_more_param_0[40]"), "{text}");
        for (index, why) in [(0, "a pointer"), (2, "not there")] {
            let error = align_parameter(SAMPLE, "scale", index, 64).unwrap_err().to_string();
            assert!(error.contains("scale_param_0"), "{why}: {error}");
        }
    }

    #[test]
    fn labels_lose_the_number_of_their_function() {
        let text = "\t@%p1 bra \t$L__BB12_2;\n$L__BB12_2:\n";
        assert_eq!(number_labels_alone(text), "\t@%p1 bra \t$L__BB_2;\n$L__BB_2:\n");
        assert_eq!(number_labels_alone("ret;"), "ret;");
    }

    #[test]
    fn stripping_takes_comments_and_blank_lines() {
        let text = "//\n// Generated\n\n.version 7.0\n\tret; \t// done\n\n";
        assert_eq!(strip(text), ".version 7.0\n\tret;\n");
        assert_eq!(strip(SAMPLE), SAMPLE);
        assert_eq!(version(&strip(text)), Some("7.0"));
    }
}
