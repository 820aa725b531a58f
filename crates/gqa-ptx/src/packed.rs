//! Compresses PTX for crates that ship many kernels: to a tenth of its bytes, and similar kernels
//! packed together to half of that.
//!
//! LLVM numbers registers in the order of their definition, so the copies of an unrolled loop
//! differ in every register. [`pack`] writes each number as its distance from the number that stood
//! last in the same class of registers (or labels); then the copies are the same text, which LZMA
//! finds.
//!
//! | PTX | relative |
//! |---|---|
//! | `add.s32 %r7, %r5, %r6;` | `add.s32 %r+7, %r-2, %r+1;` |
//! | `add.s32 %r9, %r7, %r8;` | `add.s32 %r+3, %r-2, %r+1;` |
//! | `st.local.b32 [%SP+8], %r9;` | `st.local.b32 [%SP=+8], %r+1;` |

use lzma_rust2::LzmaReader;
use std::collections::HashMap;
use std::io::{self, Read};

/// Text as bytes that [`unpack`] reads; the same bytes each time.
///
/// # Errors
///
/// Where a register number is too large, or begins with a zero: no compiler writes such text.
#[cfg(feature = "build")]
pub fn pack(ptx: &str) -> io::Result<Vec<u8>> {
    use lzma_rust2::{LzmaOptions, LzmaWriter};
    use std::io::Write;
    let text = relative(ptx);
    if absolute(&text) != ptx {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "PTX with numbers that no compiler writes",
        ));
    }
    // LZMA's position bits do not help text, and its repeats are far apart.
    let options =
        LzmaOptions { pb: 0, nice_len: LzmaOptions::NICE_LEN_MAX, ..LzmaOptions::default() };
    let mut writer = LzmaWriter::new_use_header(Vec::new(), &options, Some(text.len() as u64))?;
    writer.write_all(text.as_bytes())?;
    writer.finish()
}

/// The text of [`pack`].
///
/// # Errors
///
/// Where the bytes are damaged; not all damage is found, so compare a checksum where that can be.
pub fn unpack(bytes: &[u8]) -> io::Result<String> {
    let mut text = String::new();
    LzmaReader::new_mem_limit(bytes, MEMORY_KIB, None)?.read_to_string(&mut text)?;
    Ok(absolute(&text))
}

/// The most memory that [`pack`] ever needs; damaged bytes may ask for any amount.
const MEMORY_KIB: u32 = 64 << 10;

/// Replaces register numbers by their distance from the last number of the same class.
#[cfg(feature = "build")]
fn relative(text: &str) -> String {
    rewritten(text, |name, rest, last, out| {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        match rest[..digits].parse::<u32>() {
            Ok(number) => {
                let distance = i64::from(number) - last.insert(name, number.into()).unwrap_or(0);
                out.push_str(&format!("{distance:+}"));
            }
            // Or it would be read as a distance.
            Err(_) if rest.starts_with(['+', '-', '=']) => out.push('='),
            Err(_) => {}
        }
        digits
    })
}

/// The inverse of [`relative`].
fn absolute(text: &str) -> String {
    rewritten(text, |name, rest, last, out| {
        if rest.starts_with('=') {
            return 1;
        }
        if !rest.starts_with(['+', '-']) {
            return 0;
        }
        let digits =
            rest[1..].len() - rest[1..].trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let distance: i64 = rest[..=digits].parse().unwrap_or(0);
        let number = last.entry(name).or_insert(0);
        *number = number.saturating_add(distance);
        out.push_str(&number.to_string());
        digits + 1
    })
}

/// Rewrites the suffix of each register or label name. `replace` gets the name, the text behind it,
/// and the last number of each name; it writes the replacement and returns how many bytes it
/// consumed.
fn rewritten<'a>(
    text: &'a str,
    mut replace: impl FnMut(&'a str, &'a str, &mut HashMap<&'a str, i64>, &mut String) -> usize,
) -> String {
    let mut last = HashMap::new();
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(['%', '$']) {
        let (before, from_name) = rest.split_at(start);
        let (name, after) = from_name.split_at(name_length(from_name));
        out.push_str(before);
        out.push_str(name);
        let taken = replace(name, after, &mut last, &mut out);
        rest = &after[taken..];
    }
    out + rest
}

/// Length of the name at the begin of the text, with its sigil and without the number at its end.
fn name_length(text: &str) -> usize {
    let inside = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let word = 1 + text[1..].len() - text[1..].trim_start_matches(inside).len();
    text[..word].trim_end_matches(|c: char| c.is_ascii_digit()).len()
}

#[cfg(all(test, feature = "build"))]
mod tests {
    use super::*;
    use crate::text::SAMPLE;

    const LINES: &str = "\tadd.s32 %r7, %r5, %r6;\n\tadd.s32 %r9, %r7, %r8;\n\
        \tst.local.b32 [%SP+8], %r9;\n$L__BB3_12:\n\t@%p1 bra $L__BB3_11;\n\tmov.u32 %r10, %tid.x;\n\
        \t.reg .b32 %r<11>;\n\tmov.b64 {_, %r2}, %rd4;\n\tld.param.b64 %rd1, [scale_param_0+136];\n% $ %=";

    #[test]
    fn numbers_become_distances() {
        let text = relative(LINES);
        assert!(
            text.starts_with("\tadd.s32 %r+7, %r-2, %r+1;\n\tadd.s32 %r+3, %r-2, %r+1;\n"),
            "{text}"
        );
        assert!(text.contains("[%SP=+8], %r+1;\n$L__BB3_+12:\n\t@%p+1 bra $L__BB3_-1;"), "{text}");
        assert!(text.contains("%tid.x") && text.contains("%r<11>"), "{text}");
        assert_eq!(absolute(&text), LINES);
    }

    #[test]
    fn text_comes_back_small_and_reproducibly() {
        let unrolled: String = (0..2000)
            .map(|i| format!("\tfma.rn.f32 %f{}, %f{i}, %f{i}, %f{};\n", i + 900, i + 899))
            .collect();
        for text in [SAMPLE, LINES, unrolled.as_str(), ""] {
            let bytes = pack(text).unwrap();
            assert_eq!(unpack(&bytes).unwrap(), text);
            assert_eq!(bytes, pack(text).unwrap());
        }
        assert!(pack(&unrolled).unwrap().len() * 50 < unrolled.len());
    }

    #[test]
    fn what_does_not_come_back_is_refused() {
        for text in ["%r007", "%r5000000000"] {
            assert!(pack(text).is_err(), "{text}");
        }
    }

    #[test]
    fn damage_is_an_error_or_another_text_but_no_panic() {
        let bytes = pack(SAMPLE).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x55;
            let _ = unpack(&damaged);
            assert!(unpack(&bytes[..at]).is_err(), "{at}");
        }
    }
}
