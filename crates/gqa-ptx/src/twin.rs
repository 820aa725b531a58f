//! One text for both 16-bit element types.
//!
//! A kernel for bfloat16 and its twin for float16 differ in the instructions that read and write
//! elements, and in some constants. The kernels write such an operation as one statement that names
//! the type, so that the compiler makes the same text of both. [`lower`] replaces those statements
//! that no assembler knows, or not for that GPU; what it writes for bfloat16 is recognised again,
//! by a register named `bf16`. So [`as_f16`] makes of a kernel for bfloat16 the one for float16,
//! and only the first has to be shipped.
//!
//! | the kernels write | for bfloat16 | for float16 |
//! |---|---|---|
//! | `mma….f32.bf16.bf16.f32` | the same | `mma….f32.f16.f16.f32` |
//! | `cvt.rn.bf16x2.f32 %r1, %r2, %r3;` | the same | `cvt.rn.f16x2.f32 %r1, %r2, %r3;` |
//! | `cvt.f32.bf16 %r1, %rs2;` | a shift | `cvt.f32.f16 %r1, %rs2;` |
//! | `cvt.f32.bf16.low %r1, %r2;`, `….high` | a shift, a mask | `cvt.f32.f16` of a half of `%r2` |
//! | `cvt.rn.bf16.f32 %rs1, %r2;` | before SM 80 in integers | `cvt.rn.f16.f32 %rs1, %r2;` |
//! | `mov.b32.bf16 %r1, 7, 5;` | `mov` of the first | `mov` of the second |

/// What stands for one operation. `#0` to `#2` are its operands.
#[cfg_attr(not(feature = "build"), expect(dead_code, reason = "who builds reads all of it"))]
struct Operation {
    /// As the kernels write it for bfloat16; for float16 with that type's name.
    written: &'static str,
    /// PTX for bfloat16.
    bf16: &'static str,
    /// PTX for float16.
    f16: &'static str,
    /// First GPU (compute capability, times ten) whose assembler knows what the kernels write.
    since: u32,
}

/// Of an operation that no GPU has as it is written.
const NEVER: u32 = u32::MAX;

const OPERATIONS: [Operation; 5] = [
    Operation {
        written: "cvt.f32.bf16 #0, #1;",
        bf16: "{ .reg .b32 bf16; cvt.u32.u16 bf16, #1; shl.b32 #0, bf16, 16; }",
        f16: "cvt.f32.f16 #0, #1;",
        // It came with SM 90 and PTX 7.8, and is the same shift there.
        since: NEVER,
    },
    Operation {
        written: "cvt.f32.bf16.low #0, #1;",
        bf16: "{ .reg .b32 bf16; mov.b32 bf16, #1; shl.b32 #0, bf16, 16; }",
        f16: "{ .reg .b16 low, high; mov.b32 {low, high}, #1; cvt.f32.f16 #0, low; }",
        since: NEVER,
    },
    Operation {
        written: "cvt.f32.bf16.high #0, #1;",
        bf16: "{ .reg .b32 bf16; mov.b32 bf16, #1; and.b32 #0, bf16, 0xffff0000; }",
        f16: "{ .reg .b16 low, high; mov.b32 {low, high}, #1; cvt.f32.f16 #0, high; }",
        since: NEVER,
    },
    Operation {
        written: "cvt.rn.bf16.f32 #0, #1;",
        bf16: "{ .reg .b32 bf16; .reg .b16 low; .reg .pred nan; setp.nan.f32 nan, #1, #1; \
               bfe.u32 bf16, #1, 16, 1; add.u32 bf16, bf16, 0x7fff; add.u32 bf16, bf16, #1; \
               selp.b32 bf16, 0x7fffffff, bf16, nan; mov.b32 {low, #0}, bf16; }",
        f16: "cvt.rn.f16.f32 #0, #1;",
        since: 80,
    },
    Operation {
        written: "mov.b32.bf16 #0, #1, #2;",
        bf16: "{ .reg .b32 bf16, f16; mov.b32 f16, #2; mov.b32 bf16, #1; mov.b32 #0, bf16; }",
        f16: "mov.b32 #0, #2;",
        since: NEVER,
    },
];

/// With what every lowered operation on bfloat16 begins, and nothing that a compiler writes.
const MARK: &str = "{ .reg .b32 bf16";

/// Replaces operations on elements by instructions of a GPU (compute capability, times ten). The
/// text must be free of comments.
#[cfg(feature = "build")]
pub(crate) fn lower(ptx: &str, sm: u32) -> String {
    let operations = || OPERATIONS.iter().filter(|operation| sm < operation.since);
    rewritten(ptx, |statement| {
        operations().find_map(|operation| {
            let of_f16 = || operands(&operation.written.replace("bf16", "f16"), statement);
            match operands(operation.written, statement) {
                Some(operands) => Some(filled(operation.bf16, &operands)),
                None => of_f16().map(|operands| filled(operation.f16, &operands)),
            }
        })
    })
}

/// The text of a kernel for float16, from that of its twin for bfloat16, whose operations
/// `post::lower_elements` wrote. The kernel's name gets the other type, too.
pub fn as_f16(ptx: &str) -> String {
    let lowered = rewritten(ptx, |statement| {
        let of = |operation: &Operation| {
            operands(operation.bf16, statement).map(|operands| filled(operation.f16, &operands))
        };
        if statement.starts_with(MARK) { OPERATIONS.iter().find_map(of) } else { None }
    });
    lowered.replace("bf16", "f16")
}

/// The text with other statements where `replace` has one for a line's.
fn rewritten(ptx: &str, replace: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::with_capacity(ptx.len());
    for line in ptx.split_inclusive('\n') {
        match replace(line.trim()) {
            Some(statement) => {
                text.push('\t');
                text.push_str(&statement);
                text.push('\n');
            }
            None => text.push_str(line),
        }
    }
    text
}

/// The operands of a statement that is written as `template`; `None` if it is another.
fn operands<'a>(template: &str, statement: &'a str) -> Option<[&'a str; 3]> {
    let mut found = [""; 3];
    let mut rest = statement;
    let mut parts = template.split('#');
    rest = rest.strip_prefix(parts.next()?)?;
    for part in parts {
        let (number, literal) = part.split_at(1);
        let inside = |c: char| c == '%' || c.is_ascii_alphanumeric();
        let end = rest.find(|c| !inside(c)).unwrap_or(rest.len());
        let operand = number.parse::<usize>().ok().and_then(|number| found.get_mut(number))?;
        if end == 0 || !operand.is_empty() && *operand != &rest[..end] {
            return None;
        }
        *operand = &rest[..end];
        rest = rest[end..].strip_prefix(literal)?;
    }
    rest.is_empty().then_some(found)
}

/// The statement that `template` stands for.
fn filled(template: &str, operands: &[&str; 3]) -> String {
    let numbered = (0..).zip(operands);
    numbered.fold(template.to_owned(), |text, (number, operand): (u32, _)| {
        text.replace(&format!("#{number}"), operand)
    })
}

#[cfg(all(test, feature = "build"))]
mod tests {
    use super::*;

    /// What kernels write for bfloat16, and what that is for bfloat16 and for float16 on SM 70.
    const CASES: [(&str, &str, &str); 8] = [
        (
            "cvt.f32.bf16 %r1, %rs2;",
            "{ .reg .b32 bf16; cvt.u32.u16 bf16, %rs2; shl.b32 %r1, bf16, 16; }",
            "cvt.f32.f16 %r1, %rs2;",
        ),
        (
            "cvt.f32.bf16.low %r1, %r2;",
            "{ .reg .b32 bf16; mov.b32 bf16, %r2; shl.b32 %r1, bf16, 16; }",
            "{ .reg .b16 low, high; mov.b32 {low, high}, %r2; cvt.f32.f16 %r1, low; }",
        ),
        (
            "cvt.f32.bf16.high %r1, %r2;",
            "{ .reg .b32 bf16; mov.b32 bf16, %r2; and.b32 %r1, bf16, 0xffff0000; }",
            "{ .reg .b16 low, high; mov.b32 {low, high}, %r2; cvt.f32.f16 %r1, high; }",
        ),
        (
            "cvt.rn.bf16.f32 %rs11, %r2;",
            "{ .reg .b32 bf16; .reg .b16 low; .reg .pred nan; setp.nan.f32 nan, %r2, %r2; \
             bfe.u32 bf16, %r2, 16, 1; add.u32 bf16, bf16, 0x7fff; add.u32 bf16, bf16, %r2; \
             selp.b32 bf16, 0x7fffffff, bf16, nan; mov.b32 {low, %rs11}, bf16; }",
            "cvt.rn.f16.f32 %rs11, %r2;",
        ),
        (
            "mov.b32.bf16 %r1, 7, 5;",
            "{ .reg .b32 bf16, f16; mov.b32 f16, 5; mov.b32 bf16, 7; mov.b32 %r1, bf16; }",
            "mov.b32 %r1, 5;",
        ),
        (
            "cvt.rn.bf16x2.f32 %r1, %r2, %r3;",
            "cvt.rn.bf16x2.f32 %r1, %r2, %r3;",
            "cvt.rn.f16x2.f32 %r1, %r2, %r3;",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
        ),
        ("shl.b32 %r1, %r2, 16;", "shl.b32 %r1, %r2, 16;", "shl.b32 %r1, %r2, 16;"),
    ];

    #[test]
    fn every_operation_is_lowered_for_both_types_and_rewritten_from_one_to_the_other() {
        let line = |statement: &str| format!("\t{statement}\n");
        for (written, bf16, f16) in CASES {
            assert_eq!(lower(&line(written), 70), line(bf16));
            assert_eq!(lower(&line(&written.replace("bf16", "f16")), 70), line(f16));
            assert_eq!(as_f16(&line(bf16)), line(f16));
        }
        let lowered = |operation: &&Operation| {
            CASES.iter().any(|(written, ..)| operands(operation.written, written).is_some())
        };
        assert_eq!(OPERATIONS.iter().filter(lowered).count(), OPERATIONS.len());
        assert!(OPERATIONS.iter().all(|operation| operation.bf16.starts_with(MARK)));
    }

    #[test]
    fn what_a_gpu_knows_stays() {
        let rounds = "\tcvt.rn.bf16.f32 \t%rs1, %r2;\n\tcvt.rn.bf16.f32 %rs1, %r2;\n";
        assert_eq!(lower(rounds, 80), rounds);
        assert_eq!(as_f16(rounds), rounds.replace("bf16", "f16"));
    }

    #[test]
    fn names_follow_and_other_statements_stay() {
        let text = ".visible .entry k_bf16_d64(\n\t.param .b32 k_bf16_d64_param_0\n)\n{\n\
                    $L__BB_1:\n\t{ .reg .b16 tmp; mov.b32 {tmp, %rs1}, %r1; }\n}\n";
        assert_eq!(as_f16(text), text.replace("bf16", "f16"));
        assert_eq!(lower(text, 70), text);
    }

    #[test]
    fn a_statement_that_is_written_otherwise_is_another() {
        let template = "op #0, #1, #0;";
        assert_eq!(operands(template, "op %r1, %r2, %r1;"), Some(["%r1", "%r2", ""]));
        for other in ["op %r1, %r2, %r3;", "op %r1, , %r1;", "op %r1, %r2, %r1; }", "op %r1, %r2"] {
            assert_eq!(operands(template, other), None, "{other}");
        }
    }
}
