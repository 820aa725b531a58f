//! A minimal parser of PTX: finds entries and statements.

#[cfg(feature = "build")]
use crate::error::{Error, Result};
use std::ops::Range;

/// Byte ranges of one `.entry` in a PTX text.
#[derive(Clone, Debug)]
pub(crate) struct EntryText<'a> {
    pub name: &'a str,
    /// What stands between the parentheses.
    pub signature: Range<usize>,
    /// What stands between the braces.
    #[cfg_attr(not(feature = "build"), expect(dead_code, reason = "who builds reads it"))]
    pub body: Range<usize>,
}

/// All entries, in order. The text must be free of comments: [`crate::post::strip`].
pub(crate) fn entries(ptx: &str) -> Vec<EntryText<'_>> {
    ptx.match_indices(".entry ")
        .filter_map(|(at, keyword)| entry(ptx, at + keyword.len()))
        .collect()
}

/// The entry of that name.
#[cfg(feature = "build")]
pub(crate) fn entry_named<'a>(ptx: &'a str, name: &str) -> Result<EntryText<'a>> {
    let all = entries(ptx);
    let has = || all.iter().map(|entry| entry.name.to_owned()).collect();
    all.iter()
        .find(|entry| entry.name == name)
        .cloned()
        .ok_or_else(|| Error::NoEntry { entry: name.into(), has: has() })
}

/// The text before the first entry, and each entry's name with its text.
pub(crate) fn apart(ptx: &str) -> (&str, Vec<(&str, &str)>) {
    const VISIBLE: &str = ".visible ";
    let starts = entries(ptx).into_iter().filter_map(|entry| {
        let keyword = ptx[..entry.signature.start].rfind(VISIBLE)?;
        Some((entry.name, keyword))
    });
    let starts: Vec<_> = starts.collect();
    let ends = starts.iter().skip(1).map(|&(_, start)| start).chain([ptx.len()]);
    let texts = starts.iter().zip(ends).map(|(&(name, start), end)| (name, &ptx[start..end]));
    let header = starts.first().map_or(ptx, |&(_, start)| &ptx[..start]);
    (header, texts.collect())
}

/// The whole PTX texts for a target such as `sm_80` in a concatenation of texts.
pub(crate) fn sections<'a>(texts: &'a str, arch: &str) -> impl Iterator<Item = &'a str> {
    const BEGIN: &str = ".version ";
    let starts: Vec<_> = texts
        .match_indices(BEGIN)
        .map(|(at, _)| at)
        .filter(|&at| at == 0 || texts[..at].ends_with('\n'))
        .collect();
    let ends: Vec<_> = starts.iter().skip(1).copied().chain([texts.len()]).collect();
    let target = format!("\n.target {arch}\n");
    let is_for = move |text: &&str| {
        text.find("\n.target ").is_some_and(|at| text[at..].starts_with(&target))
    };
    starts.into_iter().zip(ends).map(|(start, end)| &texts[start..end]).filter(is_for)
}

/// In a concatenation of whole PTX texts, the one for that target that contains the kernel.
pub fn section<'a>(texts: &'a str, arch: &str, kernel: &str) -> Option<&'a str> {
    let entry = format!(".entry {kernel}(");
    sections(texts, arch).find(|text| text.contains(&entry))
}

/// A whole PTX text that keeps one kernel; `None` where the text lacks it.
pub fn alone(ptx: &str, kernel: &str) -> Option<String> {
    let (header, kernels) = apart(ptx);
    let (_, text) = kernels.into_iter().find(|(name, _)| *name == kernel)?;
    Some([header, text].concat())
}

/// The entry whose name starts at `start`.
fn entry(ptx: &str, start: usize) -> Option<EntryText<'_>> {
    let open = start + ptx[start..].find('(')?;
    let close = matching(ptx, open)?;
    let body = close + ptx[close..].find('{')?;
    let end = matching(ptx, body)?;
    Some(EntryText {
        name: ptx[start..open].trim(),
        signature: open + 1..close,
        body: body + 1..end,
    })
}

/// Position of the bracket that closes the one at `open`.
fn matching(ptx: &str, open: usize) -> Option<usize> {
    let mut depth = 0i32;
    for (at, byte) in ptx.bytes().enumerate().skip(open) {
        match byte {
            b'(' | b'{' => depth += 1,
            b')' | b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
pub(crate) const SAMPLE: &str = "\
.version 7.0
.target sm_80
.address_size 64
.extern .shared .align 128 .b8 dyn_smem[];
.visible .entry scale(
\t.param .u64 .ptr .align 1 scale_param_0,
\t.param .align 8 .b8 scale_param_1[40]
)
{
\t.local .align 4 .b8 \t__local_depot0[64];
\t.reg .pred \t%p<7>;
\tld.param.b64 \t%rd6, [scale_param_0];
\tmov.u32 \t%r1, %tid.x;
\t@%p1 bra \t$L__BB0_2;
\tbar.sync \t0;
$L__BB0_2:
\t{ .reg .b32 tmp; mov.b64 {tmp, %r8}, %rd3; }
\tld.global.v4.b32 \t{%r2, %r5, %r6, %r7}, [%rd8];
\t@%p2 shfl.sync.bfly.b32 \t%r10, %r9, 1, 31, -1;
\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2}, {%r3}, {%r4}, {%r1, %r2};
\tst.global.b32 \t[%rd8], %r19;
\tst.b32 \t[%rd8], %r19;
\ttrap; exit;
}
.visible .entry scale_more(
\t.param .align 8 .b8 scale_more_param_0[40]
)
{
\tbarrier.sync.aligned \t1, 64;
\tret;
}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_whole() {
        let found = entries(SAMPLE);
        assert_eq!(
            found.iter().map(|entry| entry.name).collect::<Vec<_>>(),
            ["scale", "scale_more"]
        );
        assert!(SAMPLE[found[0].signature.clone()].contains("scale_param_1[40]"));
        assert!(SAMPLE[found[0].body.clone()].trim_end().ends_with("trap; exit;"));
        assert!(SAMPLE[found[1].body.clone()].trim_end().ends_with("ret;"));
    }

    #[test]
    fn entries_are_taken_apart_whole() {
        let (header, kernels) = apart(SAMPLE);
        assert!(header.starts_with(".version 7.0\n") && header.ends_with("dyn_smem[];\n"));
        let names: Vec<_> = kernels.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["scale", "scale_more"]);
        let texts: String = kernels.iter().map(|(_, text)| *text).collect();
        assert_eq!(header.to_owned() + &texts, SAMPLE);
        assert_eq!(apart(header), (header, Vec::new()));
        assert_eq!(alone(SAMPLE, "scale_more"), Some(header.to_owned() + kernels[1].1));
        assert_eq!(alone(SAMPLE, "more"), None);
    }

    #[test]
    fn an_unknown_entry_names_the_known_ones() {
        let error = entry_named(SAMPLE, "scal").unwrap_err().to_string();
        assert!(error.contains("`scal`") && error.contains("scale, scale_more"), "{error}");
    }

    #[test]
    fn a_cut_text_has_only_its_whole_entries() {
        let cut = &SAMPLE[..SAMPLE.len() - 20];
        assert_eq!(entries(cut).len(), 1);
    }
}
