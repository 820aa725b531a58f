//! Parameters of a kernel made constants of its text.
//!
//! A kernel reads a parameter once, into a register. Where the value is known before the kernel is
//! assembled, [`fold`] writes an immediate in place of the load, and ptxas drops the code that
//! becomes unreachable: a kernel with every option becomes one with none.
//!
//! | PTX | with bytes 8 to 12 of parameter 2 known as 7 |
//! |---|---|
//! | `ld.param.b32 %r1, [k_param_2+8];` | `mov.b32 %r1, 0x7;` |
//! | `ld.param.b64 %rd1, [k_param_2+8];` | `{ .reg .b32 lo, hi; mov.b32 lo, 0x7; ld.param.b32 hi, [k_param_2+12]; mov.b64 %rd1, {lo, hi}; }` |
//!
//! The kernel keeps its signature, and a load that cannot be folded stays. So the text is correct
//! for every launch whose parameters have these bytes, however many loads were folded.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Bytes of a kernel's parameters that have the same value in every launch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Constants(BTreeMap<(usize, usize), u8>);

impl Constants {
    /// Bytes from byte `offset` of parameter number `parameter` on.
    pub fn insert(&mut self, parameter: usize, offset: usize, bytes: &[u8]) {
        let places = (offset..).map(|offset| (parameter, offset));
        self.0.extend(places.zip(bytes.iter().copied()));
    }

    /// Whether no byte is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes that are known, each as its parameter's number, its offset there and its value.
    pub fn bytes(&self) -> impl Iterator<Item = (usize, usize, u8)> {
        self.0.iter().map(|(&(parameter, offset), &byte)| (parameter, offset, byte))
    }

    /// The `bytes` bytes at `place` as a little-endian integer (8 at most), if all of them are
    /// known.
    fn number(&self, place: &Place<'_>, bytes: usize) -> Option<u64> {
        (0..bytes).try_fold(0, |number, byte| {
            let known = self.0.get(&(place.parameter, place.offset + byte))?;
            Some(number | u64::from(*known) << (8 * byte))
        })
    }
}

/// The text of a single kernel with `constants` in place of the loads that read them.
pub fn fold(ptx: &str, kernel: &str, constants: &Constants) -> String {
    let prefix = format!("[{kernel}_param_");
    let mut folded = String::with_capacity(ptx.len());
    for line in ptx.split_inclusive('\n') {
        match Load::parse(line, &prefix).and_then(|load| load.folded(constants)) {
            Some(moves) => {
                folded.push('\t');
                folded.push_str(&moves);
                folded.push('\n');
            }
            None => folded.push_str(line),
        }
    }
    folded
}

/// The source of a load: an offset into a parameter named `[kernel_param_N`.
#[derive(Clone, Copy)]
struct Place<'a> {
    name: &'a str,
    parameter: usize,
    offset: usize,
}

impl Place<'_> {
    fn behind(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }

    fn address(&self) -> String {
        format!("{}+{}]", self.name, self.offset)
    }
}

/// One `ld.param` of untyped or unsigned values.
struct Load<'a> {
    /// Bytes of an element.
    bytes: usize,
    registers: Vec<&'a str>,
    place: Place<'a>,
}

impl<'a> Load<'a> {
    fn parse(line: &'a str, prefix: &str) -> Option<Self> {
        let (kind, operands) =
            line.trim().strip_prefix("ld.param.")?.split_once(char::is_whitespace)?;
        let (registers, address) = operands.strip_suffix(';')?.rsplit_once(", ")?;
        let registers = registers.trim().trim_start_matches('{').trim_end_matches('}');
        let registers: Vec<_> = registers.split(", ").collect();
        let element = match kind.split_once('.') {
            Some((vector, element)) if vector == format!("v{}", registers.len()) => element,
            None if registers.len() == 1 => kind,
            _ => return None,
        };
        let bytes = match element {
            "b8" | "u8" => 1,
            "b16" | "u16" => 2,
            "b32" | "u32" | "f32" => 4,
            "b64" | "u64" | "f64" => 8,
            _ => return None,
        };
        Some(Self { bytes, registers, place: place(address, prefix)? })
    }

    /// Equivalent statements with the known bytes as immediates; `None` where no byte is known.
    fn folded(&self, constants: &Constants) -> Option<String> {
        let places = (0..).map(|element| self.place.behind(element * self.bytes));
        let mut any = false;
        let mut text = String::new();
        for (register, place) in self.registers.iter().zip(places) {
            let known = element(register, &place, self.bytes, constants);
            any |= known.is_some();
            text += &known.unwrap_or_else(|| load(register, &place, self.bytes));
            text.push(' ');
        }
        any.then(|| text.trim_end().to_owned())
    }
}

/// A parameter's number and the offset in `[kernel_param_N+M]`.
fn place<'a>(address: &'a str, prefix: &str) -> Option<Place<'a>> {
    let (name, offset) = match address.strip_suffix(']')?.split_once('+') {
        Some((name, offset)) => (name, offset.parse().ok()?),
        None => (address.strip_suffix(']')?, 0),
    };
    let parameter = name.strip_prefix(prefix)?.parse().ok()?;
    Some(Place { name, parameter, offset })
}

/// The statements that set a register from known bytes, or from a known half; `None` where neither
/// half is known.
fn element(
    register: &str,
    place: &Place<'_>,
    bytes: usize,
    constants: &Constants,
) -> Option<String> {
    if let Some(number) = constants.number(place, bytes) {
        return Some(format!("mov.{} {register}, {number:#x};", kind(register)?));
    }
    let halves = [*place, place.behind(4)].map(|half| (constants.number(&half, 4), half));
    if bytes != 8 || halves.iter().all(|(number, _)| number.is_none()) {
        return None;
    }
    let mut text = "{ .reg .b32 lo, hi;".to_owned();
    for ((number, half), name) in halves.iter().zip(["lo", "hi"]) {
        let _ = match number {
            Some(number) => write!(text, " mov.b32 {name}, {number:#x};"),
            None => write!(text, " {}", load(name, half, 4)),
        };
    }
    Some(text + &format!(" mov.b64 {register}, {{lo, hi}}; }}"))
}

fn load(register: &str, place: &Place<'_>, bytes: usize) -> String {
    format!("ld.param.b{} {register}, {};", 8 * bytes, place.address())
}

/// The type of a register that LLVM named.
fn kind(register: &str) -> Option<&'static str> {
    match register.trim_end_matches(|c: char| c.is_ascii_digit()) {
        "%rs" => Some("b16"),
        "%r" | "%f" => Some("b32"),
        "%rd" | "%fd" => Some("b64"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOADS: &str = "\
\tld.param.b64 \t%rd1, [k_param_0];
\tld.param.b64 \t%rd2, [k_param_1+8];
\tld.param.b32 \t%r1, [k_param_1+4];
\tld.param.v2.b32 \t{%r2, %r3}, [k_param_1+8];
\tld.param.b8 \t%rs1, [k_param_1+15];
\tmov.b64 %rd9, k_param_1;
\tld.param.b32 \t%r4, [other_k_param_1+4];
";

    fn folded(parameter: usize, offset: usize, bytes: &[u8]) -> Vec<String> {
        let mut constants = Constants::default();
        constants.insert(parameter, offset, bytes);
        let text = fold(LOADS, "k", &constants);
        assert_eq!(text.lines().count(), LOADS.lines().count());
        let changed = text.lines().zip(LOADS.lines()).filter(|(new, old)| new != old);
        changed.map(|(new, _)| new.trim().to_owned()).collect()
    }

    #[test]
    fn a_known_value_is_moved() {
        assert_eq!(folded(0, 0, &[0; 8]), ["mov.b64 %rd1, 0x0;"]);
        assert_eq!(folded(1, 4, &[1, 2, 3, 0x80]), ["mov.b32 %r1, 0x80030201;"]);
        assert_eq!(folded(1, 15, &[255]), ["mov.b16 %rs1, 0xff;"]);
    }

    #[test]
    fn half_of_a_load_is_moved_where_only_that_is_known() {
        let low = "{ .reg .b32 lo, hi; mov.b32 lo, 0x7; ld.param.b32 hi, [k_param_1+12]; \
                   mov.b64 %rd2, {lo, hi}; }";
        let vector = "mov.b32 %r2, 0x7; ld.param.b32 %r3, [k_param_1+12];";
        assert_eq!(folded(1, 8, &[7, 0, 0, 0]), [low, vector]);
    }

    #[test]
    fn what_is_not_known_whole_stays() {
        assert!(folded(0, 0, &[0; 3]).is_empty());
        assert!(folded(2, 0, &[0; 64]).is_empty());
        assert_eq!(fold(LOADS, "k", &Constants::default()), LOADS);
    }

    #[test]
    fn bytes_that_were_inserted_last_count() {
        let mut constants = Constants::default();
        assert!(constants.is_empty());
        constants.insert(1, 0, &[1; 16]);
        constants.insert(1, 4, &[2; 4]);
        assert!(fold(LOADS, "k", &constants).contains("mov.b32 %r1, 0x2020202;"));
    }
}
