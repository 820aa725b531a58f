//! Element types, and descriptions of tensors without data.

/// Element type of a [`Tensor`](crate::Tensor).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// Lengths.
    I32,
    /// Positions.
    I64,
    /// IEEE double precision (ONNX Attention on the CPU).
    F64,
    /// Masks.
    Bool,
    /// Values of a quantized KV cache.
    I8,
    /// Two 4-bit values of a quantized KV cache.
    U8,
    /// 8-bit floating point with a 4-bit exponent and without infinities (e4m3): values of a
    /// quantized KV cache.
    F8E4M3,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 | Self::F8E4M3 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Whether query, key and value of some operator may have the type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16 | Self::F64)
    }
}

impl std::fmt::Display for DType {
    /// The name ONNX uses.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F64 => "float64",
            Self::Bool => "bool",
            Self::I8 => "int8",
            Self::U8 => "uint8",
            Self::F8E4M3 => "float8e4m3fn",
        })
    }
}

/// Type and shape of a tensor, wherever its data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorDesc<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: &'a [usize],
}

/// A byte that makes NaN in every floating-point type when repeated. Outputs are filled with it
/// before a launch, so that elements a kernel does not write are found.
pub const POISON: u8 = 0xff;
