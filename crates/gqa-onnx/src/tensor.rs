//! `TensorProto` to [`Tensor`] and back.

use std::path::Path;

use float8::F8E4M3;
use gqa_host::{DType, Tensor, op};
use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn};
use prost::Message;

use crate::error::{Error, Result};
use crate::file;
use crate::proto::{TensorProto, element_type_name};

/// More than the dimensions of any supported tensor.
const MAX_RANK: usize = 8;

/// Element types as messages list them.
pub(crate) const ELEMENT_TYPES: &str =
    "float32, float16, bfloat16, float64, float8e4m3fn, int32, int64, int8, uint8, bool";

/// The [`DType`] of a TensorProto.DataType number.
pub(crate) fn dtype_of(number: i32) -> Option<DType> {
    match number {
        1 => Some(DType::F32),
        2 => Some(DType::U8),
        3 => Some(DType::I8),
        6 => Some(DType::I32),
        7 => Some(DType::I64),
        9 => Some(DType::Bool),
        10 => Some(DType::F16),
        11 => Some(DType::F64),
        16 => Some(DType::BF16),
        17 => Some(DType::F8E4M3),
        _ => None,
    }
}

/// Reads a file that holds one `TensorProto`. `what` names the tensor in errors.
///
/// # Errors
///
/// Where the file cannot be read, and those of [`decode_tensor`].
pub fn read_tensor(path: &Path, what: &str) -> Result<Tensor> {
    let bytes = file::read_file(path, file::MESSAGE_BYTES).map_err(|error| match error {
        Error::Invalid { subject, got, allowed } => {
            Error::invalid(what, format_args!("{subject}, {got}"), allowed)
        }
        error => Error::invalid(what, error, "a readable file"),
    })?;
    decode_tensor(&bytes, what)
}

/// Decodes a `TensorProto`. No allocation depends on declared sizes: the dimensions must agree with
/// the data.
///
/// # Errors
///
/// Where the bytes are not a tensor, or its type is not supported; the error names `what`.
pub fn decode_tensor(bytes: &[u8], what: &str) -> Result<Tensor> {
    let proto = TensorProto::decode(bytes)
        .map_err(|e| Error::invalid(what, format!("malformed protobuf ({e})"), "a TensorProto"))?;
    from_proto(&proto, what)
}

/// Encodes a tensor as a `TensorProto` with raw data.
pub fn encode_tensor(name: &str, tensor: &Tensor) -> Vec<u8> {
    let proto = TensorProto {
        dims: tensor.shape().iter().map(|&n| n as i64).collect(),
        data_type: op::element_type(tensor.dtype()),
        name: name.to_owned(),
        raw_data: little_endian(tensor),
        ..TensorProto::default()
    };
    proto.encode_to_vec()
}

/// Bytes of the elements, least significant first.
fn little_endian(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = tensor.bytes().to_vec();
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(tensor.dtype().size()).for_each(<[u8]>::reverse);
    }
    bytes
}

/// Converts a decoded message. `what` names the tensor in errors.
pub(crate) fn from_proto(proto: &TensorProto, what: &str) -> Result<Tensor> {
    if proto.data_location != 0 || !proto.external_data.is_empty() {
        return Err(Error::invalid(what, "external data", "data inside the file"));
    }
    if proto.segment.is_some() {
        return Err(Error::invalid(what, "a segment of a tensor", "a whole tensor"));
    }
    let dtype = dtype_of(proto.data_type)
        .ok_or_else(|| Error::invalid(what, element_type_name(proto.data_type), ELEMENT_TYPES))?;
    let payload = Payload { proto, what, shape: shape(&proto.dims, dtype, what)? };
    match dtype {
        DType::F32 => payload.array(f32::from_le_bytes, &proto.float_data, Some).map(Tensor::from),
        DType::F16 => payload
            .array(f16::from_le_bytes, &proto.int32_data, |bits| {
                Some(f16::from_bits(bits.try_into().ok()?))
            })
            .map(Tensor::from),
        DType::BF16 => payload
            .array(bf16::from_le_bytes, &proto.int32_data, |bits| {
                Some(bf16::from_bits(bits.try_into().ok()?))
            })
            .map(Tensor::from),
        DType::I32 => payload.array(i32::from_le_bytes, &proto.int32_data, Some).map(Tensor::from),
        DType::I64 => payload.array(i64::from_le_bytes, &proto.int64_data, Some).map(Tensor::from),
        DType::F64 => payload.array(f64::from_le_bytes, &proto.double_data, Some).map(Tensor::from),
        DType::Bool => payload
            .array(|[byte]: [u8; 1]| byte != 0, &proto.int32_data, |x| Some(x != 0))
            .map(Tensor::from),
        DType::I8 => payload
            .array(i8::from_le_bytes, &proto.int32_data, |x| i8::try_from(x).ok())
            .map(Tensor::from),
        DType::U8 => payload
            .array(u8::from_le_bytes, &proto.int32_data, |x| u8::try_from(x).ok())
            .map(Tensor::from),
        DType::F8E4M3 => payload
            .array(
                |[byte]: [u8; 1]| F8E4M3::from_bits(byte),
                &proto.int32_data,
                |x| Some(F8E4M3::from_bits(x.try_into().ok()?)),
            )
            .map(Tensor::from),
    }
}

/// Checked dimensions: the number of bytes must be countable.
fn shape(dims: &[i64], dtype: DType, what: &str) -> Result<Vec<usize>> {
    if dims.len() > MAX_RANK {
        let got = format!("{} dimensions", dims.len());
        return Err(Error::invalid(what, got, format_args!("at most {MAX_RANK}")));
    }
    let shape: Option<Vec<usize>> = dims.iter().map(|&n| usize::try_from(n).ok()).collect();
    let shape = shape.ok_or_else(|| {
        Error::invalid(what, format_args!("dimensions {dims:?}"), "no negative dimension")
    })?;
    // A dimension of 0 does not excuse others that overflow: strides are products of them.
    let bytes = shape
        .iter()
        .filter(|&&n| n != 0)
        .try_fold(dtype.size(), |product, &n| product.checked_mul(n))
        .filter(|&bytes| isize::try_from(bytes).is_ok());
    match bytes {
        Some(_) => Ok(shape),
        None => Err(Error::invalid(
            what,
            format_args!("dimensions {dims:?}"),
            "dimensions whose product can be addressed",
        )),
    }
}

/// A tensor's message and its checked dimensions.
struct Payload<'a> {
    proto: &'a TensorProto,
    what: &'a str,
    shape: Vec<usize>,
}

impl Payload<'_> {
    /// The elements, from raw_data or from the field for their type.
    fn array<T, U: Copy, const N: usize>(
        &self,
        from_bytes: impl Fn([u8; N]) -> T,
        typed: &[U],
        from_typed: impl Fn(U) -> Option<T>,
    ) -> Result<ArrayD<T>> {
        let count: usize = self.shape.iter().product();
        let raw = &self.proto.raw_data;
        let elements = if typed.is_empty() {
            self.expect(raw.len(), "bytes of raw_data", count * N)?;
            raw.as_chunks::<N>().0.iter().map(|&bytes| from_bytes(bytes)).collect()
        } else {
            self.expect(raw.len(), "bytes of raw_data beside typed data", 0)?;
            self.expect(typed.len(), "elements", count)?;
            let elements: Option<Vec<T>> = typed.iter().map(|&value| from_typed(value)).collect();
            elements.ok_or_else(|| {
                Error::invalid(self.what, "int32_data beyond 16 bits", "bit patterns 0 to 65535")
            })?
        };
        ArrayD::from_shape_vec(IxDyn(&self.shape), elements)
            .map_err(|e| Error::invalid(self.what, e, "elements that fill the dimensions"))
    }

    /// The declared size must equal the actual one before memory is allocated.
    fn expect(&self, got: usize, unit: &str, allowed: usize) -> Result<()> {
        if got == allowed {
            return Ok(());
        }
        let got = format!("{got} {unit} for dimensions {:?}", self.shape);
        Err(Error::invalid(self.what, got, allowed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn proto(data_type: i32, dims: &[i64]) -> TensorProto {
        TensorProto { data_type, dims: dims.to_vec(), ..TensorProto::default() }
    }

    fn refusal(proto: &TensorProto) -> String {
        match from_proto(proto, "query") {
            Err(e) => e.to_string(),
            Ok(tensor) => format!("accepted {tensor:?}"),
        }
    }

    #[test]
    fn typed_fields_are_read() {
        let floats = TensorProto { float_data: vec![1.0, -2.5], ..proto(1, &[2]) };
        let tensor = |dtype, shape: &[usize]| Tensor::from_f32(dtype, shape, &[1.0, -2.5]).ok();
        assert_eq!(from_proto(&floats, "x").ok(), tensor(DType::F32, &[2]));
        let halves = TensorProto { int32_data: vec![0x3c00, 0xc100], ..proto(10, &[1, 2]) };
        assert_eq!(from_proto(&halves, "x").ok(), tensor(DType::F16, &[1, 2]));
        let brains = TensorProto { int32_data: vec![0x3f80, 0xc020], ..proto(16, &[2]) };
        assert_eq!(from_proto(&brains, "x").ok(), tensor(DType::BF16, &[2]));
        let longs = TensorProto { int64_data: vec![7], ..proto(7, &[]) };
        assert_eq!(from_proto(&longs, "x").map(|t| t.to_f64()).ok(), Some(vec![7.0]));
    }

    #[test]
    fn refusals_name_the_tensor_and_the_reason() {
        let cases = [
            (
                proto(1, &[1 << 40, 1 << 20]),
                "query: got 0 bytes of raw_data for dimensions [1099511627776, 1048576]; allowed: 4611686018427387904",
            ),
            (
                proto(1, &[1 << 40, 1 << 40]),
                "query: got dimensions [1099511627776, 1099511627776]; allowed: dimensions whose product can be addressed",
            ),
            (
                proto(1, &[0, i64::MAX, i64::MAX]),
                "query: got dimensions [0, 9223372036854775807, 9223372036854775807]; allowed: dimensions whose product can be addressed",
            ),
            (proto(1, &[2, -1]), "query: got dimensions [2, -1]; allowed: no negative dimension"),
            (proto(1, &[1; 9]), "query: got 9 dimensions; allowed: at most 8"),
            (
                proto(4, &[1]),
                "query: got uint16; allowed: float32, float16, bfloat16, float64, float8e4m3fn, int32, int64, int8, uint8, bool",
            ),
            (
                proto(0, &[]),
                "query: got undefined; allowed: float32, float16, bfloat16, float64, float8e4m3fn, int32, int64, int8, uint8, bool",
            ),
            (
                proto(-7, &[]),
                "query: got element type -7; allowed: float32, float16, bfloat16, float64, float8e4m3fn, int32, int64, int8, uint8, bool",
            ),
            (
                TensorProto { raw_data: vec![0; 5], ..proto(1, &[1]) },
                "query: got 5 bytes of raw_data for dimensions [1]; allowed: 4",
            ),
            (
                TensorProto { float_data: vec![0.0; 3], ..proto(1, &[2]) },
                "query: got 3 elements for dimensions [2]; allowed: 2",
            ),
            (
                TensorProto { int32_data: vec![0; 2], ..proto(1, &[2]) },
                "query: got 0 bytes of raw_data for dimensions [2]; allowed: 8",
            ),
            (
                TensorProto { int32_data: vec![-1], ..proto(10, &[1]) },
                "query: got int32_data beyond 16 bits; allowed: bit patterns 0 to 65535",
            ),
            (
                TensorProto { data_location: 1, ..proto(1, &[1]) },
                "query: got external data; allowed: data inside the file",
            ),
        ];
        for (proto, want) in cases {
            assert_eq!(refusal(&proto), want);
        }
    }

    #[test]
    fn empty_tensors_keep_their_shape() {
        let past = from_proto(&proto(1, &[2, 1, 0, 8]), "past_key").map(|t| t.shape().to_vec());
        assert_eq!(past.ok(), Some(vec![2, 1, 0, 8]));
    }

    fn any_tensor() -> impl Strategy<Value = Tensor> {
        let dtype = proptest::sample::select(vec![1, 2, 3, 6, 7, 9, 10, 11, 16, 17]);
        (dtype, proptest::collection::vec(0..5i64, 0..4)).prop_flat_map(|(number, dims)| {
            let count = dims.iter().product::<i64>() as usize;
            let size = dtype_of(number).map_or(0, DType::size);
            proptest::collection::vec(any::<u8>(), count * size).prop_filter_map(
                "decodes",
                move |raw_data| {
                    from_proto(&TensorProto { raw_data, ..proto(number, &dims) }, "x").ok()
                },
            )
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn what_is_written_is_read_back(tensor in any_tensor()) {
            let back = decode_tensor(&encode_tensor("x", &tensor), "x");
            let back = back.map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(back.shape(), tensor.shape());
            prop_assert_eq!(back.bytes(), tensor.bytes());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode_tensor(&bytes, "x");
        }

        #[test]
        fn damaged_tensors_never_panic(
            tensor in any_tensor(),
            damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            keep in any::<prop::sample::Index>(),
        ) {
            let mut bytes = encode_tensor("x", &tensor);
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            let _ = decode_tensor(&bytes, "x");
            bytes.truncate(keep.index(bytes.len()));
            let _ = decode_tensor(&bytes, "x");
        }
    }
}
