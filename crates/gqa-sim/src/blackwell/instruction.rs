//! Instruction descriptors of `tcgen05.mma` of kinds f16 and f8f6f4.
//!
//! From the text of the PTX ISA, version 9.2, sections 9.7.16.4.2 (the fields), 9.7.16.2.1 (shapes)
//! and 9.7.16.10.1 (transposed operands).
//!
//! | bits | field | of kind f16 | of kind f8f6f4 |
//! |---|---|---|---|
//! | 0–3 | sparsity, saturation of integers | 0 | 0 |
//! | 4–5 | type of D | f16 0, f32 1 | f32 1 |
//! | 7–9, 10–12 | types of A and B | f16 0, bf16 1 | e4m3 0, e5m2 1, e2m3 3, e3m2 4, e2m1 5 |
//! | 13, 14 | whether A and B are negated | | |
//! | 15, 16 | whether A and B are MN-major | | |
//! | 17–22 | N / 8 | | |
//! | 24–28 | M / 16 | | |
//! | 30–31 | shift of B, of `.ws` only | 0 | 0 |
//!
//! Simulated are dense operands of 16 and 8 bits and D in f32. Where documents disagree:
//! - The shapes of ISA 9.2 have N in steps of 8 for M of 64 and 128; CUTLASS
//!   (`cute/atom/mma_traits_sm100.hpp`) has steps of 16 for M of 128. The latter holds here.
//! - The ISA's table of shapes has D in f16 for kind f8f6f4, its table of fields only f32.
//! - The ISA lists f16 and bf16 as types of A and B together and does not say whether one operand
//!   may have the other's; CUTLASS has both of one type. So it is here.

use super::descriptor::{Major, Tile};
use crate::arithmetic::{e4m3x2_to_f16x2, f16_to_f32};
use crate::instruction::Product;

/// The instruction's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    F16,
    F8f6f4,
}

/// Type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Half(Product),
    E4m3,
    E5m2,
}

impl Element {
    fn new(kind: Kind, code: u32) -> Option<Self> {
        match (kind, code) {
            (Kind::F16, 0) => Some(Self::Half(Product::F16)),
            (Kind::F16, 1) => Some(Self::Half(Product::Bf16)),
            (Kind::F8f6f4, 0) => Some(Self::E4m3),
            (Kind::F8f6f4, 1) => Some(Self::E5m2),
            _ => None,
        }
    }

    /// Bytes of an element.
    pub(super) fn bytes(self) -> u32 {
        if matches!(self, Self::Half(_)) { 2 } else { 1 }
    }

    /// The elements of a word, the lowest first: two or four.
    #[inline]
    pub(super) fn widen(self, word: u32, to: &mut Vec<f32>) {
        match self {
            Self::Half(product) => to.extend(product.widen(word)),
            Self::E4m3 => {
                let [low, high] = [word, word >> 16].map(|two| e4m3x2_to_f16x2(two as u16));
                to.extend([low, low >> 16, high, high >> 16].map(|half| f16_to_f32(half as u16)));
            }
            // The upper half of an f16.
            Self::E5m2 => {
                to.extend(word.to_le_bytes().map(|byte| f16_to_f32(u16::from(byte) << 8)));
            }
        }
    }
}

/// An operand: its type, order and sign.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub(super) element: Element,
    pub(super) major: Major,
    pub(super) negated: bool,
    /// Rows of A or columns of B.
    pub(super) extent: u32,
}

impl Operand {
    /// As descriptors of shared memory describe it.
    pub(super) fn tile(self) -> Tile {
        let Self { element, major, extent, .. } = self;
        Tile { major, extent, element_bytes: element.bytes() }
    }

    /// Elements that one instruction multiplies.
    pub(super) fn depth(self) -> u32 {
        32 / self.element.bytes()
    }
}

/// A decoded descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instruction {
    pub(super) a: Operand,
    pub(super) b: Operand,
}

impl Instruction {
    /// Decodes a descriptor, or says what is wrong with it.
    pub(super) fn new(kind: Kind, bits: u32) -> Result<Self, String> {
        let refuse = |what: &str| Err(format!("instruction descriptor {bits:#010x} {what}"));
        let field = |at: u32, size: u32| bits >> at & ((1 << size) - 1);
        if field(0, 4) != 0 || field(30, 2) != 0 {
            return refuse("has sparsity, saturation or a shift, which are not simulated");
        }
        if field(6, 1) | field(23, 1) | field(29, 1) != 0 {
            return refuse("sets reserved bits");
        }
        if field(4, 2) != 1 {
            return refuse("does not have D in f32, and other types are not simulated");
        }
        let (m, n) = (16 * field(24, 5), 8 * field(17, 6));
        let operand = |code: u32, negated: u32, transposed: u32, extent: u32| {
            let element = Element::new(kind, code)?;
            let major = if transposed == 1 { Major::Mn } else { Major::K };
            Some(Operand { element, major, negated: negated == 1, extent })
        };
        let a = operand(field(7, 3), field(13, 1), field(15, 1), m);
        let b = operand(field(10, 3), field(14, 1), field(16, 1), n);
        let (Some(a), Some(b)) = (a, b) else {
            return refuse(
                "has types of A or B that this kind does not have, or are not simulated",
            );
        };
        if kind == Kind::F16 && a.element != b.element {
            return refuse("has A and B of different types");
        }
        let step = match m {
            64 => 8,
            128 => 16,
            _ => return refuse("has an M that is neither 64 nor 128"),
        };
        let step = if b.element.bytes() == 1 && b.major == Major::Mn { 16 } else { step };
        if n == 0 || n > 256 || n % step != 0 {
            return refuse(&format!("has N = {n}; a multiple of {step} up to 256"));
        }
        Ok(Self { a, b })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// D in f32, bf16 by bf16, B transposed, 128 by 64.
    #[test]
    fn fields_are_where_the_isa_has_them() {
        let bits = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | (64 / 8) << 17 | (128 / 16) << 24;
        let Instruction { a, b } = Instruction::new(Kind::F16, bits).unwrap();
        assert_eq!((a.element, b.element), (Element::Half(Product::Bf16), a.element));
        assert_eq!((a.major, b.major), (Major::K, Major::Mn));
        assert_eq!((a.extent, b.extent), (128, 64));
        assert_eq!((a.negated, b.negated, a.depth()), (false, false, 16));
        let negated = Instruction::new(Kind::F16, bits | 1 << 14).unwrap();
        assert_eq!((negated.a.negated, negated.b.negated), (false, true));
        // e4m3, 64 by 64, as published tests of a B200 have it.
        let Instruction { a, b } = Instruction::new(Kind::F8f6f4, 0x0410_0010).unwrap();
        assert_eq!((a.element, b.element, a.depth()), (Element::E4m3, Element::E4m3, 32));
        assert_eq!((a.extent, b.extent, a.major, b.major), (64, 64, Major::K, Major::K));
    }

    #[test]
    fn descriptors_that_are_none() {
        let right: u32 = 1 << 4 | (64 / 8) << 17 | (128 / 16) << 24;
        let n = |n: u32| right & !(63 << 17) | (n / 8) << 17;
        Instruction::new(Kind::F16, right).unwrap();
        let wrong = [
            (Kind::F16, right | 1 << 2, "sparsity"),
            (Kind::F16, right | 1 << 3, "saturation"),
            (Kind::F16, right | 1 << 31, "shift"),
            (Kind::F16, right | 1 << 6, "reserved"),
            (Kind::F16, right | 1 << 23, "reserved"),
            (Kind::F16, right | 1 << 29, "reserved"),
            (Kind::F16, right & !(1 << 4), "D in f32"),
            (Kind::F16, right | 2 << 7, "types"),
            (Kind::F16, right | 1 << 7, "different types"),
            (Kind::F8f6f4, right | 3 << 10, "types"),
            (Kind::F16, right & !(31 << 24) | 2 << 24, "neither 64 nor 128"),
            (Kind::F16, n(0), "multiple of 16"),
            (Kind::F16, n(24), "multiple of 16"),
            (Kind::F16, n(264), "multiple of 16"),
        ];
        for (kind, bits, what) in wrong {
            let refusal = Instruction::new(kind, bits).unwrap_err();
            assert!(refusal.contains(what), "{bits:#x}: {refusal}");
        }
        let of_64 = 1 << 4 | (24 / 8) << 17 | (64 / 16) << 24;
        Instruction::new(Kind::F8f6f4, of_64).unwrap();
        let refusal = Instruction::new(Kind::F8f6f4, of_64 | 1 << 16).unwrap_err();
        assert!(refusal.contains("multiple of 16"), "{refusal}");
    }

    #[test]
    fn elements_of_eight_bits() {
        let widened = |element: Element, word: u32| {
            let mut all = Vec::new();
            element.widen(word, &mut all);
            all
        };
        // e4m3: 1 is 0x38, 4 is 0x48, -448 is 0xfe; e5m2: 1 is 0x3c, 2 is 0x40, -57344 is 0xfb.
        assert_eq!(widened(Element::E4m3, 0x00fe_4838), [1.0, 4.0, -448.0, 0.0]);
        assert_eq!(widened(Element::E5m2, 0x00fb_403c), [1.0, 2.0, -57344.0, 0.0]);
        assert_eq!(widened(Element::Half(Product::Bf16), 0xc000_3f80), [1.0, -2.0]);
    }
}
